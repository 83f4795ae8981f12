"""Models that take pictures, against transformers: float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tiny import make_core, over_two_ranks, run, tiny_config
from vision_models import TEXT, Answer, Model, check_answers, picture, save_model, token

from sgla.errors import InvalidField
from sgla.loading.tower import small_config
from sgla.media import prepare
from sgla.media.picture import Picture
from sgla.messages import Submit
from sgla.model.read import read_decoder
from sgla.model.vision.table import VISIONS
from sgla.worker.cpu import CpuRunner


def llava(folder: Path) -> Model:
    from transformers import LlavaConfig

    tower = {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "patch_size": 4,
        "image_size": 16,
    }
    text = {"model_type": "llama", **TEXT}
    config = LlavaConfig(vision_config=tower, text_config=text, image_token_index=token("<image>"))
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
    }
    return save_model(folder, "LlavaForConditionalGeneration", config, images)


def gemma3(folder: Path) -> Model:
    from transformers import Gemma3Config

    tower = {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 4,
        "image_size": 32,
        "vision_use_head": False,
    }
    text = {
        **TEXT,
        "model_type": "gemma3_text",
        "head_dim": 8,
        "num_key_value_heads": 3,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 4,
    }
    config = Gemma3Config(
        vision_config=tower,
        text_config=text,
        mm_tokens_per_image=16,
        image_token_index=token("<image_soft_token>"),
        boi_token_index=token("<start_of_image>"),
        eoi_token_index=token("<end_of_image>"),
    )
    images = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
    return save_model(folder, "Gemma3ForConditionalGeneration", config, images)


def gemma4(folder: Path, sounds: dict[str, Any] | None = None, seed: int = 0, **text: Any) -> Model:
    from transformers import Gemma4Config

    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
    }
    text = {
        **TEXT,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 84,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 0,
        **text,
    }
    config = Gemma4Config(
        vision_config=tower,
        text_config=text,
        image_token_id=token("<|image|>"),
        boi_token_id=token("<|image>"),
        eoi_token_id=token("<image|>"),
        video_token_id=token("<|video|>"),
        audio_token_id=token("<|audio|>"),
        audio_config=sounds,
    )
    images = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2}
    images |= {"max_soft_tokens": 70, "feature_size": 8}
    return save_model(folder, "Gemma4ForConditionalGeneration", config, images, seed)


def gemma4_large(folder: Path) -> Model:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24}
    return gemma4(folder, use_bidirectional_attention="vision", attention_k_eq_v=True, **experts)


def gemma4_small(folder: Path, sounds: dict[str, Any] | None = None, seed: int = 0) -> Model:
    """``sounds``: of a tower for these."""
    own = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": TEXT["vocab_size"]}
    return gemma4(folder, sounds, seed, num_kv_shared_layers=2, use_double_wide_mlp=True, **own)


def qwen_vl(
    folder: Path,
    kind: str,
    tower: dict[str, Any],
    text: dict[str, Any],
    image: int = token("<|image_pad|>"),
    processor: str = "Qwen2VLImageProcessor",
) -> Model:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind](
        vision_config={"depth": 2, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2, **tower},
        text_config={key: value for key, value in {**TEXT, **text}.items() if value is not None},
        image_token_id=image,
        vision_start_token_id=token("<|vision_start|>"),
        video_token_id=token("<|video_pad|>"),
    )
    images: dict[str, Any] = {"image_processor_type": processor, "patch_size": 4}
    images["size"] = {"shortest_edge": 256, "longest_edge": 2048}
    return save_model(
        folder, type(config).__name__.replace("Config", "ForConditionalGeneration"), config, images
    )


def qwen2_vl(folder: Path) -> Model:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    tower = {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}
    return qwen_vl(folder, "qwen2_vl", tower, {"rope_parameters": rope})


def qwen2_5_vl(folder: Path) -> Model:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48, "window_size": 16}
    tower["fullatt_block_indexes"] = [1]
    return qwen_vl(folder, "qwen2_5_vl", tower, {"rope_parameters": rope})


def qwen3_vl(folder: Path) -> Model:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 48,
        "deepstack_visual_indexes": [0, 1],
    }
    tower["num_position_embeddings"] = 64
    return qwen_vl(
        folder, "qwen3_vl", tower, {"rope_parameters": rope, "head_dim": 16, "num_hidden_layers": 4}
    )


def qwen3_5(folder: Path, kind: str = "qwen3_5", **more: Any) -> Model:
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    }
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48, "num_position_embeddings": 64}
    text = {
        "rope_parameters": rope,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    return qwen_vl(folder, kind, tower, {**text, **more})


def glm4v(folder: Path, kind: str = "glm4v", **text: Any) -> Model:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48, "image_size": 32}
    own = {
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {**rope, "mrope_section": [1, 1, 2]},
    }
    return qwen_vl(folder, kind, tower, {**own, **text}, token("<|image|>"), "Glm4vImageProcessor")


def glm4v_moe(folder: Path) -> Model:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1}
    return glm4v(folder, "glm4v_moe", **experts)


def idefics2(folder: Path) -> Model:
    from transformers import Idefics2Config

    sees = {"resampler_n_latents": 5, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
    config = Idefics2Config(
        vision_config=clip(32),
        perceiver_config={**sees, "num_key_value_heads": 1, "hidden_size": 48, "rms_norm_eps": 1e-5},
        text_config={"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
        image_token_id=token("<image>"),
    )
    images = {"image_processor_type": "Idefics2ImageProcessor", "do_image_splitting": True}
    images["size"] = {"shortest_edge": 12, "longest_edge": 32}
    return save_model(folder, "Idefics2ForConditionalGeneration", config, images)


def smolvlm(folder: Path) -> Model:
    from transformers import SmolVLMConfig

    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 4,
        "image_size": 16,
    }
    config = SmolVLMConfig(
        vision_config=tower,
        text_config={"model_type": "llama", **TEXT},
        image_token_id=token("<image>"),
        scale_factor=2,
    )
    images = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
    }
    return save_model(folder, "SmolVLMForConditionalGeneration", config, images)


def internvl(folder: Path) -> Model:
    from transformers import InternVLConfig

    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": [4, 4],
        "image_size": [16, 16],
    }
    config = InternVLConfig(
        vision_config=tower,
        text_config={"model_type": "qwen2", **TEXT},
        image_token_id=token("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    images = {
        "image_processor_type": "GotOcr2ImageProcessor",
        "size": {"height": 16, "width": 16},
        "max_patches": 4,
    }
    return save_model(folder, "InternVLForConditionalGeneration", config, images)


def mistral3(folder: Path) -> Model:
    from transformers import Mistral3Config

    tower = {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 4,
        "image_size": 64,
    }
    text = {"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None}
    config = Mistral3Config(
        vision_config=tower,
        text_config=text,
        image_token_index=token("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    images = {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": 40},
        "patch_size": {"height": 4, "width": 4},
    }
    return save_model(folder, "Mistral3ForConditionalGeneration", config, images)


def llama4(folder: Path) -> Model:
    from transformers import Llama4Config
    from transformers.modeling_outputs import MoeCausalLMOutputWithPast

    MoeCausalLMOutputWithPast.image_outputs = None  # transformers 5.24 looks for them there
    tower = {
        **clip(16),
        "intermediate_size": 128,
        "vision_output_dim": 40,
        "projector_input_dim": 40,
        "projector_output_dim": 40,
    }
    text = {
        **TEXT,
        "head_dim": 8,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 64,
        "no_rope_layers": [1, 1, 0],
        "attn_temperature_tuning": False,
    }
    config = Llama4Config(
        vision_config=tower,
        text_config=text,
        image_token_index=token("<|patch|>"),
        boi_token_index=token("<|image_start|>"),
        eoi_token_index=token("<|image_end|>"),
    )
    images = {"image_processor_type": "Llama4ImageProcessor", "size": {"height": 16, "width": 16}}
    images["max_patches"] = 4
    return save_model(folder, "Llama4ForConditionalGeneration", config, images)


def kimi(folder: Path) -> Model:
    from transformers import Kimi_K25Config

    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 4,
        "pos_emb_height": 8,
        "pos_emb_width": 8,
    }
    text = {
        **{key: value for key, value in TEXT.items() if key != "num_key_value_heads"},
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "num_key_value_heads": 6,
        "tie_word_embeddings": False,
    }
    config = Kimi_K25Config(
        vision_config=tower,
        text_config=text,
        image_token_id=token("<|media_pad|>"),
        video_token_id=token("<|kimi_k25_video_placeholder|>"),
        projection_hidden_size=32,
        tie_word_embeddings=False,
    )
    images = {"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 4, "max_patches": 60}
    model = save_model(folder, "Kimi_K25ForConditionalGeneration", config, images)
    path = folder / "model.safetensors"  # as published; transformers 5.24 calls all layers blocks
    text = ("language_model.model.blocks.", "language_model.model.layers.")
    save_file({name.replace(*text): x for name, x in load_file(path).items()}, path, {"format": "pt"})
    return model


def clip(size: int = 16) -> dict[str, Any]:
    return {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "patch_size": 4,
        "image_size": size,
    }


def siglip(size: int = 16) -> dict[str, Any]:
    return {**clip(size), "model_type": "siglip_vision_model", "vision_use_head": False}


def tiled(folder: Path, name: str, tower: dict[str, Any], kind: str, **images: Any) -> Model:
    import transformers

    shapes = [[16, 32], [32, 16], [32, 32], [16, 48]]
    config = getattr(transformers, f"{name}Config")(
        vision_config=tower,
        text_config={"model_type": kind, **TEXT},
        image_token_index=token("<image>"),
        image_grid_pinpoints=shapes,
        **({"video_token_index": token("<video>")} if name == "LlavaOnevision" else {}),
    )
    images |= {"image_processor_type": f"{name}ImageProcessor", "image_grid_pinpoints": shapes}
    return save_model(folder, f"{name}ForConditionalGeneration", config, images)


def llava_next(folder: Path) -> Model:
    size = {"height": 16, "width": 16}
    return tiled(folder, "LlavaNext", clip(), "mistral", size={"shortest_edge": 16}, crop_size=size)


def llava_onevision(folder: Path) -> Model:
    tower = siglip()
    return tiled(folder, "LlavaOnevision", tower, "qwen2", size={"height": 16, "width": 16})


def pixtral(folder: Path) -> Model:
    from transformers import LlavaConfig

    config = LlavaConfig(
        vision_config={**clip(64), "model_type": "pixtral"},
        text_config={"model_type": "mistral", **TEXT, "head_dim": 8, "sliding_window": None},
        image_token_index=token("[IMG]"),
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=1,
    )
    images = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 40}}
    images["patch_size"] = {"height": 4, "width": 4}
    return save_model(folder, "LlavaForConditionalGeneration", config, images)


def paligemma(folder: Path, kind: str = "gemma", **text: Any) -> Model:
    from transformers import PaliGemmaConfig

    config = PaliGemmaConfig(
        vision_config=siglip(),
        text_config={"model_type": kind, **TEXT, "head_dim": 8, **text},
        image_token_index=token("<image>"),
        projection_dim=48,
        hidden_size=48,
        vocab_size=TEXT["vocab_size"],
    )
    images = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}}
    return save_model(folder, "PaliGemmaForConditionalGeneration", config, images)


def paligemma2(folder: Path) -> Model:
    return paligemma(folder, "gemma2", query_pre_attn_scalar=8, sliding_window=128)


def qwen3_vl_moe(folder: Path) -> Model:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    tower = {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 48}
    tower |= {"deepstack_visual_indexes": [1], "num_position_embeddings": 64}
    text = {"rope_parameters": rope, "head_dim": 16, "moe_intermediate_size": 40}
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0], "tie_word_embeddings": False}
    model = qwen_vl(folder, "qwen3_vl_moe", tower, text)
    path = folder / "model.safetensors"  # as published, transformers 5 writes it otherwise
    stacks = {name: x.mT.contiguous() if ".experts." in name else x for name, x in load_file(path).items()}
    save_file(stacks, path, {"format": "pt"})
    return model


def qwen3_5_moe(folder: Path) -> Model:
    experts = {"intermediate_size": None, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
    return qwen3_5(folder, "qwen3_5_moe", **experts, num_experts=4, num_experts_per_tok=2)


def minicpm(folder: Path) -> Model:
    from transformers import MiniCPMV4_6Config

    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    }
    text = {
        **TEXT,
        "model_type": "qwen3_5_text",
        "rope_parameters": rope,
        "head_dim": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    }
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 4,
        "image_size": 32,
    }
    config = MiniCPMV4_6Config(
        vision_config=tower,
        text_config=text,
        insert_layer_id=0,
        image_size=32,
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
    )
    images = {
        "image_processor_type": "MiniCPMV4_6ImageProcessor",
        "patch_size": 4,
        "scale_resolution": 32,
        "max_slice_nums": 4,
    }
    return save_model(folder, "MiniCPMV4_6ForConditionalGeneration", config, images)


MAKERS = {
    "llava": llava,
    "llava-next": llava_next,
    "llava-onevision": llava_onevision,
    "pixtral": pixtral,
    "paligemma": paligemma,
    "paligemma2": paligemma2,
    "qwen3-vl-moe": qwen3_vl_moe,
    "qwen3.5-moe": qwen3_5_moe,
    "gemma3": gemma3,
    "gemma4": gemma4_large,
    "gemma4-small": gemma4_small,
    "glm4v": glm4v,
    "glm4v-moe": glm4v_moe,
    "qwen2-vl": qwen2_vl,
    "qwen2.5-vl": qwen2_5_vl,
    "qwen3-vl": qwen3_vl,
    "qwen3.5": qwen3_5,
    "idefics2": idefics2,
    "kimi-k2.5": kimi,
    "llama4": llama4,
    "smolvlm": smolvlm,
    "internvl": internvl,
    "mistral3": mistral3,
    "minicpm-v": minicpm,
}
SHOWN = [picture(20, 30, 1), picture(50, 24, 2), picture(40, 40, 3)]
TEXTS = {0: "No picture at all.", 1: "Look: <image> and tell.", 3: "<image> One, <image><image> three."}


class Served(NamedTuple):
    model: Model
    runner: CpuRunner
    requests: list[Submit]
    answers: dict[str, Answer]  # of transformers


FAST = ("gemma3", "paligemma", "qwen3-vl", "smolvlm")


@pytest.fixture(
    scope="module",
    params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MAKERS],
)
def served(request: Any, tmp_path_factory: Any) -> Served:
    model = MAKERS[request.param](tmp_path_factory.mktemp("model"))
    requests = [model.submit(str(count), text, SHOWN[:count]) for count, text in TEXTS.items()]
    answers = {r.rid: model.answer(r, SHOWN[: int(r.rid)]) for r in requests}
    config = tiny_config(step_tokens=256, native_kernels=True)
    return Served(model, CpuRunner(config, model.source, 0, 1, "", lambda progress: None), requests, answers)


def test_equal_to_transformers(served: Served) -> None:
    check_answers(run(served.runner, served.requests), served.answers)
    assert served.runner._pictures is not None
    seen = {shown.picture.digest for r in served.requests for shown in r.pictures if shown.picture.arrays}
    assert served.runner._pictures.computed == len(seen)  # once each, though two requests have the first
    again = [replace(request, rid=f"{request.rid} again") for request in served.requests]
    core = make_core(served.runner.facts)
    check_answers(run(served.runner, served.requests, core), served.answers)
    warm = run(served.runner, again, core)
    check_answers(warm, served.answers)
    for request in again:
        assert warm[request.rid][0].cached_tokens >= (len(request.tokens) - 1) // 16 * 16


def test_features_that_cannot_be_had_end_their_request_alone(served: Served) -> None:
    """Nothing of it stays, so the next one with the picture is answered."""
    first, _, last = served.requests
    *around, picture = served.requests[1].pictures
    wrong = replace(picture, picture=replace(picture.picture, digest=b"gone", file="/nowhere"))
    core = make_core(served.runner.facts)
    broken = replace(served.requests[1], rid="broken", pictures=[*around, wrong])
    found = run(served.runner, [first, broken, last], core)
    assert found.finish() == {first.rid: "length", "broken": "error", last.rid: "length"}
    assert found.tokens()[last.rid] == served.answers[last.rid].tokens
    check_answers(run(served.runner, [served.requests[1]], core), served.answers)


def test_in_chunks_and_alone(served: Served) -> None:
    wholes = [shown.end - shown.first for r in served.requests for shown in r.pictures if shown.whole]
    step = max([9, *(whole + 8 for whole in wholes)])
    for request in served.requests:
        check_answers(run(served.runner, [request], step_tokens=step, prefix_cache=False), served.answers)


def test_another_picture_is_no_hit(served: Served) -> None:
    core = make_core(served.runner.facts)
    text = f"{'As long as a page, or two of them. '} <image>{' and more' * 6}"
    first, other = (served.model.submit(str(i), text, SHOWN[i : i + 1], 4) for i in (0, 1))
    run(served.runner, [first], core)
    found = run(served.runner, [other], core)["1"][0].cached_tokens
    recurrent = served.runner.model.spec.recurrent  # it has no state there
    assert found == (0 if recurrent else other.pictures[0].first // 16 * 16)


def test_pictures_of_idefics2_share_what_is_between_them() -> None:
    """As in its processor."""
    around, vision = "<fake_token_around_image>", VISIONS["Idefics2ForConditionalGeneration"]
    assert vision.joined is not None
    pictures = f"{around}<image>{around}" * 2
    expected = f"one {around}<image>{around}<image>{around} two{around}\n<end>"
    assert vision.joined(f"one {pictures}two{around}\n<end>") == expected


QWEN = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "sliding_window": 32768,
    "use_sliding_window": False,
    "vocab_size": 152064,
    "image_token_id": 151655,
    "vision_token_id": 151654,
}
# As files on the Hub have them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "LlavaForConditionalGeneration": {
        "model_type": "llava",
        "ignore_index": -100,
        "image_token_index": 32000,
        "pad_token_id": 32001,
        "projector_hidden_act": "gelu",
        "text_config": {"max_position_embeddings": 4096, "model_type": "llama", "vocab_size": 32064},
        "vision_config": {"hidden_size": 1024, "num_attention_heads": 16, "model_type": "clip_vision_model"},
        "vocab_size": 32064,
    },
    "Qwen2VLForConditionalGeneration": {"model_type": "qwen2_vl", **QWEN, "vision_config": {"depth": 32}},
    "Qwen2_5_VLForConditionalGeneration": {
        "model_type": "qwen2_5_vl",
        **QWEN,
        "vision_config": {"depth": 32},
    },
    "SmolVLMForConditionalGeneration": {
        "model_type": "smolvlm",
        "image_token_id": 49190,
        "pad_token_id": 128002,
        "scale_factor": 4,
        "text_config": {
            "hidden_size": 576,
            "is_llama_config": True,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "perceiver_config": {"hidden_act": "silu"},
            "pixel_shuffle_factor": 4,
            "qk_layer_norms": False,
            "use_resampler": False,
            "vocab_size": 49280,
        },
        "vision_config": {"hidden_size": 768, "image_size": 512, "patch_size": 16},
        "vocab_size": 49280,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name: str) -> None:
    config = {"architectures": [name], **PUBLISHED[name]}
    vision, text = VISIONS[name], PUBLISHED[name].get("text_config", PUBLISHED[name])
    assert read_decoder(config).vocab == text["vocab_size"]
    assert vision.token_of(config) < text["vocab_size"]
    assert small_config(config).get_text_config().num_hidden_layers == 0
    if vision.merged is not None:
        assert vision.sections(config) == ([16, 24, 24], False)


@pytest.mark.slow
async def test_two_ranks_equal_one(tmp_path: Path) -> None:
    model = qwen2_vl(tmp_path)
    requests = [model.submit(str(count), text, SHOWN[:count]) for count, text in TEXTS.items()]
    runner = CpuRunner(tiny_config(step_tokens=256), model.source, 0, 1, "", lambda progress: None)
    found = await over_two_ranks(model.source, requests, step_tokens=40)
    assert found.tokens() == run(runner, requests).tokens()


def test_transformers_prepares_a_picture_and_refuses_what_it_cannot(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
    picture = Picture.of(9, 12, pixels.tobytes())
    settings = '{"size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}'
    made = prepare.prepare(
        picture, "CLIPImageProcessor", settings, {}, False, str(tmp_path / "made"), 1 << 20
    )
    assert made == [("pixel_values", "float32", [1, 3, 8, 8], 0, [])]
    thin = Picture.of(1, 900, bytes(2700))
    with pytest.raises(InvalidField, match="cannot be prepared"):
        prepare.prepare(thin, "Qwen2VLImageProcessor", "{}", {}, False, str(tmp_path / "made"), 1 << 20)

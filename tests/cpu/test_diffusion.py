"""A model that writes blocks out of noise, against transformers': float32 on the CPU, with the same noise."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tiny import make_core, run, submit, tiny_config

from sgla.errors import ConfigError, ContextTooLong
from sgla.hub.source import ModelSource, open_source
from sgla.messages import Submit
from sgla.model.diffusion_gemma_spec import Denoising, check_canvas, denoising_of
from sgla.model.read import read_decoder
from sgla.sampling.draw import Distribution, draw, uniform
from sgla.sampling.draw_rows import draw_rows
from sgla.worker.cpu import CpuRunner

BLOCK, BLOCKS, VOCAB, PAGE = 12, 2, 211, 16
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "max_position_embeddings": 256,
    "sliding_window": 20,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "pad_token_id": 0,
    "eos_token_id": 2,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
}
# Of models with random weights, whose entropies are large: some blocks end early, some do not.
HOW = {
    "max_denoising_steps": 9,
    "t_min": 0.2,
    "t_max": 0.9,
    "stability_threshold": 1,
    "confidence_threshold": 1.6,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 3.0},
}


class Served(NamedTuple):
    module: Any
    source: ModelSource
    runner: CpuRunner


def save_model(folder: Path) -> tuple[Any, ModelSource]:
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    config = DiffusionGemmaConfig(text_config=TEXT, vision_config=TOWER, canvas_length=BLOCK)
    torch.manual_seed(3)
    module = DiffusionGemmaForBlockDiffusion._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            # Larger ones make it chaotic: each step has twenty times the rounding errors of the one before.
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.05 if "self_cond" in name else 0.2)
        for name, buffer in module.named_buffers():
            if name.endswith("layer_scalar"):  # in the two ways they differ
                buffer.uniform_(0.5, 1.5)
    module.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(HOW))
    return module, open_source(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Served:
    module, source = save_model(tmp_path_factory.mktemp("diffusion"))
    return Served(module, source, runner(source))


def runner(source: ModelSource, **changes: Any) -> CpuRunner:
    config = tiny_config(native_kernels=True, **changes)
    return CpuRunner(config, source, 0, 1, "", lambda progress: None)


def prompt(length: int, seed: int = 0) -> list[int]:
    found: list[int] = np.random.default_rng(seed).integers(3, VOCAB, length).tolist()
    return found


def asked(rid: str, tokens: list[int], **sampling: Any) -> Submit:
    return submit(rid, tokens, BLOCKS * BLOCK, **{"temperature": 1.0, "seed": 17, **sampling})


def generated(module: Any, request: Submit, steps: list[int] | None = None, **how: Any) -> list[int]:
    """What transformers' module makes of it with our noise. ``steps``: gets one entry for each."""
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as theirs

    seed, prepare = request.sampling.seed, theirs.DiffusionGemmaGenerationMixin._prepare_denoiser_inputs
    at = {"start": len(request.tokens) - BLOCK, "turn": 0}

    def place(i: int) -> int:
        return at["turn"] << 32 | (at["start"] + i)

    def begin(self: Any, **given: Any) -> Any:
        at.update(start=at["start"] + BLOCK, turn=0)
        return prepare(self, **given)

    def noise(self: Any, batch_size: int, device: Any) -> Any:
        return torch.tensor([[uniform(seed, place(i), VOCAB) for i in range(BLOCK)]])

    def drawn(probabilities: Any, num_samples: int) -> Any:
        at["turn"] += 1
        if steps is not None:
            steps.append(at["start"])
        if request.sampling.temperature == 0:
            return probabilities.argmax(-1, keepdim=True)
        logs = probabilities.log().numpy()
        return torch.tensor([[draw(x, Distribution(1.0), seed, place(i))] for i, x in enumerate(logs)])

    config = theirs.DiffusionGemmaGenerationConfig(**{**deepcopy(HOW), **how})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs.DiffusionGemmaGenerationMixin, "_prepare_denoiser_inputs", begin)
        patch.setattr(theirs.EntropyBoundSampler, "initialize_canvas", noise)
        patch.setattr(torch, "multinomial", drawn)
        out = module.generate(
            torch.tensor([request.tokens]), generation_config=config, max_new_tokens=request.max_new
        )
    found: list[int] = out.sequences[0, len(request.tokens) :].tolist()
    return found


REQUESTS = [
    asked("short", prompt(5)),
    asked("beyond the window", prompt(37, 1)),
    asked("greedy", prompt(18, 2), temperature=0.0),
]


@pytest.fixture(scope="module")
def expected(served: Served) -> dict[str, list[int]]:
    """Of transformers."""
    return {request.rid: generated(served.module, request) for request in REQUESTS}


def test_equal_to_transformers(served: Served, expected: dict[str, list[int]]) -> None:
    """In a batch, behind a cached prefix, and block by block."""
    core = make_core(served.runner.facts)
    found = run(served.runner, REQUESTS, core)
    assert found.tokens() == expected
    for deltas in found.values():
        assert [len(delta.tokens) for delta in deltas] == [BLOCK] * BLOCKS
    longer = [replace(r, tokens=r.tokens + expected[r.rid][:BLOCK], max_new=BLOCK) for r in REQUESTS]
    warm = run(served.runner, longer, core)
    cold = run(served.runner, longer)
    assert warm.tokens() == cold.tokens() == {rid: tokens[BLOCK:] for rid, tokens in expected.items()}
    for request in longer:  # a block that was written is there for the next turn
        assert warm[request.rid][0].cached_tokens >= (len(request.tokens) - 1) // PAGE * PAGE


def test_alone_and_in_chunks(served: Served, expected: dict[str, list[int]]) -> None:
    for request in REQUESTS:
        found = run(served.runner, [request], step_tokens=2 * BLOCK, prefix_cache=False)
        assert found.tokens() == {request.rid: expected[request.rid]}


def test_whoever_gives_up_its_pages_writes_the_same(served: Served, expected: dict[str, list[int]]) -> None:
    core = make_core(served.runner.facts, pages=8, windows=(8,), reserve=0.01)
    assert run(served.runner, REQUESTS, core).tokens() == expected
    assert core.stats().preemptions


def test_blocks_end_early_when_they_are_sure(served: Served) -> None:
    how = {"confidence_threshold": 3.0, "stability_threshold": 0}
    steps: list[int] = []
    first = generated(served.module, REQUESTS[0], steps=steps, **how)
    quick = runner(served.source, diffusion_config=how)
    assert run(quick, REQUESTS[:1]).tokens() == {"short": first}
    assert len(steps) < BLOCKS * HOW["max_denoising_steps"]


def test_texts_end_within_blocks(served: Served, expected: dict[str, list[int]]) -> None:
    whole, stop = expected["short"], expected["short"][BLOCK + 3]
    short = replace(REQUESTS[0], rid="length", max_new=BLOCK + 2)
    ended = replace(REQUESTS[0], rid="stop", stop_ids=frozenset([stop]))
    found = run(served.runner, [short, ended])
    assert found.tokens() == {"length": whole[: BLOCK + 2], "stop": whole[: whole.index(stop) + 1]}
    assert found.finish() == {"length": "length", "stop": "stop"}


def test_a_context_has_whole_blocks(served: Served) -> None:
    limit = served.runner.facts.context_len
    full = replace(REQUESTS[0], tokens=prompt(limit - BLOCK - 1), max_new=BLOCK + 1)
    found = run(served.runner, [full])
    assert len(found.tokens()["short"]) == BLOCK
    with pytest.raises(ContextTooLong):
        make_core(served.runner.facts).offer(replace(full, tokens=prompt(limit - BLOCK + 1)), 0.0)


@pytest.mark.parametrize(
    "distribution",
    [
        Distribution(0.7),
        Distribution(1.3, top_k=9),
        Distribution(1.0, top_p=0.8),
        Distribution(0.5, 20, 0.9, 0.1),
    ],
)
def test_rows_are_drawn_as_each_alone(distribution: Distribution) -> None:
    """What a GPU does with a block."""
    logits = np.random.default_rng(0).normal(0, 2, (40, 3000)).astype(np.float32)
    places = [turn << 32 | 7 * turn for turn in range(40)]
    found = draw_rows(torch.from_numpy(logits), distribution, 12345, places)
    assert found.tolist() == [draw(row, distribution, 12345, at) for row, at in zip(logits, places)]


def test_attention_that_sees_no_block_is_refused(served: Served) -> None:
    spec = read_decoder(served.source.config)
    check_canvas(tiny_config(), "cuda", spec)
    with pytest.raises(ConfigError, match="--attention-backend flashinfer"):
        check_canvas(tiny_config(attention_backend="flashinfer"), "cuda", spec)
    with pytest.raises(ConfigError, match="--device npu"):
        check_canvas(tiny_config(), "npu", spec)


def test_settings_of_files_and_flags() -> None:
    """Those of transformers where neither says anything."""
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as theirs

    theirs_of = theirs.DiffusionGemmaGenerationConfig._get_default_generation_params()
    plain = Denoising()
    assert (plain.steps, plain.t_min, plain.t_max) == tuple(
        theirs_of[key] for key in ("max_denoising_steps", "t_min", "t_max")
    )
    assert (plain.stability, plain.confidence) == (
        theirs_of["stability_threshold"],
        theirs_of["confidence_threshold"],
    )
    assert plain.entropy_bound == theirs_of["sampler_config"].entropy_bound
    assert denoising_of({}, {}) == plain
    assert denoising_of(HOW, {"t_max": 0.5}) == Denoising(9, 0.2, 0.5, 3.0, 1, 1.6)


@pytest.mark.parametrize(
    ("file", "flag", "words"),
    [
        ({}, {"steps": 3}, "--diffusion-config has 'steps'; it may have max_denoising_steps"),
        (
            {},
            {"max_denoising_steps": 0},
            "--diffusion-config: max_denoising_steps must be a whole number from 1",
        ),
        ({"t_max": "hot"}, {}, "generation_config.json: t_max must be a number"),
        ({}, {"confidence_threshold": 0.0}, "confidence_threshold must be a number from 1e-09 to 65536"),
        ({}, {"t_min": 0.8}, "must be above t_min"),
        ({"sampler_config": 3}, {}, "sampler_config must be an object"),
    ],
)
def test_settings_that_mean_nothing(file: dict[str, Any], flag: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        denoising_of(file, flag)

"""A tiny random Llama with a byte-level tokenizer and a chat template, and a tiny random BERT, as folders in
Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from server_process import ServerProcess, serving
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": len(SPECIAL) + 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(20))]

CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 16,
}
IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
}
EARS = {
    "model_type": "qwen2_audio_encoder",
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 100,
}
SOUNDS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 2}
SHOWING = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type != 'text' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def write_tokenizer(folder: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_weights(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        folder / "model.safetensors",
    )


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)
    write_weights(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertModel

    folder = tmp_path_factory.mktemp("tiny-bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One for all files whose tests leave it as it was."""
    folder = tmp_path_factory.mktemp("profile")
    flags = ("--dtype", "float32", "--served-model-name", "tiny", "--profile-folder", str(folder))
    with serving("--model", str(tiny_model), *flags) as server:
        yield server


def with_token(tiny_model: Path, folder: Path, content: str) -> dict[str, Any]:
    """Write the tokenizer with one more token, and a chat template that writes it for a picture or a sound;
    the configuration of the model of texts."""
    tokenizer = json.loads((tiny_model / "tokenizer.json").read_text())
    text = json.loads((tiny_model / "config.json").read_text())
    number = text["vocab_size"]
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": number, "content": content})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    settings["chat_template"] = SHOWING.replace("<image>", content)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return {**text, "vocab_size": number + 1, "max_position_embeddings": 512}


@pytest.fixture(scope="session")
def tiny_llava(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes pictures, without weights."""
    folder = tmp_path_factory.mktemp("tiny-llava")
    text = with_token(tiny_model, folder, "<image>")
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": text["vocab_size"] - 1,
        "vision_config": CLIP,
        "text_config": text,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    return folder


@pytest.fixture(scope="session")
def tiny_listener(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes sounds of two seconds, without weights."""
    folder = tmp_path_factory.mktemp("tiny-listener")
    text = with_token(tiny_model, folder, "<|AUDIO|>")
    config = {
        "architectures": ["Qwen2AudioForConditionalGeneration"],
        "model_type": "qwen2_audio",
        "audio_token_index": text["vocab_size"] - 1,
        "audio_config": EARS,
        "text_config": {**text, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(SOUNDS))
    return folder

"""A tiny Llama with random weights, adapters of it, and other weights for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WIDTH, HEADS, KV_HEADS, MLP, LAYERS = 64, 4, 2, 128, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": len(SPECIAL) + 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH * KV_HEADS // HEADS, WIDTH),
    "self_attn.v_proj": (WIDTH * KV_HEADS // HEADS, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (MLP, WIDTH),
    "mlp.up_proj": (MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
}
RANK = 4


def tiny(folder: Path) -> Path:
    folder.mkdir()
    vocabulary = len(SPECIAL) + 256
    shapes = {
        "model.embed_tokens": (vocabulary, WIDTH),
        "lm_head": (vocabulary, WIDTH),
        "model.norm": (WIDTH,),
    }
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in SHAPES.items()}
    drawn = torch.Generator().manual_seed(0)
    tensors = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else 0.15 * torch.randn(shape, generator=drawn)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def adapter(folder: Path, base: Path, seed: int) -> Path:
    """A random LoRA adapter of all layers of ``base``, in PEFT's format."""
    folder.mkdir()
    drawn, tensors, modules = torch.Generator().manual_seed(seed), {}, set()
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj"):
            modules.add(module.rpartition(".")[2])
            for half, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                matrix = 0.2 * torch.randn(shape, generator=drawn)
                tensors[f"base_model.model.{module}.lora_{half}.weight"] = matrix
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 8,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def update(folder: Path, base: Path, other: bool) -> None:
    """The base's files, or ``other`` weights of the same shapes."""
    shutil.copytree(base, folder)
    if other:
        tensors = load_file(folder / "model.safetensors")
        save_file({name: tensor.flip(0) for name, tensor in tensors.items()}, folder / "model.safetensors")

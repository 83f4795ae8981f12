"""Ling 2 and Ring 2, whose code comes with checkpoints: transformers' class for GLM-4.5 computes the same (as
it does for Sarvam, which has their names of tensors), so it is their reference."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeForCausalLM
from transformers.models.sarvam_moe.configuration_sarvam_moe import SarvamMoEConfig

_PARTS = ("q_proj", "k_proj", "v_proj")
_NAMES = (
    (".self_attn.o_proj.", ".attention.dense."),
    (".self_attn.q_norm.", ".attention.query_layernorm."),
    (".self_attn.k_norm.", ".attention.key_layernorm."),
    (".self_attn.", ".attention."),
    ("model.embed_tokens.", "model.word_embeddings."),
    (".gate.e_score_correction_bias", ".gate.expert_bias"),
)


class BailingMoeV2Config(SarvamMoEConfig):
    model_type = "bailing_moe"


class BailingMoeV2ForCausalLM(Glm4MoeForCausalLM):
    config_class = BailingMoeV2Config

    def save_pretrained(self, folder: Any, **settings: Any) -> None:
        """With the names of published files, which have q, k and v as one."""
        super().save_pretrained(folder, **settings)
        path = Path(folder) / "model.safetensors"
        save_file(published(load_file(path)), path, {"format": "pt"})


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        part = next((part for part in _PARTS if f".{part}." in name), None)
        if part == "q_proj":
            parts = [tensors[name.replace("q_proj", other)] for other in _PARTS]
            name, tensor = name.replace("q_proj", "query_key_value"), torch.cat(parts)
        elif part is not None:
            continue
        if stack := re.search(r"experts\.(gate_up|down)_proj$", name):
            for which in stack[1].split("_"):
                own = tensor if stack[1] == "down" else tensor.chunk(2, 1)[which == "up"]
                for e, expert in enumerate(own):
                    found[f"{name[: stack.start()]}experts.{e}.{which}_proj.weight"] = expert.contiguous()
            continue
        for theirs, ours in _NAMES:
            name = name.replace(theirs, ours)
        found[name] = tensor
    return found


def register() -> None:
    AutoConfig.register("bailing_moe", BailingMoeV2Config, exist_ok=True)
    AutoModelForCausalLM.register(BailingMoeV2Config, BailingMoeV2ForCausalLM, exist_ok=True)
    sys.modules["transformers"].BailingMoeV2ForCausalLM = BailingMoeV2ForCausalLM  # type: ignore[attr-defined]

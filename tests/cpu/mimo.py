"""MiMo-7B, whose code comes with checkpoints: Qwen2's class of transformers is its reference. Files have a
layer for guessing further tokens, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    config_class = MiMoConfig

    def save_pretrained(self, folder: Any, **settings: Any) -> None:
        super().save_pretrained(folder, **settings)
        path = Path(folder) / "model.safetensors"
        guesses = {"model.mtp_layers.0.token_layernorm.weight": torch.ones(self.config.hidden_size)}
        save_file(load_file(path) | guesses, path, {"format": "pt"})


def register() -> None:
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM, exist_ok=True)
    sys.modules["transformers"].MiMoForCausalLM = MiMoForCausalLM  # type: ignore[attr-defined]

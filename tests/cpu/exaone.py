"""EXAONE 3 and 3.5, whose code comes with checkpoints: transformers has their configuration, and computes
them with Llama's class, which is their reference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, ExaoneConfig, LlamaForCausalLM

_NAMES = (
    ("model.layers.", "transformer.h."),
    ("model.embed_tokens.", "transformer.wte."),
    ("model.norm.", "transformer.ln_f."),
)


class ExaoneForCausalLM(LlamaForCausalLM):
    config_class = ExaoneConfig

    def save_pretrained(self, folder: Any, **settings: Any) -> None:
        """With the names of published files, which transformers gives the insides of layers alone."""
        super().save_pretrained(folder, **settings)
        path, found = Path(folder) / "model.safetensors", {}
        for name, tensor in load_file(path).items():
            for ours, theirs in _NAMES:
                name = name.replace(ours, theirs)
            found[name] = tensor
        save_file(found, path, {"format": "pt"})


def register() -> None:
    AutoModelForCausalLM.register(ExaoneConfig, ExaoneForCausalLM, exist_ok=True)
    sys.modules["transformers"].ExaoneForCausalLM = ExaoneForCausalLM  # type: ignore[attr-defined]

"""GGUF files, whose tensors have types of their own (``hub/gguf.py``). Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.quant.formats import FORMATS
from sgla.quant.method import Method


class Gguf(Method):
    """A CPU keeps each matrix in the storage that has its values in the fewest bytes."""

    name, devices = "gguf", ("cpu",)

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.shares: dict[str, float] = config["kept"]  # what part of the matrices' values each storage has

    def bytes(self, plain: str, device: str = "cpu") -> float:
        return sum(FORMATS[kind or plain].bytes * part for kind, part in self.shares.items())

    def vocab_bytes(self, plain: str) -> float:
        return self.bytes(plain)

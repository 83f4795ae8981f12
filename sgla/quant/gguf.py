"""GGUF files, whose tensors have types of their own (``hub/gguf.py``). Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgla.quant.formats import FORMATS
from sgla.quant.method import Method

# The storage of GPUs for what a CPU keeps in one of its own.
_ON_GPUS = {"": "", "q4_0": "int4g32", "int4": "int4m32", "int5": "int8m32", "nvfp4": "nvfp4"}


def kept_on(kind: str, device: str) -> str:
    """Where a kind of device keeps what a CPU keeps in the storage ``kind``; "": in floating point."""
    return kind if device == "cpu" else _ON_GPUS.get(kind, "int8g32")


class Gguf(Method):
    """Each matrix is kept in the storage that has its values in the fewest bytes; on GPUs embedding and
    output layer are floating-point numbers."""

    name, devices = "gguf", ("cpu", "cuda")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.shares: dict[str, float] = config["kept"]  # what part of the matrices' values each storage has

    def expands(self, device: str) -> bool:
        return False

    def bytes(self, plain: str, device: str = "cpu") -> float:
        return sum(FORMATS[kept_on(kind, device) or plain].bytes * part for kind, part in self.shares.items())

    def vocab_bytes(self, plain: str, device: str = "cpu") -> float:
        return self.bytes(plain) if device == "cpu" else FORMATS[plain].bytes

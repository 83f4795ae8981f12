"""What an H200 needs at least for what ``offline.py`` measures: bytes that a step must read, or products
that it must make."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sgla.model.read import read_decoder
from sgla.model.sizes import parameters, weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.state import LayerState, state_of

# Measured: bytes a second; bf16 operations a second, in short and over seconds, when power is what limits.
READ, PRODUCTS, SUSTAINED = 4.34e12, 795e12, 690e12
MOST_ROWS = 4096


@dataclass(frozen=True)
class Limits:
    """Of a model on one GPU. ``quantization``: as in ``sizes.weight_bytes``."""

    spec: ModelSpec
    quantization: str | None
    kv_dtype: str

    @classmethod
    def of(cls, folder: str, settings: dict[str, Any]) -> Limits:
        """``settings``: of the engine."""
        spec = read_decoder(json.loads((Path(folder) / "config.json").read_text()))
        kv_dtype = settings.get("kv_cache_dtype", "auto")
        kv_dtype = "bfloat16" if kv_dtype == "auto" else kv_dtype
        return cls(spec, settings.get("quantization") or spec.quantization, kv_dtype)

    @cached_property
    def state(self) -> list[LayerState]:
        return state_of(self.spec, 1)

    def weights(self, rows: int) -> float:
        """Bytes of the matrices that a step of ``rows`` tokens reads: of experts those that some row chooses,
        on average, and of an embedding beside the output layer nothing."""
        spec = replace(self.spec, tied=True)
        if spec.moe is None:
            return weight_bytes(spec, "bfloat16", self.quantization, 1, "cuda")
        none, every = (
            weight_bytes(
                replace(spec, moe=replace(spec.moe, experts=n)), "bfloat16", self.quantization, 1, "cuda"
            )
            for n in (0, spec.moe.experts)
        )
        missed = (1 - spec.moe.routing.top_k / spec.moe.experts) ** rows
        return none + (every - none) * (1 - missed)

    def history(self, context: int) -> float:
        """Bytes that one row reads, and of states writes, behind ``context`` tokens."""
        tokens = sum(
            layer.token_bytes(self.kv_dtype) * min(context, layer.window or context) for layer in self.state
        )
        return tokens + 2 * sum(layer.unit_bytes(self.kv_dtype) for layer in self.state)

    def step(self, contexts: Sequence[int]) -> float:
        """Seconds of one with a row behind each of these."""
        return max(self.read(contexts), self.prompt(len(contexts)))

    def read(self, contexts: Sequence[int]) -> float:
        """Seconds in which it reads what it must."""
        rows = sum(count * self.history(context) for context, count in Counter(contexts).items())
        return (self.weights(len(contexts)) + rows) / READ

    def prompt(self, tokens: int) -> float:
        """Seconds of the matrices' products for so many tokens; attention is left out."""
        return 2 * parameters(replace(self.spec, tied=True)).active * tokens / PRODUCTS

    def document(self, tokens: int, cached: int = 0) -> float:
        """Seconds of a long prompt at the sustained rate: of what stands behind ``cached`` tokens, with its
        attention and without the output layer, which only the last token meets."""
        head = self.spec.vocab * self.spec.hidden
        products = (parameters(replace(self.spec, tied=True)).active - head) * (tokens - cached)
        return 2 * (products + self.scores(cached, tokens)) / SUSTAINED

    def scores(self, first: int, last: int) -> float:
        """Products of queries with keys, and of their weights with values, of the tokens between."""
        return sum(
            layer.heads * (layer.head_dim + layer.v_dim) * seen(first, last, layer.window)
            for layer in self.spec.attention
            if layer.heads
        )

    def crowd(self, inputs: Sequence[int], outputs: Sequence[int], every: int = 16) -> float:
        """Seconds of requests that come together: all prompts, then steps."""
        return self.prompt(sum(inputs)) + self.steps(inputs, outputs, every)

    def steps(self, inputs: Sequence[int], outputs: Sequence[int], every: int = 16) -> float:
        """Seconds of the decode steps of requests that go on together, of which each ``every``-th is
        computed."""
        spent = 0.0
        for at in range(0, max(outputs), every):
            rows = [n + at for n, out in zip(inputs, outputs, strict=True) if out > at]
            spent += min(every, max(outputs) - at) * self.step(rows)
        return spent

    def rate(self, inputs: float, outputs: float, gap: float) -> float:
        """Requests a second, at most, whose tokens come ``gap`` seconds apart: a step has a token of each
        request that goes on, and the prompts that came meanwhile."""

        def seconds(rows: int) -> float:  # by Little's law rows / outputs prompts come in a step
            step = self.step([round(inputs + outputs / 2)] * rows)
            return step + rows / outputs * self.prompt(round(inputs))

        rows = bisect_right(range(MOST_ROWS), gap, lo=1, key=seconds) - 1
        return rows / outputs / seconds(rows) if rows else 0.0


def seen(first: int, last: int, window: int) -> int:
    """Pairs of a token from ``first`` on, and each that it reads, itself included."""
    whole = last * (last + 1) // 2 - first * (first + 1) // 2
    if not window or last <= window:
        return whole
    full = max(first, window)  # from here on each reads a whole window
    return (full * (full + 1) - first * (first + 1)) // 2 + (last - full) * window

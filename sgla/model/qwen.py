"""Qwen 2 and 2.5 (arXiv 2407.10671) and Qwen 3 (arXiv 2505.09388): Llama's decoder with small differences."""

from __future__ import annotations

from sgla.model.llama import Llama


class Qwen2(Llama):
    """Bias on q, k and v."""

    qkv_bias = True
    out_bias = False


class Qwen3(Llama):
    """RMSNorm on each head of q and k; the head size is independent of the width."""

    qk_norm = True

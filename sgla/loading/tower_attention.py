"""Attention of towers on a GPU, for pictures and windows of several lengths behind each other: one kernel a
layer, where transformers' modules would call one for each window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "sgla_flash"  # transformers' modules hand lengths over where the name has "flash" in it
HALVES = torch.bfloat16, torch.float16


def packed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """q, k and v ``[1, H, T, d]`` -> ``[1, T, H, d]``; ``cu_seq_lens_q`` int[N + 1]: where each of N texts
    begins, whose tokens see each other."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    ends = cu_seq_lens_q.to(torch.int32)
    out = varlen_attn(q, k, v, ends, ends, max_length_q, max_length_q, scale=scaling)
    assert isinstance(out, Tensor)
    return out[None], None


def use_packed(module: Any) -> None:
    """Have a model of transformers with a tower of such pictures use it."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed)
    module.config.vision_config._attn_implementation = NAME

"""Attention of towers on a GPU, for pictures and windows of several lengths behind each other: one kernel a
layer, where transformers' modules would call one for each window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "sgla_flash"  # transformers' modules hand lengths over where the name has "flash" in it


def attend(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: Any, scale: float) -> Tensor:
    """q, k and v ``[T, H, d]`` -> the same shape; ``ends`` int[N + 1]: where each of N texts begins, whose
    tokens see each other, and where the last one ends."""
    from torch.nn.attention.varlen import varlen_attn

    if longest is None:
        longest = ends.diff().max()
    ends, most = ends.to(torch.int32), int(longest)
    more: dict[str, Any] = {} if scale == q.shape[-1] ** -0.5 else {"scale": scale}
    out = varlen_attn(q, k, v, ends, ends, most, most, **more)
    assert isinstance(out, Tensor)
    return out


def packed(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    cu_seq_lens_q: Tensor,
    max_length_q: Any,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: ``attend`` of ``[1, H, T, d]`` -> ``[1, T, H, d]``."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return attend(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None


def use_packed(module: Any) -> None:
    """Have a model of transformers use it, whose tower has pictures of any size behind each other."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, packed)
    module.config.vision_config._attn_implementation = NAME

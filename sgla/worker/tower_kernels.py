"""Towers of pictures on a GPU: parts of transformers' modules that take our kernels, with the same weights. A
module of another shape stays as it is."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgla.kernels.cuda import prompt_gemm
from sgla.kernels.device import this_device
from sgla.kernels.triton import elementwise
from sgla.kernels.triton.tower import rotate
from sgla.loading.tower_attention import attend

EVEN = 64  # columns of a product, or fast kernels would not take it


def hasten(tower: nn.Module) -> int:
    """How many parts have others' places now."""
    count = 0
    for part in list(tower.modules()):
        for fits, make in KINDS:
            if fits(part):
                part.forward = make(part)
                count += 1
                break
    return count


def is_norm(part: Any) -> bool:
    return type(part).__name__.endswith("RMSNorm") and hasattr(part, "variance_epsilon")


def norm(part: Any) -> Any:
    weight, eps = part.weight.float(), part.variance_epsilon
    return lambda x: elementwise.rms_norm(x.contiguous(), weight, eps)


def is_gated(part: Any) -> bool:
    names = ("gate_proj", "up_proj", "down_proj")
    whole = all(isinstance(getattr(part, name, None), nn.Linear) for name in names)
    return whole and type(getattr(part, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")


def gated(part: Any) -> Any:
    """Gate and up are one product, whose columns are made even by zeros."""
    gate, up, down = part.gate_proj, part.up_proj, part.down_proj
    lack = -gate.out_features % EVEN
    weight = torch.cat([F.pad(x.weight, (0, 0, 0, lack)) for x in (gate, up)])
    bias = None if gate.bias is None else torch.cat([F.pad(x.bias, (0, lack)) for x in (gate, up)])
    last, behind = F.pad(down.weight, (0, lack)), down.bias
    plain = None if bias is None else bias.float()
    del part.gate_proj, part.up_proj, part.down_proj
    for name, values in (
        ("both", weight),
        ("both_bias", bias),
        ("plain", plain),
        ("last", last),
        ("last_bias", behind),
    ):
        part.register_buffer(name, values, persistent=False)

    def run(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if one_kernel(rows, weight):
            inner = prompt_gemm.linear(rows.contiguous(), weight, bias=plain, epilogue=prompt_gemm.SILU)
        else:
            inner = elementwise.act_mul(F.linear(rows, weight, bias), "silu")
        return F.linear(inner, last, behind).view(*x.shape[:-1], -1)

    return run


def one_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether our product does the activation, too, and keeps the GPU busy."""
    (m, k), n = x.shape, weight.shape[0]
    ours = this_device().wgmma and x.dtype == torch.bfloat16
    return ours and prompt_gemm.refuses(m, n, k, gated=True) is None and prompt_gemm.fills(m, n)


def is_attention(part: Any) -> bool:
    own = all(isinstance(getattr(part, name, None), nn.Linear) for name in ("qkv", "proj"))
    return own and hasattr(part, "num_heads") and part.qkv.out_features == 3 * part.qkv.in_features


def attention(part: Any) -> Any:
    return partial(attended, part)


def attended(
    part: Any,
    hidden_states: Tensor,
    cu_seqlens: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    max_seqlen: int | None = None,
    **_: Any,
) -> Tensor:
    """``[T, d]`` -> the same shape."""
    qkv = part.qkv(hidden_states)
    cos, sin = (x.contiguous() for x in position_embeddings)
    rotate(qkv, cos, sin, part.num_heads)
    q, k, v = qkv.view(len(qkv), 3, part.num_heads, -1).unbind(1)
    return part.proj(attend(q, k, v, cu_seqlens, max_seqlen, part.scaling).flatten(1))  # type: ignore[no-any-return]


def is_patches(part: Any) -> bool:
    conv = getattr(part, "proj", None)
    return (
        isinstance(conv, nn.Conv3d)
        and type(part).__name__.endswith("PatchEmbed")
        and conv.stride == conv.kernel_size
        and not any(conv.padding)
    )


def patches(part: Any) -> Any:
    """A convolution over patches that do not overlap is a product."""
    weight, bias = part.proj.weight.flatten(1), part.proj.bias
    return lambda x: F.linear(x.reshape(-1, weight.shape[1]).to(weight.dtype), weight, bias)


def is_block(part: Any) -> bool:
    """A layer: norms before attention and before an MLP, whose results are added to what they are made of."""
    whole = all(hasattr(part, name) for name in ("norm1", "norm2", "attn", "mlp"))
    return whole and is_attention(part.attn) and is_norm(part.norm2)


def block(part: Any) -> Any:
    weight, eps = part.norm2.weight.float(), part.norm2.variance_epsilon

    def run(hidden_states: Tensor, *given: Any, **more: Any) -> Tensor:
        x = part.attn.forward(part.norm1.forward(hidden_states), *given, **more)
        x, total = elementwise.add_rms_norm(x, hidden_states.contiguous(), weight, eps)
        return total + part.mlp.forward(x)  # type: ignore[no-any-return]

    return run


KINDS = (
    (is_block, block),
    (is_norm, norm),
    (is_gated, gated),
    (is_attention, attention),
    (is_patches, patches),
)

"""Towers of pictures on a GPU: parts of transformers' modules that take our kernels, with the same weights. A
module of another shape stays as it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgla.kernels.cuda import prompt_attention, prompt_gemm
from sgla.kernels.device import this_device
from sgla.kernels.triton import elementwise
from sgla.kernels.triton.tower import shifted_norm, turn
from sgla.loading.tower_attention import attend
from sgla.loading.tower_grid import KEPT

EVEN = 64  # columns of a product, or fast kernels would not take it
OURS_FROM = 256  # our kernel attends over texts from so many tokens on; over windows of 64 torch's is as fast
LARGE = 16.0  # silu(LARGE) / LARGE is 1


def hasten(tower: nn.Module) -> int:
    """How many parts have others' places now."""
    count, angles = 0, Angles()
    for part in list(tower.modules()):
        for fits, make in KINDS:
            if fits(part):
                part.forward = make(part, angles) if make in TURNING else make(part)
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
    behind = part.down_proj.bias
    inner, last = packed(part)
    part.register_buffer("last_bias", behind, persistent=False)
    return lambda x: F.linear(inner(x), last, behind)


def packed(part: Any, constant: Tensor | None = None) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Gate and up as one product with the activation behind it, ``[..., d]`` -> ``[..., f]``, and the weight
    of down ``[d, f]``, without its bias. Zeros make the columns even; one of them is 1 in each row where
    down's product is to add a ``constant`` ``[d]``, too."""
    gate, up, down = part.gate_proj, part.up_proj, part.down_proj
    f = gate.out_features
    lack = -f % EVEN or (EVEN if constant is not None else 0)
    weight = torch.cat([F.pad(x.weight, (0, 0, 0, lack)) for x in (gate, up)])
    last, bias = F.pad(down.weight, (0, lack)), None
    if gate.bias is not None or constant is not None:
        biases = [x.weight.new_zeros(f) if x.bias is None else x.bias for x in (gate, up)]
        bias = torch.cat([F.pad(x, (0, lack)) for x in biases])
    if constant is not None:
        assert bias is not None
        bias[f], bias[f + lack + f] = LARGE, 1 / LARGE
        last[:, f] = constant
    plain = None if bias is None else bias.float()
    del part.gate_proj, part.up_proj, part.down_proj
    for name, values in (("both", weight), ("both_bias", bias), ("plain", plain), ("last", last)):
        part.register_buffer(name, values, persistent=False)

    def inner(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if one_kernel(rows, weight, gated=True):
            made = prompt_gemm.linear(rows.contiguous(), weight, bias=plain, epilogue=prompt_gemm.SILU)
        else:
            made = elementwise.act_mul(F.linear(rows, weight, bias), "silu")
        return made.view(*x.shape[:-1], -1)

    return inner, last


def one_kernel(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether our product does what follows it, too, and keeps the GPU busy."""
    (m, k), n = x.shape, weight.shape[0]
    ours = this_device().wgmma and x.dtype == torch.bfloat16
    return ours and prompt_gemm.refuses(m, n, k, gated) is None and prompt_gemm.fills(m, n)


def is_attention(part: Any) -> bool:
    own = all(isinstance(getattr(part, name, None), nn.Linear) for name in ("qkv", "proj"))
    return own and hasattr(part, "num_heads") and part.qkv.out_features == 3 * part.qkv.in_features


def ours(x: Tensor, dim: int, longest: Any) -> bool:
    """Whether our kernel attends."""
    long = longest is not None and longest >= OURS_FROM
    return long and x.is_cuda and prompt_attention.takes_whole(this_device(), x.dtype, dim)


class Angles:
    """What all layers have in common that get the same places: cosines and sines beside each other, and tiles
    of texts."""

    def __init__(self) -> None:
        self._given: tuple[Tensor, Tensor] | None = None
        self._made = torch.empty(0)
        self._tiles: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()  # by id: ends, and their tiles

    def of(self, given: tuple[Tensor, Tensor]) -> Tensor:
        """``given``: cosines and sines ``[T, d]``, the second halves like the first -> float32 ``[T, d]``."""
        if given is not self._given:
            half = given[0].shape[1] // 2
            pairs = torch.stack([values[:, :half].float() for values in given], 2)
            self._given, self._made = given, pairs.flatten(1)
        return self._made

    def tiles(self, ends: Tensor, tokens: int) -> Tensor:
        """See ``prompt_attention.tiles_of``."""
        known = self._tiles.pop(id(ends), None) or (ends, prompt_attention.tiles_of(ends, tokens))
        self._tiles[id(ends)] = known
        if len(self._tiles) > 2 * KEPT:  # of a shape its pictures and their windows
            self._tiles.popitem(last=False)
        return known[1]


def attention(part: Any, angles: Angles) -> Any:
    heads = turned(part, angles)
    return lambda *given, **more: part.proj(heads(*given, **more))


def turned(part: Any, angles: Angles) -> Callable[..., Tensor]:
    """What the heads of attention give, ``[T, d]`` -> the same shape. Dims of q and k that are turned
    together are neighbours, so that their product can turn them, which changes no product of q and k."""
    heads, width = part.num_heads, part.qkv.in_features
    dim = width // heads
    rows = torch.arange(3 * width, device=part.qkv.weight.device)
    rows[: 2 * width] = rows[: 2 * width].view(2 * heads, 2, -1).transpose(1, 2).flatten()
    weight, bias = part.qkv.weight[rows], None if part.qkv.bias is None else part.qkv.bias[rows]
    plain = None if bias is None else bias.float()
    del part.qkv
    for name, values in (("qkv_weight", weight), ("qkv_bias", bias), ("qkv_plain", plain)):
        part.register_buffer(name, values, persistent=False)

    def run(
        x: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        max_seqlen: Any = None,
        **_: Any,
    ) -> Tensor:
        by = angles.of(position_embeddings)
        if one_kernel(x, weight, gated=False) and dim % 8 == 0:
            qkv = prompt_gemm.linear_turned(x.contiguous(), weight, plain, by, 2 * width)
        else:
            qkv = F.linear(x, weight, bias)
            turn(qkv, by, heads)
        q, k, v = qkv.view(-1, 3, heads, dim).unbind(1)
        if ours(x, dim, max_seqlen):
            tiles = angles.tiles(cu_seqlens, len(x))
            return prompt_attention.attend_whole(q, k, v, tiles, part.scaling).flatten(1)
        return attend(q, k, v, cu_seqlens, max_seqlen, part.scaling).flatten(1)

    return run


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
    return whole and is_attention(part.attn) and is_norm(part.norm2) and is_gated(part.mlp)


def block(part: Any, angles: Angles) -> Any:
    """Both products add to their input where it lies. They have no biases: that of attention is added by the
    second norm, as it reads, and both by a column of the last product."""
    proj, norm2, down = part.attn.proj, part.norm2, part.mlp.down_proj
    weight, eps = norm2.weight.float(), norm2.variance_epsilon
    biases = [x.bias for x in (proj, down) if x.bias is not None]
    heads = turned(part.attn, angles)
    inner, last = packed(part.mlp, sum(biases) if biases else None)
    shift = None if proj.bias is None else proj.bias.float()

    def run(hidden_states: Tensor, *given: Any, **more: Any) -> Tensor:
        x = hidden_states.contiguous()
        x.addmm_(heads(part.norm1.forward(x), *given, **more), proj.weight.t())
        y = elementwise.rms_norm(x, weight, eps) if shift is None else shifted_norm(x, shift, weight, eps)
        return x.addmm_(inner(y), last.t())

    return run


KINDS: tuple[tuple[Callable[[Any], bool], Callable[..., Any]], ...] = (
    (is_block, block),
    (is_norm, norm),
    (is_gated, gated),
    (is_attention, attention),
    (is_patches, patches),
)
TURNING = block, attention

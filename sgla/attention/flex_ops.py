"""A second oracle: PyTorch's FlexAttention, not compiled, which computes all scores of a row in float32. Its
softmax, its groups of heads and its masks are torch's own."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from sgla.attention.base import PARTS, AttentionShape, DeviceBatch
from sgla.attention.torch_ops import TorchDecode, TorchExtend
from sgla.device import Device
from sgla.kernels import ops
from sgla.kernels.ops import KVLayer, Scoring

warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
PAIRS = 1 << 22  # of a token and a place in its history, at a time


class FlexDecode(TorchDecode):
    name = "flex"

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring) -> Tensor:
        out = ops.outcome(q, kv)
        slots, lengths = batch.slots.tolist(), batch.kv_len.tolist()
        for row in range(batch.decode_rows):
            pages = batch.pages(kv.group)[slots[row]]
            out[row : row + 1] = attend(q[row : row + 1], kv, pages, lengths[row], scoring)
        return out


class FlexExtend(TorchExtend):
    name = "flex"

    @staticmethod
    def refuses(shape: AttentionShape, device: Device) -> str | None:
        if shape.parts:
            return PARTS
        return "tokens of a picture see each other" if shape.together else None

    def forward(self, q: Tensor, kv: KVLayer, batch: DeviceBatch, scoring: Scoring, out: Tensor) -> None:
        rows, at = batch.extend, 0
        assert rows is not None
        for slot, q_len, kv_len in zip(rows.slots.tolist(), rows.q_lens.tolist(), rows.kv_lens.tolist()):
            pages, few = batch.pages(kv.group)[slot], max(1, PAIRS // kv_len)
            for begin in range(0, q_len, few):
                end = min(begin + few, q_len)
                part = slice(at + begin, at + end)
                out[part] = attend(q[part], kv, pages, kv_len - q_len + end, scoring)
            at += q_len


def attend(q: Tensor, kv: KVLayer, pages: Tensor, kv_len: int, scoring: Scoring) -> Tensor:
    """q ``[T, Hq * hd]``, the last T of the ``kv_len`` tokens in ``pages`` int32[n] -> ``[T, Hq * vd]``."""
    tokens, dim = q.shape[0], kv.k.shape[3]
    first = kv_len - tokens  # place of the first token
    begin = max(0, scoring.begin(first)) if scoring.window else 0  # what is before may be another's
    size = kv.k.shape[1]
    which, offset = pages[begin // size : -(-kv_len // size)].long(), begin // size * size
    k, v = (
        x.flatten(0, 1)[begin - offset : kv_len - offset].transpose(0, 1)[None]
        for x in (kv.keys(which), kv.values(which))
    )
    at = torch.arange(first - begin, kv_len - begin, device=q.device)

    def score(value: Tensor, row: Tensor, head: Tensor, token: Tensor, place: Tensor) -> Tensor:
        if scoring.softcap:
            value = scoring.softcap * torch.tanh(value / scoring.softcap)
        if scoring.slopes is not None:
            value = value + scoring.slopes[head] * (place + begin)
        seen = place <= at[token]
        if scoring.window:
            seen = seen & (place >= scoring.begin(at[token] + begin) - begin)
        return torch.where(seen, value, -float("inf"))

    queries = q.view(1, tokens, -1, dim).transpose(1, 2).float()
    wanted = AuxRequest(lse=True)
    out, more = flex_attention(queries, k, v, score, scale=scoring.scale, enable_gqa=True, return_aux=wanted)
    if scoring.sinks is not None and more.lse is not None:  # which take a share of the softmax
        out = out * torch.sigmoid(more.lse - scoring.sinks[:, None])[..., None]
    return out[0].transpose(0, 1).flatten(1).to(q.dtype)

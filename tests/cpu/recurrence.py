"""Ops of layers that keep a state, token by token: what bodies and kernels are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from sgla.kernels.batch import ForwardBatch, StateRows

Step = Callable[[int, Tensor], tuple[Tensor, Tensor]]  # (token, state) -> what comes of it, state behind it


def batch_of(
    lengths: Sequence[int],
    reads: Sequence[int],
    writes: Sequence[int],
    marks: Sequence[tuple[int, int, int]] = (),
    device: str = "cpu",
) -> ForwardBatch:
    """Rows that layers with states alone compute."""

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    states = StateRows(ints(reads), ints(writes), ints([n for mark in marks for n in mark]).view(-1, 3))
    starts, none = ints([0, *accumulate(lengths)]), ints([])
    return ForwardBatch(
        rows=len(lengths),
        tokens=sum(lengths),
        ids=none,
        positions=none,
        slots=none,
        q_start=starts,
        kv_len=none,
        out_loc=none,
        page_table=none,
        page_size=16,
        sample_rows=none,
        states=states,
    )


def walk(batch: ForwardBatch, units: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """What comes of each token [T, ...], and the units afterwards."""
    states, starts = batch.states, batch.q_start.tolist()
    assert states is not None
    made, after = [], units.clone()
    for row in range(batch.rows):
        unit = int(states.reads[row])
        state = units[unit].float() if unit else torch.zeros_like(units[0]).float()
        for token in range(starts[row], starts[row + 1]):
            out, state = step(token, state)
            made.append(out)
            for at, length, target in states.marks.tolist():
                if at == row and length == token + 1 - starts[row] and target:
                    after[target] = state.to(after.dtype)
        after[int(states.writes[row])] = state.to(after.dtype)
    return torch.stack(made), after


def conv_step(x: Tensor, weight: Tensor, bias: Tensor | None) -> Step:
    def step(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        inputs = torch.cat([state, x[token].float()[:, None]], 1)
        y = (inputs * weight.float()).sum(1) + (0 if bias is None else bias.float())
        return y, inputs[:, 1:]

    return step


def delta_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Step:
    group, dk = v.shape[1] // k.shape[1], k.shape[2]

    def step(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        heads = (x[token].float().repeat_interleave(group, 0) for x in (q, k))
        one_q, one_k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in heads)
        state = state * decay[token].view(v.shape[1], -1, 1).exp()
        error = v[token].float() - torch.einsum("hkv,hk->hv", state, one_k)
        state = state + torch.einsum("hk,hv->hkv", one_k, error * beta[token, :, None])
        return torch.einsum("hkv,hk->hv", state, one_q * dk**-0.5), state

    return step


def scan_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None) -> Step:
    group = x.shape[1] // b.shape[1]

    def step(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        given, taken = (y[token].float().repeat_interleave(group, 0) for y in (b, c))
        time, inputs = dt[token], x[token].float()
        decay = (time.view(-1, 1) * a.view(len(time), -1)).exp()[:, None]
        state = state * decay + torch.einsum("hp,hn->hpn", inputs * time[:, None], given)
        y = torch.einsum("hpn,hn->hp", state, taken)
        return y if d is None else y + d[:, None] * inputs, state

    return step

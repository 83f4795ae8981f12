"""What the ops of layers that keep a state do, in torch: rows go on from the units that they begin with, and
leave states in others (``batch.StateRows``). Everything is float32 inside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sgla.kernels.batch import ForwardBatch

CHUNK, FINE_CHUNK = 64, 16  # tokens computed at once where a head has one decay, and one for each channel
EPS = 1e-6  # beside the squares of q and k


class Stretch(NamedTuple):
    """The next L tokens of n rows, int64[n, L], and the units int64[n] before and after them; 0: none."""

    tokens: Tensor
    before: Tensor
    after: Tensor


def stretches(batch: ForwardBatch) -> Iterator[Stretch]:
    """Rows of one token together, then each longer row, cut where it leaves a state on the way. States at the
    end of a row are for ``leave``."""
    states = batch.states
    assert states is not None, "layers that keep a state, and a batch without any"
    starts = batch.q_start[: batch.rows].long()
    lengths = batch.q_start[1 : batch.rows + 1].long() - starts
    single = (lengths == 1).nonzero()[:, 0]
    if single.numel():
        yield Stretch(starts[single, None], states.reads[single].long(), states.writes[single].long())
    longer = (lengths > 1).nonzero()[:, 0].tolist()
    marks = states.marks.tolist() if longer else []
    for row in longer:
        at, unit, length = 0, int(states.reads[row]), int(lengths[row])
        cuts = sorted(mark[1:] for mark in marks if mark[0] == row and mark[1] < length and mark[2])
        for end, target in (*cuts, (length, int(states.writes[row]))):
            tokens = starts[row] + torch.arange(at, end, device=starts.device)
            yield Stretch(tokens[None], tokens.new_tensor([unit]), tokens.new_tensor([target]))
            at, unit = end, target


def leave(units: Tensor, batch: ForwardBatch) -> None:
    """Copy states in which rows have ended to where they are left besides: ``units`` [units, ...]."""
    states = batch.states
    assert states is not None
    rows, lengths, targets = states.marks.long().unbind(1)
    ended = (batch.q_start[rows + 1] - batch.q_start[rows] == lengths) & (targets > 0)
    units[targets[ended]] = units[states.writes[rows[ended]].long()]


def begin(units: Tensor, before: Tensor) -> Tensor:
    """What rows begin with, float32[n, ...]: zeros where there is no state, whatever the dummy holds."""
    found = units[before].float()
    return found.masked_fill_((before == 0).view(-1, *[1] * (found.dim() - 1)), 0.0)


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, units: Tensor, batch: ForwardBatch) -> Tensor:
    """``ops.causal_conv`` without its activation: float32[T, C]. What later tokens see is rounded as units
    are, so that it does not matter where a step ends."""
    out, taps = x.new_empty(x.shape, dtype=torch.float32), weight.float().t().contiguous()
    for tokens, before, after in stretches(batch):
        seen = x[tokens].to(units.dtype).float()
        inputs = torch.cat([begin(units, before).transpose(1, 2), seen], 1)
        units[after] = inputs[:, tokens.shape[1] :].transpose(1, 2).to(units.dtype)
        made = x[tokens].float() * taps[-1]
        for k, tap in enumerate(taps[:-1]):
            made.addcmul_(inputs[:, k : k + tokens.shape[1]], tap)
        out[tokens] = made
    leave(units, batch)
    return out if bias is None else out + bias.float()


def of_length_1(x: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, units: Tensor, batch: ForwardBatch
) -> Tensor:
    """``ops.gated_delta``: float32[T, Hv, dv]."""
    out = v.new_empty(v.shape, dtype=torch.float32)
    decay = decay.float() if decay.dim() > beta.dim() else decay.float()[..., None]
    chunk = CHUNK if decay.shape[-1] == 1 else FINE_CHUNK
    group = v.shape[1] // k.shape[1]
    for tokens, before, after in stretches(batch):
        state = begin(units, before)
        for part in tokens.split(chunk, 1):
            unit_q, unit_k = (of_length_1(x[part]).repeat_interleave(group, 2) for x in (q, k))
            columns = [unit_q * q.shape[-1] ** -0.5, unit_k, v[part].float(), decay[part], beta[part].float()]
            step = _delta_token if part.shape[1] == 1 else _delta_chunk
            made, state = step([x.transpose(1, 2) for x in columns], state)
            out[part] = made.transpose(1, 2)
        units[after] = state.to(units.dtype)
    leave(units, batch)
    return out


def _delta_chunk(columns: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """L tokens of n rows from ``state`` [n, H, dk, dv] on: q and k ``[n, H, L, dk]``, v ``[n, H, L, dv]``,
    decay ``[n, H, L, 1 or dk]``, beta ``[n, H, L]`` -> what comes ``[n, H, L, dv]`` and the state behind it.

    A token writes ``k u^T``, where u depends on those that tokens before it write: a triangular system.
    """
    q, k, v, decay, beta = columns
    total = decay.cumsum(2)
    asked, seen = q * total.exp(), k * total.exp()
    # How much of what token i writes is left at token t: [n, H, t, i, 1 or dk]
    left = (total[:, :, :, None] - total[:, :, None]).clamp(max=0).exp()
    if decay.shape[-1] == 1:
        keys, queries = k @ k.transpose(2, 3) * left[..., 0], q @ k.transpose(2, 3) * left[..., 0]
    else:
        keys, queries = (torch.einsum("nhtd,nhtid,nhid->nhti", x, left, k) for x in (k, q))
    system = (keys * beta[..., None]).tril(-1)
    written = torch.linalg.solve_triangular(
        system, beta[..., None] * (v - seen @ state), upper=False, unitriangular=True
    )
    kept = k * (total[:, :, -1:] - total).exp()
    last = total[:, :, -1].exp()[..., None]
    return asked @ state + queries.tril() @ written, state * last + kept.transpose(2, 3) @ written


def _delta_token(columns: list[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """``_delta_chunk`` of one token, which changes ``state``: a decode row reads it a few times, and makes
    nothing as large."""
    q, k, v, decay, beta = columns
    state = state.mul_(decay.transpose(2, 3).exp())
    state.addcmul_(k.transpose(2, 3), beta[..., None] * (v - k @ state))
    return q @ state, state


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, units: Tensor, batch: ForwardBatch
) -> Tensor:
    """``ops.selective_scan`` without d, of time steps float32[T, H]: float32[T, H, P]."""
    out, a = x.new_empty(x.shape, dtype=torch.float32), a.float()
    group = x.shape[1] // b.shape[1]
    for tokens, before, after in stretches(batch):
        state = begin(units, before)
        for part in tokens.split(CHUNK, 1):
            given, taken = (y[part].float().repeat_interleave(group, 2).transpose(1, 2) for y in (b, c))
            time = dt[part].transpose(1, 2)
            inputs = x[part].float().transpose(1, 2) * time[..., None]
            if a.dim() > 1:
                step = _scan_channels
            else:
                step = _scan_token if part.shape[1] == 1 else _scan_chunk
            made, state = step(inputs, time, a, given, taken, state)
            out[part] = made.transpose(1, 2)
        units[after] = state.to(units.dtype)
    leave(units, batch)
    return out


def _scan_chunk(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """L tokens of n rows from ``state`` [n, H, P, N] on: x ``[n, H, L, P]`` times dt, dt ``[n, H, L]``,
    b and c ``[n, H, L, N]`` -> what comes ``[n, H, L, P]`` and the state behind it."""
    total = (dt * a[:, None]).cumsum(2)
    left = (total[..., None] - total[:, :, None]).clamp(max=0).exp()
    made = (c @ b.transpose(2, 3) * left).tril() @ x + total.exp()[..., None] * (c @ state.transpose(2, 3))
    kept = x * (total[..., -1:] - total).exp()[..., None]
    return made, state * total[..., -1, None, None].exp() + kept.transpose(2, 3) @ b


def _scan_token(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """``_scan_chunk`` of one token, which changes ``state``."""
    state = state.mul_((dt * a[:, None]).exp()[..., None])
    state.addcmul_(x.transpose(2, 3), b)
    return c @ state.transpose(2, 3), state


def _scan_channels(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """``_scan_chunk`` where a ``[H, N]`` has a value for each place of a state and P is 1: one token after
    another, which changes ``state``. In chunks every pair of tokens would have a decay for each place."""
    decay, inputs = (dt[..., None] * a[:, None]).exp(), x * b
    places = state.squeeze(2)
    made = x.new_empty(x.shape)
    for t in range(x.shape[2]):
        places.mul_(decay[:, :, t]).add_(inputs[:, :, t])
        made[:, :, t, 0] = (places * c[:, :, t]).sum(-1)
    return made, state

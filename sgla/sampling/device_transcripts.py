"""``rules.Transcribing`` on a GPU, for rows that transcribe: nothing of it is looked at on the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.kernels.triton.tokens import TokenTable
from sgla.messages import Transcript

Int32s = NDArray[np.int32]


class DeviceTranscripts:
    """``tokens``: those of all slots."""

    def __init__(self, tokens: TokenTable) -> None:
        self._tokens = tokens
        self._said: dict[int, tuple[Transcript, int]] = {}  # by slot, with the length of the prompt

    def admit(self, slot: int, prompt_len: int, transcript: Transcript | None) -> None:
        self._said.pop(slot, None)
        if transcript is not None:
            self._said[slot] = transcript, prompt_len

    def apply(self, logits: Tensor, rows: NDArray[Any], slots: Int32s, positions: Int32s) -> None:
        """``rows`` of ``logits`` float32[S, V], whose tokens will stand at ``positions`` of ``slots``,
        int32[S]."""
        left = rows.tolist()
        while left:  # those with the same rules together
            said = self._said[int(slots[left[0]])][0]
            own = [row for row in left if self._said[int(slots[row])][0] == said]
            left = [row for row in left if row not in own]
            begins = np.array([self._said[int(slots[row])][1] for row in own])
            changed = logits[own]
            self._change(changed, said, slots[own], begins, positions[own])
            logits[own] = changed

    def _change(
        self, logits: Tensor, said: Transcript, slots: Int32s, begins: NDArray[Any], ends: Int32s
    ) -> None:
        """``begins`` and ``ends``: where each row's output begins, and where its next token will stand."""
        logits[:, self._known(said.suppressed, logits)] = -math.inf
        empty, first = self._put(ends <= begins), self._known(said.first_suppressed, logits)
        logits[:, first] = torch.where(empty[:, None], -math.inf, logits[:, first])
        if said.timed:
            logits.masked_fill_(self._wrong(logits, said, slots, begins, ends, empty), -math.inf)
            prefer(logits, said.first_time)

    def _wrong(
        self,
        logits: Tensor,
        said: Transcript,
        slots: Int32s,
        begins: NDArray[Any],
        ends: Int32s,
        empty: Tensor,
    ) -> Tensor:
        """bool[rows, V]: timestamps come in pairs, but for the first and the last, and never fall."""
        device, time = logits.device, said.first_time
        longest = max(1, int((ends - begins).max()))
        places = np.minimum(begins[:, None] + np.arange(longest), self._tokens.longest - 1)
        there, where = self._put(places < ends[:, None]), self._put(places.astype(np.int64))
        output = self._tokens.read(self._put(slots.astype(np.int64)), where)
        times = there & (output >= time)  # [rows, longest]
        count = self._put((ends - begins).astype(np.int64))
        ended, before = (times.gather(1, (count - n).clamp(min=0)[:, None])[:, 0] for n in (1, 2))
        paired = (count < 2) | before
        latest = torch.where(times, torch.arange(longest, device=device), -1).amax(1)
        least = output.gather(1, latest.clamp(min=0)[:, None])[:, 0] + torch.where(ended & ~paired, 0, 1)
        tokens = torch.arange(logits.shape[1], device=device)
        timed = tokens >= time
        wrong = (ended & paired)[:, None] & timed
        wrong |= (ended & ~paired)[:, None] & (tokens < said.end)
        wrong |= (latest >= 0)[:, None] & timed & (tokens < least[:, None])
        begin = ~timed
        if said.latest >= 0:
            begin = begin | (tokens > time + said.latest)
        return torch.where(empty[:, None], begin, wrong) | (tokens == said.untimed)

    def _known(self, tokens: list[int], logits: Tensor) -> Tensor:
        """Those that have a column."""
        return self._put(np.array([token for token in tokens if token < logits.shape[1]], np.int64))

    def _put(self, values: NDArray[Any]) -> Tensor:
        """On the GPU, without waiting."""
        host, device = torch.from_numpy(values), self._tokens.device
        return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def prefer(logits: Tensor, time: int) -> None:
    """A timestamp comes where all together are more probable than any other token. ``time``: the first."""
    together, word = logits[:, time:].logsumexp(1), logits[:, :time].amax(1)
    logits[:, :time].masked_fill_((together > word)[:, None], -math.inf)

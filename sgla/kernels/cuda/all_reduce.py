"""Launcher of ``all_reduce.cu``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from copy import copy
from functools import cache
from itertools import accumulate
from typing import Self, get_args

import torch
from torch import Tensor

from sgla.kernels.cuda.batch_gemm import Sending
from sgla.kernels.cuda.build import Kernel, processors
from sgla.kernels.cuda.decode_step import MAX_RANKS, StepInbox, told
from sgla.kernels.cuda.mixture_step import MixtureShape
from sgla.kernels.ops import AddedNorm, Sent

KEYS = 8192  # rows that ``all_max`` takes at a time
STATE_BYTES, KEYS_BYTES = 256, 2 * MAX_RANKS * KEYS * 8
STEP_BYTES = 1 << 20  # where whole steps exchange what they add (``decode_step.py``)
BESIDE = 5  # of so many multiprocessors one is taken by sums beside other kernels
EMPTY = -0x7FFF8000  # 0x80008000 as int32: two negative zeros
P = ctypes.c_void_p


class _Params(ctypes.Structure):
    _fields_ = (
        *((name, P) for name in ("x", "out", "residual", "weight", "bias")),
        ("inbox", P * MAX_RANKS),
        ("state", P),
        ("half", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rank", "rows", "width")),
        ("eps", ctypes.c_float),
        ("first", ctypes.c_int * (MAX_RANKS + 1)),
    )


class _MaxParams(ctypes.Structure):
    _fields_ = (
        ("keys", P),
        ("inbox", P * MAX_RANKS),
        ("state", P),
        ("half", ctypes.c_longlong),
        ("rank", ctypes.c_int),
        ("rows", ctypes.c_int),
    )


@cache
def _kernel(ranks: int, threads: int, vectors: int, two_shot: bool, norm: int, sent: int) -> Kernel:
    defines = {"RANKS": ranks, "THREADS": threads, "VECS": vectors, "SENT": sent}
    return Kernel("all_reduce.cu", "all_reduce", defines | {"TWO_SHOT": int(two_shot), "NORM": norm})


@cache
def _own_kernel(name: str, ranks: int, threads: int, vectors: int, norm: int) -> Kernel:
    defines = {"RANKS": ranks, "THREADS": threads, "VECS": vectors, "TWO_SHOT": 0, "NORM": norm}
    return Kernel("all_reduce.cu", name, defines)


@cache
def _max_kernel(ranks: int) -> Kernel:
    defines = {"RANKS": ranks, "THREADS": 256, "VECS": 1, "TWO_SHOT": 0, "NORM": 0}
    return Kernel("all_reduce.cu", "all_max", defines)


def inbox_bytes(ranks: int, message: int) -> int:
    """Memory a rank shares for messages of up to ``message`` bytes."""
    sums = 2 * max(2 * message + ranks * (64 << 10), ranks * one_shot_bytes(ranks, message))
    return sums + KEYS_BYTES + STEP_BYTES


def one_shot_bytes(ranks: int, message: int) -> int:
    """Messages up to this many bytes go to all ranks whole: for two that is never slower, for four it is up
    to 16 rows of 4096 (bench/allreduce.py)."""
    return message if ranks == 2 else min(message, (512 << 10) // ranks)


def _threads(d: int) -> tuple[int, int]:
    """Of a block, and vectors of a row of d values that each has."""
    width = d // 8
    vectors = -(-width // 1024)
    return -(-width // vectors // 32) * 32, vectors


def _kind(norm: AddedNorm | None) -> int:
    """NORM of the kernels."""
    if norm is None:
        return 0
    return 2 if norm.residual is None else 1 if norm.bias is None else 3


class AllReduce:
    """``inboxes``: where this process sees each rank's memory of ``inbox_bytes(ranks, message)`` bytes, which
    its owner has passed to ``clear`` and no other has touched. All ranks must make the same calls in the same
    order, on one stream, or on several that wait for each other."""

    _few = False

    def __init__(self, inboxes: list[int], rank: int, message: int) -> None:
        self._ranks, self._rank, self._message = len(inboxes), rank, message
        pad = [0] * (MAX_RANKS - self._ranks)
        before = KEYS_BYTES + STEP_BYTES
        self._inboxes = (P * MAX_RANKS)(*(address + before for address in inboxes), *pad)
        self._key_inboxes = (P * MAX_RANKS)(*inboxes, *pad)
        self._half = (inbox_bytes(self._ranks, message) - before) // 2
        self._step_inboxes = [address + KEYS_BYTES for address in inboxes]
        self._steps = dict[MixtureShape, StepInbox]()
        self._step_bytes = 0
        self._state = torch.zeros(STATE_BYTES // 4, dtype=torch.int32, device="cuda")
        self._key_state = self._state.data_ptr() + STATE_BYTES // 2

    @staticmethod
    def clear(memory: Tensor) -> None:
        """Make uint8 ``memory`` an empty inbox."""
        memory[:KEYS_BYTES].zero_()
        memory[KEYS_BYTES:].view(torch.int32).fill_(EMPTY)

    def for_steps(self, shape: MixtureShape) -> StepInbox | None:
        """Where whole steps of this shape exchange what they add, or None if there is no room. All ranks must
        ask for the same shapes in the same order."""
        if shape not in self._steps:
            if shape.ranks != self._ranks or self._step_bytes + 4 * shape.inbox > STEP_BYTES:
                return None
            addresses = (address + self._step_bytes for address in self._step_inboxes)
            pad = [0] * (MAX_RANKS - self._ranks)
            kept = told(shape.words, self._state.device)
            self._steps[shape] = StepInbox((P * MAX_RANKS)(*addresses, *pad), self._rank, *kept)
            self._step_bytes += 4 * shape.inbox
        return self._steps[shape]

    def beside(self) -> Self:
        """The same, whose sums leave most of the GPU to what runs beside them."""
        made = copy(self)
        made._few = True
        return made

    def takes(self, x: Tensor) -> bool:
        return x.dtype == torch.bfloat16 and 0 < x.nbytes <= self._message and x.shape[-1] % 8 == 0

    def fits(self, x: Tensor, two_shot: bool) -> bool:
        """Whether an inbox has room for x sent that way."""
        row = x.shape[1] * x.itemsize
        places = self._ranks * -(-len(x) // self._ranks) + len(x) if two_shot else self._ranks * len(x)
        return places * row <= self._half

    def sending(self, rows: int, d: int) -> Sending | None:
        """How a kernel sends its part of ``[rows, d]`` bf16 when it makes it, before ``sum`` with ``sent``;
        None if that goes otherwise."""
        if rows * d * 2 > one_shot_bytes(self._ranks, self._message) or d % 8:
            return None
        return Sending(self._ranks, self._rank, self._inboxes, self._state.data_ptr(), self._half // 4)

    def sum(
        self,
        x: Tensor,
        norm: AddedNorm | None = None,
        two_shot: bool | None = None,
        sent: Sent = "",
    ) -> Tensor:
        """The sum over the ranks of x bf16 ``[T, d]``, in place; with ``norm`` x becomes the norm of the new
        residual, or of the sum. ``sent``: the kernel before has x on its way to the others (``sending``), or
        to all, so that it is not read here; such a sum begins before that kernel has ended."""
        assert x.is_contiguous()
        rows, d = x.shape
        threads, vectors = _threads(d)
        if two_shot is None:
            two_shot = x.nbytes > one_shot_bytes(self._ranks, self._message)
        assert self.fits(x, two_shot)
        assert not (sent and two_shot)
        kernel = _kernel(self._ranks, threads, vectors, two_shot, _kind(norm), get_args(Sent).index(sent))
        kernel.launch(self._blocks(rows, threads), threads, self._params(x, x, rows, norm))
        return x

    def takes_own(self, rows: Tensor, counts: Sequence[int]) -> bool:
        """Whether ``gather`` gives, or ``scatter`` takes, what looks like ``rows`` [A, d], of which each rank
        has ``counts``. The same on every rank, each of which hears of every other."""
        row = rows.shape[1] * rows.itemsize
        return self.takes(rows) and min(counts) > 0 and self._ranks * max(counts) * row <= self._half

    def gather(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, which have ``counts``: x bf16 ``[T, d]`` of this one -> ``[A, d]``."""
        out = x.new_empty(sum(counts), x.shape[1])
        self._launch_own("all_gather", x, out, counts, None)
        return out

    def scatter(self, x: Tensor, counts: Sequence[int], norm: AddedNorm | None = None) -> Tensor:
        """The sum over the ranks of x bf16 ``[A, d]``, each rank's own rows alone, ``[T, d]``; ``norm``: see
        ``sum``."""
        out = x.new_empty(counts[self._rank], x.shape[1])
        self._launch_own("reduce_scatter", x, out, counts, norm)
        return out

    def _launch_own(
        self, name: str, x: Tensor, out: Tensor, counts: Sequence[int], norm: AddedNorm | None
    ) -> None:
        assert x.is_contiguous()
        rows, (threads, vectors) = sum(counts), _threads(x.shape[1])
        params = self._params(x, out, rows, norm)
        params.first[: self._ranks + 1] = list(accumulate(counts, initial=0))
        kernel = _own_kernel(name, self._ranks, threads, vectors, _kind(norm))
        kernel.launch(self._blocks(rows, threads), threads, params)

    def _params(self, x: Tensor, out: Tensor, rows: int, norm: AddedNorm | None) -> _Params:
        weight, eps = (norm.weight.data_ptr(), norm.eps) if norm else (0, 0.0)
        more = (None, None) if norm is None else (norm.residual, norm.bias)
        residual, bias = (0 if each is None else each.data_ptr() for each in more)
        return _Params(
            x.data_ptr(), out.data_ptr(), residual, weight, bias, self._inboxes, self._state.data_ptr(),
            self._half // 16, self._rank, rows, x.shape[1] // 8, eps,
        )  # fmt: skip

    def _blocks(self, rows: int, threads: int) -> int:
        """Blocks wait for their peers' counterparts, so all of them must be on the GPU at once."""
        most = processors() // BESIDE if self._few else processors() * max(1, 1024 // threads)
        return min(rows, most)

    def max(self, keys: Tensor) -> None:
        """The largest over the ranks of each of ``keys`` int64[S], none of which is 0; in place."""
        assert keys.is_contiguous()
        for part in keys.split(KEYS):
            params = _MaxParams(
                part.data_ptr(), self._key_inboxes, self._key_state, KEYS_BYTES // 16, self._rank, len(part)
            )
            _max_kernel(self._ranks).launch(-(-len(part) // 256), 256, params)

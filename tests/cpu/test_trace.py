"""Torch operations in a recorded forward: the program computes what the forward computes, at any number of
tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_program import STEPS, step
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu.fuse import Node
from sgla.kernels.cpu.native import Opcode
from sgla.kernels.cpu.program import Program, ProgramLimits
from sgla.kernels.dispatch import op, using
from sgla.kernels.ops import KVLayer
from sgla.kernels.trace import NotRecorded
from sgla.quant.weight import pack
from sgla.worker.forward import compiled

pytestmark = pytest.mark.native
LIMITS = ProgramLimits(40, 5)
WIDTH, HEADS = 24, 4
torch.manual_seed(3)
TABLE = torch.randn(100, WIDTH)
MATRIX = pack(torch.randn(WIDTH, WIDTH) / 5, "f32")
NORM = torch.rand(WIDTH) + 0.5
Forward = Callable[[ForwardBatch], Tensor]


def equal(forward: Forward) -> list[Node]:
    """The program of ``forward`` equals it in steps of three sizes; returns its nodes."""
    program = Program.record(forward, LIMITS)
    for rows in STEPS:
        batch = step(rows)
        torch.testing.assert_close(program.run(batch), forward(batch), rtol=1e-5, atol=1e-5)
    return program.nodes


def words(b: ForwardBatch) -> Tensor:
    return ops.embedding(b.ids, TABLE)


FORWARDS: dict[str, Forward] = {
    "arithmetic": lambda b: ops.linear((words(b) * 2.0 - 1.0) / 3 + torch.sin(words(b)), MATRIX),
    "a constant on the right": lambda b: 1.0 - words(b) @ torch.eye(WIDTH),
    "heads": lambda b: (words(b).view(b.tokens, HEADS, -1) * torch.arange(1.0, HEADS + 1)[:, None]).flatten(
        1
    ),
    "a shape that is asked for": lambda b: words(b).reshape(words(b).shape[0] * 2, -1).view(-1, WIDTH),
    "a norm of each head": lambda b: ops.rms_norm(
        words(b).view(b.tokens, HEADS, -1), NORM[: WIDTH // HEADS], 1e-5
    ).flatten(1),
    "split and joined": lambda b: torch.cat(words(b).chunk(2, dim=-1)[::-1], dim=-1),
    "several results": lambda b: words(b).topk(WIDTH, dim=-1).values,
    "positions": lambda b: words(b) * b.positions[:, None].float(),
    "rows": lambda b: words(b) + (b.kv_len.float().mean() + (b.q_start[1:] - b.q_start[:-1]).sum()),
    "between tokens": lambda b: torch.softmax(words(b) @ words(b).T / 5, dim=-1) @ words(b),
    "slices": lambda b: F.pad(words(b)[:, 4:], (0, 4)),
    "the rows that are sampled": lambda b: words(b)[b.sample_rows.long()].tanh(),
    "types": lambda b: words(b).to(torch.bfloat16).float(),
    "what is not float32 is passed on": lambda b: (
        ops.rms_norm(words(b), NORM, 1e-5) * (words(b) > 0).to(words(b).dtype)
    ),
    "native in between": lambda b: ops.rms_norm(
        torch.relu(ops.linear(words(b), MATRIX)), NORM, 1e-5
    ).square(),
    "a device that is asked for": lambda b: words(b) + torch.ones(WIDTH, device=words(b).device),
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_program_with_torch_operations_equals_the_forward(name: str) -> None:
    equal(FORWARDS[name])


def test_values_of_any_type_live_until_their_last_reader() -> None:
    def forward(b: ForwardBatch) -> Tensor:
        x = words(b)
        mask, turned, half = x > 0, x.T.contiguous(), x[:, ::2]
        for _ in range(3):  # takes the memory of x again and again
            x = ops.rms_norm(ops.linear(x, MATRIX), NORM, 1e-5)
        return x * mask + turned.T + half.repeat_interleave(2, dim=1)

    nodes = equal(forward)
    assert [node.op == Opcode.PYTHON for node in nodes].count(True) == 2  # neighbours are one


@op
def relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()


@op
def mixed(x: Tensor) -> Tensor:
    return ops.rms_norm(ops.linear(relu_squared(x), MATRIX), NORM, 1e-5)


@op(like="x")
def by_value(x: Tensor, b: ForwardBatch) -> Tensor:
    """Looks at numbers on the host, as no program can."""
    scale = [1.0 if int(row) % 2 else -1.0 for row in b.positions.tolist()]
    return x * torch.tensor(scale)[:, None]


def test_an_op_without_a_kernel_is_its_body() -> None:
    assert Opcode.LINEAR in {node.op for node in equal(lambda b: mixed(words(b)))}


def test_a_sum_of_rows_is_native() -> None:
    nodes = equal(lambda b: ops.rms_norm(words(b) + ops.linear(words(b), MATRIX), NORM, 1e-5))
    assert [node.op for node in nodes] == [
        Opcode.EMBEDDING,
        Opcode.EMBEDDING,
        Opcode.LINEAR,
        Opcode.RMS_NORM,
    ]
    equal(lambda b: ops.rms_norm(words(b) + 1.0 + NORM, NORM, 1e-5))


def test_a_body_that_looks_at_values_is_one_call() -> None:
    equal(lambda b: ops.linear(by_value(words(b), b), MATRIX))


def test_bodies_run_where_no_kernel_fits() -> None:
    """Heads of 600 dimensions, which the kernels have no scratch for."""
    kv = KVLayer(torch.zeros(60, 4, 1, 600), torch.zeros(60, 4, 1, 600))
    qkv = pack(torch.randn(1800, WIDTH), "f32")
    for page in (kv.k, kv.v):
        page.normal_()

    def forward(b: ForwardBatch) -> Tensor:
        return ops.attention(ops.linear(words(b), qkv)[:, :600].contiguous(), kv, b, 0.01)

    equal(forward)


def unequal(b: ForwardBatch) -> Tensor:
    return words(b) if float(words(b).sum()) > 0 else words(b) * 2


UNABLE: dict[str, tuple[Forward, str]] = {
    "a look at values": (unequal, "__float__"),
    "in place": (lambda b: words(b).mul_(2.0), "mul_: an operation in place"),
    "in place by an operator": (lambda b: words(b).__setitem__(0, 1.0) or words(b), "in place"),
    "a size that is a sum": (lambda b: words(b).new_zeros(b.tokens + 1, WIDTH)[1:], "a sum"),
    "the page table": (lambda b: words(b) + b.page_table.sum(), "page table"),
    "no rows": (lambda b: ops.linear(words(b).sum(0, keepdim=True), MATRIX), r"not float32 \[T, width\]"),
}


@pytest.mark.parametrize("name", UNABLE)
def test_what_a_program_cannot_replay_is_said(name: str) -> None:
    forward, message = UNABLE[name]
    with pytest.raises(NotRecorded, match=message):
        Program.record(forward, LIMITS)
    run, note = compiled(forward, LIMITS, 1, True)
    assert run is forward
    assert "cannot be recorded" in note


def test_symbols_of_another_recording_are_refused() -> None:
    kept: list[Tensor] = []

    def first(b: ForwardBatch) -> Tensor:
        kept.append(words(b))
        return kept[0]

    Program.record(first, LIMITS)
    with pytest.raises(TypeError, match="outside of this recording"):
        Program.record(lambda b: ops.linear(kept[0], MATRIX), LIMITS)


def test_a_dispatcher_is_one_models_alone() -> None:
    """Two of them in one process, one inside of the other, and none afterwards."""
    calls: list[str] = []

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, op: Any, args: Any, kwargs: Any) -> Any:
            calls.append(f"{self.name} {op.name}")
            with using(None):
                return op.body(*args, **kwargs)

    x = torch.ones(2, WIDTH)
    with using(Named("a")):
        ops.rms_norm(x, NORM, 1e-5)
        with using(Named("b")):
            relu_squared(x)
        ops.add(x, x)
    ops.add(x, x)
    assert calls == ["a rms_norm", "b relu_squared", "a add"]

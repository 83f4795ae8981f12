"""A decode step of one row as one kernel, of a dense model and of a mixture on two ranks: the CUDA kernels,
emulated, against torch."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulated_cuda import HERE, compile_kernel
from torch import Tensor

from sgla.device import nvidia
from sgla.kernels import device, ops
from sgla.kernels.cuda import decode_step, mixture_step
from sgla.kernels.cuda.decode_step import (
    BLOCKS,
    Copies,
    DecodeStep,
    DenseShape,
    LayerWeights,
    StepInbox,
    told,
)
from sgla.kernels.cuda.mixture_step import MixtureShape
from sgla.kernels.ops import KVLayer

LAYERS, VOCAB, EPS, SLOT, HD, RANKS = 2, 1200, 1e-6, 2, 128, 2
BF16 = torch.bfloat16


def weight(*shape: int) -> Tensor:
    return (torch.randn(*shape) * 0.02).to(BF16)


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That has room for all blocks."""
    monkeypatch.setattr(device, "_this", [nvidia("", (9, 0), 132)])


class Copied:
    """Where the second layer's input and the last state go, and what has to come there."""

    def __init__(self, hidden: int) -> None:
        self.latest = torch.full((3, 2 * hidden), float("nan"), dtype=BF16)
        self.to = Copies([None, self.latest[0, hidden:]], self.latest[0, :hidden])
        self.expected = torch.empty(0)

    def compare(self) -> None:
        found = self.latest[0].float()
        assert self.latest[1:].isnan().all()
        assert (found - self.expected).norm() < 0.015 * self.expected.norm()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    (a, b), (c, s) = x.chunk(2, -1), angles.chunk(2)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


class Layer:
    """Weights of all ranks."""

    def __init__(self, shape: MixtureShape) -> None:
        hidden, inner, experts = shape.hidden, RANKS * shape.inner, shape.experts
        heads, kv = RANKS * shape.heads, RANKS * shape.kv_heads
        self.q, self.k, self.v = weight(heads * HD, hidden), weight(kv * HD, hidden), weight(kv * HD, hidden)
        self.out, self.router = weight(hidden, heads * HD), weight(experts, hidden)
        self.gate, self.up = weight(experts, inner, hidden), weight(experts, inner, hidden)
        self.down = weight(experts, hidden, inner)
        self.norms = [1 + 0.1 * torch.randn(n) for n in (hidden, hidden, HD, HD)]

    def of(self, rank: int) -> tuple[Tensor, ...]:
        """As the kernel takes them."""

        def part(x: Tensor, dim: int) -> Tensor:
            return x.chunk(RANKS, dim)[rank]

        qkv = torch.cat([part(x, 0) for x in (self.q, self.k, self.v)])
        gate_up = torch.cat([part(self.gate, 1), part(self.up, 1)], 1)
        found = qkv, part(self.out, 1), self.router, gate_up, part(self.down, 2), *self.norms
        return tuple(x.contiguous() for x in found)

    def experts(self, x: Tensor) -> Tensor:
        best = (self.router.float() @ x).topk(8)
        gate, up, down = (w[best.indices].float() for w in (self.gate, self.up, self.down))
        inner = F.silu(gate @ x) * (up @ x) * best.values.softmax(0)[:, None]
        return torch.einsum("edf,ef->d", down, inner)


class Model:
    """Random weights and a random history; ranks are threads of this machine."""

    def __init__(self, shape: MixtureShape, tokens: int) -> None:
        pages, heads = -(-tokens // 16), RANKS * shape.kv_heads
        self.layers = [Layer(shape) for _ in range(LAYERS)]
        self.embedding, self.head = weight(VOCAB, shape.hidden), weight(VOCAB, shape.hidden)
        self.norm, self.group = 1 + 0.1 * torch.randn(shape.hidden), shape.heads // shape.kv_heads
        self.table = torch.zeros(4, pages + 3, dtype=torch.int32)
        self.table[SLOT, :pages] = 1 + torch.randperm(pages).int()
        angles = torch.arange(tokens)[:, None] / 1e4 ** (torch.arange(0, HD, 2) / HD)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).contiguous()
        pool = torch.randn(LAYERS, 2, pages + 1, heads, 16, HD).to(BF16)
        self.pools = [part.contiguous() for part in pool.chunk(RANKS, 3)]
        inboxes = [told(shape.inbox, torch.device("cpu"))[0] for _ in range(RANKS)]
        addresses = (ctypes.c_void_p * 8)(*(inbox.data_ptr() for inbox in inboxes))
        self.kept = inboxes
        self.copied = [Copied(shape.hidden) for _ in range(RANKS)]
        self.steps = [
            DecodeStep(
                shape,
                [layer.of(rank) for layer in self.layers],
                [KVLayer(k.transpose(1, 2), v.transpose(1, 2)) for k, v in self.pools[rank]],
                self.embedding,
                self.head.chunk(RANKS)[rank],
                self.norm,
                self.cos_sin,
                EPS,
                HD**-0.5,
                StepInbox(addresses, rank, *told(shape.words, torch.device("cpu"))),
                self.copied[rank].to if shape.copied else None,
            )
            for rank in range(RANKS)
        ]

    def step(self, token: int, length: int) -> list[Tensor]:
        """The part of the logits of each rank, when the kernel has run."""
        ids, slots, kv_len, positions = (
            torch.tensor([x], dtype=torch.int32) for x in (token, SLOT, length, length - 1)
        )
        parts = [torch.full((1, VOCAB // RANKS), float("nan")) for _ in self.steps]
        for step, logits in zip(self.steps, parts, strict=True):
            step(ids, positions, slots, kv_len, self.table, logits)
        self.given = ids, slots, kv_len, positions
        return parts

    def oracle(self, token: int, length: int) -> Tensor:
        h, angles = self.embedding[token].float(), self.cos_sin[length - 1]
        pool = torch.cat(self.pools, 3)
        for layer, pages in zip(self.layers, pool, strict=True):
            second_input = h
            first, second, q_norm, k_norm = layer.norms
            x = ops.rms_norm(h, first, EPS)
            q, k, v = ((w.float() @ x).view(-1, HD) for w in (layer.q, layer.k, layer.v))
            q, k = rotate(ops.rms_norm(q, q_norm, EPS), angles), rotate(ops.rms_norm(k, k_norm, EPS), angles)
            mine = self.table[SLOT, : -(-length // 16)].long()
            past = pages[:, mine].transpose(2, 3).flatten(1, 2)[:, : length - 1].float()
            keys, values = torch.cat([past[0], k[None]]), torch.cat([past[1], v[None]])
            scores = torch.einsum("hgd,nhd->hgn", q.view(-1, self.group, HD), keys) * HD**-0.5
            h = h + layer.out.float() @ torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values).flatten()
            h = h + layer.experts(ops.rms_norm(h, second, EPS))
        last = ops.rms_norm(h, self.norm, EPS)
        for copied in self.copied:
            copied.expected = torch.cat([last, second_input])
        return self.head.float() @ last


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize("copied", [False, True])
def test_two_ranks_equal_the_model(copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tokens before, and more than blocks have tiles for; steps that follow each other."""
    torch.manual_seed(0)
    shape = MixtureShape(2048, 16, 2, 384, 128, 8, True, True, 16, RANKS, copied)
    libraries, params = [], list[Any]()

    class Emulated:
        def __init__(self, file: str, name: str, defines: dict[str, int], shared: int) -> None:
            threads = 32 * shape.warps
            libraries.append(compile_kernel(file, name, defines, threads, RANKS * BLOCKS, tmp_path))

        def launch(self, grid: int, threads: int, given: Any) -> None:
            params.append(given)

    monkeypatch.setattr(mixture_step, "Kernel", Emulated)
    model = Model(shape, 1120)
    for token, length in ((7, 17), (8, 1100)):
        expected, parts = model.oracle(token, length), model.step(token, length)
        given = (decode_step._Params * RANKS)(*params)
        params.clear()
        libraries[0].run(ctypes.byref(given), RANKS, BLOCKS)
        assert (torch.cat(parts, 1)[0] - expected).norm() < 0.015 * expected.norm()
        for each in model.copied if copied else ():
            each.compare()


class Dense:
    """A dense model with random weights and a random history."""

    def __init__(self, shape: DenseShape, tokens: int) -> None:
        hidden, pages = shape.hidden, -(-tokens // 16)
        self.shape, self.layers = shape, list[LayerWeights]()
        for _ in range(LAYERS):
            products = weight(shape.qkv, hidden), weight(hidden, shape.heads * HD)
            mlp = weight(2 * shape.inner, hidden), weight(hidden, shape.inner)
            norms = (1 + 0.1 * torch.randn(n) for n in (hidden, hidden, HD, HD))
            self.layers.append(LayerWeights(*products, *mlp, *norms))
        self.embedding, self.head = weight(VOCAB, hidden), weight(VOCAB, hidden)
        self.norm = 1 + 0.1 * torch.randn(hidden)
        self.table = torch.zeros(4, pages + 3, dtype=torch.int32)
        self.table[SLOT, :pages] = 1 + torch.randperm(pages).int()
        angles = torch.arange(tokens)[:, None] / 1e4 ** (torch.arange(0, HD, 2) / HD)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1).contiguous()
        self.pool = torch.randn(LAYERS, 2, pages + 1, shape.kv_heads, 16, HD).to(BF16)
        kv = [KVLayer(k.transpose(1, 2), v.transpose(1, 2)) for k, v in self.pool]
        parts = self.embedding, self.head, self.norm, self.cos_sin
        self.copied = Copied(hidden)
        copies = self.copied.to if shape.copied else None
        self.step = DecodeStep(shape, self.layers, kv, *parts, EPS, HD**-0.5, copies=copies)

    def oracle(self, token: int, length: int) -> Tensor:
        shape = self.shape
        h, angles = self.embedding[token].float(), self.cos_sin[length - 1]
        for w, pages in zip(self.layers, self.pool, strict=True):
            second_input = h
            heads = (w.qkv.float() @ ops.rms_norm(h, w.input_norm, EPS)).view(-1, HD)
            q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads])
            assert w.q_norm is not None
            assert w.k_norm is not None
            q, k = (
                rotate(ops.rms_norm(q, w.q_norm, EPS), angles),
                rotate(ops.rms_norm(k, w.k_norm, EPS), angles),
            )
            mine = self.table[SLOT, : -(-length // 16)].long()
            past = pages[:, mine].transpose(2, 3).flatten(1, 2)[:, : length - 1].float()
            keys, values = torch.cat([past[0], k[None]]), torch.cat([past[1], v[None]])
            scores = torch.einsum("hgd,nhd->hgn", q.view(shape.kv_heads, -1, HD), keys) * HD**-0.5
            h = h + w.out.float() @ torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values).flatten()
            gate, up = (w.gate_up.float() @ ops.rms_norm(h, w.mlp_norm, EPS)).chunk(2)
            h = h + w.down.float() @ (F.silu(gate) * up)
        last = ops.rms_norm(h, self.norm, EPS)
        self.copied.expected = torch.cat([last, second_input])
        return self.head.float() @ last


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="there is no compiler, or another CPU")
@pytest.mark.parametrize("copied", [False, True])
def test_a_dense_step_equals_the_model(copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that follow each other: tokens that one block of a head attends to, few, and more than few do."""
    torch.manual_seed(0)
    libraries, params = [], list[Any]()

    class Emulated:
        def __init__(self, file: str, name: str, defines: dict[str, int], shared: int) -> None:
            threads = 32 * shape.warps
            libraries.append(compile_kernel(file, name, defines, threads, BLOCKS, tmp_path))

        def launch(self, grid: int, threads: int, given: Any) -> None:
            params.append(given)

    monkeypatch.setattr(decode_step, "Kernel", Emulated)
    shape = DenseShape(1024, 16, 8, 1024, True, 16, copied)
    decode_step._kernel.cache_clear()
    model = Dense(shape, 1440)
    decode_step._kernel.cache_clear()
    for token, length in ((7, 17), (8, 200), (9, 600), (10, 1300)):
        ids, slots, kv_len, positions = (
            torch.tensor([x], dtype=torch.int32) for x in (token, SLOT, length, length - 1)
        )
        expected, logits = model.oracle(token, length), torch.full((1, VOCAB), float("nan"))
        model.step(ids, positions, slots, kv_len, model.table, logits)
        libraries[0].run(ctypes.byref(params.pop()), 1, BLOCKS)
        assert (logits[0] - expected).norm() < 0.015 * expected.norm()
        if copied:
            model.copied.compare()

"""The kernel of a whole decode step against torch in float32, and within the runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from test_gpu_runner import generate, make, prompt
from test_gpu_verify import BY_LAST, BY_LAYERS, FOUR
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.gpu import rules
from sgla.kernels.ops import KVLayer

pytest.importorskip("triton")
BF16 = torch.bfloat16
LAYERS, VOCAB, EPS, SLOT = 2, 2000, 1e-6, 2
LENGTHS = (1, 16, 17, 640, 2100, 4097)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    (a, b), (c, s) = x.chunk(2, -1), angles.chunk(2)
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def weight(n: int, k: int) -> Tensor:
    return torch.randn(n, k, dtype=BF16, device="cuda").mul_(0.02)


def norm(n: int) -> Tensor:
    return 1 + 0.1 * torch.randn(n, device="cuda")


class Decoder:
    """Random weights and a random history of one row, which is turned as if ``behind`` tokens were not
    there."""

    behind = 0

    def __init__(self, shape: Any, tokens: int) -> None:
        from sgla.kernels.cuda.decode_step import Copies, DecodeStep

        hidden = shape.hidden
        self.shape, self.scale, pages = shape, 128**-0.5, -(-tokens // 16)
        self.layers = [self.layer() for _ in range(LAYERS)]
        self.embedding, self.head, self.norm = weight(VOCAB, hidden), weight(VOCAB, hidden), norm(hidden)
        pool = torch.randn(LAYERS, 2, pages + 1, shape.kv_heads, 16, 128, dtype=BF16, device="cuda")
        self.kv = [KVLayer(k, v) for k, v in pool.transpose(3, 4)]
        self.table = torch.zeros(4, pages + 3, dtype=torch.int32, device="cuda")
        self.table[SLOT, :pages] = 1 + torch.randperm(pages, device="cuda").int()
        angles = torch.arange(tokens, device="cuda")[:, None] / 1e4 ** (
            torch.arange(0, 128, 2, device="cuda") / 128
        )
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
        self.copied = torch.full((3, 2, hidden), float("nan"), dtype=BF16, device="cuda")
        copies = Copies([None, self.copied[0, 0]], self.copied[0, 1]) if shape.copied else None
        parts = self.embedding, self.head, self.norm, self.cos_sin
        self.step = DecodeStep(shape, self.layers, self.kv, *parts, EPS, self.scale, copies=copies)

    def layer(self) -> Any:
        from sgla.kernels.cuda.decode_step import LayerWeights

        shape, hidden = self.shape, self.shape.hidden
        heads = (norm(128), norm(128)) if shape.qk_norm else (None, None)
        return LayerWeights(
            weight(shape.qkv, hidden), weight(hidden, shape.heads * 128), weight(2 * shape.inner, hidden),
            weight(hidden, shape.inner), norm(hidden), norm(hidden), *heads,
        )  # fmt: skip

    def mlp(self, w: Any, x: Tensor) -> Tensor:
        gate, up = (w.gate_up.float() @ x).chunk(2)
        return w.down.float() @ (F.silu(gate) * up)

    def run(self, token: int, length: int) -> Tensor:
        ids, slots, kv_len = (
            torch.tensor([x], dtype=torch.int32, device="cuda") for x in (token, SLOT, length)
        )
        logits = torch.full((1, VOCAB), float("nan"), device="cuda")
        self.step(ids, kv_len - 1 - self.behind, slots, kv_len, self.table, logits)
        return logits[0]

    def oracle(self, token: int, length: int) -> tuple[Tensor, Tensor]:
        """Logits, and k and v of the token ``[layers, 2, kv heads, 128]``."""
        shape, written = self.shape, []
        h, angles = self.embedding[token].float(), self.cos_sin[length - 1 - self.behind]
        for w, kv in zip(self.layers, self.kv):
            second_input = h
            heads = (w.qkv.float() @ rms_norm(h, w.input_norm)).view(-1, 128)
            q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads])
            if w.q_norm is not None and w.k_norm is not None:
                q, k = rms_norm(q, w.q_norm), rms_norm(k, w.k_norm)
            q, k = rotate(q, angles), rotate(k, angles)
            written.append(torch.stack([k, v]))
            pages = self.table[SLOT, : -(-length // 16)].long()
            past_k, past_v = (x[pages].flatten(0, 1)[: length - 1].float() for x in (kv.k, kv.v))
            keys, values = torch.cat([past_k, k[None]]), torch.cat([past_v, v[None]])
            scores = torch.einsum("hgd,nhd->hgn", q.view(shape.kv_heads, -1, 128), keys) * self.scale
            h = h + w.out.float() @ torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values).flatten()
            h = h + self.mlp(w, rms_norm(h, w.mlp_norm))
        last = rms_norm(h, self.norm)
        self.states = torch.stack([second_input, last])
        return self.head.float() @ last, torch.stack(written)


def relative(x: Tensor, expected: Tensor) -> float:
    return float((x.float() - expected).norm() / expected.norm())


def compare(decoder: Decoder, token: int, length: int) -> None:
    expected, written = decoder.oracle(token, length)
    assert relative(decoder.run(token, length), expected) < 0.015
    page, at = int(decoder.table[SLOT, (length - 1) // 16]), (length - 1) % 16
    stored = torch.stack([torch.stack([kv.k[page, at], kv.v[page, at]]) for kv in decoder.kv])
    assert relative(stored, written) < 0.015
    if decoder.shape.copied:
        assert relative(decoder.copied[0], decoder.states) < 0.015
        assert decoder.copied[1:].isnan().all()


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "inner", "qk_norm"),
    [(1024, 16, 8, 3072, True), (2048, 16, 4, 2048, False), (4096, 32, 8, 3072, False)],
)
def test_step_equals_torch(hidden: int, heads: int, kv_heads: int, inner: int, qk_norm: bool) -> None:
    from sgla.kernels.cuda.decode_step import DenseShape

    torch.manual_seed(0)
    decoder = Decoder(DenseShape(hidden, heads, kv_heads, inner, qk_norm, 16), 4200)
    for token, length in enumerate(LENGTHS):
        compare(decoder, token, length)


def test_a_step_turns_by_its_own_position() -> None:
    from sgla.kernels.cuda.decode_step import DenseShape

    torch.manual_seed(0)
    decoder = Decoder(DenseShape(1024, 16, 8, 3072, True, 16), 700)
    decoder.behind = 40
    compare(decoder, 3, 640)


def test_a_step_copies_hidden_states() -> None:
    from sgla.kernels.cuda.decode_step import DenseShape

    torch.manual_seed(0)
    decoder = Decoder(DenseShape(1024, 16, 8, 3072, True, 16, copied=True), 700)
    for token, length in enumerate((1, 640)):
        compare(decoder, token, length)


def test_words_of_a_step_long_ago_are_not_taken() -> None:
    """Numbers of layers come again: here the ones of the parts that only the long steps have."""
    from sgla.kernels.cuda.decode_step import DenseShape

    torch.manual_seed(0)
    decoder = Decoder(DenseShape(1024, 16, 8, 3072, True, 16), 700)
    decoder.run(1, 1)
    expected = decoder.oracle(3, 640)[0]
    for _ in range(2):
        for _ in range(170):  # with a long one 171 steps of 3 numbers: 513
            decoder.run(1, 1)
        assert relative(decoder.run(3, 640), expected) < 0.015


# Who reads hidden states: of three layers, and behind the last norm.
HEADS: dict[str, dict[str, Any]] = {"nobody": {}, "eagle3": BY_LAYERS, "medusa": BY_LAST}


@pytest.fixture(params=HEADS)
def runner(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield make(FOUR, **HEADS[request.param])
    torch.cuda.empty_cache()


def test_runner_decodes_one_row_as_it_does_many(runner: Any) -> None:
    compare_in_runner(runner)


def compare_in_runner(runner: Any) -> None:
    """The kernel in the graph, by itself, and the usual kernels one after the other."""
    graphs = runner.graphs
    assert any(program.work.taken["whole step"] for program in runner.steps.forward._programs.values())
    generate(runner, {3: prompt(3, 250)}, 8, False)

    def logits(run: Callable[[], None]) -> Tensor:
        runner.steps.logits.zero_()
        if runner.steps.hidden is not None:
            runner.steps.hidden.latest.zero_()
        run()
        return runner.steps.logits[0].clone()

    def states() -> Tensor:
        """Of the row, which its slot keeps, too."""
        hidden = runner.steps.hidden
        if hidden is None:
            return torch.ones(1)
        assert (hidden.ring[3] == hidden.latest[0]).all(1).any()
        return hidden.latest[0].clone()

    with torch.inference_mode():
        captured, copied = logits(graphs._graphs[1].replay), states()
        assert torch.equal(logits(lambda: graphs._forward(1)), captured)
        runner.steps.forward._programs.clear()
        others = [rule for rule in rules.RULES[ops.logits] if rule.name != "whole step"]
        with patch.dict(rules.RULES, {ops.logits: tuple(others)}):
            assert relative(captured, logits(lambda: graphs._forward(1))) < 0.05
            assert relative(states(), copied.float()) < 0.05

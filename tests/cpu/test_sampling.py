from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sgla.messages import RowSampling
from sgla.sampling import Sampler, faults
from sgla.sampling.device import score as device_score
from sgla.sampling.draw import CANDIDATES, Draw, Shape, draw, uniform
from sgla.sampling.logprobs import join, score
from sgla.sampling.native import find_draw

VOCAB = 1700  # more than CANDIDATES and no multiple of BLOCK


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def make_logits(seed: int, scale: float = 2.0, vocab: int = VOCAB) -> np.ndarray:
    return (rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def oracle(logits: np.ndarray, shape: Shape) -> np.ndarray:
    """The filtered distribution float64[V], straight from the definition."""
    x = torch.from_numpy(logits).double() / shape.temperature
    order = x.argsort(descending=True, stable=True)
    keep = torch.ones(len(x), dtype=torch.bool)
    if shape.top_k > 0:
        keep[order[shape.top_k :]] = False
    p = x.masked_fill(~keep, -torch.inf).softmax(-1)
    if shape.top_p < 1:
        before = p[order].cumsum(-1) - p[order]
        drop = before >= shape.top_p
        drop[0] = False
        keep[order[drop]] = False
    if shape.min_p > 0:
        keep &= p >= shape.min_p * p.max()
    return x.masked_fill(~keep, -torch.inf).softmax(-1).numpy()


SHAPES = [
    Shape(1.0, 0, 1.0, 0.0),
    Shape(0.7, 0, 1.0, 0.0),
    Shape(1.3, 0, 1.0, 0.05),
    Shape(1.0, 20, 1.0, 0.0),
    Shape(1.0, 0, 0.8, 0.0),
    Shape(3.0, 0, 0.999, 0.0),  # beyond the candidates
    Shape(5.0, 1200, 0.95, 0.0),  # top_k beyond the candidates
    Shape(1.5, 50, 0.9, 0.02),
    Shape(1.0, 1, 1.0, 0.0),
    Shape(1.0, 0, 0.0, 0.0),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_draw_walks_the_cdf_of_the_filtered_distribution(shape: Shape) -> None:
    """Over an even grid of u every token comes up as often as its probability says, and no other token ever."""
    logits = np.round(make_logits(1), 2)  # so that some are equal
    expected = oracle(logits, shape)
    n = 4000
    counts = np.bincount([draw(logits, shape, (i + 0.5) / n) for i in range(n)], minlength=VOCAB)
    assert np.abs(counts - n * expected).max() <= 1.5
    assert counts[expected == 0].sum() == 0


def test_both_ends_of_the_cdf_are_tokens_with_weight() -> None:
    logits = make_logits(2)
    logits[:3] = logits[-5:] = -np.inf
    for shape in SHAPES:
        allowed = set(np.flatnonzero(oracle(logits, shape)))
        for u in (0.0, 1 - 2**-40):
            assert draw(logits, shape, u) in allowed


@pytest.mark.native
@pytest.mark.parametrize(
    "shape", [*SHAPES, Shape(0.7, 0, 0.95, 0.1), Shape(0.6, 20, 0.95, 0.0), Shape(0.01, 0, 0.9, 0.0)]
)
def test_the_native_draw_gives_the_same_tokens(shape: Shape) -> None:
    fast = find_draw()
    assert fast is not draw
    for seed, vocab in ((1, VOCAB), (2, 40), (3, 49152)):
        logits = np.round(make_logits(seed, 3.0, vocab), 2)
        logits[5:9] = -np.inf
        for position in range(60):
            u = uniform(seed, position)
            assert fast(logits, shape, u) == draw(logits, shape, u)
        for u in (0.0, 1 - 2**-40):
            assert fast(logits, shape, u) == draw(logits, shape, u)
    for bad in (np.nan, -np.inf, np.inf):
        logits[3] = bad
        assert fast(logits, shape, 0.5) == draw(logits, shape, 0.5)


def test_temperature_sampling_passes_a_chi_square_test() -> None:
    logits = make_logits(3, vocab=40)
    n = 20000
    counts = np.bincount(
        [draw(logits, Shape(1.0, 0, 1.0, 0.0), uniform(7, i)) for i in range(n)], minlength=40
    )
    expected = n * oracle(logits, Shape(1.0, 0, 1.0, 0.0))
    rare = expected < 5
    statistic = ((counts - expected)[~rare] ** 2 / expected[~rare]).sum()
    degrees = int((~rare).sum()) - 1
    assert statistic < degrees + 4 * np.sqrt(2 * degrees)


def test_uniform_is_even_and_its_streams_are_unrelated() -> None:
    streams = np.array([[uniform(seed, i) for i in range(2000)] for seed in (0, 1, 2, 2**63 - 1)])
    assert ((streams >= 0) & (streams < 1)).all()
    assert np.abs(streams.mean(1) - 0.5).max() < 0.03
    correlation = np.corrcoef(np.vstack([streams, np.roll(streams[0], 1)]))
    assert np.abs(correlation - np.eye(5)).max() < 0.08


def broken(bad: float, places: slice | int) -> np.ndarray:
    logits = make_logits(4)
    logits[places] = bad
    return logits


BROKEN = {
    "a NaN": (broken(np.nan, 77), faults.NOT_NUMBERS),
    "a NaN in the last place": (broken(np.nan, VOCAB - 1), faults.NOT_NUMBERS),
    "all NaN": (broken(np.nan, slice(None)), faults.NOT_NUMBERS),
    "+inf": (broken(np.inf, 3), faults.NOT_NUMBERS),
    "all -inf": (broken(-np.inf, slice(None)), faults.NONE_LEFT),
    "NaN and -inf": (np.where(np.arange(VOCAB) == 5, np.nan, -np.inf), faults.NOT_NUMBERS),
}


@pytest.mark.parametrize(("logits", "fault"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize(
    "wants", [{}, {"logprobs": 0}, {"logprobs": 3, "logprob_ids": [5, 9]}, {"presence": 0.5}]
)
@pytest.mark.parametrize(
    "shape", [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 9}, {"temperature": 1.0, "min_p": 0.1}]
)
def test_broken_logits_end_their_row_alone(
    logits: np.ndarray, fault: int, wants: dict[str, Any], shape: dict[str, Any]
) -> None:
    for pick in {draw, find_draw()}:
        bench = Bench(pick=pick)
        for slot in range(3):
            bench.sampler.admit(slot, 5, RowSampling(**wants | shape))
        rows = np.stack([make_logits(1), logits, make_logits(2)]).astype(np.float32)
        found = bench.run(rows, [0, 1, 2], [5, 5, 5])
        (failed,) = found.failed
        assert (failed.row, failed.fault) == (1, fault == faults.NOT_NUMBERS or "presence" not in wants)
        alone = bench.run(rows[[0, 2]], [0, 2], [5, 5])
        assert found.tokens[[0, 2]].tolist() == alone.tokens.tolist()
        assert [block.values for block in found.logprobs] == [block.values for block in alone.logprobs]
        assert bench.tokens[1, 5] == 0  # the next step, which may be on its way, finds an embedding


def test_what_a_request_forbids_itself_is_its_own_fault() -> None:
    bench = Bench()
    everything = [[token] for token in range(VOCAB)]
    bench.sampler.admit(0, 5, RowSampling(bad_words=everything))
    bench.sampler.admit(1, 5, RowSampling(allowed=[VOCAB + 1]))
    bench.sampler.admit(2, 5, RowSampling(allowed=[7, 8], temperature=1.0))
    rows = np.stack([make_logits(i) for i in range(3)])
    rows[2, 7] = np.nan  # a token that may come
    failed = bench.run(rows, [0, 1, 2], [5, 5, 5]).failed
    assert [(f.row, f.fault) for f in failed] == [(0, False), (1, False), (2, True)]
    assert "forbids" in failed[0].why
    assert "NaN" in failed[2].why


class Bench:
    """A sampler with its token table."""

    def __init__(self, slots: int = 8, context: int = 64, vocab: int = VOCAB, pick: Draw = draw) -> None:
        self.tokens = rng(9).integers(0, vocab, (slots, context + 1)).astype(np.int32)
        self.sampler = Sampler(self.tokens, vocab, draw=pick)

    def run(self, logits: np.ndarray, slots: list[int], positions: list[int]):  # type: ignore[no-untyped-def]
        columns = [np.array(c, np.int32) for c in (range(len(slots)), slots, positions)]
        return self.sampler.sample(logits.copy(), *columns)


def penalised(logits: np.ndarray, prompt: np.ndarray, outputs: np.ndarray, s: RowSampling) -> np.ndarray:
    x = logits.astype(np.float64)
    for token, value in s.logit_bias:
        x[token] += value
    for token in set(prompt.tolist()) | set(outputs.tolist()):
        x[token] = x[token] / s.repetition if x[token] > 0 else x[token] * s.repetition
    for token in set(outputs.tolist()):
        x[token] -= s.presence + s.frequency * outputs.tolist().count(token)
    if len(outputs) < s.min_tokens:
        x[s.stop_ids] = -np.inf
    return x


@pytest.mark.parametrize("position", [10, 11, 40])
def test_rules_match_their_definitions(position: int) -> None:
    bench = Bench(vocab=30)
    sampling = RowSampling(
        presence=0.7,
        frequency=0.4,
        repetition=1.3,
        logit_bias=[(3, 4.0), (5, -50.0)],
        min_tokens=5,
        stop_ids=[7, 8],
    )
    bench.sampler.admit(2, 10, sampling)
    row = bench.tokens[2].copy()
    for seed in range(40):
        logits = make_logits(seed, vocab=30)
        logits[7] += 3
        expected = penalised(logits, row[:10], row[10:position], sampling)
        assert bench.run(logits[None], [2], [position]).tokens[0] == expected.argmax()
        bench.tokens[2] = row


def test_bias_and_stop_ids_outside_the_vocabulary_are_harmless() -> None:
    bench = Bench()
    bench.sampler.admit(
        0, 4, RowSampling(logit_bias=[(VOCAB, 1.0), (-1, 1.0)], min_tokens=9, stop_ids=[VOCAB + 5])
    )
    logits = make_logits(4)
    assert bench.run(logits[None], [0], [4]).tokens[0] == logits.argmax()


MIXED = [
    RowSampling(),
    RowSampling(temperature=0.9, seed=11),
    RowSampling(temperature=1.2, top_p=0.9, seed=12, logprobs=2),
    RowSampling(temperature=1.0, top_k=30, seed=13, repetition=1.2),
    RowSampling(presence=1.0, logprobs=0),
]


def test_a_row_samples_the_same_alone_and_in_any_batch() -> None:
    logits = np.stack([make_logits(20 + i) for i in range(len(MIXED))])
    alone = []
    for i, sampling in enumerate(MIXED):
        bench = Bench()
        bench.sampler.admit(i, 5, sampling)
        alone.append(int(bench.run(logits[i : i + 1], [i], [20 + i]).tokens[0]))
    for order in (range(5), (4, 2, 0, 3, 1), (1, 3)):
        bench = Bench()
        for i in order:
            bench.sampler.admit(i, 5, MIXED[i])
        samples = bench.run(logits[list(order)], list(order), [20 + i for i in order])
        assert samples.tokens.tolist() == [alone[i] for i in order]
        assert [bench.tokens[i, 20 + i] for i in order] == samples.tokens.tolist()
        assert [b.row for b in samples.logprobs] == [r for r, i in enumerate(order) if MIXED[i].logprobs >= 0]


def test_a_seeded_stream_depends_on_the_position_and_not_on_the_past() -> None:
    """So a request that was preempted and admitted again goes on with the same tokens."""
    sampling = RowSampling(temperature=1.5, seed=5, frequency=0.5)
    logits = [make_logits(i, scale=0.5) for i in range(20)]
    bench = Bench()
    bench.sampler.admit(1, 10, sampling)
    whole = [int(bench.run(logits[i][None], [1], [10 + i]).tokens[0]) for i in range(20)]
    resumed = Bench()
    resumed.tokens[3, :22] = bench.tokens[1, :22]
    resumed.sampler.admit(3, 10, sampling)
    assert [int(resumed.run(logits[i][None], [3], [10 + i]).tokens[0]) for i in range(12, 20)] == whole[12:]
    other = Bench()
    other.sampler.admit(1, 10, RowSampling(temperature=1.5, seed=6, frequency=0.5))
    assert [int(other.run(logits[i][None], [1], [10 + i]).tokens[0]) for i in range(20)] != whole


@pytest.mark.parametrize("k", [0, 1, 5, CANDIDATES + 3])
def test_scores_match_log_softmax(k: int) -> None:
    logits = np.stack([make_logits(i, scale=6.0) for i in range(6)])
    targets = rng(1).integers(0, VOCAB, 6)
    expected = torch.from_numpy(logits).log_softmax(-1)
    scores = join([score(logits[:2], targets[:2], k), score(logits[2:], targets[2:], k)])
    chosen = expected[torch.arange(6), torch.from_numpy(targets)]
    torch.testing.assert_close(torch.from_numpy(scores.values), chosen, atol=1e-5, rtol=0)
    assert scores.ranks.tolist() == (1 + (expected > chosen[:, None]).sum(-1)).tolist()
    top = expected.topk(k)
    assert scores.top_ids.tolist() == top.indices.tolist()
    torch.testing.assert_close(torch.from_numpy(scores.top_values), top.values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("k", [0, 3])
def test_tokens_asked_for_come_behind_the_most_probable(k: int) -> None:
    logits, asked = np.stack([make_logits(i) for i in range(4)]), [9, 2, 9, VOCAB - 1]
    expected = torch.from_numpy(logits).log_softmax(-1)
    (scores, plain), targets = (
        (join([score(logits, [1, 2, 3, 4], k, a)] * 2) for a in (asked, [])),
        torch.arange(1, 5),
    )
    block = scores.block(0, False, 7, 4)
    assert (block.k, block.asked) == (k + 4, 4)
    assert scores.top_ids[:, k:].tolist() == [asked] * 8
    np.testing.assert_allclose(scores.top_values[:4, k:], expected[:, asked], atol=1e-5)
    np.testing.assert_array_equal(scores.top_values[:, :k], plain.top_values)
    on_device = device_score(torch.from_numpy(logits), targets, k, torch.tensor(asked))
    np.testing.assert_array_equal(on_device[2], scores.top_ids[:4])
    np.testing.assert_allclose(on_device[3], scores.top_values[:4], atol=1e-5)
    bench = Bench()
    bench.sampler.admit(0, 4, RowSampling(logprobs=k, logprob_ids=asked, seed=1, temperature=1.0))
    (own,) = bench.run(logits[:1], [0], [9]).logprobs
    assert (own.top_ids, own.asked) == (scores.top_ids[:1].tobytes(), 4)


def test_logprobs_are_those_before_temperature_and_rules() -> None:
    bench = Bench()
    bench.sampler.admit(
        0, 4, RowSampling(temperature=3.0, seed=1, repetition=2.0, logprobs=3, logit_bias=[(9, 100.0)])
    )
    logits = make_logits(5)
    samples = bench.run(logits[None], [0], [9])
    (block,) = samples.logprobs
    assert (samples.tokens[0], block.start, block.prompt, block.k) == (9, 9, False, 3)
    raw = torch.from_numpy(logits).log_softmax(-1)
    np.testing.assert_allclose(np.frombuffer(block.values, np.float32), raw[9], atol=1e-5)
    assert np.frombuffer(block.top_ids, np.int32).tolist() == raw.topk(3).indices.tolist()
    assert np.frombuffer(block.ranks, np.int32)[0] == 1 + int((raw > raw[9]).sum())

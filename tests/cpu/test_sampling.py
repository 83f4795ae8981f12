from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from levels import WIDTHS

from sgla.messages import RowSampling
from sgla.sampling import Sampler, faults
from sgla.sampling.device import score as device_score
from sgla.sampling.draw import Distribution, Draw, bits_of, draw, threshold
from sgla.sampling.logprobs import join, score
from sgla.sampling.native import find_draw

VOCAB = 1700  # no multiple of a block
PINNED = [3787680688, 1724555295, 3559151513, 4094892475, 3775842436]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def make_logits(seed: int, scale: float = 2.0, vocab: int = VOCAB) -> np.ndarray:
    return (rng(seed).standard_normal(vocab) * scale).astype(np.float32)


def oracle(logits: np.ndarray, distribution: Distribution) -> np.ndarray:
    """The probabilities float64[V], straight from the definition."""
    x = torch.from_numpy(logits).double() / distribution.temperature
    keep = torch.ones(len(x), dtype=torch.bool)
    if distribution.top_k > 0:
        keep = x >= x.sort(descending=True).values[: distribution.top_k][-1]
    p = x.masked_fill(~keep, -torch.inf).softmax(-1)
    if distribution.top_p < 1:
        falling = p.sort(descending=True).values
        before = falling.cumsum(-1) - falling
        keep &= p >= falling[(before < distribution.top_p) | (falling == falling[0])][-1]
    if distribution.min_p > 0:
        keep &= p >= distribution.min_p * p.max()
    return x.masked_fill(~keep, -torch.inf).softmax(-1).numpy()


DISTRIBUTIONS = [
    Distribution(1.0),
    Distribution(0.7),
    Distribution(1.3, min_p=0.05),
    Distribution(1.0, top_k=20),
    Distribution(1.0, top_p=0.8),
    Distribution(3.0, top_p=0.999),
    Distribution(5.0, 1200, 0.95),
    Distribution(1.5, 50, 0.9, 0.02),
    Distribution(1.0, top_k=1),
    Distribution(1.0, top_p=0.0),
]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_draws_follow_the_definition(distribution: Distribution) -> None:
    """By the threshold exactly, and by chi-square. Some logits are equal."""
    logits = np.round(make_logits(1), 2)
    logits[:2] = logits.max()
    expected, n, pick = oracle(logits, distribution), 4000, find_draw()
    assert ((logits >= threshold(logits, distribution)) == (expected > 0)).all()
    counts = np.bincount([pick(logits, distribution, 3, i) for i in range(n)], minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    rare = n * expected < 5
    cells = np.append(counts[~rare], counts[rare].sum()), n * np.append(expected[~rare], expected[rare].sum())
    found, wanted = (cell[cells[1] > 0] for cell in cells)
    degrees = len(wanted) - 1
    assert ((found - wanted) ** 2 / wanted).sum() < degrees + 4 * np.sqrt(2 * degrees) + 1e-9


@pytest.mark.native
@pytest.mark.parametrize("level", WIDTHS)
def test_the_native_draw_gives_the_same_tokens(level: str) -> None:
    """On every level, with equal logits, logits of -inf, rows that no block divides, and tokens that are a
    part of the vocabulary."""
    fast, chance = find_draw(level), rng(8)
    for seed, vocab in enumerate([1, 2, 40, 64, 127, VOCAB, VOCAB, 20_000]):
        for scale in (0.0, 0.5, 3.0, 20.0):
            logits = np.round(make_logits(seed, scale, vocab), 2)
            logits[1:][chance.random(vocab - 1) < 0.2] = -np.inf
            ids = np.flatnonzero(chance.random(3 * vocab) < 0.4)[:vocab]
            for each in [*DISTRIBUTIONS, Distribution(0.7, 0, 0.95, 0.1), Distribution(0.01, 0, 0.9)]:
                for position in chance.integers(0, 2**20, 3).tolist():
                    given = logits, each, 2**63 - seed, position
                    assert fast(*given) == draw(*given)
                    given = logits[: len(ids)], each, seed, position
                    assert fast(*given, ids) == draw(*given, ids)
    for bad in (np.nan, -np.inf, np.inf):
        logits[:] = bad if bad == -np.inf else logits
        logits[3] = bad
        assert fast(logits, Distribution(1.0), 1, 1) == draw(logits, Distribution(1.0), 1, 1) == -1


def test_a_draw_knows_tokens_by_their_ids() -> None:
    """So what a grammar leaves is drawn alike from the whole row and from a copy of what is left."""
    logits = make_logits(6)
    for position in range(200):
        ids = np.flatnonzero(rng(position).random(VOCAB) < 0.1)
        masked = np.full_like(logits, -np.inf)
        masked[ids] = logits[ids]
        for each in DISTRIBUTIONS:
            assert draw(masked, each, 5, position) == ids[draw(logits[ids], each, 5, position, ids)]


def test_what_is_equal_is_won_by_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sgla.sampling.draw.bits_of", lambda seed, position, tokens: tokens.astype(np.uint32) // 9
    )
    logits = np.zeros(100, np.float32)
    logits[:50] = -np.inf
    assert draw(logits, Distribution(1.0), 0, 0) == 50  # 50 to 53 have the same noise


def numbers(seed: int, position: int, tokens: np.ndarray) -> np.ndarray:
    return (bits_of(seed, position, tokens) + 0.5) / 2**32


def test_the_bits_are_those_of_the_kernels() -> None:
    """Pinned: a change of them changes every seeded output."""
    found = bits_of(7, 3, np.array([0, 1, 2, 50_000, 262_143]))
    assert found.tolist() == PINNED


def test_noise_is_uniform_and_independent() -> None:
    """By the tail, which decides draws: how many tokens of a row are below a threshold, and how many at a
    distance are both."""
    rows, vocab, expected = 400, 50_000, 20
    counts, pairs, tokens = [], np.zeros(12), np.arange(vocab)
    for row in range(rows):
        few = bits_of(*divmod(row, 20), tokens) < 2**32 * expected / vocab
        counts.append(few.sum())
        pairs += [(few[1 << d :] & few[: -1 << d]).sum() for d in range(12)]
    assert abs(np.mean(counts) - expected) < 4 * (expected / rows) ** 0.5
    assert abs(np.var(counts) / expected - 1) < 4 * (2 / rows) ** 0.5
    likely = rows * expected**2 / vocab
    assert (abs(pairs - likely) < 4.5 * likely**0.5).all(), pairs


@pytest.mark.parametrize(
    ("seeds", "positions", "ids"), [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (0, 2, 4096)]
)
def test_neighbours_draw_independently(seeds: int, positions: int, ids: int) -> None:
    """The noise of a row and of one beside it, or of the tokens beside, is unrelated; so are the draws of
    eight likely tokens."""
    tokens = np.arange(20_000)
    for seed in (0, 1, 2**40, 2**63 - 2):
        a, b = numbers(seed, 9, tokens), numbers(seed + seeds, 9 + positions, tokens + ids)
        for x, y in ((a, b), (np.log(a), np.log(b))):
            assert abs(np.corrcoef(x, y)[0, 1]) < 4.5 / len(tokens) ** 0.5
    p, n = np.array([0.4, 0.2, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01]), 12_000
    few, pairs = 1000 + 64 * np.arange(8), np.zeros((8, 8))
    for i in range(n):
        seed, position = divmod(i, 100)
        one = np.log1p(-numbers(3 * seed, 3 * position, few)) / p
        two = np.log1p(-numbers(3 * seed + seeds, 3 * position + positions, few + ids)) / p
        pairs[one.argmax(), two.argmax()] += 1
    expected = np.outer(p, p) * n
    common = expected >= 5
    statistic = ((pairs - expected)[common] ** 2 / expected[common]).sum()
    assert statistic < common.sum() + 4.5 * (2 * common.sum()) ** 0.5


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


@pytest.mark.parametrize("k", [0, 1, 5, 1027])
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

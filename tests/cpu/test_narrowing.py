"""Bad words, runs that do not come twice, allowed tokens and limits of reasoning: on the host and by the
GPU's kernels, against their definitions; penalties and biases by these kernels against those on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from token_tables import in_rows
from transformers import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from sgla.kernels.triton import rules
from sgla.messages import MAX_BIASES, MAX_STOP_IDS, MAX_WORD_TOKENS, NewRow, RowSampling, ThinkLimit
from sgla.sampling import Sampler, device_rules
from sgla.sampling.device import DeviceSampler
from sgla.sampling.rules import FALL

VOCAB, PROMPT, CONTEXT = 12, 6, 40
OPEN, CLOSE = 10, 11
Narrowed = Callable[[RowSampling, np.ndarray, np.ndarray], np.ndarray]


def on_host(sampling: RowSampling, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Logits of the token behind ``tokens``, which begin with a prompt."""
    table = np.zeros((3, CONTEXT), np.int32)
    table[1, : len(tokens)] = tokens
    sampler = Sampler(table, VOCAB)
    sampler.admit(1, PROMPT, sampling)
    assert not sampler.plain(np.array([1], np.int32))
    changed = logits.copy()
    for rule in sampler._of_slot[1].rules:  # type: ignore[union-attr]
        rule.apply(changed, len(tokens))
    return changed


def change(sampler: DeviceSampler, logits: torch.Tensor, slots: list[int], positions: list[int]) -> None:
    host = np.array(slots, np.int32), np.array(positions, np.int32)
    sampler._rules.apply(logits, *map(torch.from_numpy, host), host)


def on_device(sampling: RowSampling, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The same by the GPU's kernels, as the second of two rows."""
    table = torch.zeros(4, CONTEXT, dtype=torch.int32)
    table[1, : len(tokens)] = torch.from_numpy(tokens)
    sampler = DeviceSampler(in_rows(table), VOCAB)
    for slot, asked in ((1, sampling), (2, RowSampling())):
        sampler.admit(NewRow(slot=slot, tokens=b"", prompt_len=PROMPT, pages=[b""], sampling=asked))
    assert not sampler.plain(np.array([1], np.int32))
    assert sampler.plain(np.array([2], np.int32))
    rows = torch.from_numpy(np.stack([logits, logits]))
    change(sampler, rows, [2, 1], [PROMPT, len(tokens)])
    assert np.array_equal(rows[0], logits)
    return rows[1].numpy()


@pytest.fixture(autouse=True)
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "HISTORY", 8)
    monkeypatch.setattr(rules, "DEEP", 2)
    monkeypatch.setattr(device_rules, "AT_ONCE", 3)


EITHER = pytest.mark.parametrize("narrowed", [on_host, on_device])


def cases(n: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens so far, of which few kinds exist, and logits."""
    rng = np.random.default_rng(3)
    return [
        (
            rng.integers(0, 4, PROMPT + int(rng.integers(0, 12))).astype(np.int32),
            rng.standard_normal(VOCAB).astype(np.float32),
        )
        for _ in range(n)
    ]


@EITHER
def test_bad_words_are_forbidden_as_in_transformers(narrowed: Narrowed) -> None:
    words = [[9], [0, 5], [1, 2], [1, 3, 2], [2, 2], [3, 3, 3, 3, 1]]
    oracle = NoBadWordsLogitsProcessor(words)
    longer = 0
    for tokens, logits in cases(120):
        output = torch.from_numpy(tokens[PROMPT:]).long()[None]
        expected = oracle(output, torch.from_numpy(logits)[None])[0].numpy()
        got = narrowed(RowSampling(bad_words=[*words, [0, VOCAB]]), tokens, logits)
        np.testing.assert_array_equal(got, expected)
        longer += int(np.isinf(expected).sum() > 1)
    assert longer > 20


@EITHER
@pytest.mark.parametrize("size", [1, 2, 5])
def test_runs_do_not_come_twice_as_in_transformers(narrowed: Narrowed, size: int) -> None:
    """Of the output alone. What transformers forbids stays possible where all else is forbidden."""
    oracle, found = NoRepeatNGramLogitsProcessor(size), 0
    for tokens, logits in cases(30):
        tokens %= 2
        output = torch.from_numpy(tokens[PROMPT:]).long()[None]
        forbidden = oracle(output, torch.from_numpy(logits)[None])[0].numpy() == -np.inf
        got = narrowed(RowSampling(ngram=size), tokens, logits)
        np.testing.assert_array_equal(got, np.where(forbidden, logits - FALL, logits))
        found += int(forbidden.sum())
    assert found > 2
    alone = RowSampling(ngram=1, allowed=[0])
    assert np.flatnonzero(np.isfinite(narrowed(alone, np.zeros(PROMPT + 1, np.int32), logits))).tolist() == [
        0
    ]


@EITHER
def test_only_allowed_tokens_stay_and_none_that_is_forbidden(narrowed: Narrowed) -> None:
    for tokens, logits in cases(5):
        got = narrowed(RowSampling(allowed=[2, 7, VOCAB]), tokens, logits)
        expected = np.full(VOCAB, -np.inf, np.float32)
        expected[[2, 7]] = logits[[2, 7]]
        np.testing.assert_array_equal(got, expected)
        got = narrowed(RowSampling(allowed=[2, 7], bad_words=[[2], [7]]), tokens, logits)
        assert (got == -np.inf).all()


def must_close(output: list[int], opened: bool, budget: int) -> bool:
    """The definition, token by token."""
    inside, used = opened, 0
    for token in output:
        used += inside and token != CLOSE
        inside = token == OPEN or (inside and token != CLOSE)
    return inside and used >= budget


@EITHER
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 3])
def test_reasoning_ends_when_its_budget_is_spent(narrowed: Narrowed, opened: bool, budget: int) -> None:
    rng = np.random.default_rng(budget)
    seen = set()
    for _ in range(60):
        output = rng.choice([1, 2, 3, OPEN, CLOSE], int(rng.integers(0, 9)), p=[0.25, 0.2, 0.2, 0.2, 0.15])
        tokens = np.concatenate([[OPEN] * PROMPT, output]).astype(
            np.int32
        )  # what prompts hold does not count
        logits = rng.standard_normal(VOCAB).astype(np.float32)
        sampling = RowSampling(thinking=ThinkLimit(budget, OPEN, CLOSE, opened), allowed=[1, 2, OPEN])
        got = narrowed(sampling, tokens, logits)
        expected = must_close(output.tolist(), opened, budget)
        assert np.flatnonzero(np.isfinite(got)).tolist() == ([CLOSE] if expected else [1, 2, OPEN])
        seen.add(expected)
    assert seen == {True, False}


def test_all_rules_of_all_rows_are_those_of_the_host() -> None:
    """Also of slots that had other rules before."""
    rng = np.random.default_rng(1)
    table = rng.integers(0, VOCAB, (8, CONTEXT)).astype(np.int32)
    sampler, host = DeviceSampler(in_rows(torch.from_numpy(table)), VOCAB), Sampler(table, VOCAB)
    words = [[4], [1, 2], *([int(a), int(b)] for a, b in table[:, -3:-1]), table[2, -20:].tolist()]
    asked = [
        RowSampling(
            repetition=1.7, frequency=0.3, presence=-0.2, logit_bias=[(t, t / 7) for t in range(VOCAB)]
        ),
        RowSampling(bad_words=words, logit_bias=[(4, 1.0), (5, 0.1)], stop_ids=[5, 6], min_tokens=CONTEXT),
        RowSampling(bad_words=words, repetition=0.7, allowed=[1, 2, 7]),
        RowSampling(frequency=-1.5, stop_ids=[3], min_tokens=2, ngram=2),
        RowSampling(thinking=ThinkLimit(2, OPEN, CLOSE, True), ngram=1),
        RowSampling(thinking=ThinkLimit(2**31 - 1, OPEN, CLOSE, True), presence=2.0),
        RowSampling(),
    ]
    for turn in range(7):
        slots = rng.permutation(7).tolist()
        for slot, sampling in zip(slots, asked):
            sampler.admit(NewRow(slot=slot, tokens=b"", prompt_len=PROMPT, pages=[b""], sampling=sampling))
            host.admit(slot, PROMPT, sampling)
        slots = rng.permutation(7)[: 7 - turn // 2].tolist()
        positions = [CONTEXT - 1, *rng.integers(PROMPT, CONTEXT, len(slots) - 1).tolist()]
        logits = rng.standard_normal((len(slots), VOCAB)).astype(np.float32)
        changed = torch.from_numpy(logits.copy())
        change(sampler, changed, slots, positions)
        for row, slot, position in zip(logits, slots, positions):
            for rule in host._of_slot[slot].rules:  # type: ignore[union-attr]
                rule.apply(row, position)
        np.testing.assert_array_equal(changed, logits)


def test_the_largest_rules_fit_their_records() -> None:
    vocab = 2 * (MAX_BIASES + MAX_STOP_IDS + MAX_WORD_TOKENS)
    sampler = DeviceSampler(in_rows(torch.zeros(2, CONTEXT, dtype=torch.int32)), vocab)
    largest = {
        "logit_bias": [(token, 1.0) for token in range(MAX_BIASES)],
        "stop_ids": list(range(vocab - MAX_STOP_IDS, vocab)),
        "min_tokens": 2**31 - 1,
        "thinking": ThinkLimit(2**31 - 1, -1, 0, False),
    }
    for length in (1, 2, MAX_WORD_TOKENS):
        begins = range(MAX_BIASES, MAX_BIASES + MAX_WORD_TOKENS, length)
        words = [list(range(begin, begin + length)) for begin in begins]
        asked = RowSampling(**largest, bad_words=words)  # type: ignore[arg-type]
        sampler.admit(NewRow(slot=0, tokens=b"", prompt_len=PROMPT, pages=[b""], sampling=asked))


@pytest.mark.parametrize("stops", [0, 20])
def test_penalties_and_biases(stops: int) -> None:
    sampling = RowSampling(
        repetition=1.3,
        frequency=0.2,
        presence=0.4,
        logit_bias=[(2, 1.5), (VOCAB, 1.0)],
        min_tokens=stops,
        stop_ids=[3, 5],
    )
    for tokens, logits in cases(40):
        expected = on_host(sampling, tokens, logits)
        np.testing.assert_array_equal(on_device(sampling, tokens, logits), expected)

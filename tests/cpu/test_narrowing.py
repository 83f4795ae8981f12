"""Bad words, allowed tokens and limits of reasoning: on the host and by torch, against their definitions; penalties and biases
by torch against those on the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from sgla.messages import NewRow, RowSampling, ThinkLimit
from sgla.sampling import Sampler, device
from sgla.sampling.device import DeviceSampler

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
    for rule in sampler._choices[1].rules:  # type: ignore[union-attr]
        rule.apply(changed, len(tokens))
    return changed


def on_device(sampling: RowSampling, tokens: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """The same by torch, as the second of two rows."""
    table = torch.zeros(4, CONTEXT, dtype=torch.int32)
    table[1, : len(tokens)] = torch.from_numpy(tokens)
    sampler = DeviceSampler(table, VOCAB)
    for slot, asked in ((1, sampling), (2, RowSampling())):
        sampler.admit(NewRow(slot=slot, tokens=b"", prompt_len=PROMPT, pages=b"", sampling=asked))
    assert not sampler.plain(np.array([1], np.int32))
    assert sampler.plain(np.array([2], np.int32))
    rows = torch.from_numpy(np.stack([logits, logits]))
    sampler._change(rows, np.array([2, 1], np.int32), np.array([PROMPT, len(tokens)], np.int32))
    assert np.array_equal(rows[0], logits)
    return rows[1].numpy()


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
def test_only_allowed_tokens_stay_whatever_else_forbids_them(narrowed: Narrowed) -> None:
    for tokens, logits in cases(5):
        got = narrowed(RowSampling(allowed=[2, 7, VOCAB]), tokens, logits)
        expected = np.full(VOCAB, -np.inf, np.float32)
        expected[[2, 7]] = logits[[2, 7]]
        np.testing.assert_array_equal(got, expected)
        got = narrowed(RowSampling(allowed=[2, 7], bad_words=[[2], [7]]), tokens, logits)
        assert np.flatnonzero(np.isfinite(got)).tolist() == [2, 7]


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


def test_long_histories_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = torch.from_numpy(np.random.default_rng(1).integers(0, VOCAB, (5, CONTEXT)).astype(np.int32))
    sampler = DeviceSampler(table, VOCAB)
    limit = ThinkLimit(2, OPEN, CLOSE, True)
    for slot in range(4):
        asked = RowSampling(frequency=0.5, repetition=1.1, thinking=limit if slot else None)
        sampler.admit(NewRow(slot=slot, tokens=b"", prompt_len=PROMPT, pages=b"", sampling=asked))
    whole = torch.randn(4, VOCAB)
    parts = whole.clone()
    slots, positions = np.array([2, 0, 3, 1], np.int32), np.array([20, 39, 7, 11], np.int32)
    sampler._change(whole, slots, positions)
    monkeypatch.setattr(device, "CELLS", 50)
    sampler._change(parts, slots, positions)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("stops", [0, 20])
def test_penalties_and_biases(stops: int) -> None:
    sampling = RowSampling(
        repetition=1.3, frequency=0.2, presence=0.4, logit_bias=[(2, 1.5), (VOCAB, 1.0)], min_tokens=stops, stop_ids=[3, 5]
    )  # fmt: skip
    for tokens, logits in cases(40):
        expected = on_host(sampling, tokens, logits)
        np.testing.assert_allclose(on_device(sampling, tokens, logits), expected, rtol=1e-6)

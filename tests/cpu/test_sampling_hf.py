"""Draws of the CPU's samplers against the distribution of Hugging Face's logits processors, by chi-square."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import generation

from sgla.messages import RowSampling
from sgla.sampling import Sampler
from sgla.sampling.draw import Draw, draw
from sgla.sampling.native import find_draw

VOCAB, DRAWS = 24, 2000
PROMPT, OUTPUT = [3, 4, 4, 9, 1], [7, 3, 7, 7, 12]
LOGITS = np.random.default_rng(4).normal(0, 1.5, VOCAB).astype(np.float32)


class Counted(generation.LogitsProcessor):
    """OpenAI's presence and frequency penalties, which transformers does not have."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, len(PROMPT) :], minlength=VOCAB)
        return scores - self.presence * (counts > 0) - self.frequency * counts


def processors(s: RowSampling) -> generation.LogitsProcessorList:
    """In the order of ``GenerationMixin._get_logits_processor``, which is sgla's: biases, penalties, what is
    forbidden, temperature, top-k, top-p, min-p."""
    bias = {(token,): value for token, value in s.logit_bias}
    ends = generation.MinNewTokensLengthLogitsProcessor(len(PROMPT), s.min_tokens, list(s.stop_ids))
    every = [
        (bias, lambda: generation.SequenceBiasLogitsProcessor(bias)),
        (s.repetition != 1, lambda: generation.RepetitionPenaltyLogitsProcessor(s.repetition)),
        (s.presence or s.frequency, lambda: Counted(s.presence, s.frequency)),
        (s.min_tokens, lambda: ends),
        (s.temperature != 1, lambda: generation.TemperatureLogitsWarper(s.temperature)),
        (s.top_k > 0, lambda: generation.TopKLogitsWarper(s.top_k)),
        (s.top_p < 1, lambda: generation.TopPLogitsWarper(s.top_p)),
        (s.min_p > 0, lambda: generation.MinPLogitsWarper(s.min_p)),
    ]
    return generation.LogitsProcessorList([make() for wanted, make in every if wanted])


def expected(s: RowSampling) -> np.ndarray:
    """float64[VOCAB]"""
    ids, scores = torch.tensor([PROMPT + OUTPUT]), torch.from_numpy(LOGITS.copy())[None]
    found: np.ndarray = processors(s)(ids, scores)[0].double().softmax(-1).numpy()
    return found


def drawn(s: RowSampling, pick: Draw) -> np.ndarray:
    """How often each token comes up, each draw with a seed of its own; int[VOCAB]."""
    history = PROMPT + OUTPUT
    tokens = np.tile(np.array([*history, 0], np.int32), (DRAWS, 1))
    sampler = Sampler(tokens, VOCAB, draw=pick)
    for seed in range(DRAWS):
        s.seed = seed
        sampler.admit(seed, len(PROMPT), s)
    rows = np.arange(DRAWS, dtype=np.int32)
    places = np.full(DRAWS, len(history), np.int32)
    chosen = sampler.sample(np.tile(LOGITS, (DRAWS, 1)), rows, rows, places).tokens
    return np.bincount(chosen, minlength=VOCAB)


def p_value(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Of Pearson's test; tokens that are expected fewer than five times are one cell."""
    wanted = probabilities * counts.sum()
    rare = wanted < 5
    cells = [(counts[~rare], wanted[~rare]), (counts[rare].sum(), wanted[rare].sum())]
    statistic = sum(float(np.sum((n - e) ** 2 / np.maximum(e, 1e-9))) for n, e in cells)
    freedom = float((~rare).sum() + (wanted[rare].sum() > 0) - 1)
    if freedom < 1:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


BIAS = [(2, 2.5), (5, -3.0), (7, 1.0)]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "presence": {"presence": 1.2},
    "frequency": {"frequency": 0.7},
    "repetition": {"repetition": 1.6},
    "bias": {"logit_bias": BIAS},
    "min tokens": {"min_tokens": 8, "stop_ids": [int(LOGITS.argmax()), 2]},
    "enough tokens": {"min_tokens": 5, "stop_ids": [int(LOGITS.argmax()), 2]},
    "cuts": {"temperature": 1.7, "top_k": 12, "top_p": 0.85, "min_p": 0.12},
    "penalties": {"presence": 0.5, "frequency": -0.4, "repetition": 0.8, "logit_bias": BIAS},
    "all": {
        "temperature": 1.4,
        "top_k": 15,
        "top_p": 0.92,
        "min_p": 0.03,
        "presence": 0.4,
        "frequency": 0.3,
        "repetition": 1.3,
        "logit_bias": BIAS,
        "min_tokens": 9,
        "stop_ids": [0, 6],
    },
}


@pytest.mark.parametrize("pick", [draw, find_draw()], ids=["numpy", "native"])
@pytest.mark.parametrize("case", CASES)
def test_draws_have_the_distribution_of_transformers(case: str, pick: Draw) -> None:
    sampling = RowSampling(**{"temperature": 1.0} | CASES[case])
    probabilities, counts = expected(sampling), drawn(sampling, pick)
    assert counts[probabilities == 0].sum() == 0
    assert p_value(counts, probabilities) > 1e-4


def test_the_test_sees_an_order_that_differs() -> None:
    """Cuts before the temperature, and biases behind the repetition penalty, give other distributions."""
    biased = {"temperature": 1.0, "repetition": 2.0, "logit_bias": [(3, 4.0)]}
    for case, first, second in ((CASES["all"], 4, 6), (biased, 0, 1)):
        sampling = RowSampling(**case)
        counts, chain = drawn(sampling, draw), processors(sampling)
        other = list(chain)
        other[first], other[second] = other[second], other[first]
        ids, scores = torch.tensor([PROMPT + OUTPUT]), torch.from_numpy(LOGITS.copy())[None]
        wrong = generation.LogitsProcessorList(other)(ids, scores)[0].double().softmax(-1).numpy()
        assert counts[wrong == 0].sum() > 0 or p_value(counts, wrong) < 1e-9

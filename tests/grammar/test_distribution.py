"""Tokens drawn under a grammar's mask: softmax over what is allowed, then the cuts, as if nothing else were
in the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from test_matcher import END, SIZE, matchers

from sgla.grammar.matcher import Matchers
from sgla.messages import RowSampling
from sgla.sampling import Sampler
from sgla.sampling.draw import Draw, draw
from sgla.sampling.native import find_draw

__all__ = ["matchers"]
DRAWS = 1500
# A few tokens are copied out of the row, many are masked in it.
GRAMMARS = {
    "few": ("[a-z0-9]", set(b"abcdefghijklmnopqrstuvwxyz0123456789")),
    "many": ("[ -~]", set(range(32, 127))),
}
SHAPES = [(0.7, 0, 1.0, 0.0), (1.0, 9, 1.0, 0.0), (1.2, 0, 0.8, 0.0), (1.1, 20, 0.9, 0.03)]


def oracle(logits: np.ndarray, allowed: set[int], shape: tuple[float, int, float, float]) -> np.ndarray:
    """float64[V], by Hugging Face's processors behind a mask."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    temperature, top_k, top_p, min_p = shape
    x = torch.full((1, len(logits)), -torch.inf, dtype=torch.float64)
    kept = sorted(allowed)
    x[0, kept] = torch.from_numpy(logits).double()[kept]
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        x = warper(torch.zeros(1, 1), x)
    return x[0].softmax(-1).numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_draws_under_a_mask_pass_a_chi_square_test(
    matchers: Matchers, grammar: str, shape: tuple[float, int, float, float]
) -> None:
    regex, allowed = GRAMMARS[grammar]
    logits = (np.random.default_rng(7).standard_normal(SIZE) * 1.5).astype(np.float32)
    logits[200:] += 5  # what is not allowed would be likelier
    pick: Draw = find_draw() if grammar == "few" else draw
    sampler = Sampler(np.zeros((1, 64), np.int32), SIZE, matchers, pick, skip_forced=False)
    text = LLMatcher.grammar_from_regex(regex)
    one, counts = np.zeros(1, np.int32), np.zeros(SIZE)
    names = ("temperature", "top_k", "top_p", "min_p")
    for seed in range(DRAWS):
        sampler.admit(0, 3, RowSampling(grammar=text, stop_ids=[END], seed=seed, **dict(zip(names, shape))))
        counts[sampler.sample(logits[None].copy(), one, one, one + 3).tokens[0]] += 1
    expected = DRAWS * oracle(logits, allowed, shape)
    assert not counts[expected == 0].any()
    common = expected >= 5
    groups = [(counts[common], expected[common])]
    if (rare := expected[~common].sum()) >= 5:
        groups.append((counts[~common].sum(keepdims=True), np.array([rare])))
    found, wanted = (np.concatenate(column) for column in zip(*groups))
    degrees = len(wanted) - 1
    assert degrees >= 5
    assert ((found - wanted) ** 2 / wanted).sum() < degrees + 4 * np.sqrt(2 * degrees)

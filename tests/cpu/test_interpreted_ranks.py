"""Ranks of a GPU runner answer as one rank on a CPU does, as far as that shows without GPUs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from forked import run_script

CASES = (
    "stages",
    "parts of a prompt",
    "parts of a cache",
    "copies of experts",
    "attention by data",
    "attention by data, tokens sent",
    "guesses beside attention by data",
    "heads of Medusa beside attention by data",
    "heads of Medusa beside parts of a prompt",
    "rows shared out",
    "halves",
)
SLOW = (
    "adapters in stages",
    "parts of a prompt, latent",
    "parts of a prompt in stages",
    "parts of layers",
    "whole experts",
    "attention by data in stages",
    "attention by data, parts of a prompt",
    "attention by data, states",
    "attention by data, whole experts",
    "attention by data on two hosts",
    "parts of a prompt on two hosts",
    "attention by data, tokens sent, latent",
    "attention by data in stages, tokens sent",
    "attention by data, tokens sent by DeepEP",
    "guesses beside parts of a prompt",
    "guesses in stages",
    "guesses beside parts of a prompt in stages",
    "guesses beside attention by data in stages",
    "guesses beside attention by data in stages, states",
    "guesses beside attention by data and parts of a prompt",
    "guesses beside attention by data, states",
    "a model guesses beside attention by data",
    "a head beside attention by data",
    "blocks beside attention by data",
    "an older head beside attention by data",
    "a layer beside attention by data",
    "a layer beside experts that tokens are sent to",
    "a layer beside attention by data in stages",
    "a layer beside attention by data and parts of a prompt",
    "a model guesses beside parts of a prompt",
    "a head beside parts of a prompt",
    "a layer beside parts of a prompt",
    "a layer beside parts of a prompt in stages",
    "a head beside parts of a prompt in stages",
    "rows shared out, latent",
    "rows and a cache shared out",
    "rows shared out, experts",
    "rows shared out, adapters",
    "rows shared out, guesses",
    "rows shared out in stages",
    "halves, latent",
    "halves, experts",
    "halves, states",
    "halves, adapters",
    "halves, guesses",
    "halves in stages",
)


def check(case: str, both: dict[str, Any]) -> None:
    """With cached prefixes and without, and before and behind a move of experts; of logprobs those that rank
    0 has."""
    expected, ranks = both["cpu"], both["ranks"]
    for rank in ranks:
        for found in rank["answers"]:
            assert found.keys() == expected.keys()
            assert {rid: one["tokens"] for rid, one in found.items()} == {
                rid: one["tokens"] for rid, one in expected.items()
            }
            for rid, one in expected.items():
                np.testing.assert_allclose(found[rid]["logprobs"], one["logprobs"], atol=2e-5, rtol=1e-4)
    assert ranks[0] == ranks[1]
    graphs = ranks[0]["replays"], ranks[0]["read"]
    assert graphs == (0, 0) if "DeepEP" in case else min(graphs) > 2
    assert all(ranks[0].get("shared", [1])), "steps with regions of own rows"
    if "guesses" in case:
        assert ranks[0]["right"] > 5
    if "parts of a prompt" in case and ("guesses" in case or "guesses" in both):
        least = 1 if "guesses" not in both else 0 if "stages" in case else 4
        assert ranks[0]["alike"] >= least, "rows that guess beside prompts that are shared out"
    if "guesses" in both:  # of what a model or a head guesses, by the text before
        alone, found = both["guesses"], ranks[0]["guesses"]
        assert len(found) > 7
        assert {place: found[place] for place in alone if place in found} == {
            place: alone[place] for place in alone if place in found
        }
    if "counts" in ranks[0] and ("data" not in case or "sent" in case):
        assert ranks[0]["counts"] == both["counts"]
    if "moved" in ranks[0]:
        assert ranks[0]["moved"]
        before, behind = zip(*ranks[0]["balance"])
        copies = "copies" in case  # without them experts may lie well as they are
        assert sum(before) < sum(behind) if copies else sum(before) <= sum(behind)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    told: dict[str, Any] = json.loads(run_script("interpreted_ranks.py", *CASES)[-1])
    return told


@pytest.mark.parametrize("case", CASES)
def test_ranks_answer_as_one(found: dict[str, Any], case: str) -> None:
    check(case, found[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW)
def test_more_ranks_answer_as_one(case: str) -> None:
    check(case, json.loads(run_script("interpreted_ranks.py", case)[-1])[case])

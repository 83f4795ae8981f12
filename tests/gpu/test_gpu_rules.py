"""The rules of requests on a GPU are those of the CPU sampler, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from token_tables import in_rows

from sgla.messages import MAX_BIASES, MAX_STOP_IDS, MAX_WORD_TOKENS, NewRow, RowSampling, ThinkLimit
from sgla.sampling.device import DeviceSampler
from sgla.sampling.rules import make_rules

pytest.importorskip("triton")
VOCAB, CONTEXT, PROMPT, ROWS = 151936, 6000, 2000, 150


def asked(row: int, tokens: np.ndarray, end: int) -> RowSampling:
    rng = np.random.default_rng(row)
    kept = np.unique(np.append(tokens[end - 500 : end], rng.integers(0, VOCAB, MAX_BIASES))).tolist()
    size = MAX_WORD_TOKENS // 4
    words = [[*tokens[end - n : end].tolist(), int(tokens[n])] for n in (1, 2, 20, size)]
    words += [[int(tokens[3])], [7, *words[-1][1:]]]
    sampling = {
        0: RowSampling(repetition=1.3, frequency=0.37, presence=-0.6, ngram=1 + row % 4),
        1: RowSampling(logit_bias=[(token, 100 * rng.standard_normal()) for token in kept[:MAX_BIASES]]),
        2: RowSampling(bad_words=words, repetition=0.83, stop_ids=kept[:MAX_STOP_IDS], min_tokens=end),
        3: RowSampling(thinking=ThinkLimit(5 + row, 11, 12, bool(row % 2)), ngram=2),
        4: RowSampling(allowed=kept, frequency=0.1),
        5: RowSampling(),
    }
    return sampling[row % 6]


def test_rules_are_those_of_the_cpu() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS + 1, CONTEXT + 1)).astype(np.int32)
    tokens[::2] %= 50
    ends = rng.integers(PROMPT + 1000, CONTEXT, ROWS).astype(np.int32)
    slots = rng.permutation(ROWS).astype(np.int32)
    sampler = DeviceSampler(in_rows(torch.from_numpy(tokens).cuda()), VOCAB)
    logits = torch.randn(ROWS, VOCAB, device="cuda") * 5
    columns = torch.from_numpy(slots).cuda(), torch.from_numpy(ends).cuda()
    for turn in range(2):  # the second time with other rules in each slot
        expected = logits.cpu().numpy()
        for row, (slot, end) in enumerate(zip(slots.tolist(), ends.tolist())):
            sampling = asked(row + turn, tokens[slot], end)
            sampler.admit(NewRow(slot=slot, tokens=b"", prompt_len=PROMPT, pages=[b""], sampling=sampling))
            for rule in make_rules(tokens[slot], PROMPT, sampling, VOCAB):
                rule.apply(expected[row], end)
        changed = logits.clone()
        sampler._rules.apply(changed, *columns, (slots, ends))
        np.testing.assert_array_equal(changed.cpu().numpy(), expected)

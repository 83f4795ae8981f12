"""Whisper on the runner of a GPU, as far as that shows without a GPU."""

from __future__ import annotations

import json

import numpy as np
import torch
from forked import run_script
from token_tables import in_rows

from sgla.messages import Transcript
from sgla.sampling.device_transcripts import DeviceTranscripts
from sgla.sampling.rules import Transcribing


def test_a_gpu_writes_as_a_cpu() -> None:
    found = json.loads(run_script("interpreted_dictation.py")[-1])
    assert found["gpu"] == found["cpu"]
    assert len(found["cpu"]["together"]) == 5


def test_rules_on_a_gpu_are_those_of_a_cpu() -> None:
    """Of rows with other rules, and with outputs of any length, which may be nothing that the rules allow."""
    rng = np.random.default_rng(0)
    timed = Transcript(suppressed=[3, 99], first_suppressed=[5], untimed=19, end=16, latest=4, timed=True)
    kinds = [timed, Transcript(suppressed=[1], first_suppressed=[2, 16], untimed=19, end=16)]
    for _ in range(50):
        tokens = rng.integers(0, 32, (6, 12)).astype(np.int32)
        said = [kinds[n] for n in rng.integers(0, 2, 6)]
        begins, lengths = rng.integers(1, 4, 6), rng.integers(0, 6, 6)
        device = DeviceTranscripts(in_rows(torch.from_numpy(tokens)))
        for slot in range(6):
            device.admit(slot, int(begins[slot]), said[slot])
        slots = rng.permutation(6).astype(np.int32)
        positions = (begins + lengths)[slots].astype(np.int32)
        logits = rng.normal(size=(6, 32)).astype(np.float32)
        found = torch.from_numpy(logits.copy())
        device.apply(found, np.arange(6), slots, positions)
        for row, slot in enumerate(slots.tolist()):
            Transcribing(said[slot], tokens[slot], int(begins[slot])).apply(logits[row], int(positions[row]))
        np.testing.assert_array_equal(found.numpy(), logits)

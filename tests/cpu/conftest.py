"""Tests of what computes, on a CPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same data whichever tests ran before."""
    torch.manual_seed(0)

"""Everything here needs an NVIDIA GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA"))


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same data in every run."""
    torch.manual_seed(0)

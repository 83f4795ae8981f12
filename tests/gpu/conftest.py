"""Everything here needs an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
KEPT = 2 << 30  # bytes that a process may keep for its next test, since others share the GPU


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


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > KEPT:
        torch.cuda.empty_cache()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say why at once, since a run on a borrowed GPU may be cut short."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        why = f"{crash.path}:{crash.lineno}: {crash.message}" if crash else str(report.longrepr)[-2000:]
        print(f"\nWHY {report.nodeid}: {why[:1000]}", flush=True)

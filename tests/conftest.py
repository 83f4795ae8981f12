"""For all tests: GPU tests are skipped without CUDA, and Triton kernels run in its interpreter then."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


if "PYTEST_XDIST_WORKER" in os.environ:  # they share the cores
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)

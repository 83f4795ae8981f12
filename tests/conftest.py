"""For all tests: GPU tests are skipped without CUDA, and Triton kernels run in its interpreter then. Tests of the compiled CPU kernels,
and of equal bits in any batch, which torch's operations do not give, are skipped where these cannot be built."""

from __future__ import annotations

import os

import pytest
import torch

from sgla.kernels import build, native

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton


if "PYTEST_XDIST_WORKER" in os.environ:  # they share the cores
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        if "native" in item.keywords and isinstance(native.prepare(), build.BuildError):
            item.add_marker(pytest.mark.skip(reason=native.note()))

"""The instruction-set levels of this CPU, the best first, as tests take them."""

from __future__ import annotations

import pytest

from sgla.kernels import build
from sgla.kernels.cpu.panels import KINDS
from sgla.quant.weight import OF_PANELS

LEVELS = [level.name for level in build.supported()]
WIDTHS = list(
    dict.fromkeys([LEVELS[0], *(name for name in LEVELS if not name.startswith("avx512"))])
)  # one level of each width of vectors
# All of them. Each takes the compiler ten seconds, so those beside WIDTHS are left to .ci/full.
EACH = [pytest.param(name, marks=[] if name in WIDTHS else pytest.mark.slow) for name in LEVELS]
STORAGES = [OF_PANELS.get(kind, kind) for kind in KINDS]  # that CPU kernels know

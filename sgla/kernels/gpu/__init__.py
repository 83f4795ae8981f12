"""Ops on an NVIDIA GPU. ``ops.py``: a kernel for each op, which works for every shape. A forward pass is
recorded (``record.py``) and rewritten by rules (``rules.py``) whose kernels do several ops at once;
``program.py`` runs what comes out."""

from sgla.kernels.gpu.ops import GpuOps
from sgla.kernels.gpu.program import Output, RecordedForward

__all__ = ["GpuOps", "Output", "RecordedForward"]

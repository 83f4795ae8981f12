"""Portable GPU kernels in Triton:
one launcher per operation of ``kernels/ops.py``, plus the step's bookkeeping."""

from sgla.kernels.triton.threads import mend

mend()

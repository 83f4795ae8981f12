"""CUDA C++ kernels where Triton leaves time on the table; each has its oracle in ``kernels/ops.py``."""

"""The batch as layers and models see it; defined with the kernels, which read it too."""

from sgla.kernels.batch import ForwardBatch

__all__ = ["ForwardBatch"]

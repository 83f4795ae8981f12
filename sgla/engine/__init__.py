"""The Python Engine: the same actors as the server, on a loop in a thread, without HTTP."""

from sgla.engine.engine import Engine, Output
from sgla.engine.params import SamplingParams, StructuredOutputsParams

__all__ = ["Engine", "Output", "SamplingParams", "StructuredOutputsParams"]

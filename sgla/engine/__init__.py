"""The Python Engine: the same actors as the server, on a loop in a thread, without HTTP."""

from sgla.engine.engine import Engine, Output
from sgla.messages import SamplingParams

__all__ = ["Engine", "Output", "SamplingParams"]

"""The Python Engine: the same actors as the server, on a loop in a thread, without HTTP."""

from sgla.engine.engine import Engine
from sgla.engine.outputs import Output
from sgla.engine.params import BeamSearchParams, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "Engine", "Output", "SamplingParams", "StructuredOutputsParams"]

"""Steps of a transformers' module through torch.compile, if they have few tokens.

The module is compiled whole, in which attention is one op (``generic.attend_op``), for one token and for any
other number. A step of which every token is sampled takes it: those with prompts run as they are.
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor

from sgla.errors import ConfigError
from sgla.model.base import CausalLM
from sgla.model.generic import CLOSE, Generic, first_line


def compile_steps(model: CausalLM, most: int) -> None:
    """Compile ``model``'s steps of up to ``most`` tokens. Raises ConfigError where torch cannot, or where
    what it has compiled computes something else."""
    assert isinstance(model, Generic)
    inductor.compile_threads = 1  # else it leaves processes of its own behind
    inductor.cpp.dynamic_threads = True  # those of a step, of which loading has one
    model.most = 0
    expected = [model.of_rows(count) for count in (1, 4)]
    try:
        model.compiled = torch.compile(model.module, fullgraph=True, dynamic=True)
        model.most = min(most, 4)
        found = [model.of_rows(count) for count in (1, 4)]
    except Exception as error:
        raise refusal(f"torch cannot: {first_line(error)}") from error
    for eager, fast in zip(expected, found):
        largest = CLOSE[model.dtype] * float(eager.abs().max())
        if not torch.allclose(eager, fast, rtol=0, atol=largest, equal_nan=True):
            raise refusal("what torch makes of it computes something else")
    model.most = most


def refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"--enable-torch-compile cannot be honoured for this module: {reason}; leave it out",
        param="enable_torch_compile",
    )

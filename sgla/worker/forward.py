"""The model's forward pass as one function of the batch:
a native program where there are kernels, else torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sgla.config import Config
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.build import BuildError
from sgla.kernels.cpu import native
from sgla.kernels.cpu.program import Program, ProgramLimits
from sgla.kernels.ops import Layer
from sgla.kernels.trace import NotRecorded
from sgla.messages import Progress
from sgla.model.base import CausalLM

# -> logits float32 [S, V] of ``sample_rows``, valid until the next call
Forward = Callable[[ForwardBatch], Tensor]


class KeptHidden:
    """The final hidden states ``[S, d]`` of the latest call of a Forward, in ``hidden``."""

    hidden: Tensor

    def keep(self, hidden: Tensor) -> None:
        self.hidden = hidden.clone()  # a program's memory has something else after that


def make_forward(
    model: CausalLM,
    kv: list[Layer],
    limits: ProgramLimits,
    threads: int,
    use_native: bool,
    kept: KeptHidden | None = None,
    hook: Callable[[Tensor], None] | None = None,
) -> tuple[Forward, str]:
    """``compiled`` for ``eager_forward``."""
    return compiled(eager_forward(model, kv, kept, hook), limits, threads, use_native)


def eager_forward(
    model: CausalLM,
    kv: list[Layer],
    kept: KeptHidden | None = None,
    hook: Callable[[Tensor], None] | None = None,
) -> Forward:
    """A model's logits. ``kept`` keeps the hidden states of the sampled rows; ``hook`` is called with those
    of all tokens."""

    def forward(batch: ForwardBatch) -> Tensor:
        rows = batch.sample_rows
        if hook is None:
            hidden = model.forward(batch, kv, rows)
        else:
            hidden = ops.gather(ops.tap(hook, model.forward(batch, kv)), rows)
        return model.logits(hidden if kept is None else ops.tap(kept.keep, hidden))

    return forward


def compiling(model: CausalLM, config: Config, report: Callable[[Progress], None]) -> None:
    """Compile the steps of a module of transformers. Raises ConfigError."""
    from sgla.model.generic_compile import compile_steps  # seconds, which other models need not spend

    report(Progress(phase="compile", message="torch.compile"))
    compile_steps(model, config.torch_compile_max_bs)


def compiled(forward: Forward, limits: ProgramLimits, threads: int, use_native: bool) -> tuple[Forward, str]:
    """``forward`` as a program, or as it is where there can be none;
    and a note on that for the start-up report."""
    note = "CPU kernels in torch (slow): native kernels are turned off"
    if use_native:
        note = native.note()
        try:
            return Program.record(forward, limits, threads).run, note
        except NotRecorded as error:
            note = f"CPU kernels in torch (slow): this model cannot be recorded ({error})"
        except BuildError:
            pass
    torch.set_num_threads(threads)
    return forward, note

"""How a runner on a GPU gets the model that guesses for its own."""

from __future__ import annotations

from collections.abc import Callable

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.loading.load import load_model
from sgla.messages import Progress
from sgla.model.spec import ModelSpec
from sgla.quant.weight import Make
from sgla.worker.chains import AGAIN, READS, ROWS, Chains
from sgla.worker.facts import drafts_of
from sgla.worker.gpu_load import choose_kernels, dtype_of
from sgla.worker.gpu_steps import GpuSteps, Sizes
from sgla.worker.place import Gpu


def load_chains(
    config: Config,
    source: ModelSource,
    spec: ModelSpec,
    place: Gpu,
    sizes: Sizes,
    target: GpuSteps,
    report: Callable[[Progress], None],
    make: Make,
) -> Chains:
    """``spec``: of the draft of ``source``; ``sizes``: of its ``target``."""
    assert source.draft is not None
    assert target.drafts is not None
    kernels, _ = choose_kernels(config, spec, place, sizes._replace(rows=max(READS[-1], AGAIN * ROWS[-1])))
    seed, quantization = config.random_seed or 0, config.speculative_quantization
    model = load_model(
        source.draft, dtype_of(config), quantization, place.shard, sizes.context_len, report, seed, make=make
    )
    steps = GpuSteps(model, kernels, sizes._replace(rows=ROWS[-1]), tables=target.tables)
    return Chains(steps, target, target.drafts, drafts_of(config), config.speculative_adaptive)

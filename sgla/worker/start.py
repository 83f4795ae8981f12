"""Which runner a CPU worker makes of the model it is given. A worker imports this before it knows the model."""

from __future__ import annotations

from collections.abc import Callable

from sgla.config import Config
from sgla.hub.source import ModelSource
from sgla.messages import Progress
from sgla.model.pooling import read_pooling
from sgla.worker.encoder import EncoderRunner
from sgla.worker.pooled import PooledRunner
from sgla.worker.runner import Runner


def cpu_runner(
    config: Config,
    source: ModelSource,
    rank: int,
    size: int,
    rendezvous: str,
    report: Callable[[Progress], None],
) -> Runner | EncoderRunner:
    """Raises ConfigError and its kin."""
    pooling = read_pooling(source, config.task)
    if pooling is None:
        return Runner(config, source, rank, size, rendezvous, report)
    if pooling.encoder:
        return EncoderRunner(config, source, pooling, rank, size, report)
    return PooledRunner(config, source, pooling, rank, size, rendezvous, report)

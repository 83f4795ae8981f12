"""Which runner a worker on an NVIDIA GPU makes of the model it is given.
A worker imports this before it knows the model."""

from __future__ import annotations

from collections.abc import Callable

from sgla.config import Config
from sgla.device import check_answers
from sgla.hub.source import ModelSource
from sgla.messages import Progress
from sgla.model.pooling import read_pooling
from sgla.model.registry import is_dual
from sgla.worker.cuda import CudaRunner
from sgla.worker.dual import DualRunner
from sgla.worker.encode import EncodeRunner
from sgla.worker.encoder import EncoderRunner
from sgla.worker.runner import Runner


def cuda_runner(
    config: Config,
    source: ModelSource,
    rank: int,
    size: int,
    rendezvous: str,
    report: Callable[[Progress], None],
) -> Runner:
    """Raises ConfigError and its kin."""
    pooling = read_pooling(source, config.task)
    encoder = pooling is not None and pooling.encoder
    check_answers(config, "cuda", pooling is not None, encoder)
    if config.role == "encode":
        return EncodeRunner(config, source, rank, size, rendezvous, report, pooling)
    if is_dual(source.config):
        return DualRunner(config, source, rank, size, rendezvous, report, pooling)
    kind = EncoderRunner if encoder else CudaRunner
    return kind(config, source, rank, size, rendezvous, report, pooling)

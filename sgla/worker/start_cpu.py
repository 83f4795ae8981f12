"""Which runner a worker on a CPU makes of the model it is given.
A worker imports this before it knows the model."""

from __future__ import annotations

from collections.abc import Callable

from sgla.config import Config
from sgla.device import check_answers
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.kernels.build import BuildError
from sgla.kernels.cpu.native import library, prepare
from sgla.messages import Progress
from sgla.model.pooling import read_pooling
from sgla.model.read import read_decoder
from sgla.model.registry import is_dual
from sgla.worker.cpu import CpuRunner
from sgla.worker.dual import DualRunner
from sgla.worker.encode import EncodeRunner
from sgla.worker.encoder import EncoderRunner
from sgla.worker.runner import Runner


def cpu_runner(
    config: Config,
    source: ModelSource,
    rank: int,
    size: int,
    rendezvous: str,
    report: Callable[[Progress], None],
) -> Runner:
    """Raises ConfigError and its kin."""
    if config.native_kernels:
        prepare(
            lambda done, of: report(Progress(phase="compile", message="CPU kernels", done=done, total=of))
        )
    pooling = read_pooling(source, config.task)
    encoder = pooling is not None and pooling.encoder
    check_answers(config, "cpu", pooling is not None, encoder)
    if config.deterministic:
        check_deterministic(source)
    if config.role == "encode":
        return EncodeRunner(config, source, rank, size, rendezvous, report, pooling)
    if is_dual(source.config):
        return DualRunner(config, source, rank, size, rendezvous, report, pooling)
    kind = EncoderRunner if encoder else CpuRunner
    return kind(config, source, rank, size, rendezvous, report, pooling)


def check_deterministic(source: ModelSource) -> None:
    """Raise ConfigError for what torch computes, whose bits depend on the number of rows: routers, and
    everything where the native kernels cannot be had."""
    obstacle = None
    if read_decoder(source.config).moe is not None:
        obstacle = "for mixtures of experts"
    else:
        try:
            library()
        except BuildError as error:
            obstacle = f"by torch operations, and there are no native kernels: {error}"
    if obstacle:
        raise ConfigError(
            f"--deterministic cannot be honoured {obstacle}; leave it out", param="deterministic"
        )

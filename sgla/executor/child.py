"""The first code of a worker process: tie it to the main process, make the rings, load, serve.

``python -c "from sgla.executor.child import main; main()" PIPE PARENT SPAWNED RANK RUNNER ANSWERS``:
descriptor of the pipe, pid of the main process, its monotonic time at the start, the rank, the runner as
``module:class``, and 1 if steps have their results from this rank.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import sys
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pkgutil import resolve_name
from typing import Any

from sgla import clock
from sgla.errors import ConfigError, SglaError
from sgla.executor.base import STACKS
from sgla.executor.ring import Ring
from sgla.messages import Progress
from sgla.nodes import listening
from sgla.processes import die_with, leave_to_parent
from sgla.worker.loop import serve

PLANS = 16 << 20  # bytes; see sched/limits.py: FLIGHT_BYTES
RESULTS = 4 << 20
SPIN = 50e-6  # seconds to look for the next plan before sleeping, where there are cores to spare


def main() -> None:
    fd, parent, spawned, rank, runner, answers = sys.argv[1:]
    begun = clock.now()
    die_with(int(parent))
    leave_to_parent()
    faulthandler.register(STACKS)
    os.set_inheritable(int(fd), False)
    pipe = Connection(int(fd))
    code = 1
    try:
        code = run(pipe, int(rank), runner, answers == "1", {"spawn": begun - float(spawned)})
    except (BrokenPipeError, ConnectionResetError, EOFError):
        code = 0  # the main process gave up on us
    except BaseException:
        traceback.print_exc()
    # Not sys.exit: joining thread pools and destroying torch takes longer than the process is worth.
    sys.stderr.flush()
    os._exit(code)


# Runners stay until the process ends: their last steps may still be under way in the memory that they have.
_kept: list[Any] = []


def run(pipe: Connection, rank: int, runner: str, answers: bool, timings: dict[str, float]) -> int:
    """Exit code of the process."""
    begun = clock.now()
    gc.disable()  # imports and loading make no garbage, and looking for it takes a tenth of their time
    pipe.send(("progress", Progress(phase="spawn", message="importing torch")))
    try:
        rings = [Ring.create(PLANS)] + ([Ring.create(RESULTS)] if answers else [])
    except OSError as error:
        need = f"{(PLANS + RESULTS) >> 20} MiB of shared memory"
        message = f"{need} cannot be had ({error}); raise the limits of memory and of file sizes"
        pipe.send(("error", ConfigError(message)))
        return 2
    pipe.send(("rings", len(rings)))
    for ring in rings:
        send_handle(pipe, ring.shared_fd, os.getppid())
        send_handle(pipe, ring.fileno(), os.getppid())
    make = resolve_name(runner)
    timings["import"] = clock.now() - begun
    config, source, size, rendezvous = pipe.recv()
    if config.nnodes > 1 and rank == 0:
        rendezvous = listening(rendezvous, recv_handle(pipe))
    logging.basicConfig(
        format=f"%(asctime)s.%(msecs)03d %(levelname)-7s worker {rank}: %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("sgla").setLevel(config.log_level.upper())

    def report(progress: Progress) -> None:
        pipe.send(("progress", progress))

    try:
        worker: Any = make(config, source, rank, size, rendezvous, report)
    except SglaError as error:
        pipe.send(("error", error))
        return 2
    _kept.append(worker)
    worker.facts.timings = timings | worker.facts.timings
    give_back_memory()
    pipe.send(("facts", worker.facts))
    spare = len(os.sched_getaffinity(0)) - config.local_ranks * (config.threads or 1)
    done = serve(worker, rings[0], rings[1] if answers else None, pipe, SPIN if spare > 1 else 0.0)
    return 0 if done else 1


def give_back_memory() -> None:
    """What loading needed and serving does not: a fifth of the process with a small model."""
    gc.enable()
    gc.collect()
    gc.freeze()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)

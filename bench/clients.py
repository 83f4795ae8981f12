"""Several processes that ask a server together, so that none of them is late to note what has come: one takes
25 to 50 us for a chunk, which is half of its time with 64 streams and steps of 7 ms."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection

import uvloop

from sgla.bench import load
from sgla.bench.workloads import Session


def run(
    target: load.Target, sessions: Sequence[Session], at_once: int, processes: int = 8
) -> tuple[list[load.Record], float]:
    """``load.run`` by so many processes, each with its part of the sessions. Raises EOFError if one dies."""
    processes = min(processes, at_once)
    pipes = []
    for i in range(processes):
        ours, theirs = get_context("spawn").Pipe()
        own = target, sessions[i::processes], at_once // processes
        get_context("spawn").Process(target=_ask, args=(theirs, *own), daemon=True).start()
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send(None)
    records = [record for pipe in pipes for record in pipe.recv()]
    return records, max(record.end for record in records) - min(record.start for record in records)


def _ask(pipe: Connection, target: load.Target, sessions: Sequence[Session], at_once: int) -> None:
    gc.freeze()
    gc.disable()
    pipe.send(None)
    pipe.recv()
    records, _ = uvloop.run(load.run(target, sessions, at_once))
    pipe.send(records)

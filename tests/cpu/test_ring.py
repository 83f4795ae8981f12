from __future__ import annotations

import multiprocessing
import os
import random
import select
import sys
from collections import deque
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import pytest

from sgla.executor.child import PLANS
from sgla.executor.ring import DATA, REWIND, Ring, RingFull
from sgla.sched.limits import FLIGHT_BYTES


def local(capacity: int) -> Ring:
    return Ring(memoryview(bytearray(DATA + capacity)), os.eventfd(0, os.EFD_NONBLOCK))


def test_records_come_out_in_order_across_the_end_of_the_ring() -> None:
    ring, pending, rng = local(256), deque[bytes](), random.Random(1)
    full = 0
    for _ in range(5000):
        if rng.random() < 0.55:
            record = rng.randbytes(rng.choice((0, 1, 3, 4, 5, 60, rng.randrange(252))))
            try:
                ring.push(record)
                pending.append(record)
            except RingFull:
                full += 1
                assert sum((4 + len(r) + 7) & ~7 for r in pending) + ((4 + len(record) + 7) & ~7) > 256
        else:
            assert ring.pop() == (pending.popleft() if pending else None)
        assert ring.empty == (not pending)
    assert full > 10
    ring.close()


def test_the_largest_record_fits_whatever_the_offset() -> None:
    ring = local(1024)
    for size in range(0, 1021, 7):
        for record in (b"x" * size, os.urandom(1020)):
            ring.push(record)
            assert ring.pop() == record
    with pytest.raises(RingFull, match="1021 bytes"):
        ring.push(bytes(1021))
    ring.close()


def test_an_empty_ring_stays_in_its_first_pages() -> None:
    memory = bytearray(DATA + 8 * REWIND)
    ring = Ring(memoryview(memory), os.eventfd(0, os.EFD_NONBLOCK))
    for i in range(200):
        record = bytes([i + 1]) * (REWIND // 10)
        ring.push(record)
        assert ring.pop() == record
    assert not any(memory[2 * REWIND :])
    big = b"\xff" * (7 * REWIND)
    ring.push(big)
    ring.push(b"small")
    assert ring.pop() == big
    assert ring.pop() == b"small"
    ring.close()


def test_going_back_to_the_start_takes_no_room() -> None:
    """Wherever the ring became empty, all of it holds what comes next."""
    most = 2 * FLIGHT_BYTES  # bytes of plans on their way, with as many of pages as of tokens
    rng = random.Random(2)
    for first in (REWIND // 2, 1 << 20, 6 << 20, PLANS - 64):
        ring = local(PLANS)
        ring.push(bytes(first))
        assert ring.pop() == bytes(first)
        records = [rng.randbytes(1 << 20) for _ in range(most >> 20)]
        for record in records:
            ring.push(record)
        assert [ring.pop() for _ in records] == records
        assert ring.pop() is None
        ring.close()


def test_the_event_is_readable_exactly_while_a_record_may_wait() -> None:
    ring = local(256)
    readable = lambda: bool(select.select([ring.fileno()], [], [], 0)[0])  # noqa: E731
    assert not readable()
    ring.push(b"a")
    ring.push(b"b")
    assert readable()
    ring.clear()
    assert not readable()
    assert (ring.pop(), ring.pop(), ring.pop()) == (b"a", b"b", None)
    ring.clear()
    ring.close()
    ring.close()


def fuzz_records(seed: int, count: int) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.choice((4, 100, rng.randrange(3000)))) for _ in range(count)]


def echo(conn: Connection, count: int) -> None:
    """The worker's side: makes both rings, sends every record back reversed."""
    plans, results = Ring.create(4096), Ring.create(8192)
    assert "torch" not in sys.modules
    for ring in (plans, results):
        send_handle(conn, ring.shared_fd, os.getppid())
        send_handle(conn, ring.fileno(), os.getppid())
    for i in range(count):
        while (record := plans.pop()) is None:
            if i % 2:  # half of the time spinning, half blocked
                select.select([plans.fileno()], [], [])
                plans.clear()
        while True:
            try:
                results.push(record[::-1])
                break
            except RingFull:
                os.sched_yield()
    conn.recv()


def test_the_other_end_keeps_one_descriptor_of_the_memory() -> None:
    ring = Ring.create(4096)
    before = set(os.listdir("/proc/self/fd"))
    other = Ring.attach(os.dup(ring.shared_fd), os.dup(ring.fileno()))
    assert len(set(os.listdir("/proc/self/fd")) - before) == 2  # with the event's
    ring.push(b"x")
    assert other.pop() == b"x"
    other.close()
    assert set(os.listdir("/proc/self/fd")) == before
    ring.close()


def test_two_processes_exchange_records_through_shared_memory() -> None:
    records = fuzz_records(3, 3000)
    conn, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=echo, args=(theirs, len(records)))
    process.start()
    fds = [recv_handle(conn) for _ in range(4)]
    plans, results = Ring.attach(fds[0], fds[1]), Ring.attach(fds[2], fds[3])
    sent, received = 0, []
    while len(received) < len(records):
        while sent < len(records) and sent - len(received) < 20:
            try:
                plans.push(records[sent])
                sent += 1
            except RingFull:
                break
        if results.empty:
            assert select.select([results.fileno()], [], [], 20)[0], "the other side is stuck"
        results.clear()
        while (record := results.pop()) is not None:
            received.append(record)
    assert received == [r[::-1] for r in records]
    conn.send(None)
    process.join(20)
    assert process.exitcode == 0
    for ring in (plans, results):
        ring.close()

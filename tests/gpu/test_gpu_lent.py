"""Units go from the memory of one process's GPU to that of another's: here both are one GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from config_cases import llama
from servers import decoding, port_of, prefilling, stats, write
from tiny import VOCAB

from sgla.engine import Engine
from sgla.engine.params import SamplingParams
from sgla.messages import Copy, int32
from sgla.peers import Lent
from sgla.worker.gpu_lent import GpuLending
from sgla.worker.gpu_tiers import STAGED, by_lanes, staging
from sgla.worker.lent import TOKEN

CONTEXT = get_context("spawn")
UNITS, LAYERS, WIDTH = 50, 6, 1 << 18
LENDING = GpuLending(lambda: torch.cuda.set_device(0))
SETTINGS = {"device": "cuda", "dtype": "bfloat16", "native_kernels": True, "executor": "procs"}
SETTINGS |= {"deterministic": True, "kv_cache_bytes": 64 << 20, "kv_transfer_backend": "cuda_ipc"}
SETTINGS |= {"kv_transfer_bytes": 64 << 20, "context_length": 1024, "step_tokens": 256}


def lend(pipe: Connection) -> None:
    torch.zeros(1, device="cuda")
    segment = LENDING.lend(UNITS, LAYERS * WIDTH, bytes(TOKEN))
    torch.manual_seed(0)
    segment.bytes.random_()  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    pipe.send((os.getpid(), segment.fd, segment.handle))
    pipe.recv()


@contextmanager
def another(run: object, *args: object) -> Iterator[Connection]:
    """A process."""
    ours, theirs = CONTEXT.Pipe()
    process = CONTEXT.Process(target=run, args=(*args, theirs), daemon=True)  # type: ignore[arg-type]
    process.start()
    theirs.close()  # so that its end is seen here
    yield ours
    process.kill()
    process.join()


def test_units_are_copied_out_of_the_memory_of_another_process() -> None:
    """In several pieces, from places that follow each other and others."""
    assert UNITS * LAYERS * WIDTH > 2 * STAGED
    torch.manual_seed(0)
    expected = torch.empty(UNITS + 1, LAYERS, WIDTH, dtype=torch.uint8, device="cuda").random_()
    with another(lend) as pipe, torch.inference_mode():
        pid, fd, handle = pipe.recv()
        terms = Lent(pid, bytes(TOKEN), [fd], [UNITS], [handle])
        segment = LENDING.borrow(terms, 0, LAYERS * WIDTH)
        assert segment is not None
        assert segment.content(7).tolist() == expected[7].flatten().tolist()
        pages = torch.zeros(LAYERS, UNITS + 1, WIDTH, dtype=torch.uint8, device="cuda")
        tier = by_lanes([list(pages)], staging(), lambda: None, [segment])
        places = [*range(30, UNITS + 1), *range(29, 0, -1)]
        there = int32(places), int32(range(1, UNITS + 1))
        tier.begin(Copy(3, "prefill", "device", [there[0]], [there[1]], [b""]))
        moved = []
        while not moved:
            moved = tier.ended()
        assert (moved[0].transfer, moved[0].ok) == (3, True)
        assert torch.equal(pages[:, 1:].transpose(0, 1), expected[places])
        assert LENDING.borrow(Lent(pid, b"?" * TOKEN, [fd], [UNITS], [handle]), 0, LAYERS * WIDTH) is None
        with pytest.raises(RuntimeError, match="reading the other server's GPU memory"):
            LENDING.borrow(Lent(pid, bytes(TOKEN), [fd], [UNITS], [b"?" * 64]), 0, LAYERS * WIDTH)


def prefill(folder: str, pipe: Connection) -> None:
    with prefilling(Path(folder), **SETTINGS) as engine:
        pipe.send(port_of(engine))
        pipe.send(texts(engine))
        pipe.recv()


PROMPTS = [[(a * i + a) % 300 for i in range(length)] for a, length in ((7, 700), (11, 90), (13, 500))]


def texts(engine: Engine) -> list[list[int]]:
    wanted = SamplingParams(temperature=0.7, seed=5, max_tokens=12)
    return [out.tokens for out in engine.generate(PROMPTS, wanted)]


def test_two_servers_answer_as_one_does(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    folder = write(tmp_path, llama(vocab_size=VOCAB, num_key_value_heads=2, **sizes), 1024)
    with another(prefill, str(folder)) as pipe:
        port, alone = pipe.recv(), pipe.recv()
        with decoding(folder, port, **SETTINGS) as engine:
            assert texts(engine) == alone
            [tier] = stats(engine).tiers
            assert (tier.asked, tier.unanswered, tier.failed) == (3, 0, 0)
            assert tier.loaded > 70

"""What one stream writes and another, or the host, reads or writes in turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sgla.config import Config
from sgla.dist.pipe import Pipe
from sgla.resolve import Filling, settle_depth
from sgla.worker.device_state import stages
from sgla.worker.gpu_tiers import GpuMemory

NOW: list[Any] = [None]  # current streams, the default one first


class Stream:
    def synchronize(self) -> None: ...


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    NOW.append(stream)
    yield
    NOW.pop()


class Taken(TorchFunctionMode):
    """Memory of a GPU comes from the host. ``streams``: those that were current when it was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Any] = []

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        if kwargs.get("device") == "cuda":
            self.streams.append(NOW[-1])
            kwargs["device"] = "cpu"
        return f(*args, **kwargs)


def test_threads_take_memory_for_the_stream_that_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of another stream may have been given up by a step which still writes to it."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    memory = GpuMemory([torch.arange(24, dtype=torch.uint8).view(3, 8)], lambda: None)
    with Taken() as taken:
        assert memory.read([2, 0]).tolist() == [list(range(16, 24)), list(range(8))]
    assert len(taken.streams) == 2
    assert taken.streams == [memory._own.room.stream] * 2


@pytest.mark.parametrize("count", [1, 2, 7, 8, 64])
def test_pinned_buffers_are_more_than_steps_in_flight(count: int) -> None:
    filling = Filling(Config(pp=count))
    settle_depth(filling, cuda=True)
    most = max(filling.filled["depth"], filling.filled["brief_depth"])
    assert most > count
    assert stages(None if count == 1 else Pipe(0, count, 1, 0)) > most

"""Weights from a parameter server (MoonshotAI's checkpoint-engine), which broadcasts a checkpoint to all
ranks: it fills a buffer that both processes see, tells what is where in it, and waits for an answer, bucket
by bucket. Its messages are pickles, of which nothing but tensors is made."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from sgla import clock
from sgla.errors import SglaError, WeightError
from sgla.loading.tensors import Unpickler, of_handle

PATIENCE = 60.0  # seconds for its next message
FAREWELL = 5.0  # and for what it says to an error
SPARE = 1 << 30  # bytes of a GPU, and of the host's memory, that stay free
MOST_BYTES = 64 << 20  # of a message


class ParameterServer:
    """What says something and then waits for an answer: nothing, or what is wrong."""

    def __init__(self, address: str) -> None:
        """``address``: ``ipc://...``. Raises WeightError."""
        try:
            import zmq
        except ImportError:
            raise WeightError("a parameter server needs pyzmq: pip install 'sgla[events]'") from None
        self._zmq: Any = zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, int(FAREWELL * 1e3))
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._gone = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller.register(self._gone, zmq.POLLIN)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise WeightError(f"{address[:200]} is no address: {error}") from None

    def hear(self, patience: float = PATIENCE) -> Any:
        """Its next message. Raises WeightError if none comes."""
        due = clock.now() + patience
        while (left := due - clock.now()) > 0:
            there = dict(self._poller.poll(int(left * 1e3) + 1))
            if self._socket in there:
                return _unpickled(self._socket.recv())
            if there:
                raise WeightError("the parameter server is gone")
        raise WeightError(f"the parameter server has said nothing for {patience:.0f} s")

    def answer(self, wrong: str = "") -> None:
        self._socket.send(wrong.encode())

    def refuse(self, wrong: str) -> None:
        """If it waits for an answer, tell it, and hear it out: it says the same to all ranks."""
        with suppress(SglaError, self._zmq.ZMQError):
            self.answer(wrong)
            self.hear(FAREWELL)

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy()


def from_server(
    address: str, look: Callable[[dict[str, Tensor]], None], room: Callable[[], int]
) -> dict[str, Tensor]:
    """All that it brings. ``look``: raises SglaError for tensors that do not fit; ``room``: bytes of the
    host's memory that can be had, 0 if nobody knows. Raises the same, and WeightError."""
    server = ParameterServer(address)
    try:
        return _received(server, look, room)
    except SglaError as error:
        server.refuse(error.message)
        raise
    finally:
        server.close()


def _received(
    server: ParameterServer, look: Callable[[dict[str, Tensor]], None], room: Callable[[], int]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    buffer = of_handle(server.hear())
    if buffer.dtype != torch.uint8 or buffer.dim() != 1:
        raise WeightError(f"the buffer is no row of bytes but {buffer.dtype} of shape {list(buffer.shape)}")
    server.answer()
    while (told := server.hear()) is not None:
        named = in_buffer(buffer, told)
        if twice := found.keys() & named:
            raise WeightError(f"{min(twice)} comes twice")
        look(named)
        found |= {name: _copy(tensor, room) for name, tensor in named.items()}
        if buffer.is_cuda:
            torch.cuda.synchronize()
        server.answer()
    server.answer()
    return found


def in_buffer(buffer: Tensor, told: Any) -> dict[str, Tensor]:
    """``told``: of each tensor its name, shape, dtype, and offset in bytes. Raises WeightError."""
    if not isinstance(told, list):
        raise WeightError("the parameter server has given up")
    found: dict[str, Tensor] = {}
    for item in told:
        try:
            name, shape, dtype, at = (item[key] for key in ("name", "shape", "dtype", "offset"))
            size = torch.Size(shape).numel() * dtype.itemsize
            part = buffer[at : at + size]
            if at < 0 or part.numel() != size or not isinstance(name, str) or name in found:
                raise ValueError(f"{size} bytes at {at}")
            aligned = part if part.data_ptr() % dtype.itemsize == 0 else part.clone()
            found[name] = aligned.view(dtype).view(*shape)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise WeightError(f"a tensor of the bucket is not in the buffer: {str(error)[:200]}") from error
    return found


def _copy(tensor: Tensor, room: Callable[[], int]) -> Tensor:
    """Of a tensor whose place the next bucket takes: on its GPU if there is room, else in host memory. Raises
    WeightError if there is none."""
    if tensor.is_cuda and torch.cuda.mem_get_info()[0] >= tensor.nbytes + SPARE:
        return tensor.clone()
    check_room(tensor.nbytes, room)
    return tensor.cpu() if tensor.is_cuda else tensor.clone()


def check_room(nbytes: int, room: Callable[[], int]) -> None:
    """Raises WeightError if the host's memory cannot hold so much more."""
    if 0 < (left := room()) < nbytes + SPARE:
        raise WeightError(
            f"the new weights do not fit beside the old ones: {left >> 20} MiB of the host's memory are left "
            f"for {nbytes >> 20} MiB, and 1 GiB stays free; update from a folder, which holds none twice"
        )


def _unpickled(data: bytes) -> Any:
    try:
        return Unpickler(io.BytesIO(data)).load()
    except WeightError:
        raise
    except Exception as error:  # whatever a pickle raises; an error that the server sends is none of ours
        raise WeightError(
            f"the parameter server has given up, or says what is no tensor: {str(error)[:200]}"
        ) from error

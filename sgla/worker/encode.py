"""The runner of ``--role encode``: the tower of a model alone, which makes features of pictures for servers
with ``--encode-url``."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import torch

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.loading.tower import Features, Tower
from sgla.media.arrays import FEATURES, checked, joined, parted
from sgla.messages import CacheGroup, Facts, StepPlan, StepResult
from sgla.model.read import read_decoder
from sgla.model.vision.served import vision_of
from sgla.peers import BEAT, Beside, Channel, Encode, Encoded, Frame, Leave, Link, Listener, Message
from sgla.worker.pictures import kept_on
from sgla.worker.runner import Runner
from sgla.worker.seeing import encode_identity, open_tower

MOST = 1 << 28  # bytes of what a processor made of one picture

log = logging.getLogger(__name__)


class EncodeRunner(Runner):
    """No step is ever planned: it works for ``Encoding``."""

    def _load(self, config: Config, source: ModelSource) -> None:
        self.config, self.source = config, source
        vision, why = vision_of(config, source)
        if vision is None:
            raise ConfigError(f"--role encode: {why or 'the model takes no pictures'}", param="role")
        where = self.place.torch
        dtype = config.dtype if config.dtype != "auto" else "bfloat16"
        tower, note = open_tower(config, source, vision, where, dtype)
        kept = kept_on(where)
        identity = encode_identity(config, source, tower.dtype)
        self._encoding = Encoding(config, identity, tower, kept, self.place.begin_thread)
        self.facts = Facts(
            groups=[CacheGroup(2)],
            page_size=config.page_size,
            slots=1,
            context_len=config.page_size,
            vocab_size=read_decoder(source.config).vocab,
            step_tokens=config.page_size,
            dtype=dtype,
            device=self.place.device.name,
            ledger={"tower": tower.nbytes, "pictures": kept},
            notes=[*self.place.notes, *filter(None, [note])],
            peer_ports=[self._encoding.port],
            identity=identity,
            encodes=True,
            untaken=dict.fromkeys(("image", "video"), FOR_OTHERS),
        )

    def _warm_up(self) -> None: ...

    def execute(self, plan: StepPlan) -> StepResult:
        raise AssertionError("nobody is let in")

    def close(self) -> None:
        self._encoding.close()
        super().close()


FOR_OTHERS = "this server reads pictures for others (--role encode); ask one that has it as --encode-url"


class Asked(NamedTuple):
    link: Link
    told: Encode
    data: Beside


class Encoding:
    """Listens for other servers, and has the ``tower`` look at their pictures, one after the other. ``kept``:
    bytes of features of pictures that may come again."""

    def __init__(
        self,
        config: Config,
        identity: dict[str, str],
        tower: Tower,
        kept: int,
        begin_thread: Callable[[], None],
    ) -> None:
        """Raises ConfigError if the port cannot be had."""
        self._tower, self._kept, self._begin = tower, kept, begin_thread
        self._known: OrderedDict[bytes, Features] = OrderedDict()  # by digest, the latest used one last
        self._bytes = 0
        self._open: dict[Link, set[int]] = {}  # what each waits for
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Asked | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="encode", daemon=True)
        port, secret = config.kv_transfer_port, config.kv_transfer_secret or ""
        try:
            self._listener = Listener(config.host, port, secret, identity, self._joined, most=MOST)
        except OSError as error:
            raise ConfigError(
                f"--kv-transfer-port {port}: {error.strerror or error}", param="kv_transfer_port"
            ) from error
        self._thread.start()

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def waiting(self) -> int:
        return sum(map(len, self._open.values()))

    def _joined(self, channel: Channel) -> None:
        def take(message: Message, beside: Beside) -> None:
            if isinstance(message, Encode):
                with self._lock:
                    self._open[link].add(message.number)
                self._queue.put(Asked(link, message, beside))
            elif isinstance(message, Leave):
                with self._lock:
                    self._open[link].discard(message.number)

        link = Link(channel, take, lambda: self._left(link), BEAT)
        with self._lock:
            self._open[link] = set()
        link.begin()

    def _left(self, link: Link) -> None:
        with self._lock:
            self._open.pop(link, None)

    def _work(self) -> None:
        self._begin()
        while (asked := self._queue.get()) is not None:
            number = asked.told.number
            if number not in self._open.get(asked.link, ()):
                continue
            try:
                frame = self._frame(asked)
            except Exception as error:  # whatever a picture can bring about
                log.warning("no features of a picture: %s: %s", type(error).__name__, str(error)[:300])
                frame = Encoded(number, error=f"{type(error).__name__}: {str(error)[:300]}"), b""
            with self._lock:
                self._open.get(asked.link, set()).discard(number)
            asked.link.post(partial(tuple, frame))

    def _frame(self, asked: Asked) -> Frame:
        features = self._features(asked.told, asked.data)
        found = [features.values, *features.deep]
        arrays, data = joined({f"{FEATURES}{i}": x.float().cpu().numpy() for i, x in enumerate(found)})
        return Encoded(asked.told.number, arrays, checked(data)), data

    @torch.inference_mode()
    def _features(self, told: Encode, data: Beside) -> Features:
        known = self._known.get(told.digest)
        if known is not None:
            self._known.move_to_end(told.digest)
            return known
        if checked(data) != told.sum:
            raise ValueError("it is not what was sent")
        arrays = {name: torch.from_numpy(np.array(x)) for name, x in parted(told.arrays, data).items()}
        made = self._known[told.digest] = self._tower(arrays)
        self._bytes += made.nbytes
        while self._bytes > self._kept:
            self._bytes -= self._known.popitem(last=False)[1].nbytes
        return made

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            links = list(self._open)
        for link in links:
            link.close()
        self._queue.put(None)
        self._thread.join()

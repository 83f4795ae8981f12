"""The way to a server with ``--role encode``, which makes features of pictures for this one."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from sgla.config import Config
from sgla.errors import BackendFailed, NotReady
from sgla.media.arrays import Bytes, Told, checked, parted
from sgla.peers import AGAIN, SILENCE, Beside, Encode, Encoded, Leave, Link, Message, Reconnecting, connect

MOST = 1 << 28  # bytes of features of a picture
PATIENCE = 60.0  # seconds for an answer

log = logging.getLogger(__name__)


class Encoding:
    """``told``: ``peers.Identity``. What has no comment on threads runs on the loop."""

    def __init__(self, config: Config, told: Mapping[str, str]) -> None:
        self._url, self._secret, self._told = config.encode_url or "", config.kv_transfer_secret or "", told
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[tuple[Encoded, Beside]]] = {}
        self._link: Link | None = None
        self._server = Reconnecting(
            "--encode-url", self._url, "pictures are refused", self._connect, log, "encode"
        )

    def begin(self) -> None:
        """In any thread: connect, now and whenever the connection is lost. Raises ConfigError if it is
        another server; if there is none, requests with pictures are refused until it answers."""
        self._server.begin()

    def _connect(self) -> None:
        """In any thread. Raises OSError and PeerRefused."""
        parts = urlsplit(self._url)
        channel, _ = connect(parts.hostname or "", parts.port or 0, self._secret, self._told, MOST)
        channel.trust(MOST, silence=SILENCE)
        link = Link(channel, self._take, lambda: self._call(self._gone, link))
        self._link = link
        link.begin()

    def _take(self, message: Message, beside: Beside) -> None:
        """In the link's thread."""
        if isinstance(message, Encoded):
            self._call(self._answer, message, beside)

    def _call(self, function: Any, *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return  # the loop is closed

    def _answer(self, told: Encoded, data: Beside) -> None:
        waiting = self._waiting.get(told.number)
        if waiting is not None and not waiting.done():
            waiting.set_result((told, data))

    def _gone(self, link: Link) -> None:
        if link is not self._link:
            return
        self._link = None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._missing())
        self._server.lost()

    def _missing(self) -> NotReady:
        return NotReady(
            "the server that reads pictures (--encode-url) is not there; retry", retry_after=AGAIN
        )

    async def features(self, digest: bytes, arrays: list[Told], data: Bytes) -> dict[str, Any]:
        """Of the picture of which a processor made these arrays. Raises NotReady and BackendFailed."""
        link = self._link
        if link is None:
            raise self._missing()
        number, answer = next(self._numbers), self._loop.create_future()
        self._waiting[number] = answer
        link.post(lambda: (Encode(number, digest, arrays, checked(data)), data))
        try:
            async with asyncio.timeout(PATIENCE):
                told, found = await answer
        except BaseException as error:
            link.post(Leave(number))
            if isinstance(error, TimeoutError):
                raise BackendFailed("the server that reads pictures (--encode-url) does not answer") from None
            raise
        finally:
            del self._waiting[number]
        if told.error or checked(found) != told.sum:
            raise BackendFailed(
                f"a picture has no features (--encode-url): {told.error or 'they are not what was sent'}"
            )
        return parted(told.arrays, found)

    def close(self) -> None:
        self._server.close()
        if self._link is not None:
            self._link.close()

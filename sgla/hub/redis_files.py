"""A model's files in Redis: ``redis://HOST:PORT/MODEL`` has each of them as the string ``MODEL/FILE``, of at
most 512 MB, which is Redis' bound."""

from __future__ import annotations

import re
import time
from typing import Any
from urllib.parse import unquote, urlsplit

PIECE = 8 << 20  # bytes that are asked for at a time


class RedisFiles:
    """What ``remote.py`` asks of fsspec's file systems. Raises ImportError where the client is missing, and
    the client's errors."""

    def __init__(self, url: str) -> None:
        import redis

        parts = urlsplit(url)
        query = f"?{parts.query}" if parts.query else ""
        self._client: Any = redis.Redis.from_url(f"{parts.scheme}://{parts.netloc}{query}", socket_timeout=60)
        self.root = unquote(parts.path).strip("/")

    def ls(self, path: str, detail: bool = False) -> list[str]:
        root = path.rstrip("/")
        literal = re.sub(r"([*?\[\]^\\])", r"\\\1", root)
        keys = self._client.scan_iter(match=f"{literal}/*", count=1000)
        return sorted({key.decode(errors="replace") for key in keys})

    def info(self, path: str) -> dict[str, Any]:
        """Redis does not tell when a string was written, so that each start copies it anew."""
        return {"size": self._client.strlen(path), "created": time.time_ns()}

    def get_file(self, path: str, target: str, callback: Any) -> None:
        size = self._client.strlen(path)
        with open(target, "wb") as file:
            for at in range(0, size, PIECE):
                data = self._client.getrange(path, at, min(at + PIECE, size) - 1)
                if not data:
                    raise OSError(f"{path} has become shorter")
                file.write(data)
                callback.relative_update(len(data))

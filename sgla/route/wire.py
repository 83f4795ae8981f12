"""HTTP/1.1 in bytes (RFC 9112), as strict as a proxy must be: what two servers could read in two ways, and so
take one request for two, is refused. Requests are written anew for workers, with one length; answers go on as
they came, and are looked through only to know where they end."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from urllib.parse import unquote

from sgla.errors import BadRequest

HEAD_END = b"\r\n\r\n"
LINE = 4096  # bytes of a chunk's first line, or a trailer
TRAILERS = 16 << 10  # bytes of all trailers
SMALL = 64  # bytes of a chunk, in the mean of many
MANY = 4096  # chunks that may be smaller
REQUEST = re.compile(rb"([A-Z]{1,20}) (/[\x21-\x7e]*|\*) HTTP/1\.([01])")
STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: [^\x00-\x08\x0a-\x1f\x7f]*)?")
NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
DIGITS = re.compile(rb"[0-9]{1,18}")
SIZE = re.compile(rb"([0-9a-fA-F]{1,15})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?")
# Headers of a connection, not of the request or the answer (RFC 9110, 7.6.1).
OF_CONNECTION = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
UNTIL_CLOSE, CHUNKED = -1, -2  # lengths that are no number


class Headers:
    """Of a request or an answer. ``lines`` are (lower-case name, line without its end), in order."""

    __slots__ = ("_values", "first", "lines")

    def __init__(self, head: bytes) -> None:
        """``head``: without the empty line. Raises BadRequest."""
        self.first, *rest = head.split(b"\r\n")
        self.lines: list[tuple[bytes, bytes]] = []
        self._values: dict[bytes, list[bytes]] = {}
        if CONTROL.search(head.replace(b"\r\n", b"")):
            raise BadRequest("a header has control characters")
        for line in rest:
            name, colon, value = line.partition(b":")
            if not colon or not NAME.fullmatch(name):
                raise BadRequest("a header's line is malformed")
            low = name.lower()
            self.lines.append((low, line))
            self._values.setdefault(low, []).append(value.strip(b" \t"))

    def all(self, name: bytes) -> Sequence[bytes]:
        return self._values.get(name, ())

    def get(self, name: bytes) -> bytes:
        """The first value; b"" if there is none."""
        return self._values[name][0] if name in self._values else b""

    def text(self, name: bytes) -> str:
        return self.get(name).decode("latin-1")

    def words(self, name: bytes) -> set[bytes]:
        """Of a list with commas, in small letters."""
        return {
            word.strip(b" \t")
            for value in self.all(name)
            for word in value.lower().split(b",")
            if word.strip()
        }

    def without(self, names: Iterable[bytes]) -> list[bytes]:
        return [line for name, line in self.lines if name not in names]

    def length(self, default: int) -> int:
        """Bytes of the body, CHUNKED, or ``default`` where nothing is said. Raises BadRequest."""
        lengths, codings = self.all(b"content-length"), self.all(b"transfer-encoding")
        if codings:
            if lengths or [coding.lower() for coding in codings] != [b"chunked"]:
                raise BadRequest("Transfer-Encoding must be chunked, and stand without a Content-Length")
            return CHUNKED
        if not lengths:
            return default
        if len(lengths) > 1 or not DIGITS.fullmatch(lengths[0]):
            raise BadRequest("Content-Length must be one number")
        return int(lengths[0])


def plain(target: str) -> str:
    """The path of a request as servers find their routes by it: decoded, with single slashes."""
    path = target.partition("?")[0]
    if "%" in path:
        path = unquote(path)
    return "/" + "/".join(filter(None, path.split("/"))) if "//" in path or path[-1:] == "/" else path


class Request(Headers):
    """The head of a request. ``path``: as ``plain`` makes it."""

    __slots__ = ("method", "minor", "path", "target")

    def __init__(self, head: bytes) -> None:
        super().__init__(head)
        found = REQUEST.fullmatch(self.first)
        if not found:
            raise BadRequest("the request's first line is malformed; HTTP/1.1 is spoken here")
        self.method, self.target, self.minor = found[1].decode(), found[2].decode(), int(found[3])
        self.path = plain(self.target)
        if self.minor == 1 and len(self.all(b"host")) != 1:
            raise BadRequest("a request needs one Host header")
        if self.minor == 0 and self.all(b"transfer-encoding"):
            raise BadRequest("HTTP/1.0 has no Transfer-Encoding")

    @property
    def upgrades(self) -> bool:
        """To a WebSocket."""
        return b"upgrade" in self.words(b"connection") and self.get(b"upgrade").lower() == b"websocket"

    @property
    def closes(self) -> bool:
        """Whether the client wants no second request on the connection."""
        return self.minor == 0 or b"close" in self.words(b"connection")

    def forwarded(self, size: int, more: Iterable[bytes]) -> bytes:
        """The head for a worker, of a body of ``size`` bytes: without the headers of the connection, with the
        lines ``more``."""
        dropped = OF_CONNECTION | self.words(b"connection") | {b"content-length", b"expect"}
        dropped |= {line.partition(b":")[0].lower() for line in more}
        lines = [b"%b %b HTTP/1.%d" % (self.method.encode(), self.target.encode(), self.minor)]
        lines += self.without(dropped)
        lines += more
        if size or self.method not in ("GET", "HEAD", "OPTIONS"):
            lines.append(b"Content-Length: %d" % size)
        if self.upgrades:
            lines += [b"Connection: Upgrade", b"Upgrade: websocket"]
        return b"\r\n".join(lines) + HEAD_END


class Answer(Headers):
    """The head of a worker's answer to a request of this method. ``size``: bytes of its body, CHUNKED or
    UNTIL_CLOSE."""

    __slots__ = ("keeps", "size", "status")

    def __init__(self, head: bytes, method: str) -> None:
        super().__init__(head)
        found = STATUS.fullmatch(self.first)
        if not found:
            raise BadRequest("the answer's first line is malformed")
        self.status = int(found[2])
        bodiless = method == "HEAD" or self.status in (204, 304) or self.status < 200
        self.size = 0 if bodiless else self.length(UNTIL_CLOSE)
        # Whether another request may follow on the connection.
        self.keeps = (
            found[1] == b"1" and self.size != UNTIL_CLOSE and b"close" not in self.words(b"connection")
        )

    def forwarded(self, more: Iterable[bytes]) -> bytes:
        """For a client. Its body goes on in the chunks that it has."""
        dropped = (OF_CONNECTION | self.words(b"connection")) - {b"transfer-encoding"}
        if self.status == 101:
            dropped -= {b"connection", b"upgrade"}
        return b"\r\n".join([self.first, *self.without(dropped), *more]) + HEAD_END


class Chunks:
    """Follows a body in chunks to its end. ``kept``: what gets the data of the chunks, if it is wanted."""

    def __init__(self, kept: bytearray | None = None) -> None:
        self._kept = kept
        self._left = 0  # bytes of the chunk
        self._part = "size"  # what the next line is: a size, the "end" of a chunk, or a "trailer"
        self._line = b""
        self._count = self._bytes = self._trailers = 0

    def feed(self, data: bytes) -> int | None:
        """Where the body ends in ``data``; None if it goes on. Raises BadRequest."""
        at = 0
        while at < len(data):
            if self._left:
                taken = min(self._left, len(data) - at)
                if self._kept is not None:
                    self._kept += data[at : at + taken]
                self._left -= taken
                at += taken
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            if len(self._line) > LINE:
                raise BadRequest("a chunk's line is too long")
            if not end:
                return None
            at = end
            line, self._line = self._line, b""
            if not line.endswith(b"\r\n"):
                raise BadRequest("a chunk is malformed")
            if self._next(line[:-2]):
                return at
        return None

    def _next(self, line: bytes) -> bool:
        """Take a line in; whether it is the last one."""
        if self._part == "trailer":
            self._trailers += len(line)
            if self._trailers > TRAILERS or CONTROL.search(line):
                raise BadRequest("the trailers are malformed or too long")
            return not line
        if self._part == "end":
            if line:
                raise BadRequest("a chunk is longer than its size")
            self._part = "size"
            return False
        found = SIZE.fullmatch(line)
        if not found:
            raise BadRequest("a chunk's size is malformed")
        self._left = int(found[1], 16)
        self._part = "end" if self._left else "trailer"
        self._count += 1
        self._bytes += self._left
        if self._kept is not None and self._count > MANY + self._bytes // SMALL:
            raise BadRequest("the body comes in too many small chunks")
        return False


class Body:
    """Follows any body to its end. ``size``: as ``Answer`` has it."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._chunks = Chunks() if size == CHUNKED else None

    @property
    def ended(self) -> bool:
        """Whether nothing is to come."""
        return self._left == 0

    @property
    def until_close(self) -> bool:
        return self._left == UNTIL_CLOSE

    def feed(self, data: bytes) -> int | None:
        """As ``Chunks.feed``."""
        if self._chunks is not None:
            end = self._chunks.feed(data)
            if end is not None:
                self._left = 0
            return end
        if self._left == UNTIL_CLOSE:
            return None
        taken = min(self._left, len(data))
        self._left -= taken
        return taken if not self._left else None

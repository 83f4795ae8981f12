"""JSON and event streams over HTTP, on connections that are kept."""

from __future__ import annotations

import http.client
import json
import ssl
from collections import deque
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from sgla.errors import BackendFailed, InvalidField, SglaError

TIMEOUT = 600.0  # seconds without a byte


class Client:
    """Of one server. May be used by many threads, each of which has a connection of its own meanwhile.

    ``verify``: a file of certificates to trust, or False to trust any. Raises InvalidField for no URL.
    """

    def __init__(self, url: str, key: str | None, verify: str | bool | None = None) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidField(
                f"a backend's address is like http://127.0.0.1:30000, got {url!r}", param="url"
            )
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path
        self._secure: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self._secure = ssl.create_default_context(cafile=verify if isinstance(verify, str) else None)
            if verify is False:
                self._secure.check_hostname, self._secure.verify_mode = False, ssl.CERT_NONE
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._idle: deque[http.client.HTTPConnection] = deque()

    def ask(self, path: str, body: Any = None, plain: bool = False) -> Any:
        """The JSON that comes back: of a POST, or without a body of a GET; ``plain``: or a text.
        Raises SglaErrors."""
        try:
            connection, response = self._send(path, body)
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        self._idle.append(connection)
        answer = decoded(data)
        if response.status >= 400:
            raise refusal(response.status, answer)
        if isinstance(answer, str) and not plain:
            raise self._failed("it sends no JSON")
        return answer

    def events(self, path: str, body: Any) -> Iterator[Any]:
        """The JSON of each event of a stream. Raises SglaErrors, also where the stream breaks off."""
        try:
            connection, response = self._send(path, body)
            if response.status >= 400:
                raise refusal(response.status, decoded(response.read()))
            ended = False
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    ended = True
                elif line.startswith(b"data:"):
                    event = json.loads(data)
                    if event.get("error"):
                        raise refusal(502, event)
                    yield event
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._failed(error) from error
        if not ended:
            raise self._failed("the stream broke off")
        self._idle.append(connection)

    def _send(self, path: str, body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """On a kept connection, or once more on a new one where the server has closed that one."""
        data = None if body is None else json.dumps(body).encode()
        method = "GET" if body is None else "POST"
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._connection()
        kept = connection.sock is not None
        try:
            connection.request(method, self._path + path, data, self._headers)
            return connection, connection.getresponse()
        except (ConnectionError, http.client.BadStatusLine):
            connection.close()
            if not kept:
                raise
        connection = self._connection()
        connection.request(method, self._path + path, data, self._headers)
        return connection, connection.getresponse()

    def _connection(self) -> http.client.HTTPConnection:
        if self._secure is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=TIMEOUT, context=self._secure)
        return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT)

    def _failed(self, why: Any) -> BackendFailed:
        return BackendFailed(f"no answer from {self.url}: {why}; is the server running?")


def decoded(data: bytes) -> Any:
    """JSON, or a text that is none."""
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace").strip()


def refusal(status: int, answer: Any) -> SglaError:
    """The error that a server answers with: of the kind that its code names, if that is one of ours."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    said = error if isinstance(error, dict) else {"message": error}
    message = str(said.get("message") or answer)
    kind = kinds(SglaError).get(str(said.get("code")))
    if kind is not None:
        return kind(message, param=said.get("param"))
    found = SglaError(message, param=said.get("param"))
    found.status, found.code = status, str(said.get("code") or found.code)
    return found


def kinds(kind: type[SglaError]) -> dict[str, type[SglaError]]:
    """It and those below it, by their codes."""
    found = {kind.code: kind}
    for one in kind.__subclasses__():
        found = kinds(one) | found
    return found

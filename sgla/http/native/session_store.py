"""SGLang's sessions: a tree of turns, of which each goes on from an earlier one. The prefix cache makes that cheap; kept
here are token ids alone."""

from __future__ import annotations

import uuid
from collections import OrderedDict

import msgspec

from sgla import clock
from sgla.errors import InvalidField, NotFound, Overloaded
from sgla.http.errors import Busy
from sgla.http.request.schema import SessionParams


class OpenSessionRequest(msgspec.Struct, kw_only=True):
    """``capacity_of_str_len``: the longest conversation, here in tokens. ``timeout``: seconds without a turn until it is
    closed."""

    capacity_of_str_len: int
    session_id: str | None = None
    timeout: float | None = None


class CloseSessionRequest(msgspec.Struct, kw_only=True):
    session_id: str


class SessionNotFound(NotFound):
    code = "session_not_found"


class Turn:
    """A prompt and its answer, which is None until it is complete. ``before``: the turn that it goes on from."""

    def __init__(self, session: Session, rid: str, prompt: list[int], before: Turn | None) -> None:
        self.prompt = prompt
        self.output: list[int] | None = None
        self.before = before
        self._session = session
        self._rid = rid

    def end(self, output: list[int]) -> None:
        self.output = output

    def close(self) -> None:
        """Its request is over; one that was never answered is forgotten."""
        if self.output is None:
            self._session.turns.pop(self._rid, None)

    def follows(self, other: Turn) -> bool:
        turn: Turn | None = self
        while turn is not None and turn is not other:
            turn = turn.before
        return turn is other


class Session:
    def __init__(self, capacity: int, ttl: float) -> None:
        self.turns: dict[str, Turn] = {}
        self._capacity = capacity
        self._ttl = ttl
        self.touch()

    def touch(self) -> None:
        self.expires = clock.now() + self._ttl

    def begin(self, params: SessionParams, rid: str, added: list[int]) -> Turn:
        """The turn that ``params`` ask for, with ``added`` behind what it goes on from. Raises BadRequest kinds."""
        self.touch()
        before = None if params.rid is None else self._ended(params.rid)
        prompt = [*context(before, params), *added]
        if rid in self.turns:
            raise InvalidField(f"the session has a turn {rid!r} already", param="rid")
        if len(prompt) > self._capacity:
            raise InvalidField(
                f"the turn has {len(prompt)} tokens, the session was opened for {self._capacity}",
                param="session_params",
            )
        if params.replace:
            self._forget_after(before)
        turn = self.turns[rid] = Turn(self, rid, prompt, before)
        return turn

    def _ended(self, rid: str) -> Turn:
        turn = self.turns.get(rid)
        if turn is None:
            raise InvalidField(f"session_params: the session has no turn {rid!r}", param="session_params")
        if turn.output is None:
            raise Busy(f"turn {rid!r} is still in progress", param="session_params")
        return turn

    def _forget_after(self, before: Turn | None) -> None:
        """Drop what followed ``before``, or everything."""
        self.turns = {
            rid: turn
            for rid, turn in self.turns.items()
            if turn is before or (before is not None and not turn.follows(before))
        }


def context(before: Turn | None, params: SessionParams) -> list[int]:
    """The ids that a turn goes on from."""
    if before is None:
        if params.offset is not None or params.drop_previous_output:
            raise InvalidField("offset and drop_previous_output need a rid", param="session_params")
        return []
    assert before.output is not None
    ids = before.prompt if params.drop_previous_output else [*before.prompt, *before.output]
    if params.offset is None:
        return ids
    if not 0 <= params.offset <= len(ids):
        raise InvalidField(
            f"session_params: offset must be between 0 and {len(ids)}, got {params.offset}",
            param="session_params",
        )
    return ids[: params.offset]


class Sessions:
    """At most ``limit``; each is closed after ``ttl`` seconds without a turn."""

    def __init__(self, limit: int, ttl: float) -> None:
        self._limit = limit
        self._ttl = ttl
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def open(self, request: OpenSessionRequest) -> str:
        self._expire()
        name = request.session_id or uuid.uuid4().hex
        if name in self._sessions:
            raise InvalidField(f"session {name!r} is open already", param="session_id")
        if len(self._sessions) >= self._limit:
            raise Overloaded(f"{self._limit} sessions are open, which is the limit", retry_after=5.0)
        self._sessions[name] = Session(request.capacity_of_str_len, request.timeout or self._ttl)
        return name

    def get(self, name: str) -> Session:
        self._expire()
        session = self._sessions.get(name)
        if session is None:
            raise SessionNotFound(f"there is no session {name[:200]!r}", param="session_params")
        return session

    def close(self, name: str) -> None:
        self.get(name)
        del self._sessions[name]

    def _expire(self) -> None:
        now = clock.now()
        for name in [name for name, session in self._sessions.items() if session.expires < now]:
            del self._sessions[name]

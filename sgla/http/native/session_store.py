"""SGLang's sessions: a tree of turns, of which each goes on from an earlier one. The prefix cache makes that cheap; kept
here are token ids alone, of each turn those that it added."""

from __future__ import annotations

import uuid
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from sgla import clock
from sgla.errors import InvalidField, NotFound, Overloaded
from sgla.http.errors import Busy
from sgla.http.request.schema import SessionParams

MAX_TOKENS = 16 << 20  # in all sessions, of 4 bytes each
TURN = 128  # tokens that would take the memory of an empty turn
MAX_NAME = 200


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
    """A prompt and its answer, which is None until it is complete.

    ``before``: the turn that it goes on from, with the first ``kept`` ids of that conversation. ``added``: what its prompt
    has behind them.
    """

    def __init__(
        self, session: Session, rid: str, added: Sequence[int], before: Turn | None, kept: int
    ) -> None:
        self.added = array("i", added)
        self.output: array[int] | None = None
        self.before = before
        self.kept = kept
        self._session = session
        self._rid = rid

    def prompt(self) -> list[int]:
        parts, kept, turn = [self.added], self.kept, self.before
        while turn is not None:
            assert turn.output is not None
            own = turn.added + turn.output
            parts.append(own[: max(0, kept - turn.kept)])
            kept, turn = min(kept, turn.kept), turn.before
        return [token for part in reversed(parts) for token in part]

    def length(self, with_output: bool) -> int:
        """Of the conversation up to here, in tokens."""
        return self.kept + len(self.added) + (len(self.output or ()) if with_output else 0)

    def size(self) -> int:
        return TURN + len(self.added) + len(self.output or ())

    def end(self, output: list[int]) -> None:
        self.output = array("i", output)
        if self._session.turns.get(self._rid) is self:
            self._session.size += len(output)

    def close(self) -> None:
        """Its request is over; one that was never answered is forgotten."""
        turns = self._session.turns
        if self.output is None and turns.get(self._rid) is self:
            del turns[self._rid]
            self._session.size -= self.size()


class Session:
    """``size``: that of all ``turns``, kept up to date by whoever changes them."""

    def __init__(self, capacity: int, ttl: float) -> None:
        self.turns: dict[str, Turn] = {}
        self.size = 0
        self._capacity = capacity
        self._ttl = ttl
        self.touch()

    def touch(self) -> None:
        self.expires = clock.now() + self._ttl

    def begin(self, params: SessionParams, rid: str, added: list[int], room: int) -> Turn:
        """The turn that ``params`` ask for, with ``added`` behind what it goes on from. Raises BadRequest kinds, and Overloaded
        if the session would then hold more than ``room`` tokens; either leaves it as it was."""
        self.touch()
        before = None if params.rid is None else self._ended(params.rid)
        turn = Turn(self, rid, added, before, kept_of(before, params))
        if rid in self.turns:
            raise InvalidField(f"the session has a turn {rid!r} already", param="rid")
        if (length := turn.length(False)) > self._capacity:
            raise InvalidField(
                f"the turn has {length} tokens, the session was opened for {self._capacity}",
                param="session_params",
            )
        turns, size = self.turns, self.size
        if params.replace:
            turns = self._without_later(before)
            size = sum(kept.size() for kept in turns.values())
        if size + turn.size() > room:
            raise Overloaded(
                f"the sessions hold {MAX_TOKENS} tokens, which is the limit; close some", retry_after=5.0
            )
        turns[rid] = turn
        self.turns, self.size = turns, size + turn.size()
        return turn

    def _ended(self, rid: str) -> Turn:
        turn = self.turns.get(rid)
        if turn is None:
            raise InvalidField(f"session_params: the session has no turn {rid!r}", param="session_params")
        if turn.output is None:
            raise Busy(f"turn {rid!r} is still in progress", param="session_params")
        return turn

    def _without_later(self, before: Turn | None) -> dict[str, Turn]:
        """The turns without those that followed ``before``; without any if it is None."""
        gone: set[Turn] = set()
        for turn in self.turns.values():  # a turn stands behind the one that it goes on from
            if turn.before is before or turn.before in gone:
                gone.add(turn)
        return {rid: turn for rid, turn in self.turns.items() if turn not in gone}


def kept_of(before: Turn | None, params: SessionParams) -> int:
    """How many ids of the conversation before it a turn goes on from."""
    if before is None:
        if params.offset is not None or params.drop_previous_output:
            raise InvalidField("offset and drop_previous_output need a rid", param="session_params")
        return 0
    length = before.length(not params.drop_previous_output)
    if params.offset is None:
        return length
    if not 0 <= params.offset <= length:
        raise InvalidField(
            f"session_params: offset must be between 0 and {length}, got {params.offset}",
            param="session_params",
        )
    return params.offset


class Sessions:
    """At most ``limit``; each is closed after ``ttl`` seconds without a turn."""

    def __init__(self, limit: int, ttl: float) -> None:
        self._limit = limit
        self._ttl = ttl
        self._sessions: OrderedDict[str, Session] = OrderedDict()

    def open(self, request: OpenSessionRequest) -> str:
        self._expire()
        name = request.session_id or uuid.uuid4().hex
        if len(name) > MAX_NAME:
            raise InvalidField(f"session_id may have at most {MAX_NAME} characters", param="session_id")
        if name in self._sessions:
            raise InvalidField(f"session {name!r} is open already", param="session_id")
        if len(self._sessions) >= self._limit:
            raise Overloaded(f"{self._limit} sessions are open, which is the limit", retry_after=5.0)
        self._sessions[name] = Session(request.capacity_of_str_len, request.timeout or self._ttl)
        return name

    def begin(self, params: SessionParams, rid: str, added: list[int]) -> Turn:
        """See ``Session.begin``."""
        session = self._get(params.id)
        others = sum(other.size for other in self._sessions.values() if other is not session)
        return session.begin(params, rid, added, MAX_TOKENS - others)

    def _get(self, name: str) -> Session:
        self._expire()
        session = self._sessions.get(name)
        if session is None:
            raise SessionNotFound(f"there is no session {name[:200]!r}", param="session_params")
        return session

    def close(self, name: str) -> None:
        self._get(name)
        del self._sessions[name]

    def _expire(self) -> None:
        now = clock.now()
        for name in [name for name, session in self._sessions.items() if session.expires < now]:
            del self._sessions[name]

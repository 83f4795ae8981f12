"""SGLang's sessions: a tree of turns, of which each goes on from an earlier one. The prefix cache makes that
cheap; kept here are token ids alone, of each turn those that it added. An owner (``clients.Client.owner``)
finds its own sessions; the room for them is shared among clients (``Client.name``)."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from sgla import clock
from sgla.errors import ContextTooLong, InvalidField, NotFound, Overloaded
from sgla.http.clients import Client
from sgla.http.errors import Busy
from sgla.http.ids import random_id
from sgla.http.request.schema import SessionParams

MAX_TOKENS = 16 << 20  # in all sessions, of 4 bytes each
TURN = 128  # tokens that would take the memory of an empty turn
MAX_TURNS = 4096  # of a session
MAX_NAME = 200


class OpenSessionRequest(msgspec.Struct, kw_only=True):
    """``capacity_of_str_len``: the longest conversation, here in tokens. ``timeout``: seconds without a turn
    until it is closed. ``streaming``: each turn goes on from the one before it, without being told so."""

    capacity_of_str_len: int
    session_id: str | None = None
    timeout: float | None = None
    streaming: bool | None = None


class CloseSessionRequest(msgspec.Struct, kw_only=True):
    session_id: str


class SessionNotFound(NotFound):
    code = "session_not_found"


class Turn:
    """A prompt and its answer, which is None until it is complete.

    ``before``: the turn that it goes on from, with the first ``kept`` ids of that conversation. ``added``:
    what its prompt has behind them.
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
        while turn is not None and kept > 0:
            assert turn.output is not None
            own = max(0, kept - turn.kept)
            parts += turn.output[: max(0, own - len(turn.added))], turn.added[:own]
            kept, turn = min(kept, turn.kept), turn.before
        ids = array("i")
        for part in reversed(parts):
            ids += part
        return ids.tolist()

    def length(self, with_output: bool) -> int:
        """Of the conversation up to here, in tokens."""
        return self.kept + len(self.added) + (len(self.output or ()) if with_output else 0)

    def size(self) -> int:
        return TURN + len(self.added) + len(self.output or ())

    def end(self, output: list[int]) -> None:
        self.output = array("i", output)
        if self._session.turns.get(self._rid) is self:
            self._session.grow(len(output))

    def close(self) -> None:
        """Its request is over; one that was never answered is forgotten."""
        turns = self._session.turns
        if self.output is None and turns.get(self._rid) is self:
            del turns[self._rid]
            self._session.grow(-self.size())


class Session:
    """``size``: that of all ``turns``, kept up to date by whoever changes them; ``share`` has part of it."""

    def __init__(
        self, name: str, owner: str, share: Share, capacity: int, ttl: float, streaming: bool = False
    ) -> None:
        self.key = owner, name
        self.streaming = streaming
        self.share = share
        self.turns: dict[str, Turn] = {}
        self.size = 0
        self._capacity = capacity
        self._ttl = ttl
        self.touch()

    def touch(self) -> None:
        self.expires = clock.now() + self._ttl

    def grow(self, size: int) -> None:
        self.size += size
        self.share.grow(size)

    def close(self) -> None:
        """Forget the turns; those under way go on."""
        self.grow(-self.size)
        self.turns.clear()

    def begin(
        self,
        params: SessionParams,
        rid: str,
        added: list[int],
        longest: int,
        make_room: Callable[[int], None],
    ) -> Turn:
        """The turn that ``params`` ask for, with ``added`` behind what it goes on from. Raises BadRequest
        kinds, and what ``make_room`` raises for the tokens that the session would hold in addition; either
        leaves it as it was."""
        self.touch()
        if len(rid) > MAX_NAME:
            raise InvalidField(f"rid may have at most {MAX_NAME} characters", param="rid")
        if self.streaming:
            self._check_appends(params)
        before = None if params.rid is None else self._ended(params.rid)
        turn = Turn(self, rid, added, before, kept_of(before, params))
        if rid in self.turns:
            raise InvalidField(f"the session has a turn {rid[:200]!r} already", param="rid")
        if (length := turn.length(False)) > self._capacity:
            raise InvalidField(
                f"the turn has {length} tokens, the session was opened for {self._capacity}",
                param="session_params",
            )
        if length > longest:
            raise ContextTooLong.of(longest, length, 0)
        turns, size = self.turns, self.size
        if params.replace:
            turns = self._without_later(before)
            size = sum(kept.size() for kept in turns.values())
        if len(turns) >= MAX_TURNS:
            raise InvalidField(
                f"the session has {MAX_TURNS} turns, which is the limit; open another", param="session_params"
            )
        make_room(size + turn.size() - self.size)
        turns[rid] = turn
        self.turns = turns
        self.grow(size + turn.size() - self.size)
        return turn

    def last(self) -> str | None:
        """The rid of the newest turn."""
        return next(reversed(self.turns), None)

    def _check_appends(self, params: SessionParams) -> None:
        """A streaming session has one line of turns. Raises BadRequest kinds."""
        for name in ("offset", "replace", "drop_previous_output"):
            if getattr(params, name):
                raise InvalidField(
                    f"session_params: {name} needs a session that was opened without streaming: true",
                    param="session_params",
                )
        if params.rid == self.last():
            return
        if params.rid is None:
            raise Busy("another turn of the session has begun meanwhile", param="session_params")
        raise InvalidField(
            "session_params: a streaming session goes on from its last turn; leave rid out",
            param="session_params",
        )

    def _ended(self, rid: str) -> Turn:
        turn = self.turns.get(rid)
        if turn is None:
            raise InvalidField(
                f"session_params: the session has no turn {rid[:200]!r}", param="session_params"
            )
        if turn.output is None:
            raise Busy(f"turn {rid[:200]!r} is still in progress", param="session_params")
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


class Share:
    """The sessions of one client, the one that is longest without a turn first, and how many tokens they
    have. ``whole``: those of all clients."""

    def __init__(self, client: str = "", whole: Share | None = None) -> None:
        self.client = client
        self.sessions: OrderedDict[tuple[str, str], Session] = OrderedDict()
        self.size = 0
        self._whole = whole

    def grow(self, size: int) -> None:
        self.size += size
        if self._whole is not None:
            self._whole.size += size


class Sessions:
    """At most ``limit``; each is closed after ``ttl`` seconds without a turn. Where there is no room, a
    client that has more than the one who asks loses the session that is longest without a turn."""

    def __init__(self, limit: int, ttl: float) -> None:
        self._limit = limit
        self._ttl = ttl
        self._whole = Share()
        self._shares: dict[str, Share] = {}  # by client
        self._looked = -math.inf  # when expired ones were looked for

    def open(self, request: OpenSessionRequest, client: Client) -> str:
        name = request.session_id or random_id()
        if len(name) > MAX_NAME:
            raise InvalidField(f"session_id may have at most {MAX_NAME} characters", param="session_id")
        if self._find(name, client.owner) is not None:
            raise InvalidField(f"session {name!r} is open already", param="session_id")
        self._expire()
        share = self._shares.get(client.name) or Share(client.name, self._whole)
        if len(self._whole.sessions) >= self._limit:
            most = max(self._shares.values(), key=lambda share: len(share.sessions), default=share)
            if len(most.sessions) <= len(share.sessions) + 1:
                raise Overloaded(f"{self._limit} sessions are open, which is the limit", retry_after=5.0)
            self._close(next(iter(most.sessions.values())))
        self._shares[client.name] = share
        ttl = request.timeout or self._ttl
        session = Session(
            name, client.owner, share, request.capacity_of_str_len, ttl, bool(request.streaming)
        )
        share.sessions[session.key] = self._whole.sessions[session.key] = session
        return name

    def resolved(self, params: SessionParams, owner: str) -> SessionParams:
        """``params`` with the turn that a streaming session goes on from. Raises SessionNotFound."""
        session = self._get(params.id, owner)
        if session.streaming and params.rid is None:
            return msgspec.structs.replace(params, rid=session.last())
        return params

    def begin(self, params: SessionParams, rid: str, added: list[int], owner: str, longest: int) -> Turn:
        """See ``Session.begin``."""
        session = self._get(params.id, owner)
        session.share.sessions.move_to_end(session.key)
        return session.begin(params, rid, added, longest, lambda size: self._make_room(size, session.share))

    def _make_room(self, size: int, share: Share) -> None:
        """For ``size`` more tokens of ``share``. Raises Overloaded."""
        while self._whole.size + size > MAX_TOKENS:
            most = max(self._shares.values(), key=lambda share: share.size)
            if most is share or most.size <= share.size + size:
                raise Overloaded(
                    f"the sessions hold {MAX_TOKENS} tokens, which is the limit; close some", retry_after=5.0
                )
            self._close(next(iter(most.sessions.values())))

    def _find(self, name: str, owner: str) -> Session | None:
        session = self._whole.sessions.get((owner, name))
        if session is not None and session.expires < clock.now():
            self._close(session)
            return None
        return session

    def _get(self, name: str, owner: str, param: str = "session_params") -> Session:
        session = self._find(name, owner)
        if session is None:
            raise SessionNotFound(f"there is no session {name[:200]!r}", param=param)
        return session

    def close(self, name: str, owner: str) -> None:
        self._close(self._get(name, owner, "session_id"))

    def _close(self, session: Session) -> None:
        share = session.share
        session.close()
        del share.sessions[session.key], self._whole.sessions[session.key]
        if not share.sessions:
            del self._shares[share.client]

    def _expire(self) -> None:
        """Not more often than once a second, since it looks at all of them."""
        now = clock.now()
        if now < self._looked + 1.0:
            return
        self._looked = now
        for session in [session for session in self._whole.sessions.values() if session.expires < now]:
            self._close(session)

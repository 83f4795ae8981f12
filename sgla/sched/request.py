"""A request as the scheduler sees it, and the only place that changes its state."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from enum import Enum

from msgspec.structs import replace

from sgla.cache.tier import chain
from sgla.cache.tree import TOKEN_BYTES, Node
from sgla.messages import Delta, Ready, Submit, TokenLogprob, int32
from sgla.sched.repetition import Loop
from sgla.sched.runs import Text

CREDIT = 2  # rows with guesses that may all be wrong before a request guesses rarely


class Prompt:
    """The tokens of a prompt as int32, which a request's choices share until they run."""

    __slots__ = ("array", "data", "given")

    def __init__(self, given: Sequence[int]) -> None:
        self.given = given
        self.data = int32(given)
        self.array = array("I", self.data)  # an "I" takes tokens faster than an "i"


class HiddenStates:
    """Hidden states of a request, or the experts of its tokens, on their way to its Deltas, each once:
    after a retraction its tokens are computed again."""

    __slots__ = ("_have", "_seen", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._have = 0  # bytes that came
        self._seen = 0  # of them since the request last began

    def add(self, data: bytes) -> None:
        """Those of the tokens behind the ones that were added before."""
        fresh = data[self._have - self._seen :]
        self._seen += len(data)
        if fresh:
            self._have = self._seen
            self._waiting.append(fresh)

    def take(self) -> list[bytes]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def restart(self) -> None:
        self._seen = 0


class State(Enum):
    HELD = "held"  # cannot run before what its ``holds`` name is there
    WAITING = "waiting"  # for room
    RUNNING = "running"  # takes part in steps
    DRAINING = "draining"  # takes no more steps, but a submitted one contains it
    DONE = "done"


# The life of a request: what may happen to it in each state, and in which one it is then.
# docs/design.md says who owns what in each.
LIFE: dict[State, dict[str, State]] = {
    State.HELD: {"ready": State.WAITING, "end": State.DONE},
    State.WAITING: {"hold": State.HELD, "run": State.RUNNING, "end": State.DONE},
    State.RUNNING: {"leave": State.DRAINING},
    State.DRAINING: {"requeue": State.WAITING, "end": State.DONE},
    State.DONE: {},
}
OWNERS = (State.RUNNING, State.DRAINING)  # states in which it has a slot and units


class _Stepped:
    """What every step reads of each of its requests. Slots of a base class come first, so these lie side by
    side in memory: what thousands of requests have does not fit the processor's caches."""

    __slots__ = (
        "ahead",
        "allocated",
        "finish",
        "first_token",
        "goal",
        "known",
        "last_step",
        "loop",
        "planned",
        "prompt_len",
        "rid",
        "slot",
        "stop_ids",
        "tokens",
    )


class Request(_Stepped):
    """One child. Token counts:
    ``len(tokens)`` committed, ``planned``, ``known``, ``allocated`` (docs/design.md).

    Its pages are ``pages[:shared]``, owned by the tree and locked through ``node``, then private ones. Of
    each group with a window it has as many in ``windows``, but holds only those from the index ``behind`` on;
    the others are 0. Of a group of states it owns ``unit``, and until its next row holds ``read``, the
    checkpoint which that begins with; ``mark`` is the length of a checkpoint of its own, and its unit, and
    ``tails`` has the same of its output, and ``trial`` of its latest row, where that had guesses.
    ``goal`` is the number of tokens whose KV is ever needed: the last output's is not.
    """

    __slots__ = (
        "adapter",
        "apart",
        "arrival",
        "behind",
        "borrowed",
        "branch",
        "brought",
        "cached",
        "credit",
        "data",
        "drafting",
        "elsewhere",
        "fetched",
        "given",
        "guesses",
        "hidden",
        "holds",
        "keys",
        "limit",
        "looked",
        "loose",
        "mark",
        "marks",
        "min_tokens",
        "most_cached",
        "namespace",
        "node",
        "pages",
        "past",
        "place",
        "preemptions",
        "probed",
        "prompt_logprobs",
        "proposed",
        "rank",
        "reach",
        "read",
        "scheduled",
        "seq",
        "shared",
        "spoiled",
        "state",
        "submit",
        "tails",
        "text",
        "told",
        "trial",
        "turn",
        "unit",
        "windows",
        "yields",
    )

    fields = (*_Stepped.__slots__, *__slots__)

    def __init__(
        self,
        submit: Submit,
        prompt: Prompt,
        max_new: int,
        seq: int,
        arrival: float,
        priority: int,
        turn: int = 0,
    ) -> None:
        self.submit = submit
        self.rid = submit.rid
        self.namespace = submit.namespace
        self.adapter = submit.adapter
        self.place = 0  # of its adapter on the device, while it has a slot
        self.marks: dict[int, bytes] = {}  # of pages (cache/radix.py)
        self.looked = False  # a shared tier has been asked for more of it
        self.fetched = False  # before its turn, tiers have been asked for more of it
        self.keys: list[bytes] = []  # of its first pages (cache/tier.py)
        self.tokens = prompt.array  # its own once it has run
        self.data = prompt.data  # committed tokens when it last began to wait
        self.prompt_len = len(self.tokens)
        self.limit = self.prompt_len + max_new
        self.goal = max(self.limit - 1, self.prompt_len)
        self.stop_ids = submit.stop_ids
        self.loop = None if submit.repetition is None else Loop(submit.repetition)
        self.min_tokens = submit.sampling.min_tokens
        self.seq = seq
        self.arrival = arrival
        self.yields = submit.yields
        first = math.inf if submit.yields else -priority
        self.turn = turn  # among those of all clients (Turns)
        self.rank: tuple[float, int, float, int] = (first, turn, arrival, seq)  # smaller is served first
        self.holds = set(submit.holds)
        self.state = State.HELD if self.holds else State.WAITING
        self.finish: str | None = None
        self.spoiled = False  # its pages may hold NaN

        self.slot = -1
        self.pages: list[int] = []
        self.windows: list[list[int]] = []
        self.behind: list[int] = []
        self.unit = 0
        self.read = 0
        self.mark: tuple[int, int] | None = None
        self.tails: list[tuple[int, int]] = []
        self.trial: list[tuple[int, int]] = []
        self.given: list[int] = []  # tickets of the checkpoints that it has brought to the tree
        self.branch = 0  # where the text that the tree knew of it ended, in tokens
        self.node: Node | None = None
        self.shared = 0
        self.borrowed = 0  # pages it found in the tree
        self.told = 0  # pages the workers know of
        self.known = self.prompt_len
        self.planned = 0
        self.allocated = 0
        self.last_step = 0
        # Its decode rows may guess: ``planned`` and ``known`` are then the most there may be.
        self.drafting = False
        self.ahead = 0  # tokens that its rows in flight may bring
        self.loose = 0  # its rows in flight with drafts: without one it is certain how far it has got
        self.guesses = 0, 0, 0  # see Delta
        self.proposed: Sequence[int] = ()  # guesses behind its tokens, which a row with them has to be told
        self.credit = CREDIT  # see sched/repeats.py
        self.text: Text | None = None  # what is known of its repeating itself

        self.cached = 0
        self.brought = ("device", 0)  # a place, and how many pages it has had copied from there
        self.most_cached: int | None = None  # most tokens that were cached; others have been computed for it
        self.reach = 0  # tokens that the first cache group had of it when it first began; -1: it reads none
        self.past = 0  # tokens that it had ever had
        self.elsewhere = 0  # that it had ever had in another namespace, if those are more
        self.apart = ""  # why it could not use these (cache/spaces.py)
        self.preemptions = 0
        self.prompt_logprobs = self._unknown()
        self.hidden = HiddenStates() if submit.sampling.states else None
        self.scheduled: float | None = None
        self.first_token: float | None = None
        self.probed: tuple[int, Node | None, int] = (-1, None, 0)  # cache version, node, length

    @property
    def has_read(self) -> bool:
        """No step has prompt to read for it any more, unless it is retracted."""
        return self.planned >= self.prompt_len

    @property
    def pools(self) -> bool:
        """It is for a vector, not for tokens."""
        return self.submit.sampling.pool is not None

    def may_guess(self, guided: bool) -> bool:
        """Whether its decode rows may have drafts: not where a step brings states of its tokens, and where a
        grammar tells what comes only if rows with one are ``guided``."""
        sampling = self.submit.sampling
        return (guided or not sampling.grammar) and not (sampling.states or self.pools)

    @property
    def begun(self) -> int:
        """With how many tokens it began, or after it was retracted began again. Before it has read these no
        row of it has brought a token, from which the worker would know where one that guesses begins."""
        return len(self.data) // TOKEN_BYTES

    @property
    def plan_bytes(self) -> int:
        """Bytes that it adds to the plan in which it takes its slot, without its page table."""
        return len(self.data) + self.submit.sampling_bytes

    @property
    def cacheable(self) -> int:
        """How many tokens of a cached prefix it can read: the last one must be computed to have a successor,
        and hidden states and the logprobs of prompts that it owes need the tokens in front of them
        computed."""
        if self.hidden is not None:
            return 0
        most = self.known - 1
        return most if self.prompt_logprobs is None else min(most, self.first_logprob - 1)

    @property
    def first_logprob(self) -> int:
        """The first token of its prompt whose logprob it wants, if any; that of the first of all is none."""
        return min(max(1, self.submit.sampling.logprob_start), self.prompt_len)

    def _unknown(self) -> list[TokenLogprob | None] | None:
        """The logprobs of its prompt, of which none has been computed."""
        return [None] * self.first_logprob if self.submit.sampling.prompt_logprobs >= 0 else None

    def renew(self, namespace: str) -> None:
        """It waits, and begins in another namespace: what was found of it is of no use."""
        self.namespace, self.keys, self.looked, self.fetched = namespace, [], False, False
        self.probed = (-1, None, 0)

    def chain(self, page_size: int, count: int) -> list[bytes]:
        """Keys of its first ``count`` pages, which are of committed tokens."""
        if count > len(self.keys):
            width = page_size * TOKEN_BYTES
            tokens = self.tokens[: count * page_size].tobytes()
            return chain(self.keys, self.namespace, tokens, width, count, self.marks)
        return self.keys[:count]

    def rest(self, page_size: int) -> bytes:
        """The key of the page in which its prompt ends, up to there, if it may read tokens of it and has room
        for an output, as who reads the prompt for it needs; else nothing."""
        whole, more = divmod(self.prompt_len - 1, page_size)
        begins = self.limit > self.prompt_len == self.known and self.cacheable == self.prompt_len - 1
        if not (more and begins) or self.marks:
            return b""
        keys = self.chain(page_size, whole).copy()
        return chain(keys, self.namespace, self.data, page_size * TOKEN_BYTES, whole + 1)[-1]

    @property
    def least(self) -> int:
        """Tokens whose KV is certain to be there when the steps in flight are done."""
        return len(self.tokens) - 1 if self.ahead else self.planned

    @property
    def outputs(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.prompt_len

    def ends(self, token: int, delta: Delta) -> bool:
        """Whether the output token just committed,
        which is in ``delta``, is the last one, which both then say."""
        count = len(self.tokens)
        looping = self.loop is not None and self.loop.add(token)
        if token in self.stop_ids and count - self.prompt_len > self.min_tokens:
            delta.finish, delta.matched = "stop", token
        elif count >= self.limit:
            delta.finish = "length"
        elif looping and count - self.prompt_len >= self.min_tokens:
            delta.finish = "repetition"
        else:
            return False
        self.finish = delta.finish
        return True

    def landed(self, span: int) -> None:
        """A row in flight that could bring ``span`` tokens has brought its own:
        correct what the host took for the most."""
        self.ahead -= span
        self.loose -= span > 1
        self.planned = min(len(self.tokens) - 1 + self.ahead, self.goal)
        self.known = self.planned + 1

    def boost(self) -> None:
        """It has waited too long: from now on it goes before every request that has not."""
        self.rank = (-math.inf, 0, self.arrival, self.seq)

    @property
    def boosted(self) -> bool:
        return self.rank[0] == -math.inf

    def ready(self, told: Ready) -> bool:
        """One of its ``holds`` is there; whether it waits for room alone now."""
        self.holds.discard(told.reason)
        if told.sampling is not None:
            self.submit = replace(self.submit, sampling=told.sampling, sampling_bytes=told.sampling_bytes)
        if self.holds or self.state is not State.HELD:
            return False
        self._on("ready")
        return True

    def hold(self, reason: str) -> None:
        """It cannot run before something more is there."""
        self._on("hold")
        self.holds.add(reason)

    def run(self, now: float) -> None:
        self._on("run")
        if self.scheduled is None:
            self.scheduled = now
            self.tokens = self.tokens[:]

    def leave(self) -> None:
        """No more steps for it: it has ended or is retracted."""
        self._on("leave")

    def requeue(self) -> None:
        """A retracted request has left every step:
        all its samples are committed, and it starts over with them."""
        assert self.finish is None
        assert self.slot < 0
        assert self.planned == 0
        self._on("requeue")
        self.preemptions += 1
        assert (self.known, self.ahead) == (len(self.tokens), 0), "a sample is missing"
        self.data = self.tokens.tobytes()
        self.probed = (-1, None, 0)
        self.proposed = ()
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = self._unknown()
        if self.hidden is not None:
            self.hidden.restart()

    def end(self) -> None:
        """It has its ``finish``, and owns nothing."""
        assert self.finish is not None
        assert self.slot < 0
        self._on("end")

    def _on(self, event: str) -> None:
        after = LIFE[self.state].get(event)
        assert after is not None, f"{self.rid}: {event} while {self.state.value}"
        self.state = after

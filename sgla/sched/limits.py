"""What the scheduler may use, and what a request may want of it."""

from __future__ import annotations

from math import prod

import msgspec
from msgspec.structs import replace

from sgla.errors import ContextTooLong, InvalidField
from sgla.messages import LEAVED, LONGEST, VERIFIED, CacheGroup, RowSampling, StepCost, Submit, Tier
from sgla.model.sharing import least_pages, longest

# Plans travel through a ring of 16 MiB (executor/child.py). A request adds bytes to the plan of the step in
# which it takes its slot: its tokens, its sampling parameters and its page table. The page table is not
# counted here: with pages of one token it takes as many bytes as the tokens.
STEP_BYTES = 1 << 20  # that the new requests of a step add, unless there is only one
FLIGHT_BYTES = 6 << 20  # that those of all steps in flight add, unless there is only one
SAMPLING_BYTES = 3 << 19  # of the sampling parameters of one request
ANSWER = 3 << 19  # bytes of a step's logprobs and scores, which come back through one of 4 MiB
WIDE = 256  # logprobs of a prompt token from which on a step has few such tokens, of one request
ALTERNATIVES = 1 << 17  # of these tokens together; one token may have more
STATES = 1 << 18  # bytes of the hidden states of one request's prompt in a step
ID, BIAS = 5, 15  # most bytes of an id and of an (id, bias) in a plan
LONGEST_SEED = (1 << 63) - 1
_encode = msgspec.msgpack.Encoder().encode


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """Capacities come from ``Facts``, choices from ``Config``."""

    slots: int
    groups: list[CacheGroup]  # the first one keeps all tokens; one with states is the last
    page_size: int
    context_len: int
    step_tokens: int  # most tokens in one step
    costs: list[StepCost] = []  # Facts.costs
    drafts: int = 0  # most tokens that a decode row may guess and verify
    leaves: int = 0  # Facts.leaves
    padded_drafts: bool = False  # Facts.padded_drafts
    searched_drafts: bool = False  # Facts.searched_drafts
    guided_drafts: bool = False  # Facts.guided_drafts
    canvas: int = 0  # Facts.canvas
    tiers: list[Tier] = []  # Facts.tiers
    adapters: int = 0  # Facts.adapters
    depth: int = 2  # most steps in flight
    brief_depth: int = 0  # the same while they are brief, if that is more
    stages: int = 1  # of a pipeline that a step goes through
    itl_target: float | None = None  # seconds a step with decode rows should take at most
    policy: str = "fcfs"
    eviction: str = "lru"
    prefix_cache: bool = True
    write_policy: str = "write_through"  # what tiers get: --kv-write-policy
    reserve: float = 0.5  # part of its possible outputs for which a request gets pages reserved, at first
    encoder: bool = False  # prompts are computed in one step, longer ones alone in it, and need no pages
    patience: float = 10.0  # seconds in the waiting list after which arrival order beats the policy
    hidden: int = 0  # values of a hidden state
    experts: list[int] = []  # Facts.experts

    def __post_init__(self) -> None:
        assert min(self.slots, self.page_size, self.step_tokens) > 0, "empty limits"
        assert self.depth >= 1, "no step in flight"
        assert max(self.depth, self.brief_depth) <= max(3, self.stages + 1), (
            "more steps in flight than are of use"
        )
        assert self.leaves <= self.drafts, "second guesses without first ones"
        assert 2 * self.canvas <= self.step_tokens, "half a step has no room for a block"
        assert self.stages == 1 or not (self.drafts and self.padded_drafts), (
            "stages are told of guesses, and compute no others"
        )
        assert not self.costs or self.costs[-1].tokens >= self.step_tokens, (
            "steps that the table does not have"
        )
        assert self.context_len <= LONGEST, "plans cannot carry such contexts"
        first, *others = self.groups
        assert not first.window, "the first group keeps all tokens"
        assert not first.every, "the first group keeps all tokens"
        assert all(group.window for group in others[:-1]), "one group of states at most, which is the last"
        assert not others or bool(others[-1].window) != bool(others[-1].every), (
            "a group is of windows or of states"
        )
        assert self.groups[-1].every % self.page_size == 0, "a checkpoint lies within a page"
        assert all(len(tier.units) == len(self.groups) for tier in self.tiers), "a tier lacks a group"
        assert all(bool(group.slab) == bool(first.slab) for group in self.paged), "some groups share a memory"
        assert self.encoder or all(group.pages > 1 for group in self.groups), "no pages but the dummy"

    @property
    def paged(self) -> list[CacheGroup]:
        """All groups but that of states."""
        return self.groups[:-1] if self.recurrent else self.groups

    @property
    def recurrent(self) -> bool:
        """The last group has states."""
        return self.groups[-1].every > 0

    @property
    def rows(self) -> int:
        """Most requests resident: each needs a token of the step's budget."""
        return min(self.slots, self.step_tokens)

    @property
    def pool_tokens(self) -> int:
        """Tokens that all pages hold of one request; an encoder needs none."""
        if self.encoder:
            return self.context_len
        first, *others = self.paged
        if not first.slab:
            return (first.pages - 1) * self.page_size
        least = [least_pages(group.window, self.step_tokens, self.page_size) for group in others]
        slabs = (first.pages - 1) // first.slab
        return longest(slabs, [group.slab for group in self.paged], least) * self.page_size

    def outputs(self, submit: Submit) -> int:
        """Outputs the request can have:
        with the last one, whose KV is never stored, it must fit context and pool.

        Raises ContextTooLong, or InvalidField (empty prompt, huge answers).
        """
        assert self.adapters or not submit.adapter, "an adapter without places"
        prompt = len(submit.tokens)
        if not prompt:
            raise InvalidField("The prompt is empty.", param="prompt")
        if self._answer(submit.sampling) > ANSWER or 8 * submit.sampling.prompt_logprobs > 2 * ANSWER:
            message = "The request wants more logprobs of a token than a step can bring; ask for fewer."
            raise InvalidField(message, param="logprobs")
        self._check_pictures(submit)
        longest = min(self.context_len, self.pool_tokens)
        if submit.max_new == 0 and prompt <= longest:
            return 0
        most = min(self.context_len, self.pool_tokens + 1) - prompt
        if self.canvas:
            most = (longest - prompt) // self.canvas * self.canvas  # whole blocks are computed
        if most < 1:
            raise ContextTooLong.of(longest, prompt, 0)
        return min(submit.max_new, most)

    def _check_pictures(self, submit: Submit) -> None:
        """Tokens that see each other must fit into a step, beside a token of each other request, and into
        the windows of all layers."""
        longest = max((shown.end - shown.first for shown in submit.pictures if shown.whole), default=0)
        what = "The prompt" if longest == len(submit.tokens) else "A picture"
        if longest > (most := self.step_tokens - self.rows + 1):
            raise InvalidField(
                f"{what} has {longest} tokens, which are computed together, and a step of this server has "
                f"room for {most}; start it with a larger --step-tokens or fewer --max-running-requests.",
                param="messages",
            )
        window = min((group.window for group in self.groups if group.window), default=longest)
        if longest > window:
            raise InvalidField(
                f"{what} has {longest} tokens, which see each other, and layers of this model have windows "
                f"of {window} tokens; send a shorter one.",
                param="messages",
            )

    def _answer(self, sampling: RowSampling) -> int:
        """Bytes of logprobs and scores in a step full of such requests."""
        tokens = self.step_tokens if 0 <= sampling.prompt_logprobs < WIDE else self.rows
        prompt = sampling.prompt_logprobs if sampling.prompt_logprobs < WIDE else 0
        named = max(sampling.logprobs, prompt) + len(sampling.logprob_ids)
        states = self.rows * self._state_bytes(sampling)
        return tokens * (8 * (named + 1) + 4 * len(sampling.pool or ())) + states

    def _state_bytes(self, sampling: RowSampling) -> int:
        """That rows bring of each token."""
        return 4 * (self.hidden * sampling.hidden + prod(self.experts) * sampling.experts)

    def stated_tokens(self, sampling: RowSampling) -> int:
        """How many tokens of a request whose rows bring states a step may read."""
        return max(1, STATES // self._state_bytes(sampling))


def room_for_guesses(limits: Limits, rows: int) -> int:
    """How many tokens each of so many rows of a step may guess."""
    room = min(VERIFIED, limits.step_tokens) // max(rows, 1)
    most = limits.drafts - (limits.leaves if rows > LEAVED else 0)
    return min(most, max(room - 1, 0))


def wide_tokens(sampling: RowSampling) -> int | None:
    """How many prompt tokens of a request a step may read, because of what their logprobs take;
    None: as many as it likes."""
    if sampling.prompt_logprobs < WIDE:
        return None
    return max(1, ALTERNATIVES // (sampling.prompt_logprobs + len(sampling.logprob_ids) + 1))


def plan_bytes_of(sampling: RowSampling) -> int:
    """Most bytes that ``sampling`` takes in a plan, whatever its seed. Raises InvalidField if that is too
    much."""
    size = len(_encode(replace(sampling, allowed=[], logit_bias=[], seed=LONGEST_SEED)))
    return _bounded(size + ID * len(sampling.allowed) + BIAS * len(sampling.logit_bias))


def with_grammar(submit: Submit, source: str) -> tuple[RowSampling, int]:
    """``sampling`` and ``sampling_bytes`` of a Submit that has its compiled grammar.
    Raises InvalidField if that is too much."""
    size = len(source) if source.isascii() else 4 * len(source)
    return replace(submit.sampling, grammar=source), _bounded(submit.sampling_bytes + size + ID)


def _bounded(size: int) -> int:
    if size > SAMPLING_BYTES:
        raise InvalidField(
            f"The parameters of the request take {size} bytes; at most {SAMPLING_BYTES} are possible."
        )
    return size

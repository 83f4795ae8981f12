"""One step under construction, and what the host remembers of it until its result."""

from __future__ import annotations

from collections.abc import Sequence

from sgla.messages import DENOISE, POOL, PROMPT_LOGPROBS, SAMPLE, Copy, NewRow, StepPlan, int32
from sgla.sched.budget import pairs
from sgla.sched.request import Request

ONE = int32((1,))


class Step:
    """Columns of the plan in row order. ``samples``: requests of the SAMPLE rows; ``ends``: requests without
    outputs whose prompt is complete with this step."""

    __slots__ = (
        "_canvas",
        "_checkpoints",
        "_drafts",
        "_flags",
        "_new",
        "_page_counts",
        "_page_ids",
        "_page_slots",
        "_q_lens",
        "_slots",
        "_starts",
        "_state_reads",
        "copies",
        "counted",
        "decodes",
        "drafts",
        "dropped",
        "ends",
        "number",
        "pending",
        "pictured",
        "plan_bytes",
        "rows",
        "samples",
        "seconds",
        "steady",
        "tokens",
        "work",
        "zeroed",
    )

    def __init__(self, number: int, groups: int = 1, canvas: int = 0) -> None:
        """``groups``: how many have pages; ``canvas``: of Limits."""
        self.number = number
        self._canvas = canvas
        self.rows: list[Request] = []
        self.samples: list[Request] = []
        self.ends: list[Request] = []
        self.decodes = 0  # rows
        self.drafts: list[int] = []  # of decode rows, -1: it never has any; [] where no row may guess
        self.counted: list[Request] = []  # rows of one token each that count as ahead
        self.pending: list[int] = []  # tokens of the decode rows, guesses too, where workers have to be told
        self.tokens = 0
        self.work = 0
        self.seconds = 0.0  # it should take, where that matters
        self.steady = False  # more may be in flight with it
        self.pictured = False  # it reads a prompt up to its last picture
        self.plan_bytes = 0  # of the requests that take their slots in this step
        self.copies: list[Copy] = []
        self.dropped: list[int] = []
        self.zeroed: list[list[int]] = []  # pages of each group, or nothing
        self._slots: list[int] = []
        self._starts: list[int] = []
        self._q_lens = bytearray()  # int32
        self._drafts: list[int] = []
        self._flags = bytearray()
        self._page_slots: list[int] = []
        self._page_counts: list[int] = []
        self._page_ids: list[list[int]] = [[] for _ in range(groups)]
        self._state_reads: list[int] = []
        self._checkpoints: list[int] = []
        self._new: list[NewRow] = []

    @property
    def mixed(self) -> bool:
        """It has prompts beside decode rows."""
        return 0 < self.decodes < len(self.rows)

    def told(self, seconds: float) -> float:
        """What the ``seconds`` that it took tell of what tokens cost: nothing, where a tower may have had its
        part. Smaller steps would follow, in which that takes as long."""
        return 0.0 if self.pictured else seconds

    def set_decodes(self, rows: list[Request], slots: list[int], starts: list[int]) -> None:
        """The first rows of the step: one sampled token each. Takes the lists over."""
        assert not self.rows
        n = len(rows)
        self.rows, self._slots, self._starts = rows, slots, starts
        self.samples = rows.copy()
        self._q_lens = bytearray(ONE) * n
        self._flags = bytearray((SAMPLE,)) * n
        self.decodes = self.tokens = n
        self.work = sum(starts) + n

    def count(self, rows: list[Request]) -> None:
        """``rows`` of one token may guess in other steps, which have to know of this one."""
        self.counted = [request for request in rows if request.drafting]
        for request in self.counted:
            request.ahead += 1

    def add_verify(self, request: Request, drafts: int, goal: int) -> None:
        """A decode row that may guess so many tokens, with pages for them, before all prefills. It moves
        ``planned`` and ``known`` to the most that there may be. Where it is certain that it begins at
        ``planned`` and brings one token, the workers are told of a plain row."""
        start = request.planned
        self.rows.append(request)
        self.samples.append(request)
        self._slots.append(request.slot)
        self._starts.append(start)
        self._q_lens += int32((1 + drafts,))
        self._flags.append(SAMPLE)
        self.drafts.append(drafts if request.drafting else -1)
        request.planned = min(start + 1 + drafts, goal)
        request.known = request.planned + 1
        self._drafts.append(drafts if drafts or request.loose else -1)
        request.ahead += (1 + drafts) if request.drafting else 0
        request.loose += drafts > 0
        request.last_step = self.number
        self.decodes += 1
        self.tokens += 1 + drafts
        self.work += pairs(start, 1 + drafts)

    def add_told(self, request: Request, guesses: Sequence[int], drafts: int) -> None:
        """A decode row, with pages for it, whose pending token and ``guesses`` the workers are told. Behind
        it they may guess so many tokens more, with pages for them; -1: none."""
        self.add_verify(request, len(guesses), request.goal)
        self._drafts[-1] = drafts
        self.pending += (request.tokens[-1], *guesses)

    def add_canvas(self, request: Request) -> None:
        """A row with the request's next block, with pages for it, before all prefills. Until its result has
        come it is not known whether the request goes on with this block or behind it."""
        self.tell_pages(request)
        self.rows.append(request)
        self.samples.append(request)
        self._slots.append(request.slot)
        self._starts.append(request.planned)
        self._q_lens += int32((self._canvas,))
        self._flags.append(DENOISE)
        request.loose += 1
        request.last_step = self.number
        self.decodes += 1
        self.tokens += self._canvas
        self.work += pairs(request.planned, self._canvas)

    @property
    def canvases(self) -> bool:
        """Its decode rows are blocks."""
        return self._canvas > 0

    def add_prefill(self, request: Request, count: int) -> None:
        """A row of ``count`` tokens, with pages for them;
        moves ``planned``, and ``known`` if the row samples."""
        self.tell_pages(request)
        start = request.planned
        end = start + count
        flags = 0
        if (
            request.prompt_logprobs is not None
            and start + 1 < request.prompt_len
            and end >= request.first_logprob
        ):
            flags |= PROMPT_LOGPROBS
        if request.pools:
            flags |= POOL
        if end == request.known:
            if request.limit <= request.prompt_len:
                self.ends.append(request)
            elif not self._canvas:
                flags |= SAMPLE
                request.known += 1
                self.samples.append(request)
        self.pictured |= any(start < placed.end for placed in request.submit.pictures)
        self.rows.append(request)
        self._slots.append(request.slot)
        self._starts.append(start)
        self._q_lens += int32((count,))
        self._flags.append(flags)
        request.planned = end
        request.last_step = self.number
        self.tokens += count
        self.work += pairs(start, count)

    def tell_pages(self, request: Request) -> None:
        """Append the pages the workers do not know of yet to the table of the request,
        which has a row in this step."""
        fresh = request.pages[request.told :]
        if fresh:
            self._page_slots.append(request.slot)
            self._page_counts.append(len(fresh))
            self._page_ids[0] += fresh
            for ids, pages in zip(self._page_ids[1:], request.windows):
                ids += pages[request.told :]
            request.told = len(request.pages)

    def read_state(self, request: Request, unit: int) -> None:
        """The row of the request begins with this checkpoint."""
        self._state_reads += (request.slot, unit)

    def add_checkpoints(self, request: Request, places: list[int]) -> None:
        """The row of the request writes checkpoints: lengths and units in turn."""
        for length, unit in zip(places[::2], places[1::2]):
            self._checkpoints += (request.slot, length, unit)

    def add_new(self, request: Request) -> None:
        """The request takes its slot in this step, with the pages it holds now."""
        pages = [request.pages, *request.windows]
        if request.unit:
            pages.append([request.unit])
        self._new.append(
            NewRow(
                slot=request.slot,
                tokens=request.data,
                prompt_len=request.prompt_len,
                pages=[int32(column) for column in pages],
                sampling=request.submit.sampling,
                segment=request.submit.segment,
                limit=request.limit if request.drafting else 0,
                place=request.place,
                pictures=request.submit.pictures,
                apart=bool(request.submit.namespace),
            )
        )
        request.told = len(request.pages)
        self.plan_bytes += request.plan_bytes

    def _encoded_drafts(self) -> bytes:
        if max(self._drafts, default=-1) < 0:
            return b""
        return int32(self._drafts + [-1] * (len(self.rows) - self.decodes))

    def encode(self) -> StepPlan:
        """The message for the workers."""
        return StepPlan(
            step=self.number,
            slots=int32(self._slots),
            starts=int32(self._starts),
            q_lens=bytes(self._q_lens),
            flags=bytes(self._flags),
            drafts=self._encoded_drafts(),
            page_slots=int32(self._page_slots),
            page_counts=int32(self._page_counts),
            page_ids=[int32(ids) for ids in self._page_ids],
            state_reads=int32(self._state_reads),
            checkpoints=int32(self._checkpoints),
            new=self._new,
            copies=self.copies,
            dropped=self.dropped,
            zeroed=[int32(pages) for pages in self.zeroed],
            tokens=int32(self.pending),
        )

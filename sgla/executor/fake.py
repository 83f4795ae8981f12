"""An executor without a model: the next token is a hash of the seed and all tokens before it.

So a request's output depends on its prompt alone, and any mistake in batching, chunking, sharing or release
shows as another text. ``FakeModel`` is the pure part; it keeps the tables of a worker and checks every plan
against them.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from sgla import clock
from sgla.errors import InvalidAdapter, UnsupportedField, WorkerDied
from sgla.executor.base import Results
from sgla.executor.fake_tiers import WRONG, FakeTiers
from sgla.messages import (
    POOL,
    PROMPT_LOGPROBS,
    SAMPLE,
    CacheGroup,
    Control,
    Facts,
    LogprobBlock,
    Moved,
    NewRow,
    Progress,
    RowSampling,
    StepPlan,
    StepResult,
    Tier,
)
from sgla.model.read import read_spec
from sgla.worker.facts import drafts_of, guesses_of

if TYPE_CHECKING:
    from sgla.config import Config
    from sgla.hub.source import ModelSource

MASK = (1 << 64) - 1
POOL_TOKENS = 1 << 20
BYTES_PER_TOKEN = 1024  # what a token is said to take of --kv-cache-bytes
FAKE_WIDTH = 4  # of hidden states
COPY_SECONDS = 0.002


def mix(state: int, token: int) -> int:
    """One round of a 64-bit hash (the multiplier of splitmix64)."""
    state = ((state ^ token) + 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 & MASK
    return state ^ state >> 29


def ints(column: bytes) -> array[int]:
    return array("i", column)


class FakeSlot:
    """Tables of one slot: ``chain[p]`` is the hash of the adapter and of tokens ``0 .. p``,
    the stand-in for the KV at ``p`` and for the state behind it."""

    __slots__ = (
        "adapter",
        "chain",
        "computed",
        "index",
        "limit",
        "pages",
        "place",
        "prompt_len",
        "sampling",
        "tokens",
        "unit",
    )

    def __init__(self, new: NewRow, recurrent: bool = False, adapter: int = 0) -> None:
        self.adapter, self.place = adapter, new.place
        self.tokens = ints(new.tokens).tolist()
        self.index = new.slot
        self.pages = [ints(pages).tolist() for pages in new.pages]
        self.unit = self.pages.pop()[0] if recurrent else 0
        self.prompt_len = new.prompt_len
        self.sampling = new.sampling
        self.limit = new.limit
        self.computed = 0
        self.chain: list[int] = []
        self.hash_on()

    def hash_on(self) -> None:
        """Bring ``chain`` up to ``tokens``."""
        state = self.chain[-1] if self.chain else mix(self.adapter << 32, 0) if self.adapter else 0
        for token in self.tokens[len(self.chain) :]:
            state = mix(state, token)
            self.chain.append(state)


class FakeRow(NamedTuple):
    """Computes the tokens ``start:end`` of a slot. ``run``: of a row with drafts, what it brings; ``wrong``:
    so many guesses behind ``end`` were wrong, and what they left in the pages is nobody's."""

    slot: FakeSlot
    start: int
    end: int
    flags: int
    run: list[int] | None = None
    wrong: int = 0


class FakeSampler:
    """What comes behind the tokens of a slot, and what it guesses. See ``FakeModel``."""

    def __init__(self, seed: int, vocab: int, forced: int, acceptance: float) -> None:
        self._seed, self._vocab, self._forced, self._acceptance = seed, vocab, forced, acceptance

    def _sample(self, slot: FakeSlot) -> int:
        sampling = slot.sampling
        seed = self._seed ^ sampling.seed if sampling.temperature > 0 else self._seed
        token = (mix(slot.chain[-1], seed) >> 20) % self._vocab
        step = 1
        if sampling.grammar:
            step, token = 2, token ^ (token + slot.tokens[-1] + 1 & 1)
        if len(slot.tokens) - slot.prompt_len < sampling.min_tokens:
            while token in sampling.stop_ids:
                token = (token + step) % self._vocab
        return token

    def next(self, slot: FakeSlot) -> int:
        """Append the token that follows."""
        token = self._sample(slot)
        slot.tokens.append(token)
        slot.hash_on()
        return token

    def run(self, slot: FakeSlot) -> list[int]:
        """Append some more. How many depends on the tokens alone."""
        count = (slot.chain[-1] >> 40) % (self._forced + 1)
        return [self.next(slot) for _ in range(count)]

    def propose(self, slot: FakeSlot, most: int) -> bytes:
        """What a row that is told its guesses guesses behind its tokens."""
        known = len(slot.tokens)
        count = (slot.chain[-1] >> 44) % (max(min(most, slot.limit - known - 1), 0) + 1)
        for _ in range(count):
            right = self.right(slot)
            slot.tokens[-1] = (self.next(slot) + (not right)) % self._vocab
        guesses = slot.tokens[known:]
        del slot.tokens[known:], slot.chain[known:]
        return array("i", guesses).tobytes()

    def right(self, slot: FakeSlot) -> bool:
        """Whether the next guess is."""
        return (slot.chain[-1] >> 20 & 0xFFFF) < self._acceptance * 0x10000


class FakeModel:
    """Executes plans at once. ``forced``: the longest run of tokens that it may tell at once, as if a grammar
    forced them behind the one it has sampled. A row guesses any number of tokens, of which each is right with
    the probability ``acceptance``; that depends on its tokens alone, too. With ``second`` half of them are
    second guesses of the first places, of which so many are right where the first one is wrong. Whatever
    grammar a row has, its tokens are odd and even in turn. ``verify``: keep a page store and check it: each
    row must find exactly its own prefix in the pages it was given, and no page may be written by two rows of
    a step.

    ``cost(tokens, pairs)``: seconds that a step reports, ``pairs`` being the (query, key) pairs of attention.
    """

    def __init__(
        self,
        facts: Facts,
        seed: int = 0,
        verify: bool = True,
        cost: Callable[[int, int], float] | None = None,
        forced: int = 0,
        acceptance: float = 0.7,
        second: float = 0.0,
    ) -> None:
        self.facts = facts
        self.computed_tokens = 0
        self._cost, self._second = cost, second
        self._sampler = FakeSampler(seed, facts.vocab_size, forced, acceptance)
        self._slots: list[FakeSlot | None] = [None] * facts.slots
        self._encoder = facts.pooling is not None and facts.pooling.encoder
        self._recurrent = facts.groups[-1].every > 0
        paged = facts.groups[:-1] if self._recurrent else facts.groups
        self._stores = [[[0] * facts.page_size for _ in range(group.pages)] for group in paged if verify]
        # Units of states: how many tokens each has seen, and their hash.
        self._states = [(0, 0)] * facts.groups[-1].pages if self._recurrent and verify else []
        self.tiers = FakeTiers(facts.tiers, len(facts.groups), self._stores, self._states)
        self._adapters = [0] * (1 + facts.adapters)  # of each place
        self._arriving: dict[int, tuple[int, int]] = {}  # by transfer: an adapter, and its place
        self._step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises AssertionError if the plan is wrong."""
        assert plan.step == self._step + 1, f"step {plan.step} after {self._step}"
        self._step = plan.step
        for new in plan.new:
            self._slots[new.slot] = FakeSlot(new, self._recurrent, self._adapters[new.place])
        self._append_pages(plan)
        for store, pages in zip(self._stores, plan.zeroed):
            for page in ints(pages):
                store[page] = [0] * self.facts.page_size
        for copy in plan.copies:
            if copy.source == "adapters":
                (adapter,), (place,) = ints(copy.sources[0]), ints(copy.targets[0])
                self._arriving[copy.transfer], self._adapters[place] = (adapter, place), WRONG
            elif self._stores or self._states:
                self.tiers.begin(copy)
        rows = self._rows(plan)
        if not self._encoder:
            for g in range(len(self._stores)):
                self._write(g, rows)
                self._read(g, rows)
        if self._states:
            self._advance(plan, rows)
        tokens = array("i")
        blocks: list[LogprobBlock] = []
        vectors: list[bytes] = []
        counts, guessed = array("i"), array("i")
        hidden: list[bytes] = []
        proposed: list[bytes] = []
        drafts = ints(plan.drafts) if plan.drafts and plan.tokens else array("i", [-1]) * len(rows)
        for r, (slot, start, end, flags, told, wrong) in enumerate(rows):
            slot.computed = end
            if slot.sampling.hidden:
                hidden.append(self.states(slot.tokens[:end], start))
            if flags & PROMPT_LOGPROBS:
                blocks.append(self._prompt_block(r, slot, start, end))
            if flags & POOL and end == slot.prompt_len:
                vectors.append(self.vector(slot.tokens))
            if flags & SAMPLE:
                run = told or []
                if told is None and end == len(slot.tokens):
                    run = [self._sampler.next(slot)]
                    if slot.sampling.logprobs < 0 and not slot.sampling.hidden and not slot.limit:
                        run += self._sampler.run(slot)
                if run and slot.sampling.logprobs >= 0:
                    first = len(slot.tokens) - len(run)
                    blocks.append(self._block(r, slot, False, first, run, slot.sampling.logprobs))
                tokens.extend(run)
                counts.append(len(run))
                guessed.append(len(told) - 1 + wrong if told else 0)
                proposed.append(self._sampler.propose(slot, drafts[r]))
        count = sum(row.end - row.start + row.wrong for row in rows)
        self.computed_tokens += count
        seconds = 0.0
        if self._cost is not None:
            seconds = self._cost(
                count, sum((row.end - row.start) * (row.start + row.end + 1) // 2 for row in rows)
            )
        return StepResult(
            step=plan.step,
            tokens=tokens.tobytes(),
            logprobs=blocks,
            seconds=seconds,
            vectors=vectors,
            counts=b"" if all(n == 1 for n in counts) else counts.tobytes(),
            hidden=hidden,
            guessed=guessed.tobytes() if any(guessed) else b"",
            proposed=proposed if any(proposed) else [],
        )

    def states(self, tokens: list[int], start: int = 0) -> bytes:
        """float32[*, facts.hidden] of the tokens from ``start`` on."""
        values = array("f")
        state = 0
        for position, token in enumerate(tokens):
            state = mix(state, token)
            if position >= start:
                values.extend((state >> 8 * i & 0xFF) / 0x100 for i in range(self.facts.hidden))
        return values.tobytes()

    def move(self, transfer: int, ok: bool) -> Moved:
        """End a copy."""
        if transfer in self._arriving:
            adapter, place = self._arriving.pop(transfer)
            self._adapters[place] = adapter if ok else WRONG
        return Moved(transfer, ok, self.tiers.end(transfer, ok))

    def vector(self, tokens: list[int]) -> bytes:
        """float32[4] of a prompt."""
        state = 0
        for token in tokens:
            state = mix(state, token)
        return array("f", [(state >> 16 * i & 0xFFFF) / 0x10000 - 0.5 for i in range(4)]).tobytes()

    def continuation(
        self,
        prompt: list[int],
        sampling: RowSampling,
        stop_ids: frozenset[int],
        max_new: int,
        adapter: int = 0,
    ) -> list[int]:
        """What a request alone must produce, its stop token included."""
        new = NewRow(
            slot=0, tokens=array("i", prompt).tobytes(), prompt_len=len(prompt), pages=[], sampling=sampling
        )
        slot = FakeSlot(new, adapter=adapter)
        while len(slot.tokens) - len(prompt) < max_new:
            token = self._sampler.next(slot)
            if token in stop_ids and len(slot.tokens) - len(prompt) > sampling.min_tokens:
                break
        return slot.tokens[len(prompt) :]

    def _append_pages(self, plan: StepPlan) -> None:
        at = 0
        ids = [ints(column) for column in plan.page_ids]
        for index, count in zip(ints(plan.page_slots), ints(plan.page_counts)):
            slot = self._slots[index]
            assert slot is not None, "pages for an empty slot"
            for pages, column in zip(slot.pages, ids, strict=True):
                pages.extend(column[at : at + count])
            at += count
        assert all(len(column) == at for column in ids), "page_counts and page_ids disagree"

    def _rows(self, plan: StepPlan) -> list[FakeRow]:
        slots, starts, q_lens = ints(plan.slots), ints(plan.starts), ints(plan.q_lens)
        assert len(slots) == len(starts) == len(q_lens) == len(plan.flags), "columns of different lengths"
        assert slots or plan.copies or plan.dropped, "a plan of nothing"
        assert len(set(slots)) == len(slots), "a slot has two rows"
        alone = self._encoder and len(q_lens) == 1
        assert alone or sum(q_lens) <= self.facts.step_tokens, "more tokens than a step may have"
        rows, told = [], ints(plan.tokens)
        drafts = ints(plan.drafts) if plan.drafts else array("i", [-1]) * len(slots)
        for index, start, count, flags, most in zip(slots, starts, q_lens, plan.flags, drafts, strict=True):
            slot = self._slots[index]
            assert slot is not None, "a row of an empty slot"
            assert slot.adapter == self._adapters[slot.place], "a row whose place has another adapter"
            assert not told or slot.tokens[start] == told[0], "a row begins with another token"
            guesses, told = told[1:count], told[count:]
            if most >= 0 and plan.tokens:
                rows.append(self._verify(slot, start, guesses.tolist(), most, flags))
                continue
            if most >= 0:
                assert count == 1 + most, "a row with drafts of another length"
                rows.append(self._guess(slot, start, most, flags))
                continue
            end = start + count
            assert count > 0, "an empty row"
            assert slot.computed <= start, "a token is computed twice"
            assert end <= len(slot.tokens), "a row reads a token that does not exist"
            if self._encoder:
                assert (start, end) == (0, slot.prompt_len), "a part of a prompt"
            else:
                assert all(end <= len(pages) * self.facts.page_size for pages in slot.pages), (
                    "a row without pages"
                )
            rows.append(FakeRow(slot, start, end, flags))
        return rows

    def _verify(self, slot: FakeSlot, start: int, guesses: list[int], most: int, flags: int) -> FakeRow:
        """A row that is told its guesses."""
        assert (start, start + 1) == (slot.computed, len(slot.tokens)), "a row begins elsewhere"
        end, size = min(start + 1 + len(guesses) + most, slot.limit - 1), self.facts.page_size
        assert start + 1 + len(guesses) < slot.limit, "a row has more guesses than it may bring"
        assert all(end <= len(pages) * size for pages in slot.pages), "a row without pages"
        run = [self._sampler.next(slot)]
        while run == guesses[: len(run)]:
            run.append(self._sampler.next(slot))
        return FakeRow(slot, start, start + len(run), flags, run, len(guesses) + 1 - len(run))

    def _guess(self, slot: FakeSlot, latest: int, most: int, flags: int) -> FakeRow:
        start = slot.computed
        assert start <= latest, "a row has got further than it may have"
        assert len(slot.tokens) == start + 1, "a row with drafts has more than one token to compute"
        drafts = min(most, slot.limit - len(slot.tokens) - 1)
        if drafts < 0:  # it has all its tokens, and the host does not know yet
            return FakeRow(slot, start, start, flags, [])
        size = self.facts.page_size
        assert all(start + 1 + drafts <= len(pages) * size for pages in slot.pages), "a row without pages"
        guessed = (slot.chain[-1] >> 44) % (drafts + 1)
        beside = guessed // 2 if self._second else 0
        run = [self._sampler.next(slot)]
        while len(run) <= guessed - beside and self._sampler.right(slot):
            run.append(self._sampler.next(slot))
        if len(run) <= beside and (slot.chain[-1] >> 36 & 0xFF) < self._second * 0x100:
            run.append(self._sampler.next(slot))
        return FakeRow(slot, start, start + len(run), flags, run, guessed + 1 - len(run))

    def _write(self, g: int, rows: list[FakeRow]) -> None:
        size, store = self.facts.page_size, self._stores[g]
        written: set[int] = set()
        for slot, start, end, _, _, wrong in rows:
            if start == end:
                continue
            pages = slot.pages[g][start // size : (end + wrong - 1) // size + 1]
            assert 0 not in pages, "a row writes to the dummy page"
            assert written.isdisjoint(pages), "two rows write to one page"
            written.update(pages)
            self._overwrite(g, pages)
            for position in range(start, end):
                store[slot.pages[g][position // size]][position % size] = slot.chain[position]
            for position in range(end, end + wrong):
                store[slot.pages[g][position // size]][position % size] = WRONG

    def _overwrite(self, g: int, pages: Iterable[int]) -> None:
        """What other groups had where these pages are."""
        size = self.facts.groups[g].slab
        for slab in {(page - 1) // size for page in pages} if size else ():
            for other, store in enumerate(self._stores):
                count = self.facts.groups[other].slab
                for page in range(slab * count + 1, (slab + 1) * count + 1) if other != g else ():
                    store[page] = [WRONG] * self.facts.page_size

    def _read(self, g: int, rows: list[FakeRow]) -> None:
        size, store, window = self.facts.page_size, self._stores[g], self.facts.groups[g].window
        for slot, start, end, *_ in rows:
            first = max(0, start - window + 1) if window else 0
            for i in range(first // size, (end - 1) // size + 1):
                page, begin = slot.pages[g][i], max(i * size, first)
                expected = slot.chain[begin : min((i + 1) * size, end)]
                found = store[page][begin % size :][: len(expected)]
                assert found == expected, f"page {page} holds another prefix"

    def _advance(self, plan: StepPlan, rows: list[FakeRow]) -> None:
        """Each row goes on with the state it is told to begin with. All read before any writes, and no two
        write to one unit. Behind a wrong guess that it has been told a row has no state that is of use."""
        told = ints(plan.state_reads)
        begins = dict(zip(told[::2], told[1::2]))
        assert begins.keys() <= {row.slot.index for row in rows}, "a state for no row"
        found = [
            self._states[begins.get(row.slot.index, row.slot.unit)] if row.start else (0, 0) for row in rows
        ]
        written: set[int] = set()
        marks = ints(plan.checkpoints)
        for row, state in zip(rows, found):
            slot = row.slot
            assert state == (row.start, slot.chain[row.start - 1] if row.start else 0), (
                "a state of other tokens"
            )
            reach = row.end + row.wrong if plan.tokens else row.end
            places = [(reach, slot.unit)] if row.end > row.start else []
            places += [
                mark[1:] for mark in zip(marks[::3], marks[1::3], marks[2::3]) if mark[0] == slot.index
            ]
            for length, unit in places:
                assert row.start < length <= reach, "a checkpoint that the row does not compute"
                assert unit, "a state in the dummy unit"
                assert unit not in written, "two states for one unit"
                written.add(unit)
                self._states[unit] = length, slot.chain[length - 1] if length <= row.end else WRONG
        assert len(written) == sum(row.end > row.start for row in rows) + len(marks) // 3, (
            "a checkpoint of no row"
        )
        owns = {row.slot.index: row.slot.unit for row in rows}
        for slot_index, unit in begins.items():
            assert unit not in written or unit == owns[slot_index], (
                "a state is written while another row reads it"
            )

    def _prompt_block(self, row: int, slot: FakeSlot, start: int, end: int) -> LogprobBlock:
        """The span ``[start, end)`` predicts the tokens one later, as far as they are prompt."""
        tokens = slot.tokens[start + 1 : min(end + 1, slot.prompt_len)]
        return self._block(row, slot, True, start + 1, tokens, slot.sampling.prompt_logprobs)

    def _block(
        self, row: int, slot: FakeSlot, prompt: bool, start: int, tokens: list[int], k: int
    ) -> LogprobBlock:
        """Made-up numbers that depend on the prefix and the token."""
        values = [-(mix(slot.chain[start + i - 1], t) % 1000) / 64 for i, t in enumerate(tokens)]
        vocab = self.facts.vocab_size
        return LogprobBlock(
            row=row,
            prompt=prompt,
            start=start,
            values=array("f", values).tobytes(),
            ranks=array("i", [1] * len(tokens)).tobytes(),
            top_ids=array("i", [(t + j) % vocab for t in tokens for j in range(k)]).tobytes(),
            top_values=array("f", [v - j for v in values for j in range(k)]).tobytes(),
            k=k,
        )


def fake_facts(config: Config, source: ModelSource) -> Facts:
    """Vocabulary and context length of the model, sizes of the configuration."""
    spec = read_spec(source.config)
    context = config.context_length or spec.context_len
    tokens = (config.kv_cache_bytes or POOL_TOKENS * BYTES_PER_TOKEN) // BYTES_PER_TOKEN
    return Facts(
        groups=[CacheGroup(pages=max(tokens, context) // config.page_size + 2)],
        page_size=config.page_size,
        slots=config.max_running_requests or 256,
        context_len=context,
        vocab_size=spec.vocab,
        step_tokens=config.step_tokens or 8192,
        dtype="none",
        device="fake",
        hidden=FAKE_WIDTH if config.enable_return_hidden_states else 0,
        adapters=config.max_loras if config.enable_lora else 0,
        drafts=guesses_of(config),
        leaves=guesses_of(config) - drafts_of(config),
        guided_drafts=True,
        notes=["no model: the next token is a hash of those before it"],
    )


class FakeExecutor:
    """``FakeModel`` behind the Executor interface, in this process:
    a step is done when ``submit`` returns."""

    def __init__(self, facts: Facts, seed: int = 0, verify: bool = True) -> None:
        self.facts = facts
        self.model = FakeModel(facts, seed, verify)
        self._results = Results()
        self._on_death: Callable[[WorkerDied], None] | None = None
        self._dead = False

    @classmethod
    def from_config(cls, config: Config, source: ModelSource) -> FakeExecutor:
        return cls(fake_facts(config, source), config.random_seed or 0)

    async def start(self, on_progress: Callable[[Progress], None]) -> Facts:
        on_progress(Progress(phase="load", message="no model", done=1, total=1))
        return self.facts

    def submit(self, plan: StepPlan) -> None:
        if not self._dead:
            self._results.put(self.model.execute(plan))
            for copy in plan.copies:
                self._results.put(self.model.move(copy.transfer, True))

    def results_fd(self) -> int:
        return self._results.fd

    def drain(self) -> list[StepResult | Moved]:
        results = self._results.drain()
        return [] if self._dead else results

    async def control(self, command: Control) -> dict[str, Any]:
        return control(self.facts, command)

    def on_death(self, callback: Callable[[WorkerDied], None]) -> None:
        self._on_death = callback

    def die(self, message: str = "killed by a test") -> None:
        """What a dead worker looks like: no more results, and one call of the death callback."""
        if not self._dead and self._on_death is not None:
            self._on_death(WorkerDied(message))
        self._dead = True

    async def close(self) -> None:
        self._dead = True
        self._results.close()

    async def inquire(self) -> str:
        return "there are none"

    def kill(self) -> None:
        self._dead = True


class FakeFlight(msgspec.Struct):
    """A step of ``FakeRunner``: its result counts from ``due`` on."""

    step: int
    result: StepResult
    due: float
    held: bool = False

    @property
    def done(self) -> bool:
        return clock.now() >= self.due


class FakeRunner:
    """The runner of a fake worker process (``executor.procs``). Measures everything but the model, over the
    real process boundary.

    It stands for a device: steps queue up, and each lasts ``fake_step_ms`` from its launch, or from the end
    of the one before if that is later. The gap before a step is the time in which the device had none. With
    ``tiers`` its pages have contents, and a copy lasts ``COPY_SECONDS`` beside the steps. With attention by
    data it has the part of its rank, and waits for no other.
    """

    tiers: Sequence[Tier] = ()

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        rank: int,
        size: int,
        rendezvous: str,
        report: Callable[[Progress], None],
    ) -> None:
        self.facts = fake_facts(config, source)
        self.facts.tiers = list(self.tiers)
        self._model = FakeModel(self.facts, config.random_seed or 0, verify=bool(self.tiers))
        self._copies: deque[tuple[float, int]] = deque()  # when they end, and their transfers
        self._step_seconds = config.fake_step_ms / 1000
        self._end = clock.now()  # of the last step launched
        self._part = rank % config.tp

    def launch(self, plan: StepPlan) -> FakeFlight:
        own = plan.parts[self._part] if plan.parts else plan
        result = StepResult(step=plan.step, tokens=b"") if own is None else self._model.execute(own)
        result.gap, result.seconds = max(0.0, clock.now() - self._end), self._step_seconds
        self._end += result.gap + self._step_seconds
        self._copies += [(self._end + COPY_SECONDS, copy.transfer) for copy in plan.copies]
        return FakeFlight(plan.step, result, self._end)

    def release(self, flight: FakeFlight) -> None:
        raise AssertionError("no step is held")

    def finish(self, flight: FakeFlight) -> StepResult:
        return flight.result

    @property
    def copying(self) -> bool:
        return bool(self._copies)

    @property
    def queueing(self) -> bool:
        return False

    def moved(self) -> list[Moved]:
        now, ended = clock.now(), []
        while self._copies and self._copies[0][0] <= now:
            ended.append(self._model.move(self._copies.popleft()[1], self._copied()))
        return ended

    def _copied(self) -> bool:
        """Whether a copy succeeds."""
        return True

    def control(self, command: Control) -> dict[str, Any]:
        return control(self.facts, command)

    def close(self) -> None: ...


def control(facts: Facts, command: Control) -> dict[str, Any]:
    """The control commands of a worker without a model."""
    if command.verb in ("may_change", "sleep", "wake"):
        return {}
    if command.verb == "memory":
        return {"ledger": facts.ledger}
    if command.verb == "adapter_load" and facts.adapters:
        if not Path(command.args["path"], "adapter_config.json").is_file():
            raise InvalidAdapter(f"{command.args['path']} has no adapter_config.json")
        return {"bytes": 0}
    if command.verb == "adapter_drop" and facts.adapters:
        return {}
    raise UnsupportedField(f"The fake executor has no control command {command.verb!r}.", param="verb")

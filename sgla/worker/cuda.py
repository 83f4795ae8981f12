"""The runner of an NVIDIA GPU:
state lives on the device, decode steps are graph replays, and results are read a step late.

A step is launched without waiting for the one before it: plans carry no token ids, the token table on the
device does. ``launch`` returns a ``Flight``; once its event has passed, ``finish`` turns it into the
StepResult.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla import attention, clock
from sgla.attention import DeviceBatch, ExtendRows
from sgla.attention.base import DevicePrefixes
from sgla.attention.cascade import Cascade, Prefixes, pack, unpack
from sgla.config import Config
from sgla.device import check as check_device
from sgla.dist.gpus import join_gpus
from sgla.errors import UnsupportedField
from sgla.grammar.matcher import Matchers
from sgla.hub.source import ModelSource
from sgla.kernels import gpu
from sgla.kernels.device import describe, use
from sgla.kernels.dispatch import using
from sgla.kernels.lazy import force
from sgla.kernels.ops import KVLayer
from sgla.kernels.rehearsal import compilers
from sgla.layers.linear import split_heads
from sgla.messages import (
    LONGEST,
    PROMPT_LOGPROBS,
    SAMPLE,
    CacheGroup,
    Control,
    Facts,
    Progress,
    StepCost,
    StepPlan,
    StepResult,
)
from sgla.model.base import CausalLM
from sgla.model.load import load_model
from sgla.model.spec import ModelSpec
from sgla.model.state import kv_groups
from sgla.sampling.constraints import Constraints, mask_threads
from sgla.sampling.device import DeviceSampler, Pending, Scored, score, to_host
from sgla.worker.device_state import DeviceTables, upload, upload_columns
from sgla.worker.flights import Flight, Flights
from sgla.worker.gpu_memory import (
    FEWER_ROWS,
    FEWER_TOKENS,
    RESERVE,
    Advice,
    Peak,
    Weights,
    graph_bytes,
    ledger_of,
    size_pool,
    splits,
    within_memory,
)
from sgla.worker.graphs import Capture, DecodeGraphs, sizes_up_to
from sgla.worker.kv import zero_pages
from sgla.worker.memory import MIB, mib
from sgla.worker.profile import Profiler
from sgla.worker.prompt_graphs import HISTORY, REAL, PromptGraphs
from sgla.worker.state import column
from sgla.worker.warm_up import measure, rehearse, wake_triton, warm_up

SLOTS, STEP_TOKENS = 256, 8192  # where the configuration leaves them open
STEP_TILE = 256  # tokens of a tile of cuBLAS's fast products
LOGIT_ROWS = 256  # rows of logits that exist at a time for prompt logprobs
EAGER = 3000.0  # microseconds that an eager step takes longer to launch
CALIBRATION = 512  # random tokens that the scales of an 8-bit KV cache are measured on
E4M3_MAX = 448.0
# Tokens of a step that reads prompts beside decode rows, if weights are of more bytes:
# then more steps have more to share.
MIXED, HEAVY = 512, 4 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DECODE_FLAGS = bytes([SAMPLE])


class CudaRunner:
    """See ``worker/runner.py``. One rank. Loads on construction."""

    def __init__(
        self,
        config: Config,
        source: ModelSource,
        rank: int,
        size: int,
        rendezvous: str,
        report: Callable[[Progress], None],
    ) -> None:
        joining = clock.now()
        self.shard, ranks = join_gpus(rank, size, Path(rendezvous) / "store")
        torch.set_num_threads(1)
        self._profiler = Profiler(rank)
        self.device = describe()
        use(self.device)
        self._woken = compilers().submit(wake_triton, rank)
        begun = clock.now()
        self._load(config, source, report)
        self.notes += [ranks] if ranks else []
        loaded = clock.now()
        report(Progress(phase="compile", message="CUDA kernels"))
        if self._rehearsal is not None:
            with within_memory("rehearsing steps", lambda: FEWER_TOKENS):
                self._rehearsal.result()
        rehearsed = clock.now()
        with torch.inference_mode():
            with within_memory("measuring steps", lambda: FEWER_TOKENS):
                self._size(config)
            sized = clock.now()
            report(Progress(phase="warmup", message="graphs"))
            with within_memory("capturing graphs", self._smaller_pool):
                self._capture()
            captured = clock.now()
            with within_memory("warming up", self._smaller_pool):
                warm_up(self)
        self.facts.timings |= {
            "ranks": begun - joining,
            "weights": loaded - begun,
            "kernels": rehearsed - loaded,
            "warmup": sized - rehearsed + clock.now() - captured,
            "graphs": captured - sized,
        }

    # --- start-up

    def _load(self, config: Config, source: ModelSource, report: Callable[[Progress], None]) -> None:
        self.dtype = DTYPES["bfloat16" if config.dtype == "auto" else config.dtype]
        self._dtype_name = "bfloat16" if config.dtype == "auto" else config.dtype
        spec = ModelSpec.from_config(source.config)
        check_device(
            self.device, config, spec.head_dim, self._dtype_name, spec.moe is not None, spec.quantization
        )
        self.slots, self.step_tokens = config.max_running_requests or SLOTS, config.step_tokens or STEP_TOKENS
        self._sampled = sizes_up_to(self.slots)  # rows of a step that sample
        self.context_len = config.context_length or min(spec.context_len, LONGEST)
        heads, kv_heads = split_heads(spec.heads, spec.kv_heads, self.shard)
        shape = attention.Shape(
            heads=len(heads),
            kv_heads=len(kv_heads),
            head_dim=spec.head_dim,
            page_size=config.page_size,
            dtype=self.dtype,
            windows=frozenset(spec.windows),
            softcap=spec.attention_softcap,
            max_rows=self.slots,
            fp8_kv=config.kv_cache_dtype == "fp8",
            deterministic=config.deterministic,
            context_len=self.context_len + 1,
        )
        with within_memory("allocating workspaces of attention", lambda: FEWER_ROWS):
            self.attention, self.notes = attention.choose(
                config.attention_backend,
                shape,
                spec.attention_scale,
                self.device,
                decode=config.decode_attention_backend,
                prefill=config.prefill_attention_backend,
            )
        self._captures = self.attention.captures
        self.cascade = Cascade.of(shape, self.attention, self.device)
        self.deterministic = config.deterministic
        self.kv_dtype = self.dtype
        if config.kv_cache_dtype == "fp8":
            self.kv_dtype = torch.float8_e4m3fn
        e4m3 = (config.quantization or spec.quantization) == "fp8"
        self.ops = gpu.GpuOps(self.attention, config.deterministic, e4m3, spec.moe is not None)
        torch.cuda.empty_cache()  # what a runner before in this process had would count as free later only
        self.windows = sorted(set(spec.windows))
        begin = partial(self._begin, config.page_size, torch.cuda.memory_allocated())
        self._weights = Weights(
            spec,
            self._dtype_name,
            config.quantization or spec.quantization,
            self.shard.size,
            self.device.fp8 and not config.deterministic,
            () if config.deterministic else splits(spec, torch.cuda.device_count()),
        )
        self._weights.check(torch.cuda.mem_get_info()[0])
        with torch.device("cuda"), within_memory("loading the weights", self._lighter):
            self.model = load_model(
                source,
                self._dtype_name,
                config.quantization,
                self.shard,
                self.context_len,
                report,
                config.random_seed or 0,
                begin,
            )
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def _begin(self, page_size: int, before: int, model: CausalLM) -> None:
        """Work with a model whose weights are still to come.
        ``before``: bytes that were allocated before it was made."""
        self.model = model
        made = torch.cuda.memory_allocated()
        with within_memory("allocating the tables of rows", lambda: FEWER_ROWS):
            self.tables = DeviceTables(self.slots, self.context_len, page_size)
            self.logits = torch.empty(self.slots, len(model.lm_head.own), device="cuda")  # of graphs
            self.sampler = DeviceSampler(self.tables.tokens, model.spec.vocab, self.shard)
        self.ledger = {"weights": made - before, "tables": torch.cuda.memory_allocated() - made}
        self._scales = [(1.0, 1.0)] * model.spec.layers
        pool = ThreadPoolExecutor(1, "rehearse")
        self._rehearsal = pool.submit(rehearse, self, self._woken) if self._captures else None
        pool.shutdown(wait=False)

    def _size(self, config: Config) -> None:
        """Run the largest step once to see what it needs, then give the rest of the memory to the KV pool."""
        [group] = kv_groups(self.model.state(), 0)  # no kernel reads several page tables yet
        page = group.values * config.page_size * self.kv_dtype.itemsize
        if self.kv_dtype != self.dtype:
            self._scales = self.measure_scales()
            self.notes.append(
                "KV cache: e4m3, a scale for k and one for v of each layer, measured on random tokens"
            )
        self.kv = self.allocate(1, config.page_size, self.kv_dtype)
        self.graphs, self.prompts = DecodeGraphs(self), PromptGraphs(self)
        peak = measure(self)
        self.sampler = DeviceSampler(self.tables.tokens, self.model.spec.vocab, self.shard)
        self.matchers, self.constraints = None, None
        if self.shard.rank == 0:
            self.matchers = Matchers(mask_threads())
            self.constraints = Constraints(
                self.tables.host.tokens,
                self.model.spec.vocab,
                self.matchers,
                jumps=self.shard.size == 1,  # other ranks are told one token a row
                pin=True,
            )
        self.flights = Flights(self.tables, self.sampler, self.constraints)
        pages = self._pool(config, page, peak)
        context_len = min(self.context_len, (pages - 1) * config.page_size)
        if context_len < self.context_len:
            self.notes.append(
                f"context cut from {self.context_len} to {context_len} tokens, what the KV cache holds"
            )
        self.facts = Facts(
            groups=[CacheGroup(pages, page_bytes=page)],
            page_size=config.page_size,
            slots=self.slots,
            context_len=context_len,
            vocab_size=self.model.spec.vocab,
            step_tokens=self.step_tokens,
            costs=self._costs(),
            dtype=self._dtype_name,
            device=self.device.name,
            ledger=self.ledger,
            notes=self.notes,
            grammars=True,
        )

    def _costs(self) -> list[StepCost]:
        """Steps that run as a graph read prompts more cheaply than larger ones.
        Not those of mixtures; several ranks were not measured."""
        every = StepCost(tokens=self.step_tokens, tile=STEP_TILE)
        if self.deterministic or self.model.spec.moe or self.shard.size > 1:
            return [every]
        limit = self.prompts.limit
        tokens = min(limit, MIXED) if self.ledger["weights"] > HEAVY else limit
        return [StepCost(tokens=tokens, prompts=REAL, longest=HISTORY, tile=STEP_TILE), every]

    def _pool(self, config: Config, page: int, peak: Peak) -> int:
        """Allocate as many pages, of ``page`` bytes, as there is memory for, or as the user wants.
        Returns their number."""
        largest = max(self.slots, self.prompts.limit)  # tokens of a graph
        graphs = 0
        if self._captures:
            count = self.graphs.count + (0 if self.deterministic else len(self.prompts.pairs))
            layers = self.model.spec.layers
            graphs = graph_bytes(count, layers, peak.prompts * largest // max(largest, self.step_tokens))
        torch.cuda.empty_cache()
        kept = ledger_of(peak, graphs)
        free, total = torch.cuda.mem_get_info()
        free -= sum(kept.values()) + round((1 - config.memory_fraction) * total)

        def advise(missing: int) -> Advice:
            if config.memory_fraction < 1:
                return Advice("raise --memory-fraction", "memory_fraction")
            smaller = peak.shrink(-(-missing // 2), self.step_tokens, self.slots)  # it is kept twice
            return smaller or self._weights.lighter(self._weights.bytes - missing)

        pages = size_pool(free, page, config.page_size, config.kv_cache_bytes, config.context_length, advise)
        self.ledger |= kept | {"kv": pages * page}
        with within_memory("allocating the KV cache", self._smaller_pool):
            self.kv = self.allocate(pages, config.page_size, self.kv_dtype)
        return pages

    def _smaller_pool(self) -> Advice:
        left = self.ledger["kv"] - RESERVE
        if left < MIB:
            return self._lighter()
        return Advice(f"give --kv-cache-bytes {left // MIB}M", "kv_cache_bytes")

    def _lighter(self) -> Advice:
        return self._weights.lighter(self._weights.bytes - 1)

    def _capture(self) -> None:
        before = torch.cuda.mem_get_info()[0]
        if self._captures:
            capture = Capture()
            self.graphs.capture(capture)
            if not self.deterministic:
                self.prompts.capture(capture)
            torch.cuda.synchronize()
        taken = before - torch.cuda.mem_get_info()[0]
        self.ledger["reserve"] += self.ledger["graphs"] - taken
        self.ledger["graphs"] = taken
        if self.ledger["reserve"] < 0:
            self.notes.append(
                f"graphs took more than was kept for them: if memory runs out, {self._smaller_pool().text}"
            )
        self.notes.append("memory: " + ", ".join(f"{name} {mib(size)}" for name, size in self.ledger.items()))

    def measure_scales(self) -> list[tuple[float, float]]:
        """Scales that put the largest k and v of a random prompt at a half of what e4m3 can hold."""
        tables, slot = self.tables, self.slots
        count = min(CALIBRATION, self.step_tokens, self.context_len)
        pages = -(-count // tables.page_size)
        self.kv = self.allocate(pages + 1, tables.page_size, self.dtype)
        tables.page_table[slot, :pages] = torch.arange(1, pages + 1, device="cuda")
        ids = np.random.default_rng(0).integers(0, self.model.spec.vocab, count)
        tables.tokens[slot, :count] = torch.from_numpy(ids).cuda()
        batch = self.extend_batch(
            np.array([slot], np.int32), np.zeros(1, np.int32), np.array([count], np.int32)
        )
        with using(self.ops):
            force(self.model.forward(batch, self.kv))
        tables.page_table[slot] = 0
        most = torch.stack([torch.stack([kv.k.abs().max(), kv.v.abs().max()]) for kv in self.kv])
        return [(k, v) for k, v in (most.float().clamp(min=1e-3) * (2 / E4M3_MAX)).tolist()]

    def allocate(self, pages: int, page_size: int, dtype: torch.dtype) -> list[KVLayer]:
        """Tokens of one page and head lie together, so that a kernel reads them in one go.
        Zeros: see ``worker/kv.py``."""
        state = self.model.state()
        shape = (len(state), 2, pages, state[0].kv_heads, page_size, state[0].head_dim)
        pool = torch.zeros(shape, dtype=dtype, device="cuda").transpose(3, 4)
        scales = self._scales if dtype == self.kv_dtype else [(1.0, 1.0)] * len(state)
        return [KVLayer(layer[0], layer[1], *pair) for layer, pair in zip(pool, scales)]

    # --- steps

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Flight:
        """Queue the step on the GPU. Waits for nothing."""
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        self.tables.apply(plan, self.sampler)
        if plan.zeroed:
            zero_pages(self.kv, [upload(column(plan.zeroed[0])).long()])
        if self.constraints is not None:
            for new in plan.new:
                self.constraints.admit(new)
        slots, starts = column(plan.slots), column(plan.starts)
        rows = len(slots)
        landed: Tensor | None = None
        scored: list[Scored] = []
        if self._decodes(plan, rows):
            count = rows
            out, landed, pending = self.graphs.run(slots, starts)
        else:
            out, count, scored, pending = self._extend(plan, slots, starts)
        return self.flights.begin(plan, begin, out, count, landed, pending, scored)

    def _decodes(self, plan: StepPlan, rows: int) -> bool:
        """It is a step of decode rows alone, and there is a graph for it."""
        return (
            self._captures
            and rows <= self.graphs.limit
            and plan.flags == DECODE_FLAGS * rows
            and len(plan.q_lens) == 4 * rows
            and int(column(plan.q_lens).max()) == 1
        )

    @torch.inference_mode()
    def release(self, flight: Flight) -> None:
        """Queue the rest of a step that is held. The steps before have been finished."""
        self.flights.release(flight)

    @torch.inference_mode()
    def finish(self, flight: Flight) -> StepResult:
        """The result of a launched step, in order; blocks until it is there."""
        result = self.flights.finish(flight)
        self._profiler.step()
        return result

    def execute(self, plan: StepPlan) -> StepResult:
        flight = self.launch(plan)
        if flight.held:
            self.release(flight)
        return self.finish(flight)

    def _extend(
        self, plan: StepPlan, slots: Any, starts: Any
    ) -> tuple[Tensor, int, list[Scored], Pending | None]:
        """A step with prompt tokens."""
        q_lens, flags = column(plan.q_lens), np.frombuffer(plan.flags, np.uint8)
        graphs = self._captures and not self.deterministic and self.prompts.takes(starts, q_lens, flags)
        if graphs and not self._share_much(slots[q_lens == 1], starts[q_lens == 1]):
            out, count, pending = self.prompts.run(slots, starts, q_lens, flags)
            return out, count, [], pending
        return self.run_eagerly(plan)

    def run_eagerly(self, plan: StepPlan) -> tuple[Tensor, int, list[Scored], Pending | None]:
        """Decode rows go first, then what has a history (see ``ExtendRows``),
        which the row numbers of the result must not show."""
        slots, starts, q_lens = column(plan.slots), column(plan.starts), column(plan.q_lens)
        flags = np.frombuffer(plan.flags, np.uint8)
        order = np.argsort((q_lens > 1) * (1 + (starts == 0)), kind="stable").astype(np.int32)
        slots, starts, q_lens = slots[order], starts[order], q_lens[order]
        picked = np.flatnonzero(flags[order] & SAMPLE)
        picked = picked[np.argsort(order[picked])]  # in the plan's row order
        count = len(picked)
        # As many as a graph has, so that no kernel is new; a row that is not wanted is the first token's.
        host = np.zeros((3, next(size for size in self._sampled if size >= count)), np.int32)
        host[:, :count] = q_lens.cumsum()[picked] - 1, slots[picked], (starts + q_lens)[picked]
        at, where, positions = upload(host)
        batch = self.extend_batch(slots, starts, q_lens)
        scores = bool((flags & PROMPT_LOGPROBS).any())
        with self.ops.fused(batch.tokens):
            hidden = force(self.model.forward(batch, self.kv, None if scores else at))
        scored = self._score_prompts(plan, hidden, slots, starts, q_lens, order) if scores else []
        if not count:
            return batch.ids, 0, scored, None
        host, where, positions = host[:, :count], where[:count], positions[:count]
        logits = self.logits_of(hidden[at[:count]] if scores else hidden[:count])
        out = torch.empty(count, dtype=torch.int32, device="cuda")
        if self.sampler.plain(host[1]):
            self.sampler.draw(logits, where, positions, out)
            return out, count, scored, None
        return out, count, scored, Pending(logits, where, positions, out, order[picked], (host[1], host[2]))

    def extend_batch(self, slots: Any, starts: Any, q_lens: Any) -> DeviceBatch:
        """Rows with any number of tokens; those with one come first."""
        rows, tokens, decodes = len(slots), int(q_lens.sum()), int((q_lens == 1).sum())
        q_start = np.zeros(rows + 1, np.int32)
        np.cumsum(q_lens, out=q_start[1:])
        kv_lens = starts + q_lens
        prefixes, skip = self._shared_prefixes(slots[:decodes], starts[:decodes])
        cums = [self._tiles(kv_lens[:decodes], window, skip) for window in self.windows]
        packed = upload_columns([slots, starts, q_start, kv_lens, *cums])
        d_slots, d_starts, d_q_start, d_kv_len = packed[:4]
        ids, positions, out_loc = torch.empty(3, tokens, dtype=torch.int32, device="cuda")
        self.tables.prepare_extend(d_slots, d_starts, d_q_start, int(q_lens.max()), ids, positions, out_loc)
        extend = None
        if decodes < rows:
            extend = ExtendRows(
                slots[decodes:], q_lens[decodes:], kv_lens[decodes:], self.tables.host.page_table[0]
            )
        batch = DeviceBatch(
            rows=rows,
            tokens=tokens,
            ids=ids,
            positions=positions,
            slots=d_slots,
            q_start=d_q_start,
            kv_len=d_kv_len,
            out_loc=out_loc,
            page_table=self.tables.page_table,
            page_size=self.tables.page_size,
            sample_rows=d_q_start,  # not used: the runner gathers by itself
            decode_rows=decodes,
            cum=dict(zip(self.windows, packed[4:])),
            extend=extend,
            prefixes=prefixes,
        )
        self.attention.plan(batch)
        return batch

    def _shared_prefixes(self, slots: Any, starts: Any) -> tuple[DevicePrefixes | None, Any]:
        """What these decode rows share, and ``skip``."""
        rows, plan = len(slots), self._plan_prefixes(slots, starts)
        if plan is None:
            return None, np.zeros(rows, np.int32)
        return unpack(upload(pack(plan, rows)), rows), plan.skip

    def _plan_prefixes(self, slots: Any, starts: Any) -> Prefixes | None:
        if self.cascade is None or not len(slots):
            return None
        return self.cascade.plan(
            slots, starts, self.tables.host.page_table[0], self.tables.admissions, len(slots)
        )

    def _share_much(self, slots: Any, starts: Any) -> bool:
        """Whether an eager step, which reads what rows share once,
        beats a graph of a mixed step, which does not."""
        plan = self._plan_prefixes(slots, starts)
        return plan is not None and plan.gain * len(self.kv) > EAGER

    def _tiles(self, kv_lens: Any, window: int, skip: Any) -> Any:
        """``DeviceBatch.cum`` on the host."""
        tile = attention.TILE
        tiles = -(-kv_lens // tile)
        if window:
            tiles = tiles - np.where(kv_lens > window, (kv_lens - window) // tile, 0)
        else:
            tiles = tiles - skip // tile
        return np.concatenate([[0], np.cumsum(tiles)]).astype(np.int32)

    def logits_of(self, hidden: Any) -> Tensor:
        """Of this rank's part of the vocabulary."""
        with self.ops.float32_output():
            return self.model.logits_part(hidden)

    def _score_prompts(
        self, plan: StepPlan, hidden: Tensor, slots: Any, starts: Any, q_lens: Any, order: Any
    ) -> list[Scored]:
        """Logprobs of the prompt tokens that rows owe, a few rows of logits at a time."""
        flags = np.frombuffer(plan.flags, np.uint8)[order]
        scored = []
        first = np.cumsum(q_lens) - q_lens
        for r in np.flatnonzero(flags & PROMPT_LOGPROBS).tolist():
            slot, start = int(slots[r]), int(starts[r])
            count = min(start + int(q_lens[r]), int(self.tables.host.prompt_len[slot]) - 1) - start
            k = max(0, int(self.tables.host.prompt_logprobs[slot]))
            parts, asked = [], self.sampler.logprob_ids(slot)
            for at in range(0, count, LOGIT_ROWS):
                size = min(LOGIT_ROWS, count - at)
                with self.ops.float32_output():
                    logits = self.model.logits(hidden[first[r] + at : first[r] + at + size])
                targets = self.tables.tokens[slot, start + 1 + at : start + 1 + at + size]
                parts.append(score(logits, targets, k, asked))
            if parts:
                values, ranks, ids, tops = (to_host(torch.cat(column)) for column in zip(*parts))
                others = 0 if asked is None else len(asked)
                scored.append(Scored(int(order[r]), True, start + 1, others, values, ranks, ids, tops))
        return scored

    def control(self, command: Control) -> dict[str, Any]:
        """Verbs as in ``worker/runner.py``."""
        match command.verb:
            case "memory":
                free, total = torch.cuda.mem_get_info()
                return {"ledger": self.facts.ledger | {"free": free, "total": total}}
            case "profile_start":
                return self._profiler.start(command.args)
            case "profile_stop":
                return self._profiler.stop()
            case "vocabulary" | "grammar":
                return self.matchers.control(command.verb, command.args) if self.matchers else {}
        raise UnsupportedField(f"there is no control command {command.verb!r}", param="verb")

"""What a GPU runner does so that no kernel is compiled or loaded under traffic.

While weights load, it walks through every kind of step without launching anything, so that all kernels are
compiled at the same time. Once its graphs are there it runs requests with all that a request can ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import torch

from sgla.dist.lockstep import PlannedLockstep
from sgla.kernels.cuda.batch_gemm import ROWS
from sgla.kernels.rehearsal import rehearsing, under_way
from sgla.kernels.triton import step
from sgla.messages import PROMPT_LOGPROBS, SAMPLE, NewRow, RowSampling, StepPlan, ThinkLimit
from sgla.model.spec import ModelSpec
from sgla.sampling.constraints import Masks
from sgla.sampling.device import Pending
from sgla.worker.device_state import upload
from sgla.worker.gpu_memory import FEWER_ROWS, FEWER_TOKENS, Peak, within_memory
from sgla.worker.gpu_steps import LOGIT_ROWS, GpuSteps
from sgla.worker.graphs import DecodeGraphs
from sgla.worker.kv import tokens_of
from sgla.worker.prompt_graphs import PromptGraphs
from sgla.worker.verify import Verify

CALIBRATION = 512  # random tokens that the scales of an 8-bit KV cache are measured on
E4M3_MAX = 448.0
SIZES = 600, 1000, 2000, 4000, 8000, 3  # tokens of prompts: the libraries have kernels for each size
EVERYTHING = RowSampling(  # that a request can ask of the sampler, but for grammars
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    logprobs=20,
    prompt_logprobs=20,
    logprob_ids=[0],
    frequency=0.1,
    logit_bias=[(0, 0.1)],
    min_tokens=1,
    stop_ids=[0],
    bad_words=[[0], [0, 1]],
    allowed=[0, 1],
    thinking=ThinkLimit(1, 0, 1, False),
)


def wake_triton(device: int) -> None:
    torch.cuda.set_device(device)
    step.wake()


def rehearse(steps: GpuSteps, device: int, woken: Future[None]) -> None:
    """The model has its layers, but no weights: a few of the layers stand for all. Every row has the dummy
    page. ``woken``: Triton is ready."""
    torch.cuda.set_device(device)
    woken.result()
    layers = layers_of_all_kinds(steps.model.spec)
    first = steps.model.spec.held.start
    if steps.hidden is not None and (read := [at - first for at in steps.hidden.layers if at >= first]):
        layers = max(layers, min(read) + 2)
    with torch.inference_mode(), rehearsing():
        if steps.kv_dtype == "fp8":
            measure_scales(steps)
        steps.kv = steps.allocate([1] * len(steps.groups), steps.tables.page_size, steps.kv_dtype)[:layers]
        _rehearse_eager(steps)
        if isinstance(steps.shard.lockstep, PlannedLockstep) and steps.shard.lockstep.traffic is not None:
            with steps.shard.lockstep.sending():
                _rehearse_eager(steps)
        if steps.shard.samples:
            _rehearse_logits(steps)
        if steps.adapted is not None:
            steps.tables.host.place[: steps.slots] = 1
            _rehearse_eager(steps)
            steps.tables.host.place[:] = 0
            steps.adapted.rows.active = False
        DecodeGraphs(steps).rehearse()
        if steps.reads_in_graphs:
            PromptGraphs(steps).rehearse()
        steps.forward.load_library(steps.step_tokens)
        if steps.drafts is not None:
            plan = msgspec.structs.replace(_step([(0, 0, 1)]), drafts=bytes(4))
            verify = Verify(steps.drafts, plan, guided=True)
            verify.accept(steps.run_eagerly(verify.plan, verify).out)
            if steps.drafts.leaves:
                plan = msgspec.structs.replace(plan, drafts=np.array([2], np.int32).tobytes())
                verify = Verify(steps.drafts, plan, deep=1)
                verify.accept(steps.run_eagerly(verify.plan, verify).out)
        measure(steps)
        for plan in _plans(steps):
            steps.tables.apply(plan, steps.sampler)
        steps.tables.put(np.array([[steps.slots], [0], [0]], np.int32))


def _rehearse_eager(steps: GpuSteps) -> None:
    longest = max(1, steps.context_len - 1)
    most = min(steps.step_tokens, steps.slots * longest)
    sizes = [*_below(most, SIZES), most]  # of large products, which take longest to compile: first
    alone = ((0, size) for size in (*sizes, *_below(most, ROWS), 1))
    for decodes, size in (*alone, (1, sizes[0]), (steps.slots, sizes[0])):
        for half in (0, 1):
            plan = _behind(decodes, size, half, steps.slots, longest)
            steps.run_eagerly(plan)
            if steps.pictures is not None:
                _run_pictured(steps, plan)
    for size in steps.forward.sizes(most):
        steps.run_eagerly(_behind(0, size, 0, steps.slots, longest))


def _rehearse_logits(steps: GpuSteps) -> None:
    """Of samples, and of the prompt tokens whose logprobs are wanted."""
    most = max(steps.rows, min(LOGIT_ROWS, steps.step_tokens))
    hidden = torch.zeros(most, steps.model.width, dtype=steps.dtype, device="cuda")
    for size in steps.forward.sample_sizes(most):
        steps.logits_of(hidden[:size])


def _run_pictured(steps: GpuSteps, plan: StepPlan) -> None:
    """As if all tokens were of pictures."""
    assert steps.pictures is not None
    tokens = int(np.frombuffer(plan.q_lens, np.int32).sum())
    steps.run_eagerly(plan, media=steps.pictures.stand_in(tokens))


def measure(steps: GpuSteps) -> Peak:
    """Run the largest steps there can be. Every row has the dummy page."""
    with within_memory("sampling", lambda: FEWER_ROWS):
        kept = _peak(_admit_all, steps)
        samples = _peak(_sample_most, steps) if steps.shard.samples else 0
    with within_memory("reading prompts", lambda: FEWER_TOKENS), _as_guessing(steps):
        prompts = _peak(_read_most, steps)
    return Peak(kept + prompts, kept + samples)


@contextmanager
def _as_guessing(steps: GpuSteps) -> Iterator[None]:
    """Meanwhile no step is divided if rows may guess: each rank computes all of these rows then."""
    divides = steps.divides
    steps.divides = divides if steps.drafts is None else None
    try:
        yield
    finally:
        steps.divides = divides


def measure_scales(steps: GpuSteps) -> list[tuple[float, float]]:
    """Scales that put the largest k and v of a random prompt at a half of what e4m3 can hold."""
    tables, slot = steps.tables, steps.slots
    count = min(CALIBRATION, steps.step_tokens, steps.context_len)
    pages = -(-count // tables.page_size)
    steps.kv = steps.allocate([pages + 1] * len(steps.groups), tables.page_size, "bfloat16")
    ids = np.random.default_rng(0).integers(0, steps.model.spec.vocab, count, np.int32)
    with tables.alone(slot, ids):
        batch = steps.extend_batch(
            np.array([slot], np.int32), np.zeros(1, np.int32), np.array([count], np.int32)
        )
        steps.forward.hidden(batch)
    one = torch.ones(1, device="cuda")  # of a layer that keeps a state
    kept = [tokens_of(kv) for kv in steps.kv]
    layers = [(one, one) if kv is None else (kv.k, kv.v) for kv in kept]
    pairs = ((k, v if v.numel() else k) for k, v in layers)
    most = torch.stack([torch.stack([k.abs().max(), v.abs().max()]) for k, v in pairs])
    return [(k, v) for k, v in (most.float().clamp(min=1e-3) * (2 / E4M3_MAX)).tolist()]


def _admit_all(steps: GpuSteps) -> None:
    for slot in range(steps.slots):
        pages = [*[b""] * len(steps.tables.windows), *_unit(steps)]
        new = NewRow(
            slot=slot, tokens=bytes(4), prompt_len=steps.context_len, pages=pages, sampling=EVERYTHING
        )
        steps.tables.apply(_step([(slot, 0, 1)], new), steps.sampler)


def _peak(run: Callable[[GpuSteps], None], steps: GpuSteps) -> int:
    """Bytes that it needs: those that torch takes from the GPU, or more, if it has room of its own."""
    torch.cuda.empty_cache()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(steps)
    torch.cuda.synchronize()
    return max(torch.cuda.max_memory_reserved() - reserved, torch.cuda.max_memory_allocated() - allocated)


def _read_most(steps: GpuSteps) -> None:
    """Full steps: of prompts whose logprobs are wanted, and of prompts behind histories, with decode rows."""
    slots, context = steps.slots, steps.context_len
    tokens = min(steps.step_tokens, slots * context)
    prompts = [(slot, 0, min(context, tokens - at)) for slot, at in enumerate(range(0, tokens, context))]
    steps.run_eagerly(_step(prompts, flags=SAMPLE | PROMPT_LOGPROBS))
    torch.cuda.synchronize()  # kernels store logprobs in the host's memory, which nobody keeps
    if steps.pictures is not None:
        _run_pictured(steps, _step(prompts))
        if not under_way():
            steps.pictures.look()
    decodes, half = min(slots // 2, tokens // 2), max(1, min(tokens, context) // 2)
    start = context - half if steps.attention.grows else half
    left = range(0, tokens - decodes, half)[: slots - decodes]
    behind = [(decodes + i, start, min(half, tokens - decodes - at)) for i, at in enumerate(left)]
    steps.run_eagerly(_step([*((slot, start, 1) for slot in range(decodes)), *behind]))


def _sample_most(steps: GpuSteps) -> None:
    """Every row wants everything."""
    slots = np.arange(steps.rows, dtype=np.int32) % steps.slots
    ends = np.full_like(slots, steps.context_len)
    d_slots, d_ends = upload(np.stack([slots, ends]))
    spec, out = steps.model.spec, torch.zeros_like(d_slots)
    logits = steps.logits_of(torch.zeros(steps.rows, steps.model.width, dtype=steps.dtype, device="cuda"))
    words = torch.zeros(steps.rows, -(-spec.vocab // 32), dtype=torch.int32, device="cuda")
    steps.sampler.sample(
        Pending(logits, d_slots, d_ends, out, slots, (slots, ends)), Masks(d_slots, words, d_ends)
    )


def warm_up(steps: GpuSteps, execute: Callable[[StepPlan], object]) -> None:
    """Every row has the dummy page."""
    for plan in _plans(steps):
        execute(plan)
        if steps.pictures is not None:
            _run_pictured(steps, plan)
    steps.tables.put(np.array([[steps.slots], [0], [0]], np.int32))


def layers_of_all_kinds(spec: ModelSpec) -> int:
    """How many of the first layers it takes, and one more, since the last one goes on with few rows. All
    where some keep something beside, which stands behind all."""
    if len(spec.keepers) > len(spec.attention_held):
        return len(spec.keepers)
    mixtures = spec.moe.layers if spec.moe is not None else ()
    held = enumerate(spec.attention_held, spec.held.start)
    kinds = [(replace(layer, reads=None), index in mixtures) for index, layer in held]
    return min(len(kinds), max(2 + kinds.index(kind) for kind in kinds))


def _below(most: int, sizes: Sequence[int]) -> list[int]:
    return [n for n in sizes if n < most]


def _behind(decodes: int, size: int, half: int, slots: int, longest: int) -> StepPlan:
    """Prompts of ``size`` tokens, none longer than ``longest``, behind decode rows, as far as there are
    slots. ``half`` is 1: the first half of each is there, and of the first one in the decode rows, too; else
    0."""
    prompts = [min(longest, size - at) for at in range(0, size, longest)]
    decodes = min(decodes, slots - len(prompts))
    rows = [(row, half * (prompts[0] // 2), 1) for row in range(decodes)]
    rows += [(decodes + i, half * (n // 2), n - half * (n // 2)) for i, n in enumerate(prompts)]
    return _step(rows)


def _plans(steps: GpuSteps) -> Iterator[StepPlan]:
    """Prompts as a whole and behind a prefix, then a decode step with a new page."""
    paged = len(steps.tables.windows)
    for size in _below(min(steps.step_tokens + 1, steps.context_len), SIZES):
        for start in (0, size // 2):
            row = NewRow(
                slot=0,
                tokens=bytes(4 * size),
                prompt_len=size,
                pages=[*[bytes(4 * -(-size // steps.tables.page_size))] * paged, *_unit(steps)],
                sampling=EVERYTHING,
            )
            yield _step([(0, start, size - start)], row)
    one, zero = np.ones(1, np.int32).tobytes(), bytes(4)
    none, dummies = [*[b""] * paged, *_unit(steps)], [zero] * paged
    row = NewRow(slot=0, tokens=zero, prompt_len=1, pages=none, sampling=EVERYTHING)
    last = _step([(0, 0, 1)], row)
    yield msgspec.structs.replace(last, page_slots=zero, page_counts=one, page_ids=dummies)


def _unit(steps: GpuSteps) -> list[bytes]:
    """The dummy unit of a new row, if layers keep states."""
    return [bytes(4)] * steps.tables.states


def _step(rows: list[tuple[int, int, int]], new: NewRow | None = None, flags: int = SAMPLE) -> StepPlan:
    """``rows``: slot, position of the first token, and how many tokens are computed before one is sampled."""
    slots, starts, q_lens = (np.array(values, np.int32).tobytes() for values in zip(*rows))
    return StepPlan(
        step=0,
        slots=slots,
        starts=starts,
        q_lens=q_lens,
        flags=bytes([flags]) * len(rows),
        new=[new] if new else [],
    )

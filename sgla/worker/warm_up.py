"""What a GPU runner does so that no kernel is compiled or loaded under traffic.

While weights load, it walks through every kind of step without launching anything, so that all kernels are
compiled at the same time. Once its graphs are there it runs requests with all that a request can ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from sgla.attention.torch_ops import TorchDecode, TorchExtend
from sgla.kernels.cuda.batch_gemm import ROWS
from sgla.kernels.rehearsal import rehearsing
from sgla.kernels.triton import step
from sgla.messages import PROMPT_LOGPROBS, SAMPLE, NewRow, RowSampling, StepPlan, ThinkLimit
from sgla.model.spec import ModelSpec
from sgla.sampling.constraints import Masks
from sgla.sampling.device import Pending
from sgla.worker.device_state import upload
from sgla.worker.gpu_memory import FEWER_ROWS, FEWER_TOKENS, Peak, within_memory
from sgla.worker.graphs import DecodeGraphs
from sgla.worker.prompt_graphs import PromptGraphs

if TYPE_CHECKING:
    from sgla.worker.cuda import CudaRunner

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


def rehearse(runner: CudaRunner, woken: Future[None]) -> None:
    """The model has its layers, but no weights: a few of the layers stand for all. Every row has the dummy
    page. ``woken``: Triton is ready."""
    torch.cuda.set_device(runner.shard.rank)
    woken.result()
    layers = layers_of_all_kinds(runner.model.spec)
    with torch.inference_mode(), rehearsing():
        if runner.kv_dtype != runner.dtype:
            runner.measure_scales()
        runner.kv = runner.allocate(1, runner.tables.page_size, runner.kv_dtype)[:layers]
        longest = max(1, runner.context_len - 1)
        most = min(runner.step_tokens, runner.slots * longest)
        sizes = [*_below(most, SIZES), most]  # of large products, which take longest to compile: first
        alone = ((0, size) for size in (*sizes, *_below(most, ROWS)))
        for decodes, size in (*alone, (1, sizes[0]), (runner.slots, sizes[0])):
            for half in (0, 1):
                runner.run_eagerly(_behind(decodes, size, half, runner.slots, longest))
        for size in runner.ops.sizes(most):
            runner.run_eagerly(_behind(0, size, 0, runner.slots, longest))
        DecodeGraphs(runner).rehearse()
        if not runner.deterministic:
            PromptGraphs(runner).rehearse()
        measure(runner)
        for plan in _plans(runner):
            runner.tables.apply(plan, runner.sampler)


def measure(runner: CudaRunner) -> Peak:
    """Run the largest steps there can be. Every row has the dummy page."""
    with within_memory("sampling", lambda: FEWER_ROWS):
        kept = _peak(_admit_all, runner)
        samples = _peak(_sample_most, runner)
    with within_memory("reading prompts", lambda: FEWER_TOKENS):
        prompts = _peak(_read_most, runner)
    return Peak(kept + prompts, kept + samples)


def _admit_all(runner: CudaRunner) -> None:
    for slot in range(runner.slots):
        new = NewRow(
            slot=slot, tokens=bytes(4), prompt_len=runner.context_len, pages=[b""], sampling=EVERYTHING
        )
        runner.tables.apply(_step([(slot, 0, 1)], new), runner.sampler)


def _peak(run: Callable[[CudaRunner], None], runner: CudaRunner) -> int:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    run(runner)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_reserved() - before


def _read_most(runner: CudaRunner) -> None:
    """Full steps: of prompts whose logprobs are wanted, and of prompts behind histories, with decode rows."""
    slots, context = runner.slots, runner.context_len
    tokens = min(runner.step_tokens, slots * context)
    prompts = [(slot, 0, min(context, tokens - at)) for slot, at in enumerate(range(0, tokens, context))]
    runner.run_eagerly(_step(prompts, flags=SAMPLE | PROMPT_LOGPROBS))
    decodes, half = min(slots // 2, tokens // 2), max(1, min(tokens, context) // 2)
    parts = runner.attention.extend, runner.attention.decode
    start = context - half if any(isinstance(part, TorchExtend | TorchDecode) for part in parts) else half
    left = range(0, tokens - decodes, half)[: slots - decodes]
    behind = [(decodes + i, start, min(half, tokens - decodes - at)) for i, at in enumerate(left)]
    runner.run_eagerly(_step([*((slot, start, 1) for slot in range(decodes)), *behind]))


def _sample_most(runner: CudaRunner) -> None:
    """Every row wants everything."""
    slots = np.arange(runner.slots, dtype=np.int32)
    ends = np.full_like(slots, runner.context_len)
    d_slots, d_ends = upload(np.stack([slots, ends]))
    spec, out = runner.model.spec, torch.zeros_like(d_slots)
    logits = runner.logits_of(torch.zeros(runner.slots, spec.hidden, dtype=runner.dtype, device="cuda"))
    words = torch.zeros(runner.slots, -(-spec.vocab // 32), dtype=torch.int32, device="cuda")
    runner.sampler.sample(
        Pending(logits, d_slots, d_ends, out, slots, (slots, ends)), Masks(d_slots, words, d_ends)
    )


def warm_up(runner: CudaRunner) -> None:
    """Every row has the dummy page."""
    for plan in _plans(runner):
        runner.execute(plan)
    runner.tables.put(np.array([[runner.slots], [0], [0]]))
    runner.flights.forget()


def layers_of_all_kinds(spec: ModelSpec) -> int:
    """How many of the first layers it takes, and one more, since the last one goes on with few rows."""
    mixtures = spec.moe.layers if spec.moe is not None else ()
    kinds = [(window, index in mixtures) for index, window in enumerate(spec.windows)]
    return min(spec.layers, max(2 + kinds.index(kind) for kind in kinds))


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


def _plans(runner: CudaRunner) -> Iterator[StepPlan]:
    """Prompts as a whole and behind a prefix, then a decode step with a new page."""
    for size in _below(min(runner.step_tokens + 1, runner.context_len), SIZES):
        for start in (0, size // 2):
            row = NewRow(
                slot=0,
                tokens=bytes(4 * size),
                prompt_len=size,
                pages=[bytes(4 * -(-size // runner.tables.page_size))],
                sampling=EVERYTHING,
            )
            yield _step([(0, start, size - start)], row)
    one, zero = np.ones(1, np.int32).tobytes(), bytes(4)
    row = NewRow(slot=0, tokens=zero, prompt_len=1, pages=[b""], sampling=EVERYTHING)
    yield msgspec.structs.replace(_step([(0, 0, 1)], row), page_slots=zero, page_counts=one, page_ids=[zero])


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

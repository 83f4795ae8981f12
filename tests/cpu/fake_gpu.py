"""A CUDA runner without a GPU: torch's operations run on the CPU, our kernels and Triton's are not compiled,
and a launch only says that it was.

``python fake_gpu.py CASES``: builds a runner for each of the JSON list of cases (settings under ``config``,
the model's under ``model``, those of one that guesses under ``draft``, of the ``card``, an H200), sends it
steps of every kind and prompts of ``sizes`` tokens together, and prints for each how many kernels its
rehearsal asked for and what was launched besides, its context, its pages, its ledger, its notes and the
scales of its KV cache, and which graphs ran with columns of another size, or of no sense; or the error that
ended it. With ``compile`` Triton's kernels are compiled for the card, those of CUDA too where NVRTC is
installed, and the shared memory that they take is told. ``free``: bytes of the GPU; ``looks``: steps of a
module look at values on the host; ``stage``: which of two of a pipeline the runner has.
Kernels are known by the process, and what torch says of its GPU is cached in many places: hence a process of
its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import json
import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import numpy as np
import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.compiler import ASTSource

from sgla.config import Config
from sgla.dist import Shard, gpus
from sgla.dist.pipe import Pipe
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.kernels import device
from sgla.kernels.cuda import batch_gemm, build, tensor_map
from sgla.kernels.gpu.states import CHUNK
from sgla.kernels.rehearsal import under_way
from sgla.loading import drafter, load
from sgla.messages import SAMPLE, StepPlan
from sgla.worker import gpu_model, gpu_setup
from sgla.worker.chains import Chains
from sgla.worker.cuda import CudaRunner
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.graphs import DecodeColumns, DecodeGraphs
from sgla.worker.kv import state_of_layer, tokens_of
from sgla.worker.prompt_graphs import PromptGraphs

ROWS = 24
GPU = torch.device("cuda", 0)
LOADED: list[bool] = []  # not empty: weights were asked for
ASKEW: list[int] = []  # sizes of graphs that have run with columns of another size, or of no sense
UNSET = 1 << 28  # more than any index


class OnCpu(TorchFunctionMode):
    """What is asked of a GPU is done here; products, which cost time, give zeros, as does memory that is not
    set. In a rehearsal its integers are no index: no kernel sets them. No tensor is made there without a
    word on where: it would be the host's."""

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if under_way() and f in MAKERS and not {"device", "pin_memory"} & (kwargs or {}).keys():
            raise RuntimeError(f"{f.__name__} makes a tensor of the host in a rehearsal")
        kwargs = {k: _cpu(v) for k, v in (kwargs or {}).items() if k != "pin_memory"}
        args = [_cpu(arg) for arg in args]
        if f is torch.nn.functional.linear:
            return args[0].new_zeros(*args[0].shape[:-1], len(args[1]))
        if f is torch._scaled_mm_v2:
            return torch.zeros(len(args[0]), args[1].shape[1], dtype=torch.bfloat16)
        if f in (torch.mm, torch._scaled_mm):
            dtype, out = kwargs.get("out_dtype", args[0].dtype), kwargs.get("out")
            return torch.zeros(len(args[0]), args[1].shape[1], dtype=dtype) if out is None else out
        return ZEROS.get(f, f)(*args, **kwargs)


def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
    made = torch.zeros(*args, **kwargs)
    return made.fill_(1 << 28) if under_way() and made.dtype in (torch.int32, torch.int64) else made


MAKERS = {torch.zeros, torch.ones, torch.empty, torch.full, torch.arange}
ZEROS: dict[Any, Any] = {
    torch.empty: empty,
    torch.empty_like: torch.zeros_like,
    torch.Tensor.new_empty: torch.Tensor.new_zeros,
}


def _cpu(value: Any) -> Any:
    return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


class Nothing:
    """Has every method, and none does anything."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: 0


class HostMemory:
    """In place of a GPU's, for regions. ``taken``: bytes that are mapped."""

    granule = 1 << 12
    taken = 0

    def __init__(self, number: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # that takes nothing (MAP_NORESERVE)
        self._mapped, self._reserved = mmap.mmap(-1, 1 << 40, flags=flags), 0

    def reserve(self, size: int) -> int:
        self._reserved += size
        return self._reserved - size

    def create(self, size: int) -> int:
        HostMemory.taken += size
        return size

    def release(self, handle: int) -> None:
        HostMemory.taken -= handle

    def map(self, at: int, size: int, handle: int) -> None: ...

    def unmap(self, at: int, size: int, handle: int) -> None:
        """Who reads it now finds no numbers."""
        self.release(handle)
        self._mapped[at : at + size] = b"\xff" * size

    def free(self, at: int, size: int) -> None: ...

    def wait(self) -> None: ...

    def view(self, at: int, size: int, owner: object) -> torch.Tensor:
        return torch.frombuffer(self._mapped, dtype=torch.uint8, count=size, offset=at)


class Driver(Nothing):
    def get_current_target(self) -> Any:
        major, minor = torch.cuda.get_device_capability()
        return triton.backends.compiler.GPUTarget("cuda", 10 * major + minor, 32)


class Card(NamedTuple):
    capability: tuple[int, int]
    processors: int
    hip: str | None = None


CARDS = {
    "A100": Card((8, 0), 108),
    "RTX 3090": Card((8, 6), 82),
    "L40S": Card((8, 9), 142),
    "H100": Card((9, 0), 132),
    "H200": Card((9, 0), 132),
    "B200": Card((10, 0), 148),
    "RTX 5090": Card((12, 0), 170),
    "T4": Card((7, 5), 40),
    "MI300X": Card((9, 4), 304, "6.4"),
}


def pretend(name: str = "H200") -> None:
    card = CARDS[name]
    major, minor = card.capability
    properties = SimpleNamespace(
        major=major,
        minor=minor,
        multi_processor_count=card.processors,
        name=name,
        total_memory=100 << 30,
    )
    torch.version.hip = card.hip

    @contextlib.contextmanager
    def nothing(*args: Any, **kwargs: Any) -> Iterator[None]:
        yield

    answers = {
        "is_available": True,
        "get_device_capability": card.capability,
        "get_device_properties": properties,
        "get_device_name": name,
        "current_device": 0,
        "device_count": 1,
        "mem_get_info": (100 << 30, 100 << 30),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    silent = "set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "graph_pool_handle"
    for name in (*silent, "set_sync_debug_mode"):
        setattr(torch.cuda, name, lambda *args: None)
    for name in ("Event", "Stream", "CUDAGraph", "current_stream", "cudart"):
        setattr(torch.cuda, name, Nothing)
    for name in ("stream", "graph"):
        setattr(torch.cuda, name, nothing)
    for name in ("cuda", "pin_memory"):
        setattr(torch.Tensor, name, lambda self, *args, **kwargs: self)
    build.driver = tensor_map.driver = Nothing
    gpu_model.gpu_memory = HostMemory  # type: ignore[assignment]
    gpu_setup.numbers_again = Nothing  # type: ignore[assignment]
    triton.runtime.driver.set_active(Driver())
    load.load_weights = drafter.load_weights = lambda *args, **kwargs: LOADED.append(True)
    load._device = lambda: GPU  # so storages are those of GPUs
    device.use(device.describe())


class Launches:
    """What is launched, or asked for in a rehearsal, and what is made on the GPU once for all launches: made
    while a graph is captured, it would be set whenever that graph runs, and by no other."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.sources: dict[str, tuple[ASTSource, Any]] = {}  # of Triton's kernels
        self.files: dict[str, tuple[str, str, str]] = {}  # of CUDA's: name, text, target
        self.compiled: dict[Any, int] = {}  # of Triton's, of all cases: the shared memory
        self.texts: dict[tuple[str, str], int] = {}  # of CUDA's, with the target: their static shared memory
        self.memory: dict[str, int] = {}  # of CUDA's: the dynamic shared memory of a launch
        launch, launches, sources = build.Kernel.launch, self.seen, self.sources
        files, memory = self.files, self.memory

        def compiled(file: str, defines: Any, target: str) -> bytes:
            name = f"{file} {defines}"
            files[name] = file, build.source_of(file, defines, target)[0], target
            return name.encode()

        def launched(self: build.Kernel, *args: Any, **kwargs: Any) -> None:
            name = self._cubin.result().decode()
            launches.add(name)
            memory[name] = self.shared
            launch(self, *args, **kwargs)

        def compile_(self: Any, key: str, signature: Any, device: int, *args: Any) -> Any:
            name = f"{self.__name__} {key}"
            constants, options, attributes, *_ = args
            sources[name] = ASTSource(self, signature, constants, attributes), options
            return SimpleNamespace(name=name)

        def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            launches.add(ask(self, *args, grid=grid, warmup=True, **options).name)

        ask = triton.JITFunction.run
        build._compiled, build.Kernel.launch, build.Kernel.load = (
            compiled,
            launched,
            lambda self: ctypes.c_void_p(1),
        )
        triton.JITFunction._do_compile, triton.JITFunction.run = compile_, run
        exchange = batch_gemm._exchange

        def exchanges(*given: Any) -> Any:
            launches.add(f"exchange {given}")
            return exchange(*given)

        batch_gemm._exchange = exchanges  # type: ignore[assignment]


# Kernels that know nothing of the model but its vocabulary.
OF_NO_SHAPE = {f"sgla.kernels.triton.{name}" for name in ("sampling", "rules")}
OF_HEADS = {f"sgla.kernels.triton.{name}" for name in ("attention", "cascade")}


def likeness(source: ASTSource, options: Any) -> tuple[str, ...]:
    """Kernels of one likeness are the same but for the alignment of strides, and for how many heads share one
    of the KV, which is a bound and a divisor there and the size of nothing."""
    constants = {source.fn.arg_names[at]: value for (at, *_), value in source.constants.items()}
    if source.fn.__module__ in OF_HEADS:
        constants.pop("GROUP", None)
    kernel = f"{source.fn.__module__}.{source.fn.__name__}"
    return kernel, str(constants), str(source.signature), str(options)


RESERVED = 1024  # bytes of the system's, which sections have in front on Hopper, and limits leave out


def static_memory(cubin: bytes) -> int:
    """Bytes of shared memory that the kernel of an ELF file for Hopper declares: what its section has."""
    (start,), (size, count, names) = (
        struct.unpack_from("<Q", cubin, 40),
        struct.unpack_from("<HHH", cubin, 58),
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    texts = cubin[sections[names][4] :]
    sizes = [each[5] for each in sections if texts[each[0] :].startswith(b".nv.shared.")]
    return max(0, max(sizes, default=0) - RESERVED)


def shared(launches: Launches, card: str) -> dict[str, int]:
    """Compile the kernels for the card, those of CUDA if NVRTC is there, but for those like one that has
    been: the bytes of shared memory of a block that each of them takes."""
    major, minor = CARDS[card].capability
    target = triton.backends.compiler.GPUTarget("cuda", 10 * major + minor, 32)

    def compiled(item: tuple[str, tuple[ASTSource, Any]]) -> tuple[str, int]:
        name, (source, options) = item
        key = card, *likeness(source, options)
        if key not in launches.compiled:
            kernel = triton.compile(source, target=target, options=options.__dict__)
            launches.compiled[key] = kernel.metadata.shared
        return name.partition(" ")[0], launches.compiled[key]

    found: dict[str, int] = {}
    sources = {
        name: item for name, item in launches.sources.items() if item[0].fn.__module__ not in OF_NO_SHAPE
    }
    for name, size in map(compiled, sources.items()):
        found[name] = max(size, found.get(name, 0))
    if importlib.util.find_spec("cuda"):
        for name, (file, text, arch) in launches.files.items():
            if (text, arch) not in launches.texts:
                launches.texts[text, arch] = static_memory(build._nvrtc(text, file, arch))
            size = launches.texts[text, arch] + launches.memory.get(name, 0)
            found[file] = max(size, found.get(file, 0))
    launches.sources.clear()
    launches.files.clear()
    return found


def looked(mode: str) -> None:
    if mode == "error":
        raise RuntimeError("called a synchronizing CUDA operation")


def steps(runner: CudaRunner, sizes: list[int]) -> Iterator[StepPlan]:
    """Decode steps of all sizes, with and without prompts of several lengths beside them, whole and behind
    prefixes; and prompts of ``sizes`` tokens together."""
    half = runner.steps.context_len // 2
    three = min(3, half)
    if most := runner.facts.drafts:
        for rows, others in itertools.product((1, 3), ([], [(3, 0, half)])):
            for guesses in {min(3, most), most}:
                parts = [*((slot, half, 1 + guesses) for slot in range(rows)), *others]
                drafts = np.array([guesses] * rows + [-1] * len(others), np.int32).tobytes()
                guessing = msgspec.structs.replace(plan(parts), drafts=drafts)
                yield guessing if runner.shard.pipe is None else told(runner, guessing)
    for rows in range(1, runner.steps.slots + 1):
        yield plan([(slot, half * (rows % 2), 1) for slot in range(rows)])
    for decodes in (0, 1, 5, runner.steps.slots - 1):
        for start, size in ((0, 1), (0, 2), (0, 100), (1, 17), (0, half), (half, 300)):
            if 0 < size <= min(runner.steps.context_len - start, runner.steps.step_tokens - decodes):
                yield plan(
                    [*((slot, start, 1) for slot in range(decodes)), (runner.steps.slots - 1, start, size)]
                )
        yield plan(
            [
                *((slot, three, 1) for slot in range(decodes)),
                *((slot, 0, max(1, three)) for slot in range(decodes, runner.steps.slots)),
            ]
        )
    for size in sizes:
        lengths = [min(half, size - at) for at in range(0, size, half)]
        yield plan([(slot, 0, length) for slot, length in enumerate(lengths)])


def told(runner: CudaRunner, guessing: StepPlan) -> StepPlan:
    """As stages get it: it has the guesses, and units for the states behind them."""
    marks = np.zeros((0, 3), np.int32)
    slots, starts, drafts = (
        np.frombuffer(data, np.int32) for data in (guessing.slots, guessing.starts, guessing.drafts)
    )
    rows = drafts > 0
    if runner.steps.tables.states:
        behind = zip(slots[rows].tolist(), starts[rows].tolist(), drafts[rows].tolist())
        marks = np.array([(slot, at + i, 1) for slot, at, n in behind for i in range(1, n + 1)], np.int32)
    tokens = np.zeros(int((drafts[rows] + 1).sum()), np.int32)
    return msgspec.structs.replace(guessing, tokens=tokens.tobytes(), checkpoints=marks.tobytes())


def plan(rows: list[tuple[int, int, int]]) -> StepPlan:
    """``rows``: slot, start, length."""
    slots, starts, lens = (np.array(values, np.int32).tobytes() for values in zip(*rows))
    return StepPlan(
        step=0, slots=slots, starts=starts, q_lens=lens, flags=bytes([SAMPLE]) * len(rows), new=[]
    )


def units_of(steps: GpuSteps) -> int:
    """Of its layers that keep states."""
    layers = filter(None, map(state_of_layer, steps.kv))
    return min((len(x) for layer in layers for x in (layer.conv, layer.memory) if x.numel()), default=1)


def outside(*columns: tuple[Any, int]) -> bool:
    """Whether some of them has an index that is negative, or not below a bound."""
    return any(column.size and not 0 <= column.min() <= column.max() < end for column, end in columns)


def unset(graphs: DecodeGraphs | PromptGraphs) -> Any:
    """The columns that are filled next, with what is no index."""
    columns = graphs._pinned[graphs._stage].numpy()
    columns[:] = UNSET
    return columns


def decodes_askew(graphs: DecodeGraphs, flat: Any, rows: int, size: int) -> bool:
    """Rows of nobody, behind so many others, have to read and write the unit of nobody."""
    steps, host = graphs._steps, DecodeColumns.of(flat, size, graphs._states)
    reads, writes, marks, runs = host.states
    units, end = units_of(steps), steps.context_len
    return any(column[rows:].any() for column in (reads, writes, marks)) or outside(
        *((host.slots, steps.slots + 1), (host.starts + 1, end + 1), (host.ends, end + 1)),
        *((host.stage, len(graphs._pinned)), (host.plain, 2)),
        *((reads, units), (writes, units), (marks[:, 2], units), (runs, size + 1)),
    )


def prompts_askew(graphs: PromptGraphs, flat: Any, sizes: tuple[int, int], split: bool) -> bool:
    """``split``: its tiles are a plan of ``Splits``."""
    (padded, size), steps, end = sizes, graphs._steps, graphs._steps.context_len
    lengths = graphs._lengths(padded)
    parts = np.split(flat[: sum(lengths)], np.cumsum(lengths)[:-1])
    tiles, slots, starts, kv_len, at, where, ends, q_start, kept = parts
    tiles, lens = tiles.reshape(-1, 4)[: 0 if split else None], np.diff(q_start)
    # Rows of nobody may have as many tokens as the step.
    last = starts[padded:] + lens
    wrong = outside(
        *((slots, steps.slots + 1), (where, steps.slots + 1), (starts + 1, end + 1), (last, end + 1)),
        *((kv_len, end + 1), (ends, end + 1), (at, size), (q_start, size + 1), (lens, size + 1)),
        *((tiles[:, 0], steps.slots + 1), (tiles[:, 3], graphs._tile + 1)),
        *((tiles[:, 1] + tiles[:, 3], size + 1), (tiles[:, 2] + tiles[:, 3], end + 1)),
    )
    if wrong or not graphs._states:
        return wrong
    reads, writes, marks, runs, first, segments, chunks = graphs._units(kept, padded)
    units = units_of(steps)
    return outside(
        *((reads, units), (writes, units), (marks[:, 2], units), (segments[:, 2], units)),
        *((runs, padded + 1), (first, len(segments) + 1), (chunks[:, 1], CHUNK + 1)),
        *((segments[:, 0] + segments[:, 1], size + 1), (chunks[:, 0] + chunks[:, 1], size + 1)),
        (chunks[:, 2], len(q_start)),
    )


def note_askew() -> None:
    """From now on."""
    send, forward, fill, sent = DecodeGraphs._send, DecodeGraphs._forward, PromptGraphs._fill, [0]

    def sends(graphs: DecodeGraphs, slots: Any, starts: Any, size: int, *more: Any) -> int:
        sent[0], flat = size, unset(graphs)
        stage = send(graphs, slots, starts, size, *more)
        if decodes_askew(graphs, flat, len(slots), size):
            ASKEW.append(size)
        return stage

    def runs(graphs: DecodeGraphs, size: int, *args: Any, **how: Any) -> None:
        if size != sent[0] and not under_way():
            ASKEW.append(size)
        forward(graphs, size, *args, **how)

    def fills(graphs: PromptGraphs, *columns: Any) -> None:
        flat, (*_, sizes, _, plan) = unset(graphs), columns
        fill(graphs, *columns)
        if prompts_askew(graphs, flat, sizes, plan is not None):
            ASKEW.append(sizes[1])

    DecodeGraphs._send, DecodeGraphs._forward = sends, runs  # type: ignore[method-assign]
    PromptGraphs._fill = fills  # type: ignore[method-assign]


class Mute(Pipe):
    """Nothing comes, and nothing goes."""

    def take(self, out: torch.Tensor) -> None:
        pass

    def give(self, x: torch.Tensor) -> None:
        pass


def joining(stage: int | None) -> contextlib.AbstractContextManager[Any]:
    """Runners that are made meanwhile have this stage of two, if any."""
    if stage is None:
        return contextlib.nullcontext()
    joined = gpus.Joined(Shard(pipe=Mute(stage, 2, 1, stage)), "")
    return mock.patch.object(gpus, "join_gpus", return_value=joined)


def check(case: dict[str, Any], launches: Launches) -> dict[str, Any]:
    rehearse, asked = gpu_model.rehearse, set()

    def walk(*args: Any) -> None:
        with OnCpu():  # modes belong to a thread
            launches.seen.clear()
            rehearse(*args)
            asked.update(launches.seen)

    walk_chains = Chains.rehearse

    def rehearse_chains(chains: Chains) -> None:
        before = set(launches.seen)
        walk_chains(chains)
        asked.update(launches.seen - before)

    gpu_model.rehearse, Chains.rehearse = walk, rehearse_chains  # type: ignore[method-assign]
    settings = {
        "step_tokens": 1024,
        "context_length": 1024,
        "max_running_requests": ROWS,
        "kv_cache_bytes": 64 << 20,
    }
    config = Config(device="cuda", load_format="dummy", **settings | case.get("config", {}))
    pretend(case.get("card", "H200"))
    free = case.get("free", 100 << 30)
    begun = HostMemory.taken
    torch.cuda.mem_get_info = lambda *args: (free - HostMemory.taken + begun, free)
    if case.get("looks"):
        torch.cuda.set_sync_debug_mode = looked
    try:
        with OnCpu(), joining(case.get("stage")):
            guesses = ModelSource("dummy", Path("."), (), case["draft"], {}) if "draft" in case else None
            source = ModelSource("dummy", Path("."), (), case["model"], {}, draft=guesses)
            runner = CudaRunner(config, source, case.get("stage", 0), config.pp, "", lambda p: None)
            if (adapted := runner.steps.adapted) is not None:
                runner.steps.tables.host.place[:ROWS] = np.arange(ROWS) % (adapted.count + 1)
            for step in steps(runner, case.get("sizes", [])):
                runner.execute(step)
    finally:
        gpu_model.rehearse, Chains.rehearse = rehearse, walk_chains  # type: ignore[method-assign]
    facts = runner.facts
    kernels = shared(launches, case["card"]) if case.get("compile") else {}
    return {
        "shared": kernels,
        "asked": len(asked),
        "late": sorted(launches.seen - asked),
        "context": facts.context_len,
        "pages": facts.groups[0].pages,
        "ledger": facts.ledger,
        "notes": facts.notes,
        "askew": ASKEW,
        "scales": [(kv.k_scale, kv.v_scale) for kv in map(tokens_of, runner.steps.kv) if kv is not None],
    }


if __name__ == "__main__":
    pretend()
    note_askew()
    launches = Launches()
    for case in json.loads(sys.argv[1]):
        LOADED.clear()
        ASKEW.clear()
        try:
            found = check(case, launches)
        except ConfigError as error:
            found = {"error": error.message, "code": error.code, "param": error.param, "loaded": bool(LOADED)}
        print(json.dumps(found), flush=True)

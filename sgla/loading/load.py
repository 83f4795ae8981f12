"""From a ModelSource to a Model with weights:
tensors stream one at a time into the places the layers declared."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from pkgutil import resolve_name

import torch
from torch import Tensor

from sgla.dist import Shard
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource
from sgla.layers.adapters import Adapters
from sgla.layers.build import CHUNK, Build, Crossed, Reordered, Share, Slot, Values
from sgla.loading.checkpoint import (
    FileTensor,
    Numbers,
    cache_scales,
    canonical,
    joined,
    renamed,
    stored_tensors,
    unstacked,
)
from sgla.loading.gguf_tensors import kinds_of_file, weights_of_file
from sgla.loading.offload import Offload
from sgla.loading.pickles import TYPES
from sgla.loading.show import rows_of, shape_of
from sgla.loading.stacks import put_together, take_apart
from sgla.loading.upload import begin_thread, synchronize, threads_for
from sgla.messages import Progress
from sgla.model.base import CausalLM, elsewhere
from sgla.model.generic_spec import GenericSpec
from sgla.model.hearing import HEARINGS
from sgla.model.read import read_decoder
from sgla.model.registry import class_path, family_of
from sgla.model.sizes import FOUR_BITS, as_stored, kinds_of, wide_matrices
from sgla.model.spec import ModelSpec
from sgla.model.vision.table import VISIONS
from sgla.quant.fp8 import Fp8
from sgla.quant.method import FLOATS, PLAIN
from sgla.quant.weight import Make, SourceTensor, Weight, anywhere, storage

Mend = Callable[[str, SourceTensor], SourceTensor]
OnProgress = Callable[[Progress], None]

# Buffers that old checkpoints store and every model computes for itself.
_BUFFERS = re.compile(
    r".*(rotary_emb\.inv_freq|\.masked_bias|\.causal_mask|attention\.bias|attn\.bias|position_ids)$"
)
# Ends of the names of what quantized layers have.
_QUANTIZED = (".qweight", ".W_q", "_packed", "_scale", "_scale_inv", "_qdata", ".SCB", ".absmax")
EMBEDDING = "model.embed_tokens.weight"
_NAMED = 8  # tensor names shown in an error
SHARE = 1 << 24  # values of a tensor that one thread takes at a time, about
POOL = 1_000_003  # random values of dummy weights


def load_model(
    source: ModelSource,
    dtype: str = "float32",
    quantization: str | None = None,
    shard: Shard | None = None,
    context_len: int | None = None,
    on_progress: OnProgress | None = None,
    seed: int = 0,
    on_model: Callable[[CausalLM], None] | None = None,
    offload: Offload | None = None,
    adapters: Adapters | None = None,
    make: Make = anywhere,
    stage: range | None = None,
) -> CausalLM:
    """Build the model and load this rank's weights.

    ``dtype``: float32 | bfloat16, of weights that are not quantized. ``quantization``: int8 | int4 | fp8, or
    the name of the checkpoint's method or ``checkpoint``: as the file is. With int4 the embedding and the
    output layer are int8 (and ``wide_matrices``), with fp8 they are not quantized. Checkpoints in fp8 stay so
    on a GPU. ``context_len`` bounds positions (default: the model's own). ``seed`` makes dummy weights.
    ``on_model`` gets the model before its weights come. ``offload``: has the weights of some layers.
    ``adapters``: layers make room for them in it. ``make``: the tensors of matrices. ``stage``: layers of
    this rank, if there are several stages. Raises ConfigError, and WeightError naming missing, unexpected and
    misshapen tensors.
    """
    spec = read_decoder(source.config)
    if isinstance(spec, GenericSpec):
        from sgla.model.generic import load_generic  # seconds, which other models need not spend

        positions = context_len or spec.context_len
        report = on_progress or (lambda _: None)
        rank = shard or Shard()
        with torch.device("cpu"):
            views = {name: tensor.view for name, tensor in _stored(source).items()}
        return load_generic(source, views, spec, dtype, rank, positions, seed, on_model, report)
    rename = renaming(spec.architecture)
    if spec.tied and has_own_head(source, rename):
        spec = replace(spec, tied=False)
    if spec.moe is not None and spec.moe.crossed and has_outputs_first(source, spec):
        spec = replace(spec, moe=replace(spec.moe, crossed=False))
    spec = replace(spec, stage=stage)
    quantization = spec.quantized(quantization, _device().type)
    build = decoder_build(source, spec, dtype, quantization, shard or Shard(), rename)
    if context_len is not None and context_len > spec.context_len:
        raise ConfigError(
            f"a context of {context_len} tokens is beyond the model's {spec.context_len}; lower "
            "--context-length",
            param="context_length",
        )
    if offload is not None:
        build.elsewhere = offload.weight
    build.adapters, build.make = adapters, make
    model = model_of(spec, build, context_len or spec.context_len)
    if offload is not None:
        offload.wrap(model.blocks)
    if adapters is not None:
        _tell_names(adapters, build, rename, spec)
        adapters.allocate()
    if on_model is not None:
        on_model(model)
    ignored = (*model.ignored, *towers_of(spec.architecture))
    model.declared = Declared(build, spec.architecture, spec.tied, ignored, rename, mending(spec), seed)
    model.declared.load(source, on_progress)
    if adapters is not None:
        adapters.sample()
    if (scales := cache_scales(build, spec.layers)) is not None:
        model.cache_scales = scales[spec.held.start : spec.held.stop]
    return model


def towers_of(architecture: str) -> tuple[str, ...]:
    """Beginnings of the names of tensors that make features of pictures or sounds, which
    ``loading/tower.py`` loads, or that nothing is made with."""
    vision = VISIONS.get(architecture) or HEARINGS.get(architecture)
    return () if vision is None else (*vision.names_of_parts, *vision.unread)


def renaming(architecture: str) -> Callable[[str], str]:
    """From a checkpoint's name to a declared one."""
    pairs = family_of(architecture).renamed

    return lambda name: renamed(name, pairs)


def mending(spec: ModelSpec) -> Mend:
    """For a checkpoint with ``Family.crossed`` modules, with rows ``Family.by_head`` or ``by_quarter``, or
    with tensors of whole ``Family.numbers``."""
    family = family_of(spec.architecture)
    crossed = tuple(f".{module}.weight" for module in family.crossed)

    def mend(name: str, tensor: SourceTensor) -> SourceTensor:
        if crossed and name.endswith(crossed):
            return Crossed(tensor)
        if family.numbers and name.endswith(family.numbers) and isinstance(tensor, FileTensor):
            return Numbers(tensor)
        if (family.by_head or family.by_quarter) and ".qkv_proj." in name:
            layer, rows = spec.attention[0], tensor.shape[0] if tensor.shape else 0
            parts = 12 if family.by_quarter else layer.heads + 2 * layer.kv_heads
            if rows and rows % parts == 0:  # else it is misshapen, which loading names
                return Reordered(tensor, joined_order(rows, spec, family.by_quarter))
        return tensor

    return mend


def joined_order(rows: int, spec: ModelSpec, by_quarter: bool) -> Tensor:
    """int64[rows]: where q, then k, then v lie among joined rows that a checkpoint has head of keys by head
    of keys, or as CodeGen in four parts, with v before k."""
    where, layer = torch.arange(rows, device="cpu"), spec.attention[0]
    if by_quarter:
        return where.view(4, 3, -1)[:, [0, 2, 1]].transpose(0, 1).flatten()
    group = layer.heads // layer.kv_heads
    parts = where.view(layer.kv_heads, group + 2, -1).split([group, 1, 1], 1)
    return torch.cat([part.flatten() for part in parts])


def _tell_names(adapters: Adapters, build: Build, rename: Callable[[str], str], spec: ModelSpec) -> None:
    """How checkpoints of this model name its layers."""
    family, mend = family_of(spec.architecture), mending(spec)
    adapters.beyond = tuple(elsewhere(spec)) if spec.stage is not None else ()
    adapters.sets = spec.layers / len(spec.held)
    adapters.rename = lambda module: canonical(rename(f"{module}.weight")).removesuffix(".weight")
    adapters.joined = {
        name.removesuffix(".weight"): [(part.name.removesuffix(".weight"), part.rows) for part in parts]
        for name, (shape, parts) in build.stacks.items()
        if name.endswith(".weight") and len(shape) == 2
    }
    if family.by_head or family.by_quarter:
        adapters.mend = lambda module, rows: mend(f"{adapters.rename(module)}.weight", Values(rows)).dense()


def has_own_head(source: ModelSource, rename: Callable[[str], str]) -> bool:
    """Whether the files hold an output layer that is not the embedding, which counts for more than
    ``tie_word_embeddings``, as in transformers. ``rename``: from their names to declared ones. Raises
    WeightError."""
    if source.kind not in ("safetensors", "pt"):
        return False
    tables = {"lm_head.weight", EMBEDDING}
    names = ((canonical(rename(raw)), tensor) for raw, tensor in stored_tensors(source))
    found = {name: tensor for name, tensor in names if name in tables}
    if len(found) < 2:
        return False
    head, embedding = found["lm_head.weight"], found[EMBEDDING]
    if len(head.shape) != 2 or len(embedding.shape) != 2:
        return False  # misshapen, which loading names
    if head.shape != embedding.shape:
        return True
    rows = max(1, SHARE // head.shape[1])
    return any(
        not torch.equal(head.view[at : at + rows].float(), embedding.view[at : at + rows].float())
        for at in range(0, head.shape[0], rows)
    )


def has_outputs_first(source: ModelSource, spec: ModelSpec) -> bool:
    """Whether the files have the matrices of each expert, as llm-compressor writes them, or stacks of
    ``[output, input]``, as transformers 5 writes those of Qwen3-VL, or of e4m3 numbers, which are taken
    apart. Raises WeightError."""
    if source.kind not in ("safetensors", "pt") or spec.moe is None:
        return source.kind == "gguf"
    tensors = dict(stored_tensors(source))
    down = next((tensor for name, tensor in tensors.items() if name.endswith(".experts.down_proj")), None)
    if down is None:
        return any(".experts.0.down_proj." in name for name in tensors)
    if down.type == "F8_E4M3" and spec.moe.halves:
        return True
    shape = (spec.moe.experts, spec.hidden, spec.moe.intermediate)
    return shape[1] != shape[2] and down.shape == shape


def load_weights(
    source: ModelSource,
    build: Build,
    architecture: str,
    *,
    tied: bool = False,
    ignored: tuple[str, ...] = (),
    rename: Callable[[str], str] = lambda name: name,
    mend: Mend = lambda name, tensor: tensor,
    on_progress: OnProgress | None = None,
    seed: int = 0,
    sound: bool = False,
) -> None:
    """Fill what the layers have declared in ``build``. ``rename``: from a checkpoint's name to a declared
    one; ``mend``: what a layer wants of a stored tensor; ``ignored`` are prefixes of renamed ones; ``sound``:
    see ``Declared.load``. Raises WeightError."""
    tensors = _stream(source, build, seed, rename, mend)
    jobs = _fitting(build.table, tensors, architecture, tied, ignored)
    if build.checkpoint is PLAIN:
        _check_floats(jobs)
    if sound and build.checkpoint is PLAIN and source.kind != "gguf":
        jobs = {name: Sound(tensor) for name, tensor in jobs.items()}
    _run(build.table, jobs, on_progress or (lambda progress: None))


@dataclass(frozen=True)
class Declared:
    """Where a model's tensors go, and how its checkpoints name them; see ``load_weights``."""

    build: Build
    architecture: str
    tied: bool
    ignored: tuple[str, ...]
    rename: Callable[[str], str]
    mend: Mend = lambda name, tensor: tensor
    seed: int = 0

    def load(self, source: ModelSource, on_progress: OnProgress | None = None, sound: bool = False) -> None:
        """All of them, in place. ``sound``: whatever is no number is an error, of which others may have been
        stored before; not of numbers that are packed. Raises WeightError."""
        load_weights(
            source,
            self.build,
            self.architecture,
            tied=self.tied,
            ignored=self.ignored,
            rename=self.rename,
            mend=self.mend,
            on_progress=on_progress,
            seed=self.seed,
            sound=sound,
        )

    def part(self, source: ModelSource, prefixes: Sequence[str]) -> None:
        """Those whose names begin so, in place. Raises WeightError."""
        begins = tuple(prefixes)
        tensors = _stream(source, self.build, self.seed, self.rename, self.mend)
        found = _fitting(self.build.table, tensors, self.architecture, self.tied, self.ignored)
        jobs = {name: tensor for name, tensor in found.items() if name.startswith(begins)}
        _run(self.build.table, jobs, lambda progress: None)

    def look(self, source: ModelSource) -> None:
        """Read all of them, and store nothing. Raises WeightError."""
        if self.tied and has_own_head(source, self.rename):
            raise WeightError("the weights have an output layer of their own, which those before had not")
        tensors = _stream(source, self.build, self.seed, self.rename, self.mend)
        _look(_fitting(self.build.table, tensors, self.architecture, self.tied, self.ignored))

    def shape(self, raw: str) -> tuple[int, ...] | None:
        return shape_of(self.build, self._known(raw), partial(self.mend, self.rename(raw)))

    def show(self, raw: str, rows: range) -> Tensor:
        return rows_of(self.build, self._known(raw), partial(self.mend, self.rename(raw)), rows)

    def _known(self, raw: str) -> str:
        """The declared name of what checkpoints call so."""
        name = canonical(self.rename(raw))
        return EMBEDDING if self.tied and name == "lm_head.weight" else name

    def scramble(self, source: ModelSource) -> None:
        """Random numbers in place of all, other ones than those of random weights."""
        replace(self, seed=self.seed + 1).load(replace(source, kind="dummy"))

    def take(self, tensors: Mapping[str, Tensor], look: bool = False) -> None:
        """Some of them, in place, under the names that checkpoints have, or only ``look`` whether they fit.
        Where the files are quantized a layer comes as they have it, with all its tensors. Raises WeightError;
        then nothing has changed."""
        plain, numbers = self.build.checkpoint is PLAIN, family_of(self.architecture).numbers
        usable = {True: FLOATS, False: tuple(TYPES.values())}
        wrong = [
            name
            for name, tensor in tensors.items()
            if TYPES.get(tensor.dtype) not in usable[plain and not name.endswith(numbers)]
        ]
        floats = {name: tensor for name, tensor in tensors.items() if TYPES.get(tensor.dtype) in FLOATS}
        unsound = [] if wrong else no_numbers(floats)
        what = "of a type that is no float" if plain else "of a type that no file has"
        if complaints := _complain(what, wrong) + _complain("not finite", unsound):
            raise WeightError("the weights cannot be taken: " + "; ".join(complaints))
        device = _device()
        stored = {
            self.rename(raw): FileTensor(
                tensor, tuple(tensor.shape), TYPES[tensor.dtype], None, device=device
            )
            for raw, tensor in tensors.items()
        }
        if len(stored) < len(tensors):
            raise WeightError("the weights cannot be taken: several tensors are of one name")
        self._check_kinds(stored)
        table = self.build.table
        parts = _parted(stored, self.build, self.mend)
        jobs = _fitting(table, parts, self.architecture, self.tied, self.ignored, whole=False)
        checks = {
            name: Slot(slot.shape, slot.check) for name, slot in table.items() if slot.check is not None
        }
        _run(checks, {name: jobs[name] for name in jobs.keys() & checks.keys()}, lambda progress: None)
        if not look:
            _run(table, jobs, lambda progress: None)
        elif not plain:  # numbers that are packed show when they are read whether they are of use
            _look(jobs)

    def _check_kinds(self, stored: Mapping[str, FileTensor]) -> None:
        """Layers that are quantized do not come as floats. Raises WeightError."""
        build, method = self.build, self.build.checkpoint
        for raw, tensor in stored.items():
            name = canonical(raw)
            module = name.removesuffix(".weight")
            matrix = name in build.table and module != name and len(tensor.shape) == 2
            if not matrix or tensor.type not in FLOATS or module in build.floats:
                continue
            held = [
                part for part, wanted in method.tensors(module, *tensor.shape).items() if not wanted.optional
            ]
            if method is not PLAIN and method.covers(module) and held != [name]:
                raise WeightError(
                    f"the weights cannot be taken: {name} is quantized in the model's files; send "
                    f"{' and '.join(held)} as such a file has them"
                )


def _look(found: Mapping[str, SourceTensor]) -> None:
    """Read all of it, and store nothing. Raises WeightError."""
    jobs: dict[str, SourceTensor] = {name: Sound(tensor) for name, tensor in found.items()}
    _run({name: Slot(tensor.shape, _read) for name, tensor in jobs.items()}, jobs, lambda progress: None)


def _read(share: Share) -> None:
    rows = share.shape[0]
    step = max(1, CHUNK // prod(share.shape[1:]))
    for start in range(0, rows, step)[share.index :: share.count]:
        share.dense(range(start, min(rows, start + step)))


def no_numbers(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of those that hold what is not finite."""
    filled = [(name, tensor) for name, tensor in tensors.items() if tensor.numel()]
    sound = [torch.stack(tensor.aminmax()).float().isfinite().all().to("cpu") for _, tensor in filled]
    return [name for (name, _), good in zip(filled, sound) if not good]


@dataclass(frozen=True)
class Sound:
    """A SourceTensor of floats, all of which must be finite."""

    source: SourceTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape

    def dense(self, rows: range | None = None) -> Tensor:
        values = self.source.dense(rows)
        if no_numbers({"": values}):
            raise ValueError("it holds what is no number")
        return values

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)


def model_of(spec: ModelSpec, build: Build, positions: int) -> CausalLM:
    """The model without weights: its layers declare in ``build`` what they want. Raises ConfigError."""
    model: CausalLM = resolve_name(class_path(spec.architecture))(spec, build, positions)
    return model


def decoder_build(
    source: ModelSource,
    spec: ModelSpec,
    dtype: str,
    quantization: str | None,
    shard: Shard,
    rename: Callable[[str], str] = lambda name: name,
) -> Build:
    """What the layers of a decoder are built with. ``rename``: as in ``load_weights``. Raises ConfigError."""
    method = as_stored(spec.method, quantization)
    device = _device_kind()
    kinds = kinds_of(dtype, quantization, spec.method, device)
    build = Build(shard, *kinds, checkpoint=spec.method or PLAIN, as_stored=method is not None)
    build.joined = joins()
    build.device = device
    if quantization in FOUR_BITS and method is None and device == "cpu":
        own = source.kind == "gguf" and quantization == "int4"
        bits = {t.name: t.bits for t in source.gguf().tensors()} if own else {}
        wide = wide_matrices(spec, lambda name: (bits.get(name) or 16) <= 4).names
        build.kinds = dict.fromkeys(wide, "int8")
    if method is not None and source.kind == "gguf":
        build.kinds = kinds_of_file(source, spec, build.plain, shard.size, device)
    elif spec.method is not None and source.kind in ("safetensors", "pt"):
        stored = [(canonical(rename(name)), tensor.type) for name, tensor in stored_tensors(source)]
        floats = {name.removesuffix(".weight") for name, kind in stored if kind in FLOATS}
        more = {name.partition(".weight") for name, _ in stored}
        build.floats = frozenset(floats - {module for module, _, other in more if other})
        build.modules = frozenset(name.rpartition(".")[0] for name, _ in stored)
    return build


def _fitting(
    table: dict[str, Slot],
    tensors: Iterator[tuple[str, SourceTensor]],
    architecture: str,
    tied: bool,
    ignored: tuple[str, ...],
    whole: bool = True,
) -> dict[str, SourceTensor]:
    """What goes into which slot; ``whole``: into each. Raises WeightError, which tells of all that does not
    fit."""
    jobs: dict[str, SourceTensor] = {}
    unexpected: list[str] = []
    twice: list[str] = []
    head: SourceTensor | None = None  # a tied one, which stands for the embedding if that is left out
    for raw, tensor in tensors:
        name = canonical(raw)
        if name in table and name in jobs:
            twice.append(raw)
        elif name in table:
            jobs[name] = tensor
        elif tied and name == "lm_head.weight":
            head = tensor
        elif not (_BUFFERS.match(name) or raw.startswith(ignored) or name.startswith(ignored)):
            unexpected.append(raw)
    if head is not None and EMBEDDING in table and EMBEDDING not in jobs:
        jobs[EMBEDDING] = head
    misshapen = [
        f"{name} has shape {list(tensor.shape)}, expected {list(table[name].shape)}"
        for name, tensor in jobs.items()
        if tuple(tensor.shape) != table[name].shape
    ]
    complaints = (
        _complain("missing", [name for name in table if whole and name not in jobs])
        + _complain("unexpected", unexpected)
        + _complain("misshapen", misshapen)
        + _complain("there twice", twice)
    )
    if complaints:
        parts = [name for name in unexpected if name.endswith(_QUANTIZED)]
        why = f"; {parts[0]} is a quantized layer's, which quantization_config does not tell" if parts else ""
        raise WeightError(f"the weights do not fit {architecture}: " + "; ".join(complaints) + why)
    return jobs


def _check_floats(jobs: Mapping[str, SourceTensor]) -> None:
    """Raise WeightError for a tensor of numbers that layers do not have, before any is read."""
    for name, job in jobs.items():
        if isinstance(job, FileTensor):
            try:
                job.check_floats()
            except ValueError as error:
                raise WeightError(f"tensor {name} cannot be read: {error}") from None


def _run(table: dict[str, Slot], jobs: dict[str, SourceTensor], on_progress: OnProgress) -> None:
    total, done = sum(prod(tensor.shape) for tensor in jobs.values()), 0
    shares = [
        (name, Share(tensor, index, count))
        for name, tensor in jobs.items()
        for count in [-(-prod(tensor.shape) // SHARE)]
        for index in range(count)
    ]

    def take(job: tuple[str, Share]) -> int:
        name, share = job
        try:
            table[name].take(share)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, RuntimeError, NotImplementedError) as error:
            raise WeightError(f"tensor {name} cannot be read: {error}") from error
        values = prod(share.shape)
        return values * (share.index + 1) // share.count - values * share.index // share.count

    device = _device()
    synchronize(device)  # the threads write, on streams of their own, to what this one has made
    with ThreadPoolExecutor(threads_for(device), "load", begin_thread, (device,)) as pool:
        for count in pool.map(take, shares):
            done += count
            on_progress(Progress(phase="load", message="weights", done=done, total=total))
    synchronize(device)


def _device_kind() -> str:
    return "cpu" if _device().type == "cpu" else "cuda"


def _device() -> torch.device:
    """Where tensors are made, with its number: worker threads do not inherit it."""
    return torch.empty(0).device


def joins() -> bool:
    """See ``Build.joined``: starting a kernel costs much where tensors are made, or would be."""
    return _device().type in ("cuda", "meta")


def _complain(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{len(names)} {what}: {', '.join(names[:_NAMED])}{more}"]


def _stream(
    source: ModelSource, build: Build, seed: int, rename: Callable[[str], str], mend: Mend
) -> Iterator[tuple[str, SourceTensor]]:
    if source.kind == "dummy":
        device = _device()
        return ((name, _Dummy(name, slot.shape, seed, device)) for name, slot in build.table.items())
    if source.kind == "gguf":
        return weights_of_file(source)
    stored = _stored(source, rename)
    if build.checkpoint is PLAIN and any(tensor.type == "F8_E4M3" for tensor in stored.values()):
        build.checkpoint = Fp8({})  # which not every file says
    return _parted(stored, build, mend)


def _stored(source: ModelSource, rename: Callable[[str], str] = lambda name: name) -> dict[str, FileTensor]:
    """By the names that ``rename`` makes; none of dummy weights. Raises WeightError."""
    stored: dict[str, FileTensor] = {}
    for raw, tensor in stored_tensors(source) if source.kind != "dummy" else ():
        if (name := rename(raw)) in stored:
            raise WeightError(
                f"{name} is in two of the files {', '.join(path.name for path in source.files[:8])}"
            )
        stored[name] = tensor
    return stored


def _parted(stored: dict[str, FileTensor], build: Build, mend: Mend) -> Iterator[tuple[str, SourceTensor]]:
    """What layers want of what files have."""
    take_apart(stored, build)
    put_together(stored, build)
    return unstacked(((name, mend(name, tensor)) for name, tensor in joined(stored, build)), build)


@lru_cache(1)
def _noise(seed: int, device: torch.device) -> Tensor:
    """A pool of POOL normal values, the same on every device, and its beginnings again, so that any CHUNK of
    them is one slice. The odd length keeps rows of a matrix from repeating."""
    noise = torch.randn(POOL, generator=torch.Generator().manual_seed(seed), device="cpu").to(device)
    noise = noise.repeat(-(-CHUNK // POOL) + 1)
    synchronize(device)  # other threads read it on streams of their own
    return noise


@dataclass(frozen=True)
class _Dummy:
    """Random values that depend on name, seed and place alone: every split over ranks sees the same model.

    Norm weights and biases are 0 or 1;
    matrices have the standard deviation 1/sqrt(k), which keeps activations bounded.
    """

    name: str
    shape: tuple[int, ...]
    seed: int
    device: torch.device

    def dense(self, rows: range | None = None) -> Tensor:
        rows = range(self.shape[0] if self.shape else 1) if rows is None else rows
        if len(self.shape) < 2:
            value = 0.0 if self.name.endswith("bias") else 1.0
            return torch.full((len(rows),) if self.shape else (), value, device=self.device)
        width = prod(self.shape[1:])
        at = (zlib.crc32(self.name.encode()) + rows.start * width) % POOL
        noise, count = _noise(self.seed, self.device), len(rows) * width
        if count <= CHUNK:
            values = noise[at : at + count]
        else:
            values = noise[torch.arange(at, at + count, device=self.device) % POOL]
        return values.view(len(rows), *self.shape[1:]) * self.shape[1] ** -0.5

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)

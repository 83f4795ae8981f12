"""The tensors of GGUF files, and the storages that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sgla.hub.gguf_blocks import LazyTensor
from sgla.hub.source import ModelSource
from sgla.layers.build import Values
from sgla.model.delta_spec import DeltaSpec
from sgla.model.kimi_spec import KimiDeltaSpec
from sgla.model.latent_spec import LatentSpec
from sgla.model.mamba_spec import BesideSpec, FirstMambaSpec, MambaSpec
from sgla.model.read import read_decoder
from sgla.model.spec import ModelSpec
from sgla.quant.e2m1 import NVFP4
from sgla.quant.formats import common
from sgla.quant.gguf import kept_on
from sgla.quant.groups import GROUP, Groups
from sgla.quant.integers import Integers
from sgla.quant.weight import SourceTensor, Weight, storage

MOST_ZERO = 32768.0  # that a float16 has
CONVOLUTIONS = ("conv1d.weight", "conv.weight")
_SCANS = (".mamba.", ".conv.", ".mixer.", ".linear_attn.")
_DELTA = "linear_attn.in_proj"
OF_FIRST = (*CONVOLUTIONS, "A_log")
OF_CHANNELS = (*(f".{part}_conv1d.weight" for part in "qkv"), ".A_log")
OF_SCANS = (*CONVOLUTIONS, "A_log", "D", "norm.weight")


def kinds_of_file(
    source: ModelSource, spec: ModelSpec, plain: str, ranks: int, device: str = "cpu"
) -> dict[str, str]:
    """The formats of the matrices of a GGUF file on a kind of device;
    those that are multiplied as one have the smallest that is enough for all."""
    kinds = {tensor.name: kept_on(tensor.kept or "", device) or plain for tensor in source.gguf().tensors()}
    for i in range(spec.layers):
        layer = f"model.layers.{i}"
        for names in _groups(spec, i):
            names = [f"{layer}.{name}.weight" for name in names]
            found = {kinds[name] for name in names if name in kinds}
            if len(found) > 1:
                kinds |= dict.fromkeys(names, common(found, plain))
        if (gates := f"{layer}.{_DELTA}_z.weight") in kinds:
            kinds[f"{layer}.{_DELTA}_qkvz.weight"] = kinds[gates]
        attention = spec.attention[i]
        width = attention.value if isinstance(attention, LatentSpec) else attention.v_dim
        cut = dict.fromkeys(("self_attn.o_proj", "mixer.o_proj"), attention.heads // ranks * width)
        mamba = attention.mamba if isinstance(attention, BesideSpec) else attention
        if isinstance(mamba, MambaSpec | FirstMambaSpec):
            parts = (f"{name}.{part}_proj" for name in ("mamba", "mixer") for part in ("x", "out"))
            cut |= dict.fromkeys(parts, mamba.inner // ranks)
        if isinstance(attention, KimiDeltaSpec):
            cut["self_attn.o_proj"] = attention.count // ranks * attention.dim
        if isinstance(attention, DeltaSpec):
            cut["linear_attn.out_proj"] = attention.values // ranks * attention.value_dim
        for part, columns in cut.items():
            name = f"{layer}.{part}.weight"
            if columns % GROUP and kinds.get(name, plain) != plain:
                # Which may be cut inside of a group.
                kinds[name] = "q8_0" if device == "cpu" else plain
    return kinds


def _groups(spec: ModelSpec, layer: int) -> Iterator[list[str]]:
    """Matrices of a layer that are multiplied as one."""
    for mixer in ("self_attn", "mixer"):
        yield [f"{mixer}.{part}_proj" for part in "qkv"]
    yield [f"{_DELTA}_{part}" for part in ("qkv", "z")]
    yield ["mlp.gate_proj", "mlp.up_proj"]
    yield ["mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"]
    if spec.moe is not None and layer in spec.moe.layers:
        for module in ("mlp", "moe"):
            experts = [f"{module}.experts.{e}" for e in range(spec.moe.experts)]
            yield [f"{expert}.{part}_proj" for expert in experts for part in ("gate", "up")]


def weights_of_file(source: ModelSource) -> Iterator[tuple[str, SourceTensor]]:
    """The tensors of a GGUF file under the names that layers declare."""
    first = source.gguf().layout.first_mamba
    joined = source.gguf().layout.deltas == "joined"
    channels = source.gguf().layout.deltas == "channels"
    for name, value in source.gguf().numbers():
        yield name, Values(torch.from_numpy(value))
    halves: dict[str, dict[str, LazyTensor]] = {}
    for tensor in source.gguf().tensors():
        module, half = _half(tensor.name, joined)
        if not half:
            scan = next((end for part in _SCANS if (end := tensor.name.partition(part)[2])), "")
            known = OF_FIRST if first else OF_SCANS
            if channels and tensor.name.endswith(OF_CHANNELS):
                yield tensor.name, OfChannels(tensor)
            else:
                yield tensor.name, OfScan(scan, tensor, first) if scan in known else Blocks(tensor)
            continue
        both = halves.setdefault(module, {})
        both[half] = tensor
        if both.keys() == {"k", "v"}:
            yield f"{module}.kv_b_proj.weight", KeysAndValues(both["k"], both["v"])
        elif both.keys() == {"qkv", "z"}:
            layers = read_decoder(source.config).attention
            layer = next(layer for layer in layers if isinstance(layer, DeltaSpec))
            yield f"{module}.in_proj_qkvz.weight", ByHead(Blocks(both["qkv"]), Blocks(both["z"]), layer)


def _half(name: str, joined: bool) -> tuple[str, str]:
    """Module and part of a tensor that is one with another where layers declare it; nothing of others."""
    module, _, half = name.removesuffix("_b_proj.weight").rpartition(".")
    if name.endswith("_b_proj.weight") and half in ("k", "v"):
        return module, half
    module, _, half = name.removesuffix(".weight").rpartition(".in_proj_")
    return (module, half) if joined and half in ("qkv", "z") else ("", "")


@dataclass(frozen=True)
class ByHead:
    """What Qwen3-Next's gated delta nets read, ``[rows, width]``: of each head of keys its query, its key,
    its values and their gates. The file has all queries, keys and values one below the other, and apart from
    the gates."""

    qkv: Blocks
    gates: Blocks
    layer: DeltaSpec

    @property
    def _block(self) -> int:
        """Rows of a head of keys."""
        return 2 * self.layer.key_dim + 2 * self.layer.share * self.layer.value_dim

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layer.keys * self._block, self.qkv.shape[1]

    def _runs(self, rows: range) -> Iterator[tuple[Blocks, range]]:
        """Where ``rows`` lie in the file."""
        key, value = self.layer.key_dim, self.layer.share * self.layer.value_dim
        keys = self.layer.keys * key
        parts = (self.qkv, key, 0), (self.qkv, key, keys), (self.qkv, value, 2 * keys), (self.gates, value, 0)
        for head in range(rows.start // self._block, -(-rows.stop // self._block)):
            at = head * self._block
            for source, width, first in parts:
                inside = range(max(rows.start, at), min(rows.stop, at + width))
                if inside:
                    shift = first + head * width - at
                    yield source, range(inside.start + shift, inside.stop + shift)
                at += width

    def dense(self, rows: range | None = None) -> Tensor:
        return torch.cat([source.dense(own) for source, own in self._runs(rows or range(self.shape[0]))])

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        (source, own), *others = self._runs(rows)
        return storage(kind).read(self, rows, columns) if others else source.weight(kind, own, columns)


@dataclass(frozen=True)
class OfScan:
    """A tensor of a Mamba or of a short convolution, which the file has in another shape, and of ``A_log``
    what is made of it. ``first``: of Mamba 1, whose ``A_log`` has a state's values for each channel."""

    name: str
    tensor: LazyTensor
    first: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        rows, *columns = self.tensor.shape
        if self.name in CONVOLUTIONS:
            return rows, 1, *columns
        return (rows, *columns) if self.first else (rows * prod(columns),)

    def dense(self, rows: range | None = None) -> Tensor:
        values = torch.from_numpy(self.tensor.numpy()).reshape(self.shape)
        values = torch.log(-values) if self.name == "A_log" else values
        return values if rows is None else values[rows.start : rows.stop]

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)


@dataclass(frozen=True)
class OfChannels:
    """A convolution of a Kimi delta net, or its ``A_log``, of which the file has what is made of it."""

    tensor: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.tensor.shape
        return (1, 1, rows, 1) if self.tensor.name.endswith(".A_log") else (rows, 1, columns)

    def dense(self, rows: range | None = None) -> Tensor:
        values = torch.from_numpy(self.tensor.numpy()).reshape(self.shape)
        values = torch.log(-values) if self.tensor.name.endswith(".A_log") else values
        return values if rows is None else values[rows.start : rows.stop]

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)


@dataclass(frozen=True)
class KeysAndValues:
    """What makes keys and values of the latent, ``[heads * (key + value), rank]``: for each head the rows of
    its key, then those of its value. The file has ``keys`` ``[heads * rank, key]`` and ``values``
    ``[heads * value, rank]``."""

    keys: LazyTensor
    values: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        rank = self.values.shape[1]
        heads = self.keys.shape[0] // rank
        return heads * self.keys.shape[1] + self.values.shape[0], rank

    def dense(self, rows: range | None = None) -> Tensor:
        keys, values = (torch.from_numpy(half.numpy()) for half in (self.keys, self.values))
        rank = values.shape[1]
        keys = keys.view(-1, rank, keys.shape[1]).transpose(1, 2)
        both = torch.cat([keys, values.view(len(keys), -1, rank)], 1).flatten(0, 1)
        return both if rows is None else both[rows.start : rows.stop]

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        return storage(kind).read(self, rows, columns)


@dataclass(frozen=True)
class Blocks:
    """A tensor in a GGUF file."""

    tensor: LazyTensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    def dense(self, rows: range | None = None) -> Tensor:
        return torch.from_numpy(self.tensor.numpy(rows))

    def weight(self, kind: str, rows: range, columns: range | None = None) -> Weight:
        """Types in groups of 32 have the same constants as ours, so where these are wide enough for their
        quants they are taken over as they are."""
        made, bits = storage(kind), self.tensor.bits
        if kind == self.tensor.kept == NVFP4.kind:
            codes, scale = map(torch.from_numpy, self.tensor.numbers(rows))
            factor = torch.full((len(rows),), self.tensor.factor)
            return NVFP4.of(codes, scale.view(torch.float8_e4m3fn), factor).cut(columns)
        if bits is not None and issubclass(made, Integers) and made.group == GROUP and bits <= made.bits:
            return self._integers(made, bits, rows).cut(columns)
        if bits is None or not (
            issubclass(made, Groups) and (kind == self.tensor.kept or made.holds(bits, self.tensor.symmetric))
        ):
            return made.read(self, rows, columns)
        parts = self.tensor.quants(rows)
        assert parts is not None
        return made.of(bits, *map(torch.from_numpy, parts)).cut(columns)

    def _integers(self, made: type[Integers], bits: int, rows: range) -> Integers:
        """Its quants, of so many bits; where ``made`` wants whole zeros those of a symmetric type."""
        parts = self.tensor.quants(rows)
        assert parts is not None
        q, scale, minimum = map(torch.from_numpy, parts)
        if self.tensor.symmetric:
            zero = torch.full(scale.shape, float(1 << bits - 1))
        elif made.whole:
            return made.read(self, rows, None)
        else:
            q, zero, scale = with_zeros(q, scale.float(), minimum.float())
        if made.bits > bits:  # zeros lie in the middle
            shift = (128 - zero.round()).clamp_(0, 256 - (1 << bits))
            q = (q + shift.repeat_interleave(GROUP, 1)[:, : q.shape[1]]).to(torch.uint8)
            zero = zero + shift
        return made.of(q, zero, scale)


def with_zeros(q: Tensor, scale: Tensor, minimum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``q * scale + minimum`` as ``(q - zero) * scale``. Groups whose numbers are all but the same become
    their minimum."""
    same = minimum.abs() >= scale.abs() * MOST_ZERO
    zero = torch.where(same, 1.0, -minimum / torch.where(same, 1.0, scale))
    q = q.masked_fill(same.repeat_interleave(GROUP, 1)[:, : q.shape[1]], 0)
    return q, zero, torch.where(same, -minimum, scale)

"""Attention backends behind a narrow interface, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from sgla.attention.base import (
    Attention,
    AttentionShape,
    Decode,
    DeviceBatch,
    Extend,
    ExtendRows,
    Heads,
    Prompts,
    Unusable,
    by_layer,
)
from sgla.device import Device
from sgla.errors import ConfigError
from sgla.kernels.cuda.decode_attention import TILE
from sgla.kernels.device import this_device

__all__ = ["TILE", "Attention", "AttentionShape", "DeviceBatch", "ExtendRows", "Heads", "choose_backend"]

NARROW = "it reads no 8-bit KV cache"
NO_DECODE = (
    "its decode is planned on the host for each step, and decode steps "
    "are graphs that read lengths on the device"
)


B = TypeVar("B", covariant=True)


class BackendType(Protocol[B]):
    """A class of backends (``base.Backend``)."""

    def __call__(self, shape: AttentionShape, device: Device) -> B: ...
    def refuses(self, shape: AttentionShape, device: Device) -> str | None: ...


Make = Callable[[Any, AttentionShape, Device], Any]  # of a kind


def made(kind: BackendType[B], shape: AttentionShape, device: Device) -> B:
    return kind(shape, device)


def unmade(kind: Any, shape: AttentionShape, device: Device) -> Any:
    """The class itself, which says as much of itself as a backend would, and takes no memory of a GPU."""
    return kind


class Preference(NamedTuple):
    """A backend by name, for ``decode`` or ``prefill``, the setting that names it, and what makes it."""

    name: str
    phase: str
    setting: str
    make: Make

    @classmethod
    def of(cls, phase: str, both: str, one: str | None, make: Make) -> Preference:
        return cls(one or both, phase, f"{phase}_attention_backend" if one else "attention_backend", make)

    def refused(self, why: str) -> ConfigError:
        flag = "--" + self.setting.replace("_", "-")
        return ConfigError(
            f"{flag} {self.name} cannot be used for {self.phase}: {why}; "
            f"--{self.phase}-attention-backend auto picks one that can",
            param=self.setting,
        )


def choose_backend(
    name: str,
    shapes: Sequence[AttentionShape],
    device: Device | None = None,
    *,
    decode: str | None = None,
    prefill: str | None = None,
    make: Make = made,
) -> tuple[Attention, list[str]]:
    """The backend called ``name`` (``auto``: the fastest that takes a shape) for the layers of each of
    ``shapes``, and what was decided why. ``device``: this process's if None; ``decode`` and ``prefill``:
    another name for one of them; ``make``: ``unmade`` where there is no GPU.

    Raises ConfigError with the reason if one of the names cannot run this model.
    """
    device = device or this_device()
    asked = Preference.of("decode", name, decode, make), Preference.of("prefill", name, prefill, make)
    parts = [_choose(asked, shape, device) for shape in shapes]
    if len(parts) == 1:
        return parts[0]
    backend = by_layer({shape.width: part for shape, (part, _) in zip(shapes, parts)})
    told = {shape.width: notes[1:] for shape, (_, notes) in zip(shapes, parts)}
    notes = [
        note
        if all(note in others for others in told.values())
        else f"for {heads.heads} heads of {heads.head_dim}: {note}"
        for heads, of_these in told.items()
        for note in of_these
    ]
    slow = "" if backend.captures else ", no graphs"
    return backend, [f"attention: {backend.name}{slow}", *dict.fromkeys(notes)]


def _choose(
    asked: tuple[Preference, Preference], shape: AttentionShape, device: Device
) -> tuple[Attention, list[str]]:
    if shape.deterministic:
        return _deterministic(asked, shape, device)
    decoder, no_decode = _decode(asked[0], shape, device)
    extend, no_extend = _extend(asked[1], shape, device)
    prompts, no_prompts = _prompts(asked[1], shape, device)
    backend = Attention(decoder, extend, prompts)
    wanted = ", as asked" if {one.name for one in asked} != {"auto"} else ""
    slow = "" if backend.captures else ", no graphs"
    return backend, [f"attention: {backend.name}{slow}{wanted}", *no_decode, *no_extend, *no_prompts]


def _deterministic(
    asked: tuple[Preference, Preference], shape: AttentionShape, device: Device
) -> tuple[Attention, list[str]]:
    from sgla.attention.chunked import ChunkedDecode, ChunkedExtend, ChunkedPrompts
    from sgla.attention.invariant import InvariantDecode, InvariantExtend

    named = next((one for one in asked if one.name != "auto"), asked[0])
    why = InvariantDecode.refuses(shape, device)
    if named.name != "auto":
        why = why or f"{named.name} attention depends on the batch"
    if why is not None:
        raise ConfigError(
            f"--deterministic cannot be honoured: {why}; use "
            f"--{named.setting.replace('_', '-')} auto, or leave it out",
            param="deterministic",
        )
    if (slow := ChunkedDecode.refuses(shape, device)) is None:
        kinds = ChunkedDecode, ChunkedExtend, ChunkedPrompts
        return Attention(*(named.make(kind, shape, device) for kind in kinds)), [
            "deterministic: results do not depend on the batch"
        ]
    decode, extend = (named.make(kind, shape, device) for kind in (InvariantDecode, InvariantExtend))
    return Attention(decode, extend, None), [
        "deterministic: results do not depend on the batch; decode steps take 1.5 to 2.2 times as long",
        f"chunked attention not used: {slow}",
    ]


def _first(
    kinds: Mapping[str, BackendType[B]], asked: Preference, shape: AttentionShape, device: Device
) -> tuple[B, list[str]]:
    """The first of ``kinds`` that serves ``shape``, and why those before do not; or the one that is asked
    for."""
    notes: list[str] = []
    for name, kind in kinds.items():
        if asked.name in kinds and asked.name != name:
            continue
        why = kind.refuses(shape, device)
        if why is None:
            try:
                return asked.make(kind, shape, device), notes
            except Unusable as error:
                why = str(error)
        if asked.name == name:
            raise asked.refused(why)
        notes.append(f"{name} {asked.phase} not used: {why}")
    raise asked.refused("; ".join(notes))


class Portable(NamedTuple):
    """Kernels for every NVIDIA GPU."""

    decode: BackendType[Decode]
    extend: BackendType[Extend]
    prompts: Callable[[AttentionShape, Device], Prompts]


def _triton(shape: AttentionShape) -> Portable:
    if shape.latent:
        from sgla.attention.latent_ops import LatentDecode, LatentExtend, LatentPrompts

        return Portable(LatentDecode, LatentExtend, LatentPrompts)
    from sgla.attention.triton_ops import TritonDecode, TritonExtend, TritonPrompts

    return Portable(TritonDecode, TritonExtend, TritonPrompts)


def _decode(asked: Preference, shape: AttentionShape, device: Device) -> tuple[Decode, list[str]]:
    from sgla.attention.flex_ops import FlexDecode
    from sgla.attention.latent_ops import NativeLatentDecode
    from sgla.attention.native import NativeDecode
    from sgla.attention.torch_ops import TorchDecode

    notes = []
    if asked.name == "flashinfer":
        if asked.setting != "attention_backend":
            raise asked.refused(NO_DECODE)
        notes = [f"flashinfer is for prefill alone: {NO_DECODE}"]
    kinds: dict[str, BackendType[Decode]] = {
        "native": NativeLatentDecode if shape.latent else NativeDecode,
        "triton": _triton(shape).decode,
        "torch": TorchDecode,
        "flex": FlexDecode,
    }
    decode, why = _first(kinds, asked, shape, device)
    return decode, notes + why


def _extend(asked: Preference, shape: AttentionShape, device: Device) -> tuple[Extend, list[str]]:
    from sgla.attention.flashinfer_ops import FlashInferExtend
    from sgla.attention.flex_ops import FlexExtend
    from sgla.attention.hybrid import WholeOrPaged
    from sgla.attention.native import NativeExtend, PagedExtend
    from sgla.attention.torch_ops import TorchExtend

    kinds: dict[str, BackendType[Extend]] = {
        "native": NativeExtend,
        "flashinfer": FlashInferExtend,
        "triton": _triton(shape).extend,
        "torch": TorchExtend,
        "flex": FlexExtend,
    }
    extend, why = _first(kinds, asked, shape, device)
    if shape.kv_dtype and not extend.narrow:
        if asked.name != "auto":
            raise asked.refused(NARROW)
        paged = _triton(shape).extend if PagedExtend.refuses(shape, device) else PagedExtend
        extend = WholeOrPaged(extend, asked.make(paged, shape, device))
    return extend, why


def _prompts(asked: Preference, shape: AttentionShape, device: Device) -> tuple[Prompts, list[str]]:
    from sgla.attention.native import NativePrompts

    if asked.name in ("torch", "flex", "triton"):
        return asked.make(_triton(shape).prompts, shape, device), []
    why = NativePrompts.refuses(shape, device)
    if why is None:
        return asked.make(NativePrompts, shape, device), []
    return asked.make(_triton(shape).prompts, shape, device), [
        f"native attention of prompts in graphs not used: {why}"
    ]

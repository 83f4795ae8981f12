"""Attention backends behind a narrow interface, and the choice among them."""

from __future__ import annotations

from typing import NamedTuple

from sgla.attention.base import Attention, Decode, DeviceBatch, Extend, ExtendRows, Prompts, Shape
from sgla.device import Device
from sgla.errors import ConfigError
from sgla.kernels.cuda.decode_attention import TILE
from sgla.kernels.device import this_device

__all__ = ["TILE", "Attention", "DeviceBatch", "ExtendRows", "Shape", "choose"]

NARROW = "it reads no 8-bit KV cache"
NO_DECODE = (
    "its decode is planned on the host for each step, and decode steps "
    "are graphs that read lengths on the device"
)


class Asked(NamedTuple):
    """A backend by name, for ``decode`` or ``prefill``, and the setting that names it."""

    name: str
    phase: str
    setting: str

    @classmethod
    def of(cls, phase: str, both: str, one: str | None) -> Asked:
        return cls(one or both, phase, f"{phase}_attention_backend" if one else "attention_backend")

    def refused(self, why: str) -> ConfigError:
        flag = "--" + self.setting.replace("_", "-")
        return ConfigError(
            f"{flag} {self.name} cannot be used for {self.phase}: {why}; "
            f"--{self.phase}-attention-backend auto picks one that can",
            param=self.setting,
        )


def choose(
    name: str,
    shape: Shape,
    scale: float,
    device: Device | None = None,
    *,
    decode: str | None = None,
    prefill: str | None = None,
) -> tuple[Attention, list[str]]:
    """The backend called ``name`` (``auto``: the fastest that takes ``shape``), and what was decided why.
    ``device``: this process's if None; ``decode`` and ``prefill``: another name for one of them.

    Raises ConfigError with the reason if one of the names cannot run this model.
    """
    device = device or this_device()
    asked = Asked.of("decode", name, decode), Asked.of("prefill", name, prefill)
    if shape.deterministic:
        return _deterministic(asked, shape, device), [
            "deterministic: results do not depend on the batch; decode steps take 1.5 to 2.2 times as long"
        ]
    decoder, no_decode = _decode(asked[0], shape, device)
    extend, no_extend = _extend(asked[1], shape, scale, device)
    prompts, no_prompts = _prompts(asked[1], shape, device)
    backend = Attention(decoder, extend, prompts, all(one.name != "torch" for one in asked))
    wanted = ", as asked" if {one.name for one in asked} != {"auto"} else ""
    slow = "" if backend.captures else ", no graphs"
    return backend, [f"attention: {backend.name}{slow}{wanted}", *no_decode, *no_extend, *no_prompts]


def _deterministic(asked: tuple[Asked, Asked], shape: Shape, device: Device) -> Attention:
    from sgla.attention import invariant
    from sgla.attention.triton_ops import TritonPrompts

    named = next((one for one in asked if one.name != "auto"), asked[0])
    why = invariant.refuses(shape)
    if named.name != "auto":
        why = why or f"{named.name} attention depends on the batch"
    if why is not None:
        raise ConfigError(
            f"--deterministic cannot be honoured: {why}; use "
            f"--{named.setting.replace('_', '-')} auto, or leave it out",
            param="deterministic",
        )
    return Attention(
        invariant.InvariantDecode(shape), invariant.InvariantExtend(shape), TritonPrompts(shape, device)
    )


def _decode(asked: Asked, shape: Shape, device: Device) -> tuple[Decode, list[str]]:
    from sgla.attention.native import NativeDecode
    from sgla.attention.torch_ops import TorchDecode
    from sgla.attention.triton_ops import TritonDecode

    if asked.name == "torch":
        return TorchDecode(), []
    if asked.name == "triton":
        return TritonDecode(shape, device), []
    notes = []
    if asked.name == "flashinfer":
        if asked.setting != "attention_backend":
            raise asked.refused(NO_DECODE)
        notes = [f"flashinfer is for prefill alone: {NO_DECODE}"]
    why = NativeDecode.refuses(shape, device)
    if why is None:
        return NativeDecode(shape, device), notes
    if asked.name == "native":
        raise asked.refused(why)
    return TritonDecode(shape, device), [*notes, f"native decode not used: {why}"]


def _extend(asked: Asked, shape: Shape, scale: float, device: Device) -> tuple[Extend, list[str]]:
    from sgla.attention.flashinfer_ops import FlashInferExtend
    from sgla.attention.hybrid import WholeOrPaged
    from sgla.attention.native import NativeExtend
    from sgla.attention.torch_ops import TorchExtend
    from sgla.attention.triton_ops import TritonExtend

    if asked.name == "torch":
        return TorchExtend(), []
    if asked.name == "triton":
        return TritonExtend(shape, device), []
    if asked.name != "auto" and shape.fp8_kv:
        raise asked.refused(NARROW)
    extend: Extend | None = None
    notes = []
    if asked.name != "flashinfer":
        why = NativeExtend.refuses(shape, device)
        extend = NativeExtend(shape) if why is None else None
        if why is not None and asked.name == "native":
            raise asked.refused(why)
        notes += [f"native prefill not used: {why}"] if why else []
    if extend is None:
        found = FlashInferExtend.find(shape, scale)
        if isinstance(found, FlashInferExtend):
            extend = found
        elif asked.name == "flashinfer":
            raise asked.refused(found)
        else:
            notes.append(f"flashinfer not used: {found}")
    if extend is None:
        return TritonExtend(shape, device), notes
    return WholeOrPaged(extend, TritonExtend(shape, device)) if shape.fp8_kv else extend, notes


def _prompts(asked: Asked, shape: Shape, device: Device) -> tuple[Prompts, list[str]]:
    from sgla.attention.native import NativePrompts
    from sgla.attention.triton_ops import TritonPrompts

    if asked.name in ("torch", "triton"):
        return TritonPrompts(shape, device), []
    why = NativePrompts.refuses(shape, device)
    if why is None:
        return NativePrompts(shape), []
    return TritonPrompts(shape, device), [f"native attention of prompts in graphs not used: {why}"]

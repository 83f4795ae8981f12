"""The storages of matrices by name. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """``storage``: module and class of its ``Weight``. ``bytes``: of one weight with its share of the
    constants. ``devices``: where a checkpoint's layers are kept so; elsewhere they are floating-point.
    ``group``: input channels of which ranks have all or none."""

    name: str
    storage: str
    bytes: float
    devices: tuple[str, ...] = ("cpu", "cuda")
    group: int = 32


FORMATS: dict[str, Format] = {}
# Storages that have the values of others without loss, the smaller ones first.
HOLDS: dict[str, set[str]] = {
    "int4": {"int4", "q4_0"},
    "int4m32": {"int4m32", "int4g32"},
    "int8g32": {"int8g32", "int4g32"},
    "int8m32": {"int8m32", "int8g32", "int4m32", "int4g32"},
    "q5_0": {"q5_0", "q4_0", "e2m1"},
    "int5": {"int5", "int4", "q5_0", "q4_0", "e2m1"},
    "q8_0": {"q8_0", "q5_0", "q4_0", "iq4_nl", "e2m1"},
    "int8": {"int8", "int5", "int4", "q8_0", "q5_0", "q4_0", "iq4_nl", "e2m1"},
    "fp8g128": {"fp8g128", "fp8"},
}

ON_CPU = {"int8": "int8", "int4": "int4", "mxfp4": "e2m1"}  # storages of ``--quantization`` there
ON_GPU = {"int4": "int4g64", "int8": "int8g128", "mxfp4": "mxfp4"}  # and there


def register(format: Format) -> None:
    """Add a storage, which may be a class of any module."""
    FORMATS[format.name] = format


def common(kinds: set[str], plain: str) -> str:
    """The smallest storage that has the values of all ``kinds``; ``plain``, of floating-point numbers, if no
    other has."""
    if len(kinds) == 1:
        return next(iter(kinds))
    return next((kind for kind, held in HOLDS.items() if kinds <= held), plain)


def of_groups(bits: int, group: int, whole: bool = True) -> str:
    """The storage of GPUs for numbers of so many bits, of which ``group`` channels have constants in common
    (0: all); ``whole``: their zeros are whole numbers. Empty: none has such groups."""
    size = next((size for size in (128, 64, 32) if group % size == 0), 0)
    return f"int{4 if bits <= 4 else 8}{'g' if whole else 'm'}{size}" if size else ""


def devices(kinds: Iterable[str]) -> tuple[str, ...]:
    """Where any of these storages is kept."""
    return tuple(sorted({device for kind in kinds if kind for device in FORMATS[kind].devices}))


register(Format("f32", "sgla.quant.plain:F32", 4.0))
register(Format("bf16", "sgla.quant.plain:BF16", 2.0))
register(Format("fp8", "sgla.quant.channels:E4M3", 1.0))
register(Format("fp8g128", "sgla.quant.channels:E4M3Groups", 1.03125, group=128))
register(Format("mxfp8", "sgla.quant.channels:MXFP8", 1.03125))
register(Format("mxfp4", "sgla.quant.e2m1:E2M1", 0.53125, ("cuda",)))
register(Format("nf4", "sgla.quant.coded:NF4", 0.5625, group=64))
register(Format("fp4", "sgla.quant.coded:FP4", 0.5625, group=64))
register(Format("nvfp4", "sgla.quant.e2m1:NVFP4", 0.5625))
for _bits in (4, 8):
    for _of in "gm":
        for _group in (32, 64, 128):
            _kind = f"int{_bits}{_of}{_group}"
            _storage = f"sgla.quant.integers:{_kind.title()}"
            register(Format(_kind, _storage, _bits / 8 + 4 / _group, ("cuda",), _group))
register(Format("int8", "sgla.quant.groups:Int8", 1.125, ("cpu",)))
register(Format("int4", "sgla.quant.groups:Int4", 0.625, ("cpu",)))
register(Format("int5", "sgla.quant.groups:Int5", 0.75, ("cpu",)))
register(Format("iq4_nl", "sgla.quant.groups:IQ4_NL", 0.5625, ("cpu",)))
register(Format("e2m1", "sgla.quant.groups:E2M1", 0.5625, ("cpu",)))
register(Format("q8_0", "sgla.quant.groups:Q8_0", 1.0625, ("cpu",)))
register(Format("q5_0", "sgla.quant.groups:Q5_0", 0.6875, ("cpu",)))
register(Format("q4_0", "sgla.quant.groups:Q4_0", 0.5625, ("cpu",)))

"""The values of a GGUF file's tensors. Quantized blocks are decoded by the ``gguf`` package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Quants = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of the file under its HF name, decoded on demand.

    ``blocks`` uint8 ``[n, bytes of a row]``:
    memory-mapped, rows possibly reordered; ``type_name`` as ``Q4_1``. ``columns``: which of the file's each
    column is, those of a group of 32 together. ``factor``: of a matrix in NVFP4, what all is multiplied by.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    blocks: NDArray[np.uint8]
    shift: float = 0.0
    columns: NDArray[np.int64] | None = None
    factor: float = 1.0

    def numpy(self, rows: range | None = None) -> NDArray[np.float32]:
        """The values as a new float32 array: ``rows`` of the first dim, or all."""
        values = self._decode(rows or range(self.shape[0])).astype(np.float32, copy=self.type_name == "F32")
        if self.shift:
            values += np.float32(self.shift)
        if self.factor != 1.0:
            values *= np.float32(self.factor)
        return values

    def _decode(self, rows: range) -> NDArray[np.float32]:
        """By the ``gguf`` package, except for three simple types,
        at which this is two to three times as fast."""
        if len(self.shape) == 1:
            return self._dequantize(self.blocks)[0, rows.start : rows.stop]
        if self.type_name in _SIMPLE and (quants := self.quants(rows)) is not None:
            return _affine(*quants)
        values = self._dequantize(self.blocks[rows.start : rows.stop])
        return values if self.columns is None else values[:, self.columns]

    def _dequantize(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        return dequantize(blocks, GGMLQuantizationType[self.type_name])

    @property
    def bits(self) -> int | None:
        """Of the quants of a matrix in groups of 32 with one scale and minimum; None for other types."""
        return {"Q4_K": 4, "Q5_K": 5, "MXFP4": 5, "IQ4_NL": 8, "IQ4_XS": 8}.get(self.type_name) or getattr(
            _SIMPLE.get(self.type_name), "bits", None
        )

    @property
    def kept(self) -> str | None:
        """The storage that has these values at the least loss for its bytes;
        None of floating-point numbers."""
        return storage_of(self.type_name) or None

    @property
    def symmetric(self) -> bool:
        """Whether the minimum is half of the range of ``bits`` below 0."""
        return self.type_name in _CODED or getattr(_SIMPLE.get(self.type_name), "symmetric", False)

    def quants(self, rows: range) -> Quants | None:
        """Quants from 0 on ``[n, k]``, scales and minima ``[n, k / 32]`` of a matrix that has ``bits``; None
        of others. Scales and minima of Q4_K, Q5_K and IQ4_XS are products, which are rounded to float16."""
        found = self._quants(rows)
        if found is None or self.columns is None:
            return found
        quants, *constants = found
        scale, minimum = (values[:, self.columns[::32] // 32] for values in constants)
        return quants[:, self.columns], scale, minimum

    def numbers(self, rows: range) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Of a matrix in NVFP4: codes of four bits ``[n, k]``, and a scale of each 16, e4m3 without a sign
        ``[n, k / 16]``."""
        blocks = self.blocks[rows.start : rows.stop].reshape(len(rows), -1, 36)
        scale = blocks[..., :4].reshape(len(rows), -1) & np.uint8(127)
        pairs = blocks[..., 4:].reshape(len(rows), -1, 8)
        codes = np.concatenate([pairs & np.uint8(15), pairs >> 4], axis=-1).reshape(len(rows), -1)
        scale[scale == 127] = 0  # no number, which counts as none
        if self.columns is not None:
            codes, scale = codes[:, self.columns], scale[:, self.columns[::16] // 16]
        return codes, scale

    def _quants(self, rows: range) -> Quants | None:
        if self.type_name in ("IQ4_NL", "IQ4_XS"):
            return self._listed(rows)
        if self.type_name in ("Q4_K", "Q5_K"):
            return self._nested_quants(rows)
        if self.type_name == "MXFP4":
            return self._small_floats(rows)
        if self.type_name not in _SIMPLE:
            return None
        kind = _SIMPLE[self.type_name]
        blocks = self.blocks[rows.start : rows.stop].view(kind.record)
        stored = blocks["quants"]
        if kind.bits == 8:
            quants = stored ^ np.uint8(128)  # from -128..127 to 0..255
        else:
            quants = np.concatenate([stored & 15, stored >> 4], axis=-1)
        if kind.bits == 5:
            quants |= np.unpackbits(blocks["high"], axis=-1, bitorder="little") << 4
        scale = blocks["scale"].copy()
        minimum = scale * np.float16(-(1 << kind.bits - 1)) if kind.symmetric else blocks["minimum"].copy()
        return quants.reshape(len(blocks), -1), scale, minimum

    def _small_floats(self, rows: range) -> Quants:
        """Numbers of four bits with one exponent, which are whole ones of half of its power of two. Powers
        that float16 has not become 0 or infinite."""
        blocks = self.blocks[rows.start : rows.stop].reshape(len(rows), -1, 17)
        scale = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128).astype(np.float16)
        codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
        return _MXFP4[codes].reshape(len(rows), -1), scale, scale * np.float16(-16)

    def _listed(self, rows: range) -> Quants:
        """Codes of four bits with a scale, or with a 6-bit multiple of the block's."""
        blocks = self.blocks[rows.start : rows.stop]
        if self.type_name == "IQ4_NL":
            blocks = blocks.reshape(-1, 1, 18)
            scale, codes = blocks[..., :2].copy().view(np.float16), blocks[..., 2:]
        else:
            blocks = blocks.reshape(-1, 136)
            steps = blocks[:, :2].copy().view(np.float16).astype(np.float32)
            upper = blocks[:, 2:4].copy().view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
            lower = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], -1).reshape(-1, 8)
            scale = (steps * ((lower | upper << 4).astype(np.float32) - 32)).astype(np.float16)
            codes = blocks[:, 8:].reshape(-1, 8, 16)
        quants = _IQ4_NL[np.concatenate([codes & 15, codes >> 4], axis=-1)]
        scale = scale.reshape(len(rows), -1)
        return quants.reshape(len(rows), -1), scale, scale * np.float16(-128)

    def _nested_quants(self, rows: range) -> Quants:
        """Blocks of eight groups:
        two float16 numbers, 6-bit multiples of them for each group, the fifth bits, four bits."""
        from gguf.quants import Q4_K

        size = 144 if self.type_name == "Q4_K" else 176
        blocks = self.blocks[rows.start : rows.stop].reshape(-1, size)
        steps = blocks[:, :4].copy().view(np.float16).astype(np.float32)
        scales, minima = Q4_K.get_scale_min(blocks[:, 4:16])
        low = blocks[:, -128:].reshape(-1, 4, 1, 32)
        quants = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 8, 32)
        if self.type_name == "Q5_K":
            high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
            quants |= (high & 1) << 4
        count = len(rows)
        scale, minimum = steps[:, :1] * scales, -steps[:, 1:] * minima
        return (
            quants.reshape(count, -1),
            scale.astype(np.float16).reshape(count, -1),
            minimum.astype(np.float16).reshape(count, -1),
        )


def storage_of(name: str) -> str:
    """Of a type of tensors: the storage, "" of floating-point numbers."""
    return "" if name in _FLOATS else _KEPT.get(name, "int8")


class _Simple(NamedTuple):
    """A block of 32 quants with one scale, and one minimum unless it is half of the range below zero."""

    bits: int
    symmetric: bool

    @property
    def record(self) -> np.dtype[Any]:
        fields: list[Any] = [("scale", "<f2")]
        fields += [] if self.symmetric else [("minimum", "<f2")]
        fields += [("high", "u1", 4)] if self.bits == 5 else []
        return np.dtype([*fields, ("quants", "u1", 32 if self.bits == 8 else 16)])


# The storage (quant/formats.py) in which a CPU keeps quantized matrices; types that are not here: int8.
_KEPT = {
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_nl",
    "MXFP4": "e2m1",
    "NVFP4": "nvfp4",
    "Q4_0": "q4_0",
    "Q4_1": "int4",
    "Q4_K": "int4",
    "Q5_0": "q5_0",
    "Q5_1": "int5",
    "Q5_K": "int5",
    "Q6_K": "q8_0",
    "Q8_0": "q8_0",
}
_HALF = (0, 1, 2, 3, 4, 6, 8, 12)
_MXFP4 = np.array([16 + x for x in _HALF] + [16 - x for x in _HALF], np.uint8)
_IQ4_NL = np.array([1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241], np.uint8)
_CODED = ("MXFP4", "IQ4_NL", "IQ4_XS")
_FLOATS = ("F32", "F16", "BF16", "F64")

_SIMPLE = {
    "Q4_0": _Simple(4, True),
    "Q4_1": _Simple(4, False),
    "Q5_0": _Simple(5, True),
    "Q5_1": _Simple(5, False),
    "Q8_0": _Simple(8, True),
}


def _affine(
    quants: NDArray[np.uint8], scale: NDArray[np.float16], minimum: NDArray[np.float16]
) -> NDArray[np.float32]:
    """``quants * scale + minimum`` in groups of 32."""
    values = quants.reshape(*scale.shape, 32).astype(np.float32)
    values *= scale.astype(np.float32)[..., None]
    values += minimum.astype(np.float32)[..., None]
    return values.reshape(quants.shape)

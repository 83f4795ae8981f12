"""Attention backends behind a narrow interface, and the choice among them."""

from __future__ import annotations

from sgla.attention.base import Attention, DeviceBatch, Extend, ExtendRows, Prompts, Shape
from sgla.errors import ConfigError
from sgla.kernels.cuda.decode_attention import TILE

__all__ = ["BACKENDS", "TILE", "Attention", "DeviceBatch", "ExtendRows", "Shape", "choose"]

BACKENDS = ("auto", "torch", "triton", "flashinfer")


def choose(name: str, shape: Shape, scale: float) -> tuple[Attention, list[str]]:
    """The backend called ``name`` (``auto``: the fastest that takes ``shape``), and what was decided why.

    Raises ConfigError with the reason if ``name`` cannot run this model.
    """
    from sgla.attention import invariant
    from sgla.attention.flashinfer_ops import FlashInferExtend
    from sgla.attention.hybrid import WholeOrPaged
    from sgla.attention.native import NativeDecode, NativeExtend, NativePrompts
    from sgla.attention.torch_ops import TorchDecode, TorchExtend
    from sgla.attention.triton_ops import TritonDecode, TritonExtend, TritonPrompts

    if shape.deterministic:
        why = invariant.refuses(shape) or (
            None if name == "auto" else f"{name} attention depends on the batch"
        )
        if why is not None:
            raise ConfigError(
                f"--deterministic cannot be honoured: {why}; use --attention-backend auto, or leave it out",
                param="deterministic",
            )
        invariants = invariant.InvariantDecode(shape), invariant.InvariantExtend(shape)
        return Attention(*invariants, TritonPrompts()), [
            "attention and linear layers: batch-invariant kernels, as asked"
        ]
    if name == "torch":
        backend = Attention(TorchDecode(), TorchExtend(), TritonPrompts())
        return backend, ["attention: torch operations, no graphs, as asked"]
    no_flash, no_native = FlashInferExtend.refuses(shape), NativeDecode.refuses(shape)
    if name == "triton":
        return Attention(TritonDecode(shape), TritonExtend(), TritonPrompts()), [
            "attention: triton, as asked"
        ]
    if name == "flashinfer" and shape.fp8_kv:
        no_flash = no_flash or "it reads no 8-bit KV cache here"
    if name == "flashinfer" and no_flash:
        raise ConfigError(
            f"--attention-backend flashinfer cannot be used: {no_flash}; auto picks one that can",
            param="attention_backend",
        )
    decode = TritonDecode(shape) if no_native else NativeDecode(shape)
    no_extend, no_prompts = NativeExtend.refuses(shape), NativePrompts.refuses(shape)
    extend: Extend = TritonExtend()
    if name == "auto" and not no_extend:
        extend = NativeExtend(shape)
    elif not no_flash:
        extend = FlashInferExtend(shape, scale)
    if shape.fp8_kv and not isinstance(extend, TritonExtend):
        extend = WholeOrPaged(extend, TritonExtend())
    prompts: Prompts = TritonPrompts() if no_prompts else NativePrompts(shape)
    backend = Attention(decode, extend, prompts)
    reasons = [
        f"{what} not used: {why}"
        for what, why in (
            ("native prefill", no_extend),
            ("flashinfer", no_extend and no_flash),
            ("native decode", no_native),
            ("native prompts", no_prompts),
        )
        if why
    ]
    return backend, [f"attention: {backend.name}", *reasons]

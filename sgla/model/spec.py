"""The shape of a decoder; ``read.py`` makes it of a configuration. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sgla.layers.spec import (
    Activation,
    AltUp,
    AttentionSpec,
    HyperConnections,
    MoESpec,
    PerLayerInputs,
    QKNorm,
)
from sgla.quant.method import Method


@dataclass(frozen=True)
class ModelSpec:
    """Numbers of a decoder. ``attention``: of each layer."""

    architecture: str
    hidden: int
    intermediate: int
    attention: tuple[AttentionSpec, ...]
    vocab: int
    eps: float
    activation: Activation
    context_len: int
    final_softcap: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool  # the output layer is the embedding
    dtype: str  # of the checkpoint: float32 | bfloat16 | float16
    qk_norm: QKNorm = ""
    learned: int = 0  # positions that have vectors
    parallel: bool = False  # attention and MLP stand side by side, where a family may have either
    one_norm: bool = False  # which both read
    qkv_clip: float = 0.0  # the most that q, k and v are made of; 0: no bound
    head_bias: bool = False  # of the output layer
    late_norm: bool = False  # behind the rotation
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True  # of layer norms
    norm_offset: float = 0.0  # what is added to the stored weights of norms
    gated: bool = True  # MLPs
    interleaved: bool = False  # rotation of dims 2i and 2i + 1 together
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    moe: MoESpec | None = None
    inner: tuple[int, ...] = ()  # widths of the layers' MLPs, where they differ
    per_layer: PerLayerInputs | None = None
    canvas: int = 0  # tokens of a block that come together, out of noise; 0: tokens come one by one
    altup: AltUp | None = None
    hyper: HyperConnections | None = None
    pairs: bool = False  # of layers, each of which is one in the file and has one mixture
    norm_gates: int = 0  # inner values of what makes gates of norms; 0: there are none
    heard: int = 0  # places of what an encoder makes of a sound, to which each layer attends; 0: none does
    predictors: int = 0  # layers behind the last, which guess further tokens; they are left out
    method: Method | None = field(default=None, compare=False)  # in which the checkpoint is quantized
    stage: range | None = None  # layers that a stage of a pipeline has; None: there are no stages
    notes: tuple[str, ...] = ()  # about the file

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def held(self) -> range:
        """The layers that a rank has a part of."""
        return range(self.layers) if self.stage is None else self.stage

    @property
    def attention_held(self) -> tuple[AttentionSpec, ...]:
        """``attention`` of these."""
        return self.attention[self.held.start : self.held.stop]

    @property
    def keepers(self) -> tuple[AttentionSpec, ...]:
        """The layers of which a rank keeps something, in its order: those ``held``, and behind these, once
        more, those that keep something beside."""
        held = self.attention_held
        return *held, *(layer for layer in held if layer.beside())

    @property
    def first(self) -> bool:
        """A rank has the embedding."""
        return self.held.start == 0

    @property
    def last(self) -> bool:
        """A rank has the last norm and the output layer."""
        return self.held.stop == self.layers

    @property
    def quantization(self) -> str | None:
        """The checkpoint's method, if GPUs keep what it holds."""
        return self.method.name if self.method is not None and "cuda" in self.method.devices else None

    def quantized(self, asked: str | None, device: str) -> str | None:
        """What linear layers are kept in on this kind of device: as ``asked``, else as GPUs keep what the
        checkpoint has; None: in floating point."""
        return asked or (self.quantization if device == "cuda" else None)

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding windows of the layers; 0: full attention."""
        return tuple(layer.window for layer in self.attention)

    @property
    def recurrent(self) -> bool:
        """Some layers keep states."""
        return any(layer.unit(int) for layer in self.attention)

    def long_ropes(self, context_len: int) -> list[bool]:
        """Of each layer, whether its positions are rotated otherwise with a context of this length."""
        return [layer.rope is not None and layer.rope.long(context_len) for layer in self.attention]

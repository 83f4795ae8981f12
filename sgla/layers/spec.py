"""What layers are told of their shapes. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from sgla.kernels.routing import Clamped, Routing

Activation = Literal["silu", "gelu_tanh", "gelu", "relu", "relu2", "xielu"]
# Of q and k: RMSNorm of each head, with one vector of weights or (unit) without, or of all heads as one;
# heads: LayerNorm of each head, with weights of its own.
QKNorm = Literal["", "head", "width", "unit", "heads"]


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding:
    ``theta`` base, ``dim`` rotated dims of each head, ``kind`` and numbers of the scaling."""

    theta: float
    dim: int
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict, hash=False)

    def long(self, positions: int) -> bool:
        """Whether longrope takes its long factors, which are for more ``positions`` than were trained."""
        return self.kind == "longrope" and positions > self.scaling["original_max_position_embeddings"]


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: ``experts`` MLPs of the width ``intermediate``, to some of which ``routing`` sends
    each token. ``layers``: those that are mixtures; the others have one MLP of the model's ``intermediate``.
    A family has a function that reads it (``Family.mixture``)."""

    experts: int
    intermediate: int
    routing: Routing
    layers: frozenset[int]
    clamped: Clamped | None = None  # in place of the model's activation
    bias: bool = False  # of the experts and the router
    correction: bool = False  # a bias of the scores, which decides who is chosen and not with what weight
    crossed: bool = False  # a file has gpt-oss' stacks of experts
    halves: bool = False  # of those stacks: gate lies before up, and not in turn with it
    shared: int = 0  # width of an MLP that every token goes through, too; 0: there is none
    shared_gate: bool = False  # its output is multiplied by the sigmoid of a linear layer with one output
    idle: int = 0  # further experts, which hand on what they are given
    hashed: frozenset[int] = frozenset()  # layers in which a table says which experts a token's id has
    latent: int = 0  # width of what experts read and make, if a linear layer before and one behind change it


class PerLayerInputs(NamedTuple):
    """Of a token each layer is given ``width`` values of its own, from an embedding of ``vocab`` tokens;
    those that stand for parts of pictures have the values of the token ``pad``."""

    width: int
    vocab: int
    pad: int = 0


class AltUp(NamedTuple):
    """The residual stream is ``inputs`` wide (arXiv 2301.13310); layers read the ``active`` one, which is
    ``scaled`` for what comes last in them. ``sparsity``: of each layer, the share of its MLP's inner values
    that are none."""

    inputs: int
    active: int
    scaled: bool
    sparsity: tuple[float, ...]


class HyperConnections(NamedTuple):
    """The residual stream is ``streams`` wide (mHC, arXiv 2512.24880). The matrix by which a layer mixes them
    becomes doubly stochastic in so many ``iterations``, 0: it does not mix them. ``eps`` is added to what is
    divided by, and to what is read; ``magnitude``: the most that a stream gets of what a layer makes."""

    streams: int
    iterations: int
    eps: float
    magnitude: float = 2.0


class StateTensor(NamedTuple):
    """A tensor that a layer keeps of a token, by the name that ``KVLayer`` has for it, or in a unit of its
    state, by that of ``StateLayer``. ``dtype``: where it is not the KV cache's. ``runs``: of what the rows of
    a unit are, one run behind the other: heads of all ranks, which split them, and rows of each."""

    name: str
    shape: tuple[int, ...]  # of a token or a unit
    dtype: str = ""
    runs: tuple[tuple[int, int], ...] = ()


class Growth(NamedTuple):
    """A query is multiplied by ``1 + beta * log(1 + whole)``, where ``whole`` is how often ``length`` tokens
    stand before its position, and ``more``."""

    beta: float
    length: int
    more: int = 0


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer: ``heads`` of queries, ``kv_heads`` of keys and values, each of ``head_dim``
    values. ``rope`` None: positions are not rotated; ``window`` 0: a token reads all before it. ``sinks``:
    each head has a score that takes its share of the softmax and has no value. A family whose layers are
    others has a subclass. ``growth``: of queries. ``chunked``: a token reads those of its own chunk, which
    are as long as the window and lie behind each other. ``values``: of a head of v, where they are not
    ``head_dim``, and what these are multiplied by (``value_scale``). ``slopes``: of each head, by what its
    scores rise from one place to the next (ALiBi)."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: RopeSpec | None
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    growth: Growth | None = None
    chunked: bool = False
    reads: int | None = None  # the layer whose keys and values it reads, with the same window; None: its own
    values: int = 0
    value_scale: float = 1.0
    slopes: tuple[float, ...] = ()

    @property
    def v_dim(self) -> int:
        """Values of a head of v."""
        return self.values or self.head_dim

    @property
    def whole_until(self) -> int:
        """Tokens of a context up to which each reads all before it, as ops.attention does, where that is not
        always so; else 0."""
        return 0

    @property
    def latent(self) -> bool:
        """v is the beginning of k, and not kept beside it."""
        return False

    def kept(self, kv_heads: int) -> tuple[StateTensor, ...]:
        """What a rank with so many KV heads keeps of a token."""
        return StateTensor("k", (kv_heads, self.head_dim)), StateTensor("v", (kv_heads, self.v_dim))

    def beside(self) -> tuple[StateTensor, ...]:
        """What it keeps of every token, where ``kept`` is of those in its window."""
        return ()

    @property
    def together(self) -> int:
        """How many tokens share the places of what is kept ``beside``: as many, or several times as many, lie
        in a page."""
        return 1

    def unit(self, own: Callable[[int], int]) -> tuple[StateTensor, ...]:
        """What a rank keeps of all tokens together, in a layer that does that instead of keeping each.
        ``own``: how many of so many heads it has."""
        return ()

    def weights(self, hidden: int) -> int:
        """Values of its matrices."""
        own = 0 if self.reads is not None else self.kv_heads
        return hidden * (self.head_dim + self.v_dim) * (self.heads + own)


@dataclass(frozen=True)
class StateSpec(AttentionSpec):
    """A layer that keeps one state of all tokens, instead of the tokens; each kind has a subclass with its
    shapes. It has nothing that belongs to attention."""

    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    scale: float = 1.0
    rope: RopeSpec | None = None

    def kept(self, kv_heads: int) -> tuple[StateTensor, ...]:
        return ()

"""What an entry of the table of families may say. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from sgla.layers.spec import QKNorm
from sgla.model.gguf_words import Gguf
from sgla.model.windows import Unrotated, Windows, everywhere, none

QK_NORM = ("use_qk_norm", "qk_layernorm")  # keys that say whether a model has ``Family.qk_norm``


class PredictorNames(NamedTuple):
    """Names of the tensors of a layer that guesses further tokens; ``{n}``: how many layers stand before.
    ``counted``: files say how many there are; ``windows``: it is like a layer with a window, without experts,
    and else like the last layer that keeps tokens; ``hidden_first``: the projection reads the hidden state
    before the embedding."""

    token_norm: str
    hidden_norm: str
    join: str
    block: str
    norm: str
    counted: bool = True
    windows: bool = False
    hidden_first: bool = False

    def behind(self, layers: int) -> PredictorNames:
        """With the number of ``layers`` filled in."""
        given = self._asdict().items()
        names: dict[str, Any] = {name: x.format(n=layers) for name, x in given if isinstance(x, str)}
        return self._replace(**names)


@dataclass(frozen=True)
class Family:
    """``types``: what ``model_type`` may say. ``defaults``: the keys that HF's class reads, with what it
    fills in. ``fixed``: keys it does not read, or reads in vain, each with the value that describes what the
    class does. ``honoured``: those of ``fixed`` that it does read, so that its module computes what is not
    computed here. ``same``: keys it does not read, each with the one that says the same.

    ``words``: values in files that say the same as another, or that the class takes for it.

    ``nulls``: keys that may be null, beside ``NULLS``; with a null in any other, HF's class fails, or
    computes what is not computed here.

    ``model``: module and class that run it; an encoder has none. ``pooled``: whether there are architectures
    that make vectors of it. ``attention``: module and function (without torch) that reads the shapes of the
    layers, ``(reader, layers, positions) -> tuple[AttentionSpec, ...]``, where other keys say them than most
    families have; ``completed``: one ``(reader, spec) -> ModelSpec`` that adds to the spec what few families
    have. ``predictor``: a layer in its files that guesses further tokens. ``outer``: keys of files that have
    the language model's own in ``text_config``; ``texts``: by the ``model_type`` in there, architectures that
    it may be instead: with the same class, or of the same ``outer``. The others are values of ``ModelSpec``
    that no key says."""

    types: tuple[str, ...]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, str] = field(default_factory=dict)
    honoured: tuple[str, ...] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    model: str = ""
    attention: str = ""
    completed: str = ""
    outer: Family | None = None
    texts: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()  # keys of an ``outer`` that the language model reads, too
    either_ties: bool = False  # of an ``outer``: its embeddings are tied, or those of its language model
    of_checkpoints: bool = False  # transformers has no such class: its code comes with checkpoints
    layers_differ: bool = False  # heads, KV heads, head_dim and widths of MLPs may be lists
    by_layer: tuple[str, ...] = ()  # keys that may be a list with the same number for each layer
    pooled: bool = False
    also: tuple[str, ...] = ()  # other architectures that it runs
    qkv_bias: bool = False
    out_bias: bool = True  # where attention has a bias
    qk_norm: QKNorm = ""  # if the key that says so, where the family has one, is true
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True
    norm_offset: float = 0.0
    gated: bool = True
    interleaved: bool = False
    longrope: bool = False  # the only rope scaling
    windows: Windows = everywhere  # of its layers, if it has the key ``sliding_window``
    unrotated: Unrotated = none
    local_theta: float = 0.0  # base of the rotation in layers with windows, where no key says it
    mscales: bool = False  # longrope's table has by what cosines and sines are multiplied
    alpha: bool = False  # "dynamic" scaling with an alpha stretches the base once
    sections: bool = False  # tables of rotations say which frequencies go by which axis of a picture
    names: Mapping[str, str] = field(default_factory=dict)  # of keys that others call otherwise
    learned: bool = False  # positions have vectors, and nothing is rotated
    predictor: PredictorNames | None = None
    crossed: tuple[str, ...] = ()  # modules whose weights are stored as [input, output]
    by_head: bool = False  # joined rows of q, k and v are stored by head of keys
    by_quarter: bool = False  # they are stored in four parts, with v before k
    growing: bool = False  # the queries, with their positions
    biased: bool = False  # linear layers, where no key says it
    head_bias: bool = False
    late_norm: bool = False  # q and k are rotated before their norms
    scaled_embedding: bool = False  # by the root of the width
    sinks: bool = False  # of attention
    mixture: str = ""
    renamed: tuple[tuple[str, str], ...] = ()  # parts of names of tensors; ^: beginnings, $: ends
    numbers: tuple[str, ...] = ()  # ends of names of tensors that hold whole numbers
    gguf: tuple[Gguf, ...] = ()  # architectures of GGUF files
    classifier: tuple[str, str, str] | None = None  # of an encoder: first layer, its activation, last layer
    keys: Mapping[str, str] = field(default_factory=dict)  # of an encoder: BERT's, and its own names for them
    positions_behind_padding: bool = False  # the first is that of pad_token_id + 1

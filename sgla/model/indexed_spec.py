"""The shapes of DeepSeek's sparse attention (DSA, arXiv 2512.02556). Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from sgla.hub.reader import Reader
from sgla.layers.spec import HyperConnections, StateTensor
from sgla.model.latent_spec import LatentSpec, read
from sgla.model.limits import HEAD_DIM, HEADS, INNER, LAYERS, POSITIONS
from sgla.model.spec import ModelSpec

KINDS = "indexed_attention", "deepseek_sparse_attention"  # one kind of layer, by its names in files


@dataclass(frozen=True)
class IndexedSpec(LatentSpec):
    """A token reads the ``most`` of those before it that an indexer scores highest: ``scorers`` heads of
    ``score_dim`` values, whose one key of a token is kept, too. ``picks``: whether the layer has an indexer;
    else it reads the tokens of the last layer that has one. ``pairs``: its dims are rotated as neighbours;
    ``behind``: the last of them are, not the first. ``eps``: of its key's norm. ``gated``: what heads see is
    multiplied by the sigmoids of as many values that a matrix makes of the input."""

    most: int = 0
    scorers: int = 0
    score_dim: int = 0
    picks: bool = True
    pairs: bool = False
    behind: bool = False
    eps: float = 1e-6
    gated: bool = False

    @property
    def whole_until(self) -> int:
        return self.most

    def kept(self, kv_heads: int) -> tuple[StateTensor, ...]:
        own = (StateTensor("v", (1, self.score_dim)),) if self.picks else ()
        return *super().kept(kv_heads), *own

    def weights(self, hidden: int) -> int:
        more = self.scorers * self.score_dim * self.q_rank + hidden * (self.score_dim + self.scorers)
        gates = hidden * self.heads * self.value if self.gated else 0
        return super().weights(hidden) + (more if self.picks else 0) + gates


def deepseek(c: Reader, layers: int, positions: int) -> tuple[LatentSpec, ...]:
    """See ``Family.attention``."""
    return _indexed(c, layers, positions, lambda i: True, False)


def gated(c: Reader, layers: int, positions: int) -> tuple[LatentSpec, ...]:
    """A.X K2: DeepSeek's, with gates."""
    return tuple(replace(layer, gates=layer.value) for layer in deepseek(c, layers, positions))


def with_norm_gates(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    return replace(spec, norm_gates=c.integer("gated_norm_rank", INNER))


def glm(c: Reader, layers: int, positions: int) -> tuple[LatentSpec, ...]:
    """GLM-5 (arXiv 2603.12201): layers share what an indexer has picked."""
    kinds = c.values["indexer_types"]
    if kinds is None:
        kinds = c.values["index_topk_pattern"]
        if isinstance(kinds, str):
            kinds = [{"F": "full", "S": "shared"}.get(letter) for letter in kinds]
    if kinds is None:
        step, offset = c.integer("index_topk_freq", LAYERS), c.integer("index_skip_topk_offset", LAYERS, 0)
        kinds = ["shared" if max(i - offset + 1, 0) % step else "full" for i in range(layers)]
    picks = _kinds(c, kinds, layers)
    return _indexed(c, layers, positions, lambda i: picks[i], True)


def hunyuan(c: Reader, layers: int, positions: int) -> tuple[LatentSpec, ...]:
    """Hy 4: layers share what an indexer has picked, and have sinks and gates. Its files may give fewer heads
    of keys, which transformers does not read: a latent has none."""
    c = Reader(c.architecture, {**c.values, "num_key_value_heads": c.values["num_attention_heads"]})
    kinds = c.values["indexer_types"]
    if kinds is None:
        kinds = ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(layers)]
    picks = _kinds(c, kinds, layers)
    eps, found = c.number("rms_norm_eps", 1.0), _indexed(c, layers, positions, lambda i: picks[i], False)
    return tuple(replace(layer, behind=True, eps=eps, sinks=True, gated=True) for layer in found)


def with_streams(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    magnitude = c.number("hc_magnitude", 1e6)
    streams = HyperConnections(c.integer("hc_mult", 64), 0, c.number("hc_eps", 1.0), magnitude)
    return replace(spec, hyper=streams)


def _kinds(c: Reader, kinds: Any, layers: int) -> list[bool]:
    """Whether each layer has an indexer."""
    known = isinstance(kinds, list) and all(kind in ("full", "shared") for kind in kinds)
    if not known or len(kinds) != layers or kinds[0] != "full":
        raise c.error(
            "indexer_types", f"a list of {layers} words, full or shared, of which full is the first"
        )
    return [kind == "full" for kind in kinds]


def _indexed(
    c: Reader, layers: int, positions: int, picks: Callable[[int], bool], pairs: bool
) -> tuple[IndexedSpec, ...]:
    kinds = c.values["layer_types"]
    if kinds is not None and kinds not in ([word] * layers for word in KINDS):
        raise c.error("layer_types", f"a list of {layers} times {KINDS[0]}")
    most, scorers = c.integer("index_topk", POSITIONS), c.integer("index_n_heads", HEADS)
    score_dim = c.integer("index_head_dim", HEAD_DIM)
    latent = read(c, layers, positions)
    if not latent[0].q_rank:
        raise c.error("q_lora_rank", "a number: the indexer reads the queries' latent")
    if score_dim < latent[0].rotated:
        raise c.error("index_head_dim", f"{latent[0].rotated} (qk_rope_head_dim) or more")
    shape = {field.name: getattr(latent[0], field.name) for field in fields(LatentSpec)}
    return tuple(
        IndexedSpec(**shape, most=most, scorers=scorers, score_dim=score_dim, picks=picks(i), pairs=pairs)
        for i in range(layers)
    )

"""The shapes of DeepSeek V4. Loads no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec, HyperConnections, RopeSpec, StateTensor
from sgla.model.limits import HEAD_DIM, HEADS, INNER, LAYERS, POSITIONS
from sgla.model.ropes import ROPE, ropes
from sgla.model.spec import ModelSpec

SLIDES, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}
BY_RATE = {0: SLIDES, **{rate: kind for kind, rate in RATES.items()}}
TOGETHER = 16  # tokens, at most, over whose places an entry is spread
MOST_STREAMS, MOST_ITERATIONS = 64, 1000


@dataclass(frozen=True)
class CompressedSpec(AttentionSpec):
    """Attention to a window, and to entries that are made of every ``rate`` tokens (0: to the window alone).
    One head of keys serves all heads, and is the value, too. ``most``: so many entries are read, which an
    indexer of ``scorers`` heads with ``score_dim`` values picks; they are made of twice as many tokens. 0:
    all are. An entry lies at the places of the last tokens that it is made of, ``together`` of them. What it
    will be made of is kept as long as the window. The output goes through ``groups`` of heads, each of which
    makes ``group_rank`` values. The first ``rotated`` values of a head are rotated."""

    q_rank: int = 0
    rotated: int = 0
    groups: int = 1
    group_rank: int = 0
    rate: int = 0
    most: int = 0
    scorers: int = 0
    score_dim: int = 0

    @property
    def whole_until(self) -> int:
        return 1

    @property
    def together(self) -> int:
        return min(self.rate, TOGETHER) if self.rate else 1

    @property
    def series(self) -> int:
        """Of values that a token gives to entries: one for that of its own tokens, one for the next."""
        return 2 if self.most else 1

    @property
    def given(self) -> int:
        """Values that a token gives: those of each series, and as many for their shares."""
        return 2 * self.series * (self.head_dim + self.score_dim) if self.rate else 0

    def kept(self, kv_heads: int) -> tuple[StateTensor, ...]:
        given = (StateTensor("v", (1, self.given)),) if self.rate else ()
        return StateTensor("k", (1, self.head_dim)), *given

    def beside(self) -> tuple[StateTensor, ...]:
        if not self.rate:
            return ()
        scored = (StateTensor("v", (1, self.score_dim // self.together)),) if self.most else ()
        return StateTensor("k", (1, self.head_dim // self.together)), *scored

    def weights(self, hidden: int) -> int:
        queries = self.q_rank * (hidden + self.heads * self.head_dim + self.scorers * self.score_dim)
        keys = hidden * (self.head_dim + self.given + self.scorers)
        out = self.group_rank * (self.heads * self.head_dim + self.groups * hidden)
        return queries + keys + out


def read(c: Reader, layers: int, positions: int) -> tuple[CompressedSpec, ...]:
    """See ``Family.attention``."""
    heads, head_dim = c.integer("num_attention_heads", HEADS), c.integer("head_dim", HEAD_DIM)
    window, groups = c.integer("sliding_window", POSITIONS), c.integer("o_groups", HEADS)
    c.integer("num_key_value_heads", HEADS)
    if heads % groups:
        raise c.error("o_groups", f"a number that divides the {heads} heads (num_attention_heads)")
    rotated = _rotated(c, head_dim)
    main, compressed = _ropes(c, rotated, positions)
    slides = CompressedSpec(
        heads=heads,
        kv_heads=1,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=main,
        window=window,
        sinks=True,
        q_rank=c.integer("q_lora_rank", INNER),
        rotated=rotated,
        groups=groups,
        group_rank=c.integer("o_lora_rank", INNER),
    )
    rates = _rates(c, window)
    heavy = replace(slides, rope=compressed, rate=rates[HEAVY])
    sparse = replace(
        slides,
        rope=compressed,
        rate=rates[SPARSE],
        most=c.integer("index_topk", POSITIONS),
        scorers=c.integer("index_n_heads", HEADS),
        score_dim=c.integer("index_head_dim", HEAD_DIM),
    )
    kinds = {SLIDES: slides, SPARSE: sparse, HEAVY: heavy}
    found = tuple(kinds[kind] for kind in _kinds(c, layers))
    for layer in found:
        for key, width in (("head_dim", layer.head_dim), ("index_head_dim", layer.score_dim)):
            if width % layer.together or (width and width < rotated):
                raise c.error(key, f"a multiple of {layer.together}, and {rotated} or more")
    return found


def _kinds(c: Reader, layers: int) -> list[str]:
    """Of each layer. Those of ``compress_ratios`` may have more, for layers that guess."""
    kinds, ratios = c.values["layer_types"], c.values["compress_ratios"]
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in BY_RATE.values() for kind in kinds)
        if not known or len(kinds) != layers:
            raise c.error("layer_types", f"a list of {layers} words, each {SLIDES}, {SPARSE} or {HEAVY}")
        return kinds
    if ratios is not None:
        found = [BY_RATE.get(ratio) for ratio in c.integers("compress_ratios", LAYERS)][:layers]
        kinds = [kind for kind in found if kind is not None]
        if len(kinds) < layers:
            raise c.error("compress_ratios", f"a list of {layers} numbers, each 0, 4 or 128")
        return kinds
    return [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(layers)]


def _rates(c: Reader, window: int) -> dict[str, int]:
    """Tokens of an entry, which must all be in a window, with as many before them where entries overlap."""
    key = "compress_rates"
    table = c.table(key) if c.given(key) else dict(RATES)
    if c.given(key) and table.keys() != RATES.keys():
        raise c.error(key, f"an object with {SPARSE} and {HEAVY}")
    for kind, old in ((SPARSE, "compress_rate_csa"), (HEAVY, "compress_rate_hca")):
        if c.given(old):
            table[kind] = c.values[old]
    p = Reader(f"{c.architecture}, {key}", table)
    found = {kind: p.integer(kind, POSITIONS) for kind in RATES}
    for kind, times in ((SPARSE, 2), (HEAVY, 1)):
        rate = found[kind]
        if rate * times > window or (rate > TOGETHER and rate % TOGETHER):
            raise p.error(
                kind, f"at most {window // times}, so that a window has all of an entry, or a multiple of 16"
            )
    if found[SPARSE] > TOGETHER:
        raise p.error(SPARSE, f"at most {TOGETHER}")
    return found


def _rotated(c: Reader, head_dim: int) -> int:
    """Values of a head that are rotated."""
    if c.given("partial_rotary_factor"):
        rotated = int(head_dim * c.number("partial_rotary_factor", 1.0))
        if c.given("qk_rope_head_dim") and c.values["qk_rope_head_dim"] != rotated:
            raise c.error("qk_rope_head_dim", f"{rotated}, as partial_rotary_factor says")
    elif c.given("qk_rope_head_dim"):
        rotated = c.integer("qk_rope_head_dim", head_dim)
    else:
        rotated = head_dim * 64 // 512
    if rotated % 2 or not rotated:
        raise c.error("partial_rotary_factor", f"one that gives an even share of {head_dim} (head_dim)")
    return rotated


def _ropes(c: Reader, rotated: int, positions: int) -> tuple[RopeSpec, RopeSpec]:
    """Of layers with a window alone, and of the others, whose table may be stretched."""
    table: dict[str, Any] = c.table("rope_scaling") or c.table(ROPE)
    parts = [table.get(part) for part in ("main", "compress")]
    if parts != [None, None]:
        if not all(isinstance(part, dict) for part in parts):
            raise c.error(ROPE, "one object, or an object for each of main and compress")
        beside = table.keys() - {"main", "compress", "rope_type", "rope_theta"}
        if beside:
            raise c.error(ROPE, f"without {min(beside)} beside main and compress")
        for part in parts:
            _check_share(c, part, rotated)
    else:
        table = {key: x for key, x in table.items() if key != "rope_theta"}
        main = {"rope_theta": c.number("rope_theta")}
        compressed = {**table, "rope_theta": c.number("compress_rope_theta")}
        if "yarn" in (table.get("rope_type"), table.get("type")):
            compressed.setdefault("attention_factor", 1.0)
        parts = [main, compressed]
    found = []
    for part in parts:
        assert isinstance(part, dict)
        own = {key: x for key, x in part.items() if key != "partial_rotary_factor"}
        p = Reader(c.architecture, {**c.values, ROPE: own, "rope_scaling": None})
        found.append(ropes(p, rotated, positions)[0])
    return found[0], found[1]


def _check_share(c: Reader, part: Any, rotated: int) -> None:
    """What a part of the table says of it, by which transformers makes the angles. Raises ConfigError."""
    key, head_dim = "partial_rotary_factor", c.integer("head_dim", HEAD_DIM)
    if part.get("rope_type", part.get("type")) == "proportional":
        raise c.error(ROPE, "one of other kinds than proportional, which is of whole heads")
    p = Reader(c.architecture, {key: 1.0, **part})
    if int(head_dim * p.number(key, 1.0)) != rotated:
        raise p.error(key, f"one that gives {rotated} of {head_dim} values, as the one beside {ROPE} does")


def complete(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    c.integer("num_nextn_predict_layers", LAYERS, 0)  # which others may lack
    streams = HyperConnections(
        c.integer("hc_mult", MOST_STREAMS),
        c.integer("hc_sinkhorn_iters", MOST_ITERATIONS),
        c.number("hc_eps", 1.0),
    )
    return replace(spec, hyper=streams)


def check_compressed(config: Config, spec: object) -> None:
    """Raise ConfigError for what layers that keep entries beside windows cannot be together with."""
    if not isinstance(spec, ModelSpec):
        return
    for layer in spec.attention:
        if not isinstance(layer, CompressedSpec):
            continue
        if config.tp > layer.groups:
            raise ConfigError(
                f"--tp {config.tp} cannot be honoured by {spec.architecture}, whose heads are in "
                f"{layer.groups} groups (o_groups); give {layer.groups} or less",
                param="tp",
            )
        if config.page_size % layer.together:
            raise ConfigError(
                f"--page-size {config.page_size} cannot be honoured by {spec.architecture}, whose entries "
                f"are spread over {layer.together} tokens of a page; give a multiple",
                param="page_size",
            )
        if config.kv_cache_dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(
                f"--kv-cache-dtype {config.kv_cache_dtype} cannot be honoured by {spec.architecture}, which "
                "makes entries of what it keeps of tokens; leave it out",
                param="kv_cache_dtype",
            )

"""How families say which layers are mixtures of experts, of what, and how tokens find them: functions of the
keys of ``config.json``, as ``Family.mixture`` names them. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.kernels.routing import Clamped, Routing
from sgla.layers.spec import MoESpec
from sgla.model.limits import EXPERTS, INNER, LAYERS


def qwen3(c: Reader, layers: int, default: int = 128) -> MoESpec:
    """A mixture in every ``decoder_sparse_step``-th layer but the ``mlp_only_layers``."""
    step, dense = c.integer("decoder_sparse_step", LAYERS), c.integers("mlp_only_layers", LAYERS)
    experts = _experts(c, default)
    return MoESpec(
        experts,
        c.integer("moe_intermediate_size", INNER),
        _routing(c, experts, normalize=c.flag("norm_topk_prob")),
        frozenset(i for i in range(layers) if (i + 1) % step == 0 and i not in dense),
    )


def qwen3_vl(c: Reader, layers: int) -> MoESpec:
    """With weights that are normalized, and stacks of [input, output] in its files."""
    return replace(qwen3(_renamed(c, {}, norm_topk_prob=True), layers, 60), crossed=True, halves=True)


def mellum(c: Reader, layers: int) -> MoESpec:
    """Mellum 2: in the layers of a list, or in all."""
    experts, width = _experts(c, 64), c.integer("moe_intermediate_size", INNER)
    routing = _routing(c, experts, normalize=c.flag("norm_topk_prob"))
    kept = _behind(c, layers) if c.given("mlp_layer_types") else frozenset(range(layers))
    return MoESpec(experts, width, routing, kept)


def qwen2(c: Reader, layers: int) -> MoESpec:
    """And a shared expert with a gate."""
    shared = c.integer("shared_expert_intermediate_size", INNER)
    return replace(qwen3(c, layers), shared=shared, shared_gate=True)


def qwen3_5(c: Reader, layers: int) -> MoESpec:
    """The same in every layer, with weights that are normalized."""
    return qwen2(_renamed(c, {}, decoder_sparse_step=1, norm_topk_prob=True), layers)


def mixtral(c: Reader, layers: int) -> MoESpec:
    """Mixtral and Granite: a mixture in every layer, of MLPs as wide as ``intermediate_size``."""
    experts, shared = _experts(c, 8), "shared_intermediate_size"
    return MoESpec(
        experts,
        c.integer("intermediate_size", INNER),
        _routing(c, experts, normalize=True),
        frozenset(range(layers)),
        shared=c.integer(shared, INNER, 0) if c.given(shared) else 0,
    )


def phi(c: Reader, layers: int) -> MoESpec:
    """Phi-3.5-MoE: Mixtral's, chosen by sparsemixer."""
    if c.integer("num_experts_per_tok", EXPERTS) != 2:
        raise c.error("num_experts_per_tok", "2, as many as sparsemixer chooses")
    moe, key = mixtral(c, layers), "router_jitter_noise"
    jitter = c.number(key) if c.values[key] != 0 else 0.0
    if moe.experts < 2:
        raise c.error("num_local_experts", "2 or more")
    return replace(moe, routing=replace(moe.routing, score="sparsemixer", normalize=False, jitter=jitter))


def olmo(c: Reader, layers: int) -> MoESpec:
    """OLMoE and FlexOlmo: Mixtral's, and whether weights are normalized is said."""
    experts = c.integer("num_experts", EXPERTS)
    routing = _routing(c, experts, normalize=c.flag("norm_topk_prob"))
    return MoESpec(experts, c.integer("intermediate_size", INNER), routing, frozenset(range(layers)))


def gpt_oss(c: Reader, layers: int) -> MoESpec:
    experts = c.integer("num_local_experts", EXPERTS)
    return MoESpec(
        experts,
        c.integer("intermediate_size", INNER),
        _routing(c, experts, normalize=True),
        frozenset(range(layers)),
        clamped=Clamped(c.number("swiglu_alpha"), c.number("swiglu_limit")),
        bias=True,
        crossed=True,
    )


def ernie(c: Reader, layers: int) -> MoESpec:
    """ERNIE 4.5: a mixture in every ``moe_layer_interval``-th layer from one to another."""
    first, last = c.integer("moe_layer_start_index", LAYERS, 0), layers - 1
    if c.values["moe_layer_end_index"] != -1:
        last = c.integer("moe_layer_end_index", LAYERS, 0)
    step = c.integer("moe_layer_interval", LAYERS)
    experts = c.integer("moe_num_experts", EXPERTS)
    width = c.integer("moe_intermediate_size", INNER)
    least = c.number("moe_norm_min")
    return MoESpec(
        experts,
        width,
        _routing(c, experts, key="moe_k", normalize=True, least=least),
        frozenset(i for i in range(layers) if first <= i <= last and (i + 1) % step == 0),
        correction=True,
        shared=width * c.integer("moe_num_shared_experts", EXPERTS, 0),
    )


def deepseek(c: Reader, layers: int) -> MoESpec | None:
    """DeepSeek-MoE (arXiv 2401.06066): a softmax over all in every ``moe_layer_freq``-th layer."""
    if not c.given("n_routed_experts"):
        return None
    experts, width = c.integer("n_routed_experts", EXPERTS), c.integer("moe_intermediate_size", INNER)
    routing = _routing(c, experts, normalize=c.flag("norm_topk_prob"), least=1e-20)
    if routing.top_k == 1:
        routing = replace(routing, normalize=False)
    first, step = c.integer("first_k_dense_replace", LAYERS, 0), c.integer("moe_layer_freq", LAYERS)
    mixtures = frozenset(range(first, layers)) & frozenset(range(0, layers, step))
    shared = width * c.integer("n_shared_experts", EXPERTS, 0) if c.given("n_shared_experts") else 0
    return MoESpec(experts, width, routing, mixtures, shared=shared)


def deepseek_v2(c: Reader, layers: int) -> MoESpec:
    """DeepSeek-V2 (arXiv 2405.04434): a softmax, and groups by their best expert."""
    method = c.values.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise c.error("topk_method", "greedy or group_limited_greedy")
    experts = c.integer("n_routed_experts", EXPERTS)
    routing = _routing(c, experts, scale=c.number("routed_scaling_factor"))
    if method == "group_limited_greedy":
        routing = _grouped(c, experts, routing)
    return _deepseek(c, experts, routing, _behind(c, layers))


def deepseek_v3(c: Reader, layers: int) -> MoESpec:
    """DeepSeek-V3 (arXiv 2412.19437): sigmoids, a bias that balances experts, groups by their best two."""
    experts = c.integer("n_routed_experts", EXPERTS)
    normalize, scale = c.flag("norm_topk_prob"), c.number("routed_scaling_factor")
    routing = _routing(c, experts, sigmoid=True, normalize=normalize, least=1e-20, scale=scale)
    routing = replace(_grouped(c, experts, routing), two=True)
    return replace(_deepseek(c, experts, routing, _behind(c, layers)), correction=True)


def longcat(c: Reader, layers: int) -> MoESpec:
    """LongCat-Flash: softmax over experts, of which some do nothing, beside the first MLP of two."""
    experts, idle = c.integer("n_routed_experts", EXPERTS), c.integer("zero_expert_num", EXPERTS, 0)
    scale = c.number("routed_scaling_factor")
    routing = _routing(c, experts + idle, key="moe_topk", scale=scale)
    width = c.integer("expert_ffn_hidden_size", INNER)
    return MoESpec(experts, width, routing, frozenset(range(0, 2 * layers, 2)), correction=True, idle=idle)


def axk(c: Reader, layers: int) -> MoESpec:
    """A.X K2: DeepSeek-V3's, in every ``moe_layer_freq``-th layer, with groups or without."""
    alone = not c.given("n_group") and not c.given("topk_group")
    found = deepseek_v3(_renamed(c, {}, n_group=1, topk_group=1) if alone else c, layers)
    step, kept = c.integer("moe_layer_freq", LAYERS), found.layers
    if not c.given("mlp_layer_types"):
        kept = frozenset(i for i in kept if i % step == 0)
    return replace(found, layers=kept, routing=replace(found.routing, zeros=not alone))


def deepseek_v4(c: Reader, layers: int) -> MoESpec:
    """DeepSeek V4: in some layers a table says which experts a token has."""
    score, key = c.values["scoring_func"], "mlp_layer_types"
    if score not in ("sqrtsoftplus", "sigmoid", "softmax"):
        raise c.error("scoring_func", "sqrtsoftplus, sigmoid or softmax")
    if not c.flag("norm_topk_prob"):
        raise c.error("norm_topk_prob", "true, as transformers has it whatever is said")
    kinds = c.values[key]
    if kinds is None:
        first = c.integer("num_hash_layers", LAYERS, 0) if c.given("num_hash_layers") else 3
        kinds = ["hash_moe" if i < first else "moe" for i in range(layers)]
    known = isinstance(kinds, list) and all(kind in ("hash_moe", "moe") for kind in kinds)
    if not known or len(kinds) != layers:
        raise c.error(key, f"a list of {layers} words, hash_moe or moe")
    experts, width = c.integer("n_routed_experts", EXPERTS), c.integer("moe_intermediate_size", INNER)
    routing = _routing(c, experts, normalize=True, least=1e-20, scale=c.number("routed_scaling_factor"))
    return MoESpec(
        experts,
        width,
        replace(routing, score=score),
        frozenset(range(layers)),
        clamped=Clamped(1.0, c.number("swiglu_limit"), 0.0),
        correction=True,
        shared=width,
        hashed=frozenset(i for i, kind in enumerate(kinds) if kind == "hash_moe"),
    )


def bailing(c: Reader, layers: int) -> MoESpec:
    """Ling 2: DeepSeek-V3's, and the width of the shared expert may be said."""
    found, key = deepseek_v3(c, layers), "moe_shared_expert_intermediate_size"
    if not c.given(key):
        return found
    return replace(found, shared=c.integer(key, INNER) * c.integer("n_shared_experts", EXPERTS))


def mistral4(c: Reader, layers: int) -> MoESpec:
    """Mistral 4: a softmax, and groups by their best two."""
    experts = c.integer("n_routed_experts", EXPERTS)
    normalize, scale = c.flag("norm_topk_prob"), c.number("routed_scaling_factor")
    routing = _routing(c, experts, normalize=normalize, least=1e-20, scale=scale)
    routing = replace(_grouped(c, experts, routing), two=True)
    return _deepseek(c, experts, routing, _behind(c, layers))


def exaone(c: Reader, layers: int) -> MoESpec:
    """K-EXAONE: DeepSeek-V3's, by other names."""
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    spec = deepseek_v3(_renamed(c, names), layers)
    c.agrees("is_moe_layer", [i in spec.layers for i in range(layers)], "mlp_layer_types")
    return spec


def hunyuan_v4(c: Reader, layers: int) -> MoESpec:
    """Hy 4: DeepSeek-V3's, with bounded activations."""
    key = "swiglu_limit"
    if c.values[key] == 0:
        raise c.error(key, "above 0: transformers calls 0 no bound, and yet makes nothing of all by it")
    return replace(deepseek_v3(c, layers), clamped=Clamped(1.0, c.number("swiglu_limit"), 0.0))


def hunyuan_v3(c: Reader, layers: int) -> MoESpec:
    """DeepSeek-V3's without groups, by other names."""
    names = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    }
    return deepseek_v3(_renamed(c, names, n_group=1, topk_group=1, norm_topk_prob=True), layers)


def mimo(c: Reader, layers: int) -> MoESpec:
    """MiMo-V2: DeepSeek-V3's without a shared expert."""
    scale = 1.0 if not c.given("routed_scaling_factor") else c.number("routed_scaling_factor")
    found = deepseek_v3(_renamed(c, {}, n_shared_experts=1, routed_scaling_factor=scale), layers)
    c.agrees("moe_layer_freq", [i in found.layers for i in range(layers)], "mlp_layer_types")
    return replace(found, shared=0)


def kimi(c: Reader, layers: int) -> MoESpec:
    """Kimi Linear: DeepSeek-V3's, by another name."""
    return deepseek_v3(_renamed(c, {"n_routed_experts": "num_local_experts"}), layers)


def minimax(c: Reader, layers: int) -> MoESpec:
    """MiniMax-M2: sigmoids and a bias, and no shared expert."""
    if any(kind != 1 for kind in c.integers("attn_type_list", LAYERS)):
        raise c.error("attn_type_list", "a list of ones: softmax attention in every layer")
    experts = c.integer("num_local_experts", EXPERTS)
    routing = _routing(c, experts, sigmoid=True, normalize=True)
    width = c.integer("intermediate_size", INNER)
    return MoESpec(experts, width, routing, frozenset(range(layers)), correction=True)


def lfm2(c: Reader, layers: int) -> MoESpec:
    """LFM2's: sigmoids, and maybe a bias, behind some dense layers. Transformers adds 1e-6 to the sum that
    weights are divided by, which is not done here."""
    experts = c.integer("num_experts", EXPERTS)
    normalize, scale = c.flag("norm_topk_prob"), c.number("routed_scaling_factor")
    routing = _routing(c, experts, sigmoid=True, normalize=normalize, least=1e-6, scale=scale)
    first, width = c.integer("num_dense_layers", LAYERS, 0), c.integer("moe_intermediate_size", INNER)
    return MoESpec(
        experts, width, routing, frozenset(range(first, layers)), correction=c.flag("use_expert_bias")
    )


def hunyuan(c: Reader, layers: int) -> MoESpec:
    """Hunyuan A13B: Mixtral's, with a shared expert of the same width."""
    experts, width = c.integer("num_experts", EXPERTS), c.integer("intermediate_size", INNER)
    routing = _routing(c, experts, key="moe_topk", normalize=True)
    return MoESpec(experts, width, routing, frozenset(range(layers)), shared=width)


def _renamed(c: Reader, names: dict[str, str], **more: object) -> Reader:
    """With more names of keys: ours -> theirs."""
    return Reader(
        c.architecture, {**c.values, **more, **{ours: c.values[key] for ours, key in names.items()}}
    )


def _deepseek(c: Reader, experts: int, routing: Routing, layers: frozenset[int]) -> MoESpec:
    width = c.integer("moe_intermediate_size", INNER)
    shared = c.integer("n_shared_experts", EXPERTS)
    return MoESpec(experts, width, routing, layers, shared=width * shared)


def _behind(c: Reader, layers: int) -> frozenset[int]:
    """The layers of a list of kinds, or those behind ``first_k_dense_replace``."""
    kinds, first = c.values.get("mlp_layer_types"), 0
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
        if not known or len(kinds) != layers:
            raise c.error("mlp_layer_types", f"a list of {layers} words, dense or sparse")
        return frozenset(i for i, kind in enumerate(kinds) if kind == "sparse")
    if c.given("first_k_dense_replace"):
        first = c.integer("first_k_dense_replace", LAYERS, 0)
    elif "mlp_layer_types" in c.values:
        first = 1
    return frozenset(range(first, layers))


def _experts(c: Reader, otherwise: int) -> int:
    """Of a key with two names, which mean the same in transformers."""
    given = [name for name in ("num_experts", "num_local_experts") if c.given(name)]
    if len(given) == 2 and c.values[given[0]] != c.values[given[1]]:
        raise ConfigError("config.json: num_experts and num_local_experts are not the same", param="model")
    return c.integer(given[0], EXPERTS) if given else otherwise


def _routing(
    c: Reader,
    experts: int,
    *,
    key: str = "num_experts_per_tok",
    sigmoid: bool = False,
    normalize: bool = False,
    least: float = 0.0,
    scale: float = 1.0,
) -> Routing:
    top_k = c.integer(key, EXPERTS)
    if top_k > experts:
        raise ConfigError(f"config.json: {key}: {top_k} experts a token of {experts} experts", param="model")
    return Routing(top_k, "sigmoid" if sigmoid else "softmax", normalize, least=least, scale=scale)


def _grouped(c: Reader, experts: int, routing: Routing) -> Routing:
    """Raises ConfigError for groups that do not divide, and for those that have too few experts."""
    groups = c.integer("n_group", EXPERTS)
    kept, size = c.integer("topk_group", groups), experts // groups
    if experts % groups or size < 2:
        raise c.error("n_group", f"a number of groups with two experts or more of the {experts} each")
    if kept * size < routing.top_k:
        raise c.error("topk_group", f"enough groups of {size} experts for {routing.top_k} a token")
    return replace(routing, groups=groups, kept=kept)

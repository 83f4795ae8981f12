"""What guesses the next tokens of a model: which algorithm, and what it adds to weights and cache. Loads no
torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.homes import expanded
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec
from sgla.model.family import PredictorNames
from sgla.model.generic_spec import GenericSpec
from sgla.model.limits import LAYERS, VOCAB
from sgla.model.read import read_decoder, read_spec
from sgla.model.registry import DFLASH, EAGLE, EAGLE3, family_of
from sgla.model.sizes import Kinds, kinds_of, weight_bytes
from sgla.model.spec import ModelSpec
from sgla.model.state import LayerState, state_of
from sgla.quant.formats import FORMATS, ON_CPU, ON_GPU

NAMES = {  # as SGLang and vLLM have them
    "NGRAM": "ngram",
    "STANDALONE": "draft_model",
    "NEXTN": "mtp",
    "deepseek_mtp": "mtp",
    "EAGLE": "eagle",
    "EAGLE3": "eagle3",
    "DFLASH": "dflash",
}
FLAG = "--speculative-algorithm"
# Algorithms whose weights are not the model's own.
OTHER_FILES = ("draft_model", "eagle", "eagle3", "medusa", "dflash")
# Those that guess with an output layer which may be quantized by itself: the model's, or one of their own.
# They read the embedding, of which the last stage of a pipeline has a copy then.
BY_MODELS_HEAD = ("mtp", "eagle", "dflash")
BY_A_HEAD = (*BY_MODELS_HEAD, "eagle3")
PADDING = 128  # rows by which tables of one vocabulary may differ, as those of Qwen 2.5 do
LEAVED = "draft_model", "eagle", "eagle3", "mtp"  # whose guesses may have second ones beside them
NO_LEAVES = {  # settings that these cannot be beside, and why
    "pp": "with --pp, whose stages are told of guesses that follow each other",
    "dcp": "with --dcp, whose ranks share out the tokens of a page",
    "dp_attention": "with --dp-attention, whose ranks do not know what others' requests ask for",
    "deterministic": "with --deterministic, whose kernels have no places for second guesses",
    "kv_cache_dtype": "with --kv-cache-dtype: what leaves keep is copied as it is in --dtype",
}
BLOCK, BLOCKS = 16, 64  # tokens of a block of DFlash, if its file does not say, and at most
TOLD = 3  # layers of a target that EAGLE-3 reads


class EagleSpec(NamedTuple):
    """``spec``: of the head, as if it were a Llama of one layer; ``bias``: of its first projection. Of
    EAGLE-3 ``vocab``: tokens that it may guess; ``layers``: of the target, whose inputs it reads; ``normed``:
    what its attention is added to; ``read_normed``: what it reads, before its projection."""

    spec: ModelSpec
    bias: bool
    vocab: int
    layers: tuple[int, ...] = ()
    normed: bool = False
    read_normed: bool = False


class BlockSpec(NamedTuple):
    """A head of DFlash. ``spec``: as if it were a Qwen3; ``layers``: of the target, whose inputs it reads;
    ``mask``: the token in the place of a guess; ``size``: of a block, the last token of the text too."""

    spec: ModelSpec
    layers: tuple[int, ...]
    mask: int
    size: int


class MedusaSpec(NamedTuple):
    """So many heads, each of so many layers, with biases or without, beside a model of this width and
    vocabulary."""

    heads: int
    layers: int
    bias: bool
    width: int
    vocab: int


Guessing = ModelSpec | MedusaSpec  # what guesses, if it has weights


def by_our_names(config: Config, target: ModelSpec | None = None) -> Config:
    """``config`` with the algorithm's name here, which follows from a model that guesses. ``target``: the
    model, if it is known: SGLang calls its own layer EAGLE, too."""
    name = config.speculative_algorithm
    if name == "EAGLE" and config.speculative_model is None and (target is None or _guesses(target)):
        name = "NEXTN"
    if name == "off":
        if config.speculative_model is not None:
            raise _refused("speculative_model", f"guesses, and {FLAG} off does not; leave one of them out")
        return replace(config, speculative_algorithm=None, speculative_num_draft_tokens=None)
    return replace(config, speculative_algorithm=NAMES.get(name or "", name))


def automatic(config: Config, draft: Mapping[str, Any] | None) -> Config:
    """``config`` with what guesses if nobody says what. ``draft``: config.json of another model."""
    name = "ngram" if config.speculative_model is None else _kind_of(draft or {})
    return replace(config, speculative_algorithm=name)


def _kind_of(draft: Mapping[str, Any]) -> str:
    """The algorithm of a model that guesses, by its config.json."""
    if is_medusa(draft):
        return "medusa"
    if _is_block(draft):
        return "dflash"
    names = draft.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return "eagle3" if name in EAGLE3 else "eagle" if name in EAGLE else "draft_model"


def check_settings(config: Config, device: str) -> None:
    """Raise ConfigError for settings of guesses that are nothing without others, or cannot be honoured on
    this ``device``."""
    name, plain = config.speculative_algorithm, Config()
    if name is None:
        for field in (
            "speculative_num_draft_tokens",
            "speculative_quantization",
            "speculative_head_quantization",
            "speculative_token_map",
            "speculative_eagle_topk",
        ):
            if getattr(config, field) != getattr(plain, field):
                raise _refused(field, f"needs {FLAG}")
    if (name is None or (name == "ngram" and device != "cpu")) and not config.speculative_adaptive:
        raise ConfigError(
            "--no-speculative-adaptive is for models that guess, and for ngram on CPUs; leave it out",
            param="speculative_adaptive",
        )
    if name is None:
        return
    if name in OTHER_FILES and config.speculative_model is None:
        own = "" if name == "draft_model" else "; a checkpoint's own layer guesses by mtp"
        raise ConfigError(
            f"{FLAG} {name} needs --speculative-model, the one that guesses{own}", param="speculative_model"
        )
    for field in ("speculative_model", "speculative_quantization"):
        if name not in OTHER_FILES and getattr(config, field) != getattr(plain, field):
            raise _refused(field, f"is for {FLAG} {' and '.join(OTHER_FILES)}; leave one of them out")
    if config.speculative_head_quantization is not None and name not in BY_A_HEAD:
        raise _refused(
            "speculative_head_quantization", f"is for {FLAG} {', '.join(BY_A_HEAD)}; leave one of them out"
        )
    if config.speculative_token_map is not None and name not in ("mtp", "eagle"):
        raise _refused("speculative_token_map", f"is for {FLAG} mtp and eagle; leave one of them out")
    if config.speculative_token_map is not None and device == "cpu" and config.heads_over > 1:
        raise _refused("speculative_token_map", "cannot be honoured with --tp on CPUs; leave it out")
    if config.speculative_eagle_topk > 1 and name not in LEAVED:
        raise _refused("speculative_eagle_topk", f"2 is for {FLAG} {', '.join(LEAVED)}; leave it out")
    if config.executor == "fake":
        return
    if config.speculative_eagle_topk > 1:
        _check_leaves(config, device)
    obstacles = []
    if name != "ngram" and device not in ("cpu", "cuda"):
        obstacles.append(f"with --device {device} yet; ngram can")
    if name not in ("ngram", "medusa") and device != "cpu" and config.kv_cache_dtype == "fp8":
        obstacles.append("with --kv-cache-dtype fp8 on GPUs yet; ngram and medusa can")
    if obstacles:
        raise ConfigError(
            f"{FLAG} {name} cannot be honoured {obstacles[0]}; leave it out", param="speculative_algorithm"
        )


def _check_leaves(config: Config, device: str) -> None:
    """Raise ConfigError where there are no second guesses."""
    plain = Config()
    obstacles = [why for field, why in NO_LEAVES.items() if getattr(config, field) != getattr(plain, field)]
    if device == "cpu":
        obstacles.append("on CPUs, where a row more costs a fifth of a step")
    if obstacles:
        raise _refused("speculative_eagle_topk", f"2 cannot be honoured {obstacles[0]}; leave it out")


def check_leaves(config: Config, target: ModelSpec) -> None:
    """Raise ConfigError where second guesses are asked for that kernels of ``target`` have no places for."""
    if config.speculative_eagle_topk == 1 or config.executor == "fake":
        return
    attention = target.attention
    whole = all(type(one) is AttentionSpec and not (one.window or one.slopes) for one in attention)
    alike = whole and len({(one.heads, one.kv_heads, one.head_dim, one.v_dim) for one in attention}) == 1
    if isinstance(target, GenericSpec) or not alike:
        raise _refused(
            "speculative_eagle_topk",
            "2 is for models all of whose layers attend to all tokens before, with keys and values of as "
            "many heads; leave it out",
        )


def _refused(field: str, why: str) -> ConfigError:
    return ConfigError(f"--{field.replace('_', '-')} {why}", param=field)


def read_guessing(config: Config, draft: Mapping[str, Any] | None, target: ModelSpec) -> Guessing | None:
    """The shape of what guesses for ``target``, if it has weights. ``draft``: config.json of another model.
    Raises ConfigError for what cannot guess."""
    check_leaves(config, target)
    if not target.last:  # of a pipeline: the last stage has what guesses
        return None
    match config.speculative_algorithm:
        case "draft_model":
            return None if draft is None else _split(read_draft(draft, target), config.heads_over)
        case "eagle" | "eagle3" as name:
            eagle = None if draft is None else read_eagle(draft, target, third=name == "eagle3")
            read_tokens(config, target.vocab)
            return None if eagle is None else _split(eagle.spec, config.heads_over)
        case "mtp":
            read_tokens(config, target.vocab)
            return predictor_layer(target)
        case "medusa":
            return None if draft is None else read_medusa(draft, target)
        case "dflash":
            block = None if draft is None else read_block(draft, target)
            return None if block is None else _split(_checked(config, block), config.heads_over)
    return None


def _split(spec: ModelSpec, ranks: int) -> ModelSpec:
    """The same, if its heads can be split over so many ranks."""
    for layer in spec.attention:
        if layer.kv_heads < ranks and (layer.heads % ranks or ranks % layer.kv_heads):
            raise _unfit(f"its {layer.heads} heads cannot be split over --tp {ranks}")
    return spec


def read_draft(draft: Mapping[str, Any], target: ModelSpec) -> ModelSpec:
    """The shape of another model that guesses for ``target``."""
    if _is_eagle3(draft):
        raise _unfit(f"it is a head of EAGLE-3; give {FLAG} eagle3")
    spec = read_spec(draft)
    if not isinstance(spec, ModelSpec) or isinstance(spec, GenericSpec):
        raise _unfit(f"{draft['architectures'][0]} makes no text, or runs through transformers' module")
    if spec.recurrent:
        raise _unfit("its layers keep a state of all tokens, which cannot go back behind a wrong guess")
    if abs(spec.vocab - target.vocab) > PADDING:
        raise _unfit(f"it has {spec.vocab} tokens and the model {target.vocab}: another vocabulary")
    return spec


def _is_eagle3(draft: Mapping[str, Any]) -> bool:
    names = draft.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in EAGLE3


def is_medusa(draft: Mapping[str, Any]) -> bool:
    """In the authors' files or vLLM's."""
    return "medusa_num_heads" in draft or draft.get("model_type") == "medusa"


def _is_block(draft: Mapping[str, Any]) -> bool:
    return draft.get("architectures") == [DFLASH]


def read_eagle(draft: Mapping[str, Any], target: ModelSpec, third: bool) -> EagleSpec:
    """A head of EAGLE-3, if it is the ``third``, or of those before. Raises ConfigError for one of another
    kind, or of another model."""
    if isinstance(target, GenericSpec):
        raise _unfit("transformers' module computes it, whose layers have no hooks here")
    if third:
        _check_told(target)
    if _is_eagle3(draft) != third:
        why = f"it is no head of EAGLE-3, which {EAGLE3[0]} would be"
        raise _unfit(why if third else f"it is a head of EAGLE-3; give {FLAG} eagle3")
    others = {"model_type", "dtype", "torch_dtype", "quantization_config"}
    draft = {**Reader(EAGLE3[0], draft).table("transformer_layer_config"), **draft}  # of speculators
    kind = "Qwen2ForCausalLM" if draft.get("qkv_bias") else "LlamaForCausalLM"
    known = family_of(kind).defaults.keys() | others
    shape = {key: value for key, value in draft.items() if key in known}
    if draft.get("num_hidden_layers") != 1:
        raise _unfit(f"it has {draft.get('num_hidden_layers')} layers, and a head of EAGLE one")
    spec = read_decoder(shape | {"architectures": [kind], "num_hidden_layers": 1})
    told = {key: value for key, value in draft.items() if value is not None}
    c = Reader(EAGLE3[0], {"draft_vocab_size": spec.vocab, "bias": True, **told})
    vocab = c.integer("draft_vocab_size", VOCAB)
    if spec.vocab != target.vocab or vocab > target.vocab:
        raise _unfit(f"it has {spec.vocab} tokens and the model {target.vocab}: another vocabulary")
    if c.given("target_hidden_size") and draft["target_hidden_size"] != target.hidden:
        raise _unfit(f"target_hidden_size is {draft['target_hidden_size']}, and the model's {target.hidden}")
    if spec.hidden != target.hidden:
        raise _unfit(f"its width is {spec.hidden}, and the model's {target.hidden}")
    layers = _told_layers(c, target.layers) if third else ()
    normed = c.flag("norm_before_residual"), c.flag("norm_before_fc")
    return EagleSpec(spec, c.flag("bias"), vocab, layers, *normed)


def layers_read(config: Config, draft: Mapping[str, Any] | None, target: ModelSpec) -> tuple[int, ...]:
    """Those of the target whose inputs a head reads; none: it reads the final hidden states, or nothing."""
    if draft is not None and config.speculative_algorithm == "dflash":
        return read_block(draft, target).layers
    if draft is not None and config.speculative_algorithm == "eagle3":
        return read_eagle(draft, target, third=True).layers
    return ()


def read_medusa(draft: Mapping[str, Any], target: ModelSpec) -> MedusaSpec:
    """Heads as the authors' files have them, or vLLM's. Raises ConfigError for those of another model."""
    if isinstance(target, GenericSpec):
        raise _unfit("transformers' module computes it, whose layers have no hooks here")
    named = [key for key in ("medusa_num_heads", "num_heads") if key in draft]
    if not named:
        raise _unfit("config.json has no medusa_num_heads: these are no heads of Medusa")
    theirs = named[0] == "num_heads"
    usual = {"medusa_num_layers": 1, "num_hidden_layers": 1, "medusa_fc_bias": not theirs}
    c = Reader("Medusa", usual | dict(draft))
    for key, own in (("hidden_size", target.hidden), ("vocab_size", target.vocab)):
        if c.given(key) and draft[key] != own:
            raise _unfit(f"{key} is {draft[key]}, and the model's {own}")
    if c.given("truncated_vocab_size") and draft["truncated_vocab_size"] != target.vocab:
        raise _unfit("it guesses some tokens alone (truncated_vocab_size)")
    layers = c.integer("num_hidden_layers" if theirs else "medusa_num_layers", LAYERS)
    heads, bias = c.integer(named[0], LAYERS), c.flag("medusa_fc_bias")
    return MedusaSpec(heads, layers, bias, target.hidden, target.vocab)


def _check_told(target: ModelSpec) -> None:
    """Raise ConfigError where layers' inputs are not what a head reads of them."""
    if target.hyper is not None or target.altup is not None:
        raise _unfit("its residual stream is several wide")
    if target.pairs:
        raise _unfit("each of its layers counts as two here")


def read_block(draft: Mapping[str, Any], target: ModelSpec) -> BlockSpec:
    """A head of DFlash. Raises ConfigError for one of another kind, or of another model."""
    if isinstance(target, GenericSpec):
        raise _unfit("transformers' module computes it, whose layers have no hooks here")
    _check_told(target)
    if not _is_block(draft):
        raise _unfit(f"it is no head of DFlash, which {DFLASH} would be")
    others = {"dtype", "torch_dtype", "quantization_config"}
    known = family_of("Qwen3ForCausalLM").defaults.keys() | others
    shape = {key: value for key, value in draft.items() if key in known}
    spec = read_decoder(shape | {"architectures": ["Qwen3ForCausalLM"]})
    c = Reader(DFLASH, {"num_target_layers": target.layers, **draft})
    for key, own, other in (
        ("hidden_size", spec.hidden, target.hidden),
        ("vocab_size", spec.vocab, target.vocab),
        ("num_target_layers", c.integer("num_target_layers", LAYERS), target.layers),
    ):
        if own != other:
            raise _unfit(f"{key} is {own}, and the model's {other}")
    said = Reader(DFLASH, c.table("dflash_config") or {})
    if not said.given("mask_token_id"):
        raise _unfit("dflash_config has no mask_token_id")
    layers = [1 + layer for layer in said.integers("target_layer_ids", LAYERS) or _spread(spec, target)]
    if not layers or max(layers) >= target.layers:
        raise _unfit(f"target_layer_ids are {[layer - 1 for layer in layers]}, of {target.layers} layers")
    mask, size = said.integer("mask_token_id", VOCAB), block_size(draft)
    if mask >= target.vocab or size < 2:
        raise _unfit(f"its mask is token {mask} of {target.vocab}, and its blocks have {size} tokens")
    alone = dataclasses.replace(spec, vocab=1, tied=True)  # the tables are the target's
    return BlockSpec(alone, tuple(layers), mask, size)


def block_size(draft: Mapping[str, Any]) -> int:
    """Tokens of a block of a head of DFlash, the last one of the text among them."""
    return Reader(DFLASH, {"block_size": BLOCK, **draft}).integer("block_size", BLOCKS)


def _checked(config: Config, block: BlockSpec) -> ModelSpec:
    if (config.speculative_num_draft_tokens or 0) >= block.size:
        raise ConfigError(
            f"the blocks of --speculative-model have {block.size} tokens, one of which is known; give "
            f"--speculative-num-draft-tokens {block.size - 1} or less",
            param="speculative_num_draft_tokens",
        )
    return block.spec


def _spread(spec: ModelSpec, target: ModelSpec) -> list[int]:
    """Layers of the target whose outputs a head reads that does not say which: as many as it has itself, from
    the second on to the last but three."""
    if spec.layers == 1:
        return [target.layers // 2]
    last = target.layers - 3
    return [round(1 + i * (last - 1) / (spec.layers - 1)) for i in range(spec.layers)]


def _told_layers(c: Reader, layers: int) -> tuple[int, ...]:
    """Those of a target with so many layers whose inputs EAGLE-3 reads. A file has these for vLLM, and for
    SGLang, in ``eagle_config``, those whose outputs they are."""
    key, own = "eagle_aux_hidden_state_layer_ids", Reader(EAGLE3[0], c.table("eagle_config"))
    if own.values.get("use_aux_hidden_state") is False:
        raise _unfit("it reads the last hidden state alone (use_aux_hidden_state)")
    said = own.integers(key, LAYERS)
    given = [1 + layer for layer in said] or c.integers(key, LAYERS)
    if given and (len(given) != TOLD or max(given) >= layers):
        raise _unfit(f"{key} is {said or given}, and the model has {layers} layers")
    usual = sorted(min(max(layer, 0), layers - 1) for layer in (2, layers // 2, layers - 3))
    return tuple(given or usual)


def read_tokens(config: Config, vocab: int) -> list[int] | None:
    """The tokens of ``--speculative-token-map``, of so many, in their order. Raises ConfigError."""
    if config.speculative_token_map is None:
        return None
    path = expanded(config.speculative_token_map)
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _refused("speculative_token_map", f"{path}: {error}; give a JSON file") from error
    whole = isinstance(found, list) and all(type(token) is int and 0 <= token < vocab for token in found)
    if not whole or not found:
        raise _refused("speculative_token_map", f"{path}: it has to be a list of ids from 0 to {vocab - 1}")
    return sorted(set(found))


def predictor_names(spec: ModelSpec) -> PredictorNames:
    """Of the tensors of the model's own layer that guesses further tokens. Raises ConfigError where there is
    none."""
    names = None if isinstance(spec, GenericSpec) else family_of(spec.architecture).predictor
    if names is None or (names.counted and not spec.predictors) or (names.windows and not any(spec.windows)):
        raise ConfigError(
            f"{FLAG} mtp cannot be honoured: {spec.architecture} has no layer here that guesses further "
            "tokens; leave it out",
            param="speculative_algorithm",
        )
    return names.behind(spec.layers)


def _guesses(target: ModelSpec) -> bool:
    """Whether the model has a layer of its own that guesses further tokens."""
    try:
        predictor_names(target)
    except ConfigError:
        return False
    return True


def predictor_layer(target: ModelSpec) -> ModelSpec:
    """The shape of the model's own layer that guesses further tokens, as a model of this layer. Raises
    ConfigError where there is none."""
    windows, moe = predictor_names(target).windows, target.moe
    alike = (i for i, layer in enumerate(target.attention) if not layer.unit(int))
    layer = max(i for i in alike if target.windows[i] or not windows)
    if moe is not None:
        mixed = layer in moe.layers and not windows
        moe = dataclasses.replace(moe, layers=frozenset({0} if mixed else ()))
    alone, inner = target.attention[layer : layer + 1], target.inner[layer : layer + 1]
    return dataclasses.replace(target, attention=alone, moe=moe, inner=inner, vocab=1, tied=True, stage=None)


def check_context(draft: Guessing, context_len: int) -> None:
    """Raise ConfigError where the model that guesses has fewer positions than a text may have tokens. Files
    of heads say how long the texts of their training were, which are short."""
    if isinstance(draft, ModelSpec) and draft.context_len < context_len:
        raise ConfigError(
            f"--speculative-model has a context of {draft.context_len} tokens; give --context-length "
            f"{draft.context_len} or less, or another one that guesses",
            param="context_length",
        )


def _unfit(why: str) -> ConfigError:
    return ConfigError(f"--speculative-model cannot guess for this model: {why}", param="speculative_model")


def draft_bytes(
    config: Config, draft: Guessing | None, target: ModelSpec, dtype: str, device: str = "cpu", ranks: int = 1
) -> int:
    """Of a rank's weights of what guesses for ``target``, on this kind of device."""
    if draft is None:
        return 0
    own = config.speculative_algorithm not in OTHER_FILES
    asked = config.quantization if own else config.speculative_quantization
    if isinstance(draft, MedusaSpec):
        return _medusa_bytes(draft, kinds_of(dtype, asked, None, device), ranks)
    whole = weight_bytes(draft, dtype, draft.quantized(asked, device), ranks, device)
    table = _table_bytes(config, target, dtype, device)
    return whole + table + _copied_bytes(config, target, dtype, device, ranks)


def head_kind(config: Config, device: str) -> str | None:
    """The storage of the output layer that guesses, if not that of the layer it is made of."""
    asked = config.speculative_head_quantization
    return None if asked is None else (ON_CPU if device == "cpu" else ON_GPU)[asked]


def _table_bytes(config: Config, target: ModelSpec, dtype: str, device: str) -> int:
    """Of the embedding that the last stage of a pipeline has to guess with."""
    if config.pp == 1 or target.tied or config.speculative_algorithm not in BY_A_HEAD:
        return 0
    kind = kinds_of(dtype, target.quantized(config.quantization, device), target.method, device).vocab
    return int(target.vocab * target.hidden * FORMATS[kind].bytes)


def _copied_bytes(config: Config, target: ModelSpec, dtype: str, device: str, ranks: int) -> int:
    """Of what a rank copies of the model's output layer, to guess with that. Of some tokens a GPU keeps a
    copy that is not rounded, too: guesses are compared by its logits."""
    rounded, kinds = head_kind(config, device), list[str]()
    if config.speculative_algorithm not in BY_MODELS_HEAD:
        return 0
    tokens = read_tokens(config, target.vocab)
    if rounded is not None:
        kinds.append(rounded)
    if tokens is not None and (rounded is None or device != "cpu"):
        own = target.quantized(config.quantization, device)
        kinds.append(kinds_of(dtype, own, target.method, device).vocab)
    rows = target.vocab if tokens is None else len(tokens)
    return int(rows * target.hidden * sum(FORMATS[kind].bytes for kind in kinds) / ranks)


def _medusa_bytes(medusa: MedusaSpec, kinds: Kinds, ranks: int) -> int:
    """Each rank has the layers, and its part of the vocabulary."""
    layers = medusa.layers * medusa.width * FORMATS[kinds.linear].bytes
    return int(medusa.heads * medusa.width * (layers + medusa.vocab * FORMATS[kinds.vocab].bytes / ranks))


def draft_state(draft: Guessing | None, ranks: int, rank: int | None = None) -> list[LayerState]:
    """What its layers keep: see ``state_of``."""
    return state_of(draft, ranks, rank) if isinstance(draft, ModelSpec) else []

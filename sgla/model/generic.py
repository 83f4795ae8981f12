"""Any causal language model of transformers: its own module with our pages.

The module's layers call ``attend`` for attention, which stores k and v in the pages of their layer and reads
those of the batch's rows. All else is the module's: a step is one sequence to it, whose tokens have the
positions that they have in their rows.

What a module does is not read from its configuration but seen: ``probe`` runs it once without weights. What
cannot be served right is refused by name, there or in ``check_rows`` once the weights are loaded.
"""

from __future__ import annotations

import json
import sys
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as SEEING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as SENSING
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as ENCODING
from transformers.models.auto.modeling_auto import MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES as HEARING
from transformers.utils import logging

from sgla.dist import Shard
from sgla.errors import ConfigError, UnknownArchitecture, WeightError
from sgla.hub.reader import Reader
from sgla.hub.source import ModelSource
from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer, Layer
from sgla.kernels.rehearsal import under_way
from sgla.kernels.trace import NotRecorded, Symbol
from sgla.messages import LONGEST, Progress
from sgla.model import limits
from sgla.model.base import CausalLM
from sgla.model.generic_ranks import body_of, split
from sgla.model.generic_ranks import refusal as no_ranks
from sgla.model.generic_spec import ANSWER, GenericSpec
from sgla.model.read import dtype_of
from sgla.model.registry import architecture_of
from sgla.processes import limit_memory

PAGED, SEEN = "sgla_paged", "sgla_seen"  # names of our attention: in steps, and while a module is probed
TOKENS = 3  # of a probe
MEMORY = 4 << 30  # bytes that a probe may take; the largest models need a tenth
MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "encoder_layers"), limits.LAYERS),
    "hidden_size": limits.WIDTH,
    "intermediate_size": limits.INNER,
    "num_attention_heads": limits.HEADS,
    "num_key_value_heads": limits.HEADS,
    "head_dim": limits.HEAD_DIM,
    "vocab_size": limits.VOCAB,
    "num_labels": limits.EXPERTS,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), limits.EXPERTS),
}
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
LENGTHS = ("dynamic", "longrope")  # rope kinds whose angles depend on the longest sequence of a batch
KINDS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
}  # of layers; the last is known by its mask
HONOURED = {"scaling", "softcap", "s_aux", "sliding_window"}
# Arguments of attention that say nothing of a step's mathematics.
IDLE = {
    *("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "output_attentions"),
    *("output_hidden_states", "output_router_logits", "return_dict", "training", "deterministic"),
    "logits_to_keep",
}
EXPERTS = ["hidden_states", "top_k_index", "top_k_weights"]  # what transformers' experts are given
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 3e-2}  # of the largest logit, what rounding may change


class Attends(Protocol):
    """What the attention of a module's layers does: q ``[1, Hq, T, hd]``, k and v ``[1, Hkv, T, ...]`` ->
    ``[1, T, Hq, vd]``."""

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict[str, Any]
    ) -> Tensor: ...


_attends: ContextVar[Attends] = ContextVar("attends")


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    """What transformers' layers call."""
    if torch.compiler.is_compiling():  # one op, into which the compiler does not look
        return attend_op(query, key, value, module.layer_idx, given.get("s_aux")), None  # type: ignore[arg-type]
    return _attends.get()(module, query, key, value, attention_mask, given), None


class Index(NamedTuple):
    """Stands for the module of a layer."""

    layer_idx: int


@torch.library.custom_op("sgla::attend", mutates_args=())
def attend_op(q: Tensor, k: Tensor, v: Tensor, index: int, sinks: Tensor | None) -> Tensor:
    layer: Any = Index(index)
    return _attends.get()(layer, q, k, v, None, {"s_aux": sinks})


@attend_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, index: int, sinks: Tensor | None) -> Tensor:
    return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


@dataclass(frozen=True)
class Mask:
    """Stands for a mask that a module has asked for, and hands on as it is. ``window`` 0: causal."""

    window: int

    def __getattr__(self, name: str) -> Any:
        raise refusal("it changes its attention masks")

    def __getitem__(self, index: Any) -> Any:
        raise refusal("it changes its attention masks")


def seen_mask(*, mask_function: Any, **_: Any) -> Mask:
    probing = _attends.get()
    assert isinstance(probing, Probing)
    return Mask(window_of(mask_function, probing.context))


AttentionInterface.register(PAGED, attend)
AttentionInterface.register(SEEN, attend)
AttentionMaskInterface.register(SEEN, seen_mask)


def window_of(sees: Any, context: int) -> int:
    """The sliding window of a mask function, 0 for a causal mask. Raises ConfigError for another one."""

    def row(query: int) -> Tensor:
        at = torch.tensor(query)
        return torch.as_tensor(sees(at * 0, at * 0, at, keys)).expand(context)

    with torch.device("cpu"):
        keys = torch.arange(context)
        window = int(row(context - 1).sum())
        places = {*range(3), window - 1, window, window + 1, 2 * window + 1, context // 3, context // 2}
        for query in sorted(place for place in places if 0 <= place < context):
            if not torch.equal(row(query), (keys <= query) & (keys > query - window)):
                raise refusal("its attention mask is neither causal nor a sliding window")
    return 0 if window == context else window


@dataclass
class Probing:
    """Notes what the layers ask of attention, in facts. ``context``: tokens of the longest sequence."""

    context: int
    layers: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict[str, Any]
    ) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int) or index in self.layers:
            raise refusal("its layers do not attend once each, by a number of their own")
        if not isinstance(mask, Mask):
            raise refusal("it masks attention in a way of its own")
        if not getattr(module, "is_causal", True):
            raise refusal("its tokens see those behind them")
        if not (q.shape[2] == k.shape[2] == v.shape[2] == TOKENS) or q.shape[0] > 1:
            raise refusal("its attention is not from each token of a step to those before it")
        if not q.shape[1] or q.shape[3] < 2:
            raise refusal(
                f"a layer has {q.shape[1]} attention heads of {q.shape[3]} values; one of two is the least"
            )
        if q.shape[1] % k.shape[1] or k.shape[1] != v.shape[1]:
            raise refusal(f"{q.shape[1]} attention heads do not divide among {k.shape[1]} KV heads")
        for name, value in given.items():
            if name not in HONOURED | IDLE and value is not None and value is not False:
                raise refusal(f"its attention takes {name}, which is not supported")
        scale = given.get("scaling")
        self.layers[index] = {
            "heads": q.shape[1],
            "kv_heads": k.shape[1],
            "head_dim": q.shape[3],
            "values": v.shape[3],
            "scale": q.shape[3] ** -0.5 if scale is None else float(scale),
            "window": mask.window,
            "softcap": float(given.get("softcap") or 0.0),
            "sinks": given.get("s_aux") is not None,
        }
        return q.new_empty(1, TOKENS, q.shape[1], v.shape[3])


class Step(NamedTuple):
    """Attention over the pages of a step. ``still``: what turns nothing, and a place in it for each token."""

    batch: ForwardBatch
    kv: list[Layer]
    spec: GenericSpec
    still: tuple[Tensor, Tensor]

    def __call__(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict[str, Any]
    ) -> Tensor:
        index: int = module.layer_idx  # type: ignore[assignment]
        out = self.read(index, (q, k, v), given.get("s_aux"))
        return out.view(1, q.shape[2], q.shape[1], -1).to(q.dtype)

    def read(self, index: int, qkv: tuple[Tensor, ...], sinks: Tensor | None) -> Tensor:
        """``[T, Hq * vd]``: attention of a layer, whose k and v go to the pages first."""
        layer, kv, dtype = self.spec.attention[index], self.kv[index], qkv[2].dtype
        assert isinstance(kv, KVLayer)
        columns = torch.cat([x[0].transpose(0, 1).flatten(1).to(dtype) for x in qkv], 1)
        table, places = self.still
        q = ops.qk_norm_rope_store(columns, places, table, None, None, 0.0, kv, self.batch.out_loc)
        sinks = None if sinks is None else sinks.float()
        return ops.attention(q, kv, self.batch, layer.scale, layer.window, layer.softcap, sinks)


def own_token(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, given: dict[str, Any]) -> Tensor:
    """In place of attention, something that depends on a token's own q, k and v."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return (v + torch.tanh(q.mean(-1, True) + 2 * k.mean(-1, True))).transpose(1, 2).contiguous()


class Columns(NamedTuple):
    """Stands for the output layer, which every rank has whole: those that this one draws from."""

    own: range
    plain: bool = False


class Generic(CausalLM):
    """``forward`` gives logits, which the module's own head has made."""

    unrecorded = "it is a module of transformers"
    compiled: Any = None  # the module, for steps of up to ``most`` tokens that are all sampled
    most = 0
    module: PreTrainedModel
    spec: GenericSpec

    def __init__(self, spec: GenericSpec, positions: int, dtype: torch.dtype, shard: Shard) -> None:
        self.spec, self.shard, self.positions, self.dtype = spec, shard, positions, dtype
        self.lm_head = Columns(shard.range(spec.vocab))  # type: ignore[assignment]
        self._still = torch.tensor([[1.0, 0.0]])

    @property
    def width(self) -> int:
        return self.spec.vocab

    def forward(self, batch: ForwardBatch, kv: list[Layer], rows: Tensor | None = None) -> Tensor:
        """Logits of ``rows``."""
        if isinstance(batch.ids, Symbol):
            raise NotRecorded(self.unrecorded)
        step = Step(batch, kv, self.spec, (self._still, torch.zeros_like(batch.positions)))
        if under_way():
            return self._rehearse(step, rows)
        ids = batch.ids.clamp(min=0)  # the successor of a broken row is none, and it may be in the next step
        return self._run(step, ids, batch.positions, rows)

    def _rehearse(self, step: Step, rows: Tensor | None) -> Tensor:
        """Attention alone: all else is torch's, where nothing is compiled."""
        tokens, made = step.batch.tokens, self._still.new_zeros
        for index, layer in enumerate(self.spec.attention[: len(step.kv)]):
            heads, kv_heads = layer.heads // self.shard.size, layer.kv_heads // self.shard.size
            shapes = (heads, layer.head_dim), (kv_heads, layer.head_dim), (kv_heads, layer.v_dim)
            qkv = tuple(made(1, n, tokens, dim, dtype=self.dtype) for n, dim in shapes)
            step.read(index, qkv, made(heads) if layer.sinks else None)
        return made(tokens if rows is None else len(rows), self.spec.vocab, dtype=self.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden.float()

    def logits_part(self, hidden: Tensor) -> Tensor:
        own = self.lm_head.own
        return hidden[:, own.start : own.stop].float()

    def of_rows(self, count: int = 6, back: bool = False) -> Tensor:
        """Logits of a few tokens, each of which sees itself alone. ``back``: computed in the other order."""
        device = next(self.module.parameters()).device
        near = torch.tensor([0, 1, 2, 5, 6, 7][:count], device=device) % self.positions
        ids = (torch.arange(count, device=device) * 37 + 11) % self.spec.vocab
        return (
            self._run(own_token, ids.flip(0), near.flip(0)).flip(0)
            if back
            else self._run(own_token, ids, near)
        )

    def check_rows(self, whole: Tensor | None = None) -> None:
        """Raise ConfigError if a token's logits depend on its place in a step, or on what stands beside it
        by another way than attention; if the first position of a sequence is not 0; or if logits are not
        those that the ``whole`` module has given."""
        here, there = self.of_rows(), self.of_rows(back=True)
        if not here.isfinite().any():
            raise refusal("its logits are no numbers")
        most = CLOSE[self.module.dtype] * float(here[here.isfinite()].abs().max())

        def near(a: Tensor, b: Tensor) -> bool:
            return torch.allclose(a, b.to(a.device), rtol=0, atol=most, equal_nan=True)

        if not near(here, there):
            raise refusal("its tokens depend on each other, or on their places, beside attention")
        ids = torch.arange(3, min(9, self.spec.vocab), device=here.device)[: self.positions]
        first = torch.arange(len(ids), device=here.device)
        if not near(self._run(own_token, ids, first), self._run(own_token, ids, None)):
            raise refusal("it numbers the tokens of a sequence otherwise than from 0")
        if whole is not None and not near(here, whole):
            raise no_ranks("the parts that its plan makes do not give what the whole does")

    @torch.inference_mode()
    def _run(
        self, attends: Attends, ids: Tensor, positions: Tensor | None, rows: Tensor | None = None
    ) -> Tensor:
        """``positions`` None: those that the module gives the tokens of a sequence."""
        token = _attends.set(attends)
        keep: Any = 0 if rows is None else rows.long()
        module: Any = self.module
        if len(ids) <= self.most and (rows is None or len(rows) == len(ids)):
            module, keep = self.compiled, 0
        try:
            out = module(
                input_ids=ids.long()[None],
                position_ids=None if positions is None else positions.long()[None],
                use_cache=False,
                logits_to_keep=keep,
            )
        finally:
            _attends.reset(token)
        logits: Tensor = out.logits[0]
        return logits if rows is None or module is self.module else logits[rows.long()]


def refusal(reason: str) -> ConfigError:
    return ConfigError(f"transformers' module cannot be served: {reason}", param="model")


def class_of(config: dict[str, Any], folder: Path, trusted: bool) -> tuple[type[PreTrainedModel], str]:
    """The class of a causal language model, perhaps with towers, and where the checkpoint's own code has it.
    Raises ConfigError."""
    name, auto = architecture_of(config), config.get("auto_map")
    known = [one for table in (CAUSAL, SEEING, SENSING, ENCODING, HEARING) for one in table.values()]
    names = {n for one in known for n in ([one] if isinstance(one, str) else one)}
    if name not in names:
        name = lent(config.get("model_type")) or name
    if name in names:
        return getattr(transformers, name), ""
    if not isinstance(auto, dict) or not isinstance(auto.get("AutoModelForCausalLM"), str):
        why = f"transformers {transformers.__version__} has no causal language model {name[:99]}"
        raise UnknownArchitecture(refusal(why).message, param="model")
    code = auto["AutoModelForCausalLM"]
    if not trusted:
        raise refusal(f"it is code of the checkpoint ({code[:99]}), which runs only with --trust-remote-code")
    return local_class(code, folder), code


def lent(kind: Any) -> str | None:
    """The class that computes a kind of model which has a configuration in transformers and no class of its
    own (EXAONE 3.5 is a Llama): its checkpoints name one of their own code."""
    name = CAUSAL.get(kind) if isinstance(kind, str) and kind in CONFIG_MAPPING else None
    if not isinstance(name, str):
        return None
    own = getattr(transformers, name).config_class
    return name if own is not None and own.model_type != kind else None


def local_class(code: str, folder: Path) -> type[PreTrainedModel]:
    """``file.Class`` of the checkpoint's folder. Raises ConfigError."""
    file = folder / f"{code.partition('.')[0]}.py"
    if "--" in code or file.parent != folder or not file.is_file():
        raise refusal(f"its code {code[:99]} does not lie beside its weights")
    found: type[PreTrainedModel] = get_class_from_dynamic_module(code, str(folder), local_files_only=True)
    return found


def check_class(cls: type[PreTrainedModel], hf: PreTrainedConfig) -> None:
    """Raise ConfigError for a class that keeps more than pages of k and v, or attends by itself."""
    takes = signature(cls.forward).parameters
    kinds = set(getattr(hf.get_text_config(), "layer_types", None) or ())
    reasons = {
        "it has an encoder and cross-attention": getattr(hf, "is_encoder_decoder", False),
        "it keeps states of its own (recurrent layers)": cls._is_stateful,
        f"it has layers of the kind {', '.join(sorted(map(str, kinds - KINDS)))}": not kinds <= KINDS,
        "its class has no interface for attention": not cls._supports_attention_backend,
        "it takes no positions": "position_ids" not in takes,
        "it takes no places to keep logits of": "logits_to_keep" not in takes,
        "it is quantized": getattr(hf, "quantization_config", None) is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            raise refusal(reason)


def context_of(hf: PreTrainedConfig) -> tuple[int, list[str]]:
    """Tokens of the longest sequence, and notes on that."""
    found = next((n for key in POSITIONS if isinstance(n := getattr(hf, key, None), int) and n > 0), 0)
    if not found:
        raise refusal("its configuration names no longest sequence (max_position_embeddings)")
    context, notes = min(found, LONGEST), []
    rope = getattr(hf, "rope_parameters", None) or {}
    for table in [rope, *rope.values()]:
        if isinstance(table, dict) and (kind := table.get("rope_type")) in LENGTHS:
            trained = table.get("original_max_position_embeddings") or getattr(
                hf, "original_max_position_embeddings", None
            )
            context = min(context, trained or context)
            notes.append(f"rope scaling {kind} depends on the longest sequence beyond {context} tokens, so "
                         "the context ends there")  # fmt: skip
    return context, notes


def within_training(model: PreTrainedModel) -> PreTrainedModel:
    """Its ``dynamic`` ropes turn as they do up to where the context ends, and look at no positions."""
    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, dict):
            part.rope_type = {
                layer: "default" if kind == "dynamic" else kind for layer, kind in kinds.items()
            }
        elif kinds == "dynamic":
            part.rope_type = "default"  # type: ignore[assignment]
    return model


def configured(config: dict[str, Any], cls: type[PreTrainedModel]) -> PreTrainedConfig:
    """Raises ConfigError."""
    kind, own = config.get("model_type"), cls.config_class
    if lent(kind) == cls.__name__:
        own = CONFIG_MAPPING[kind]
    if own is None or kind != own.model_type:
        known = own and own.model_type
        raise refusal(f"config.json says model_type {str(kind)[:60]}, and the class is of {known}")
    parts = [part for key, part in config.items() if key.endswith("_config") and isinstance(part, dict)]
    for table in (config, *parts):
        for key, most in MOST.items():
            for name in {key, own.attribute_map.get(key, key)}:
                value = table.get(name)
                if isinstance(value, int) and not 0 <= value <= most:
                    raise refusal(f"{name} is {str(value)[:20]}; at most {most}")
    try:
        return own.from_dict(own._decode_special_floats(config))
    except Exception as error:
        raise refusal(f"its configuration is refused: {first_line(error)}") from error


def of_text(config: PreTrainedConfig, text: PreTrainedConfig, kind: str) -> str | dict[str, Any]:
    """``kind`` of attention for ``text`` and what holds it; towers keep their own, which may know no other
    kinds."""
    if config is text:
        return kind
    parts = {key: getattr(config, key, None) for key in config.sub_configs}
    return {"": kind} | {key: of_text(part, text, kind) for key, part in parts.items() if holds(part, text)}


def holds(config: PreTrainedConfig | None, text: PreTrainedConfig) -> bool:
    """Whether ``text`` is this configuration, or one within it."""
    if config is None or config is text:
        return config is text
    return any(holds(getattr(config, key, None), text) for key in config.sub_configs)


def probe(config: dict[str, Any], folder: Path, trusted: bool = False, ranks: int = 1) -> dict[str, Any]:
    """The facts about a model that ``config`` describes. Raises ConfigError for one that cannot be served, by
    so many ``ranks``."""
    cls, code = class_of(config, folder, trusted)
    hf = configured(config, cls)
    check_class(cls, hf)
    within = {} if config.get("dtype") or config.get("torch_dtype") else config.get("text_config") or {}
    dtype = dtype_of(Reader(architecture_of(config), within or config))
    text = hf.get_text_config()
    context, notes = context_of(text)
    try:
        with torch.device("meta"):
            made = cls._from_config(hf, attn_implementation=of_text(hf, text, SEEN), dtype=torch.float32)
        model = within_training(made).eval()
        if towers := without_towers(model):
            notes.append(f"it reads text alone, without its {', '.join(towers)}")
        if "Conv1d" in (kinds := {type(part).__name__ for part in model.modules()}):
            raise refusal("its layers mix tokens beside attention (Conv1d)")
        if any("Experts" in kind for kind in kinds):
            model.set_experts_implementation("batched_mm")  # which looks at no values
            for part in model.modules():
                if not hasattr(part, "is_concatenated") and [*signature(part.forward).parameters] == EXPERTS:
                    part.forward = unchosen
        layers = seen_layers(model, context)
        values = count_of(model)
        own = values if ranks == 1 else values_of_a_rank(model, ranks, layers, context)
    except ConfigError:
        raise
    except Exception as error:
        raise refusal(f"it does not run without weights: {first_line(error)}") from error
    return {
        "architecture": architecture_of(config),
        "code": code,
        "hidden": text.hidden_size,
        "intermediate": getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        "vocab": text.vocab_size,
        "context": context,
        "dtype": dtype,
        "layers": layers,
        "values": values,
        "own": own,
        "ranks": ranks,
        "notes": notes,
    }


def unchosen(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """In place of experts that have one implementation, a loop over those that were chosen."""
    return hidden_states


def without_towers(model: PreTrainedModel) -> list[str]:
    """Leave what reads texts; the names of what has gone. Raises ConfigError where that is not a part."""
    if model.config.get_text_config() is model.config:
        return []
    if (body := body_of(model)) is None:
        raise refusal("it has other parts than a language model")
    gone = [name for name, part in model.base_model.named_children() if part is not body]
    for name in gone:
        delattr(model.base_model, name)
    return gone


def count_of(model: PreTrainedModel) -> int:
    """Values of its parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def values_of_a_rank(model: PreTrainedModel, ranks: int, layers: list[dict[str, Any]], context: int) -> int:
    """Of the parameters that each of ``ranks`` has. Raises ConfigError if the plan of the class does not
    leave each rank its share of the heads that all ``layers`` have."""
    for layer in layers:
        if layer["heads"] % ranks or layer["kv_heads"] % ranks:
            raise no_ranks(f"{layer['heads']} heads with {layer['kv_heads']} of k and v do not divide")
    split(model, Shard(0, ranks), lambda x: None)
    for layer, own in zip(layers, seen_layers(model, context)):
        shares = {key: own[key] * ranks for key in ("heads", "kv_heads")}
        if own | shares != layer:
            raise no_ranks("its plan leaves a rank more or less than its share of the heads")
    return count_of(model)


def seen_layers(model: PreTrainedModel, context: int) -> list[dict[str, Any]]:
    """What each layer asks of attention."""
    probing = Probing(context)
    token = _attends.set(probing)
    try:
        with torch.device("meta"), torch.no_grad():
            model(
                input_ids=torch.zeros(1, TOKENS, dtype=torch.long),
                attention_mask=torch.ones(1, TOKENS, dtype=torch.long),  # or packed rows are looked for
                position_ids=torch.arange(TOKENS)[None],
                use_cache=False,
                logits_to_keep=torch.zeros(1, dtype=torch.long),
            )
    finally:
        _attends.reset(token)
    if not probing.layers or sorted(probing.layers) != list(range(len(probing.layers))):
        raise refusal("some of its layers have another kind of attention, or none")
    count = model.config.get_text_config().num_hidden_layers
    if len(probing.layers) < count:
        raise refusal(f"of {count} layers {len(probing.layers)} attend")
    return [probing.layers[i] for i in sorted(probing.layers)]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def load_generic(
    source: ModelSource,
    views: dict[str, Any],
    spec: GenericSpec,
    dtype: str,
    shard: Shard,
    positions: int,
    seed: int,
    begin: Any,
    report: Any,
) -> Generic:
    """See ``load.load_model``. ``views``: what maps the files' tensors, by their names. Raises ConfigError
    and WeightError."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = Generic(spec, positions, getattr(torch, dtype), shard)
    device = torch.empty(0).device
    report(Progress(phase="load", message="weights", done=0, total=spec.values))
    config = source.config
    cls, _ = class_of(config, source.folder, bool(spec.code))
    hf = configured(config, cls)
    with torch.device("cpu"):
        model.module = within_training(loaded(cls, hf, source.kind, views, model.dtype, seed)).eval()
        without_towers(model.module)
        expected = model.of_rows() if shard.size > 1 else None
    if shard.size > 1:
        split(model.module, shard, shard.all_reduce)
    nn.Module.to(model.module, device)
    report(Progress(phase="load", message="weights", done=spec.values, total=spec.values))
    model.check_rows(expected)
    if begin is not None:
        begin(model)
    return model


def loaded(
    cls: type[PreTrainedModel],
    hf: PreTrainedConfig,
    kind: str,
    views: dict[str, Any],
    dtype: torch.dtype,
    seed: int,
) -> PreTrainedModel:
    made: PreTrainedModel
    attention = of_text(hf, hf.get_text_config(), PAGED)
    if kind == "dummy":
        torch.manual_seed(seed)
        made = cls._from_config(hf, attn_implementation=attention, dtype=dtype)
        for weight in made.parameters():
            if weight.dim() > 1 and not weight.any():  # a router of zeros has ties, which devices break apart
                torch.nn.init.normal_(weight, std=getattr(hf, "initializer_range", 0.02))
        return made
    try:
        found: Any = cls.from_pretrained(
            None,
            config=hf,
            state_dict=views,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told
        )
    except Exception as error:
        raise WeightError(f"the weights do not fit {cls.__name__}: {first_line(error)}") from error
    made, told = found
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if names := sorted(map(str, told.get(what) or ())):
            shown = ", ".join(names[:8])
            raise WeightError(
                f"the weights do not fit {cls.__name__}: {len(names)} {what.partition('_')[0]}: {shown}"
            )
    return made


def main() -> int:
    """Facts about the model that stands on the standard input, or why it is refused, in a line behind
    ``ANSWER``."""
    asked = json.load(sys.stdin)
    logging.set_verbosity_error()
    limit_memory(MEMORY)
    try:
        found = probe(asked["config"], Path(asked["folder"]), asked["trusted"], asked["ranks"])
    except ConfigError as error:
        unknown = isinstance(error, UnknownArchitecture)
        found = {"refused": " ".join(str(error).split()), "param": error.param, "unknown": unknown}
    print("", ANSWER.decode() + json.dumps(found), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

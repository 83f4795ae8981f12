"""GGUF files: HF-style configuration, raw tokenizer tables and tensors under their HF names.

``gguf_header`` reads the file, ``gguf_keys`` says which keys are honoured. The configuration is one that HF's
class of the architecture could have, so what HF has no words for is refused. Quantized blocks are decoded by
the ``gguf`` package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import isclose, log, prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sgla.errors import ConfigError, WeightError
from sgla.hub.gguf_header import check_places, parse, type_name
from sgla.hub.gguf_keys import read_keys, read_sampling, read_vocabulary, token_id

Quants = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]

# Ends of a turn that some files do not list as eos_token_id, by the token's text.
_END_OF_TURN = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>"}
_NAMED = 8  # tensor names shown in an error


class _Place(NamedTuple):
    """Where HF has a tensor, and the dims of its weight:
    d hidden, f of the MLP, q and k of all heads, h of one, v tokens."""

    stem: str
    dims: str


_TENSORS = {
    "token_embd": _Place("model.embed_tokens", "vd"),
    "output_norm": _Place("model.norm", "d"),
    "output": _Place("lm_head", "vd"),
}
_LLAMA = {
    "attn_norm": _Place("input_layernorm", "d"),
    "attn_q": _Place("self_attn.q_proj", "qd"),
    "attn_k": _Place("self_attn.k_proj", "kd"),
    "attn_v": _Place("self_attn.v_proj", "kd"),
    "attn_output": _Place("self_attn.o_proj", "dq"),
    "ffn_norm": _Place("post_attention_layernorm", "d"),
    "ffn_gate": _Place("mlp.gate_proj", "fd"),
    "ffn_up": _Place("mlp.up_proj", "fd"),
    "ffn_down": _Place("mlp.down_proj", "df"),
}
_QWEN3 = _LLAMA | {
    "attn_q_norm": _Place("self_attn.q_norm", "h"),
    "attn_k_norm": _Place("self_attn.k_norm", "h"),
}
_GEMMA3 = _QWEN3 | {
    "ffn_norm": _Place("pre_feedforward_layernorm", "d"),
    "post_attention_norm": _Place("post_attention_layernorm", "d"),
    "post_ffw_norm": _Place("post_feedforward_layernorm", "d"),
}
_QKV, _MLP = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up", "ffn_down")


class _Architecture(NamedTuple):
    """HF's class, its ``model_type``, the tensors of a layer, and those that have biases: always, all of them
    or none by HF's ``attention_bias``, all or none by ``mlp_bias``."""

    hf_class: str
    model_type: str
    layer: dict[str, _Place]
    biased: tuple[str, ...] = ()
    attention_bias: tuple[str, ...] = (*_QKV, "attn_output")
    mlp_bias: tuple[str, ...] = ()


_ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", "llama", _LLAMA, mlp_bias=_MLP),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2", _LLAMA, biased=_QKV, attention_bias=()),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3", _QWEN3),
    "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA3),
}


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of the file under its HF name, decoded on demand.

    ``blocks`` uint8 ``[n, bytes of a row]``:
    memory-mapped, rows possibly reordered; ``type_name`` as ``Q4_1``.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    blocks: NDArray[np.uint8]
    shift: float = 0.0

    def numpy(self, rows: range | None = None) -> NDArray[np.float32]:
        """The values as a new float32 array: ``rows`` of the first dim, or all."""
        values = self._decode(rows or range(self.shape[0])).astype(np.float32, copy=self.type_name == "F32")
        if self.shift:
            values += np.float32(self.shift)
        return values

    def _decode(self, rows: range) -> NDArray[np.float32]:
        """By the ``gguf`` package, except for three simple types,
        at which this is two to three times as fast."""
        if len(self.shape) == 1:
            return self._dequantize(self.blocks)[0, rows.start : rows.stop]
        if self.type_name in _SIMPLE and (quants := self.quants(rows)) is not None:
            return _affine(*quants)
        return self._dequantize(self.blocks[rows.start : rows.stop])

    def _dequantize(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        return dequantize(blocks, GGMLQuantizationType[self.type_name])

    @property
    def bits(self) -> int | None:
        """Of the quants of a matrix in groups of 32 with one scale and minimum; None for other types."""
        return {"Q4_K": 4, "Q5_K": 5}.get(self.type_name) or getattr(
            _SIMPLE.get(self.type_name), "bits", None
        )

    @property
    def kept(self) -> str | None:
        """The storage that has these values at the least loss for its bytes;
        None of floating-point numbers."""
        return _kept(self.type_name) or None

    @property
    def symmetric(self) -> bool:
        """Whether the minimum is half of the range of ``bits`` below 0."""
        return self.type_name in _SIMPLE and _SIMPLE[self.type_name].symmetric

    def quants(self, rows: range) -> Quants | None:
        """Quants from 0 on ``[n, k]``, scales and minima ``[n, k / 32]`` of a matrix that has ``bits``; None
        of others. Those of Q4_K and Q5_K are products, which are rounded to float16."""
        if self.type_name in ("Q4_K", "Q5_K"):
            return self._nested_quants(rows)
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


def _kept(name: str) -> str:
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
    "Q4_0": "q4_0",
    "Q4_1": "int4",
    "Q4_K": "int4",
    "Q5_0": "q5_0",
    "Q6_K": "q8_0",
    "Q8_0": "q8_0",
}
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


class GGUFFile:
    """A parsed GGUF file. Raises ConfigError if it is no such file or its architecture is not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._header = parse(self._map)
        except (OSError, struct.error, ValueError) as error:
            raise ConfigError(f"{path} is not a valid GGUF file: {error}") from error
        self.metadata, self._tensors = self._header.metadata, self._header.tensors
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ConfigError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; "
                f"supported: {', '.join(sorted(_ARCHITECTURES))}"
            )

    @cached_property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` of the same model would say. Raises ConfigError for keys that are not
        supported, and WeightError for tensors that do not fit them, so that no size in it is larger than the
        file's."""
        try:
            keys = read_keys(self.metadata, self.architecture)
            check_places(self._header, len(self._map))
            config = self._read_config(keys)
            self._check_tensors(config)
        except WeightError as error:
            raise WeightError(f"{self.path}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        return config

    def _read_config(self, keys: dict[str, Any]) -> dict[str, Any]:
        hidden, heads = keys["embedding_length"], keys["attention.head_count"]
        head_dim = keys.get("attention.key_length", hidden // heads)
        if head_dim < 2 or head_dim % 2:
            raise ConfigError(f"heads of {head_dim} values are not supported; their size must be even")
        architecture = _ARCHITECTURES[self.architecture]
        for name in ("attention.value_length", "rope.dimension_count"):
            if keys.get(name, head_dim) != head_dim:
                raise ConfigError(
                    f"{self.architecture}.{name} is {keys[name]}, and only the "
                    f"size of a head, {head_dim}, is supported"
                )
        config = {
            "architectures": [architecture.hf_class],
            "model_type": architecture.model_type,
            "hidden_size": hidden,
            "intermediate_size": keys["feed_forward_length"],
            "num_hidden_layers": keys["block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": keys.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": keys["context_length"],
            "rms_norm_eps": keys["attention.layer_norm_rms_epsilon"],
            "vocab_size": self._vocab_size(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "rope_theta": keys.get("rope.freq_base", 1e6 if self.architecture == "gemma3" else 1e4),
            "rope_scaling": self._rope_scaling(keys),
            "bos_token_id": token_id(self.metadata, "bos"),
            "eos_token_id": self.eos_token_ids,
            "torch_dtype": "float16" if self._is_float16() else "float32",
        }
        for flag, stems in (
            ("attention_bias", architecture.attention_bias),
            ("mlp_bias", architecture.mlp_bias),
        ):
            if any(f"blk.0.{stem}.bias" in self._tensors for stem in stems):
                config[flag] = True
        if kept := self._kept_parts():
            config["quantization_config"] = {"quant_method": "gguf", "kept": kept}
        scale = keys.get("attention.scale") or self._default_scale(config)
        if self.architecture == "gemma3":
            config |= _gemma_config(keys, scale)
        elif not isclose(scale, head_dim**-0.5, rel_tol=1e-5):
            raise ConfigError(
                f"{self.architecture}.attention.scale is {scale:g}, and only 1/sqrt({head_dim}) is supported"
            )
        return config

    def _default_scale(self, config: dict[str, Any]) -> float:
        """Of queries. Gemma's 27B model alone has hidden/heads instead of the size of a head;
        the metadata does not say so."""
        if self.architecture == "gemma3" and config["num_hidden_layers"] == 62:
            return float((config["hidden_size"] // config["num_attention_heads"]) ** -0.5)
        return float(config["head_dim"] ** -0.5)

    def _is_float16(self) -> bool:
        """Whether matrices are float16, whose bits bfloat16 cannot keep."""
        return any(len(t.shape) > 1 and type_name(t.type) == "F16" for t in self._tensors.values())

    def _kept_parts(self) -> dict[str, float]:
        """What part of the values of all matrices a CPU keeps in each storage, "" for floating-point numbers;
        empty if none is quantized."""
        values: dict[str, int] = {}
        for t in self._tensors.values():
            if len(t.shape) > 1:
                kind = _kept(type_name(t.type))
                values[kind] = values.get(kind, 0) + prod(t.shape)
        total = sum(values.values())
        return {kind: count / total for kind, count in values.items()} if values.keys() - {""} else {}

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self._tensors:
            raise WeightError("the tensor token_embd.weight is missing")
        return self._tensors["token_embd.weight"].shape[0]

    def _rope_scaling(self, keys: dict[str, Any]) -> dict[str, Any] | None:
        """In HF's words. As in llama.cpp a factor without a type is linear, and a factor of 0 is none."""
        factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
        kind = keys.get("rope.scaling.type", "linear")
        attention = keys.get("rope.scaling.attn_factor", 1.0)
        if kind != "yarn" and attention != 1.0:
            raise ConfigError(f"{self.architecture}.rope.scaling.attn_factor is supported with yarn alone")
        plain = kind == "none" or (kind == "linear" and factor == 1.0)
        if "rope_freqs.weight" in self._tensors:  # Llama 3.x: the scaling comes as a table
            if not plain:
                raise ConfigError("rope_freqs.weight and rope.scaling at once are not supported")
            return {"rope_type": "factors", "factors": self._rope_factors()}
        if plain:
            return None
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            names = {
                "original_context_length": "original_max_position_embeddings",
                "yarn_beta_fast": "beta_fast",
                "yarn_beta_slow": "beta_slow",
            }
            given = {hf: keys.get(f"rope.scaling.{name}") for name, hf in names.items()}
            scaling |= {hf: value for hf, value in given.items() if value is not None}
            scaling["attention_factor"] = attention * (0.1 * log(factor) + 1.0 if factor > 1 else 1.0)
        return scaling

    def _rope_factors(self) -> list[float]:
        table = self._tensors["rope_freqs.weight"]
        if type_name(table.type) != "F32":
            raise WeightError(f"rope_freqs.weight has type {type_name(table.type)}, not F32")
        values = np.frombuffer(self._map, "<f4", prod(table.shape), self._header.data + table.offset)
        if not (np.isfinite(values) & (values > 0)).all():
            raise WeightError("rope_freqs.weight has values that are no positive numbers")
        factors: list[float] = values.tolist()
        return factors

    def _check_tensors(self, config: dict[str, Any]) -> None:
        """Raises WeightError naming missing, unexpected and misshapen tensors."""
        layers = {
            name.split(".")[1] for name in self._tensors if name.startswith("blk.") and name.count(".") > 1
        }
        if config["num_hidden_layers"] != len(layers):
            raise WeightError(
                f"{self.architecture}.block_count is {config['num_hidden_layers']}, and there are tensors of "
                f"{len(layers)} layers"
            )
        expected = self._expected(config)
        absent = set() if "output.weight" in self._tensors else {"output.weight"}
        misshapen = [
            f"{name} has shape {list(tensor.shape)}, expected {list(expected[name][1])}"
            for name, tensor in self._tensors.items()
            if name in expected and expected[name][1] != tensor.shape
        ]
        complaints = (
            _complain(
                "missing", [name for name in expected if name not in self._tensors and name not in absent]
            )
            + _complain("unexpected", [name for name in self._tensors if name not in expected])
            + _complain("misshapen", misshapen)
        )
        if complaints:
            raise WeightError(f"the tensors do not fit a {self.architecture} model: " + "; ".join(complaints))

    def _expected(self, config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """GGUF name -> HF name and shape of every tensor that the file may have."""
        architecture, head_dim = _ARCHITECTURES[self.architecture], config["head_dim"]
        dims = {
            "d": config["hidden_size"],
            "f": config["intermediate_size"],
            "q": config["num_attention_heads"] * head_dim,
            "k": config["num_key_value_heads"] * head_dim,
            "h": head_dim,
            "v": config["vocab_size"],
        }
        biased = set(architecture.biased)
        biased.update(architecture.attention_bias if "attention_bias" in config else ())
        biased.update(architecture.mlp_bias if "mlp_bias" in config else ())
        places = {stem: (place, False) for stem, place in _TENSORS.items()}
        for i in range(config["num_hidden_layers"]):
            for stem, place in architecture.layer.items():
                hf = place._replace(stem=f"model.layers.{i}.{place.stem}")
                places[f"blk.{i}.{stem}"] = hf, stem in biased
        expected: dict[str, tuple[str, tuple[int, ...]]] = {}
        for stem, (place, bias) in places.items():
            shape = tuple(dims[dim] for dim in place.dims)
            expected[f"{stem}.weight"] = f"{place.stem}.weight", shape
            if bias:
                expected[f"{stem}.bias"] = f"{place.stem}.bias", shape[:1]
        if self.architecture == "llama" and "rope_freqs.weight" in self._tensors:
            expected["rope_freqs.weight"] = "", (head_dim // 2,)
        return expected

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """What ``generation_config.json`` of the same model would say. Raises as ``config`` does."""
        ids = {"bos_token_id": self.config["bos_token_id"], "eos_token_id": self.eos_token_ids}
        try:
            return ids | read_sampling(self.metadata)
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a generation: eos, eot and well-known end-of-turn tokens of the vocabulary."""
        ids = {index for name in ("eos", "eot") if (index := token_id(self.metadata, name)) is not None}
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        named = enumerate(tokens) if isinstance(tokens, list) else ()
        return sorted(ids | {i for i, token in named if token in _END_OF_TURN})

    @cached_property
    def tokenizer_raw(self) -> dict[str, Any]:
        """The vocabulary: model, pre, tokens, token_type,
        merges, scores, the special ids, flags and chat template.

        Absent entries are ``None``. ``model`` is ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece).
        ``chat_template`` is its source, or sources by name. Raises ConfigError for keys that are not
        supported.
        """
        try:
            keys = read_vocabulary(self.metadata)
        except ConfigError as error:
            raise ConfigError(
                f"{self.path}: {error}; name the original model's folder with --tokenizer", param="tokenizer"
            ) from error
        raw = {
            key: keys.get(f"tokenizer.ggml.{key}")
            for key in ("model", "pre", "tokens", "token_type", "merges", "scores", "add_space_prefix")
        }
        for short, name in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("eot", "eot"),
            ("unk", "unknown"),
            ("pad", "padding"),
        ):
            raw[f"{short}_token_id"] = keys.get(f"tokenizer.ggml.{name}_token_id")
        raw["add_bos"] = keys.get("tokenizer.ggml.add_bos_token")
        raw["add_eos"] = keys.get("tokenizer.ggml.add_eos_token")
        template, before = keys.get("tokenizer.chat_template"), "tokenizer.chat_template."
        named = {key.removeprefix(before): text for key, text in keys.items() if key.startswith(before)}
        raw["chat_template"] = (named | {"default": template} if template else named) if named else template
        return raw

    def tensors(self) -> Iterator[LazyTensor]:
        """Every weight under its HF name and in HF's row order. Raises as ``config`` does."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        expected = self._expected(self.config)
        for tensor in self._tensors.values():
            if tensor.name == "rope_freqs.weight":
                continue
            name, shape = expected[tensor.name]
            kind = GGMLQuantizationType(tensor.type)
            block, size = GGML_QUANT_SIZES[kind]
            rows, row_bytes = prod(shape[:-1]), shape[-1] // block * size
            start = self._header.data + tensor.offset
            blocks = np.frombuffer(self._map, np.uint8, rows * row_bytes, start).reshape(rows, row_bytes)
            if self.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                if len(shape) == 1 and block > 1:
                    raise WeightError(
                        f"{self.path}: {tensor.name} has type {kind.name}, whose values have no order"
                    )
                blocks = self._reorder(blocks, "q_proj" in name, size if len(shape) == 1 else row_bytes)
            yield LazyTensor(name, kind.name, shape, blocks, self._shift(name))

    def _reorder(self, blocks: NDArray[np.uint8], query: bool, size: int) -> NDArray[np.uint8]:
        """Llama files interleave the two rotary halves of each q and k head; HF keeps them apart. ``size``:
        bytes of a row, or of one value of a bias."""
        heads = self.config["num_attention_heads" if query else "num_key_value_heads"]
        halves = blocks.reshape(heads, -1, 2, size).swapaxes(1, 2)
        return np.ascontiguousarray(halves).reshape(blocks.shape)

    def _shift(self, name: str) -> float:
        """Gemma files hold 1 + w of HF's norm weights w."""
        return -1.0 if self.architecture == "gemma3" and name.endswith("norm.weight") else 0.0


def _gemma_config(keys: dict[str, Any], scale: float) -> dict[str, Any]:
    scalar = scale**-2
    return {
        "query_pre_attn_scalar": round(scalar) if isclose(scalar, round(scalar), rel_tol=1e-5) else scalar,
        "sliding_window": keys.get("attention.sliding_window") or None,
        "sliding_window_pattern": keys.get("attention.sliding_window_pattern", 6)
        if keys.get("attention.sliding_window")
        else 1,
        "rope_local_base_freq": keys.get("rope.freq_base_swa", 10000.0),
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": keys.get("final_logit_softcapping") or None,
    }


def _complain(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{len(names)} {what}: {', '.join(names[:_NAMED])}{more}"]


def read_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file. Raises ConfigError when it cannot be read or its architecture is not supported."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return GGUFFile(path)

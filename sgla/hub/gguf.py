"""GGUF files: HF-style configuration, raw tokenizer tables and tensors under their HF names.

``gguf_header`` reads the file, ``gguf_layout`` says what the files of an architecture hold, ``gguf_keys``
which keys are honoured, ``gguf_blocks`` decodes. The configuration is one that HF's class of the architecture
could have, so what HF has no words for is refused.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import isclose, log, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgla.errors import ConfigError, WeightError
from sgla.hub.gguf_blocks import LazyTensor, storage_of
from sgla.hub.gguf_header import GGUFTensor, check_places, parse, type_name
from sgla.hub.gguf_keys import read_keys, read_sampling, read_vocabulary, token_id
from sgla.hub.gguf_layout import HF_KEYS, JOINED, MISSING, TOP, Layout, Place, Stored

# Ends of a turn that some files do not list as eos_token_id, by the token's text.
_END_OF_TURN = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>"}
_NAMED = 8  # tensor names shown in an error

Layouts = Mapping[str, tuple[Layout, ...]]  # by the architecture's name


class GGUFFile:
    """A parsed GGUF file. ``layouts``: the architectures that there are; its vocabulary can be read without.
    Raises ConfigError if it is no such file."""

    def __init__(self, path: Path, layouts: Layouts) -> None:
        self.path, self._layouts = path, layouts
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._header = parse(self._map)
        except (OSError, struct.error, ValueError) as error:
            raise ConfigError(f"{path} is not a valid GGUF file: {error}") from error
        self.metadata, self._tensors = self._header.metadata, self._header.tensors
        self.architecture = str(self.metadata.get("general.architecture"))

    @cached_property
    def layout(self) -> Layout:
        """What the files of its architecture hold. Raises ConfigError if there is no such architecture."""
        found = [layout for layout in self._layouts.get(self.architecture, ()) if self._is_of(layout)]
        if not found:
            raise ConfigError(
                f"{self.path}: GGUF architecture {self.architecture!r} is not supported; "
                f"supported: {', '.join(sorted(self._layouts))}"
            )
        return max(found, key=lambda layout: len(layout.when))

    def _is_of(self, layout: Layout) -> bool:
        given = {key: self.metadata.get(f"{layout.name}.{key}") for key in layout.when}
        return all(
            bool(given[key]) if want is True else given[key] == want for key, want in layout.when.items()
        )

    @cached_property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` of the same model would say. Raises ConfigError for keys that are not
        supported, and WeightError for tensors that do not fit them, so that no size in it is larger than the
        file's."""
        layout = self.layout
        try:
            check_places(self._header, len(self._map))
            self._check_layers()
            config = self._read_config(layout, self._keys)
            self._check_tensors()
        except WeightError as error:
            raise WeightError(f"{self.path}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        return config

    @cached_property
    def _keys(self) -> dict[str, Any]:
        return read_keys(self.metadata, self.layout)

    def _value(self, key: str) -> Any:
        """Of a key in HF's words, also where it is missing."""
        value = self._keys.get(key, self.layout.missing.get(key))
        return MISSING.get(key, value) if value is None or (value == 0 and value is not False) else value

    @cached_property
    def _layers(self) -> int:
        """Those behind them, which guess further tokens, are left out."""
        left_out = self._value("nextn_predict_layers") if self.layout.hf_key("nextn_predict_layers") else 0
        count: int = self._keys["block_count"] - left_out
        if count < 1:
            raise ConfigError(
                f"{self.architecture}.nextn_predict_layers is {left_out}, and there are no others"
            )
        return count

    @cached_property
    def _sizes(self) -> dict[str, int]:
        """Of the letters of ``Place.dims``."""
        keys, heads = self._keys, self._keys["attention.head_count"]
        hidden, inner = keys["embedding_length"], keys["feed_forward_length"]
        head_dim = keys.get("attention.key_length", hidden // heads)
        kv_heads = keys.get("attention.head_count_kv", heads)
        expert = keys.get("expert_feed_forward_length", inner)
        sizes = {
            "1": 1,
            "d": hidden,
            "f": inner,
            "q": heads * head_dim,
            "k": kv_heads * head_dim,
            "h": head_dim,
            "n": heads,
            "t": keys.get("rope.dimension_count", head_dim) // 2,
            "v": self._vocab_size(),
            "e": keys.get("expert_count", 0),
            "m": expert,
            "s": keys.get("expert_shared_feed_forward_length") or expert * keys.get("expert_shared_count", 0),
        }
        if not self.layout.latent:
            return sizes
        rotated, rank = keys["rope.dimension_count"], keys["attention.kv_lora_rank"]
        still = keys.get("attention.key_length_mla", head_dim) - rotated
        value = keys.get("attention.value_length_mla", keys["attention.value_length"])
        if still < 1:
            raise ConfigError(
                f"{self.architecture}.rope.dimension_count is {rotated}, which is all of a head's key"
            )
        return sizes | {
            "a": keys.get("attention.q_lora_rank", 0),
            "r": rank,
            "l": rank + rotated,
            "u": heads * (still + rotated),
            "g": still,
            "y": value,
            "o": heads * value,
            "b": heads * (still + value),
        }

    def _read_config(self, layout: Layout, keys: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = {
            "architectures": [layout.hf_class],
            "model_type": layout.model_type,
            "vocab_size": self._sizes["v"],
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "rope_theta": keys.get("rope.freq_base", layout.missing.get("rope.freq_base", 1e4)),
            "bos_token_id": token_id(self.metadata, "bos"),
            "eos_token_id": self.eos_token_ids,
            "torch_dtype": "float16" if self._is_float16() else "float32",
        }
        for key in HF_KEYS:
            if name := layout.hf_key(key):
                value = self._value(key)
                if value is not None or key in MISSING:
                    config[name] = value
        config["num_hidden_layers"] = self._layers
        if "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = 0
        config |= self._flags
        if layout.mixture:
            self._check_widths(layout, keys)
        config |= self._latent(keys) if layout.latent else self._heads(layout, keys)
        config |= self._windows(layout, keys)
        config["rope_scaling"] = self._rope_scaling(keys)
        if layout.yarn and config["rope_scaling"] is None:
            config["rope_parameters"] = None  # where HF's class would fill in another scaling
        if kept := self._kept_parts():
            config["quantization_config"] = {"quant_method": "gguf", "kept": kept}
        return config

    @cached_property
    def _flags(self) -> dict[str, bool]:
        """HF's flags: whether any layer has one of their tensors, and then all must have all."""
        return {flag: self._has(flag) for flag in {s.flag for s in self.layout.tensors.values()} - {""}}

    def _has(self, flag: str) -> bool:
        names = {name for name, stored in self.layout.tensors.items() if stored.flag == flag}
        names |= {whole for whole, parts in JOINED.items() if names.intersection(parts)}
        return any(name.partition(".")[2].partition(".")[2] in names for name in self._tensors)

    def _check_widths(self, layout: Layout, keys: dict[str, Any]) -> None:
        """Whether the keys agree on the widths of experts, which not every class has keys for."""
        said = {"expert_feed_forward_length": keys["feed_forward_length"]}
        said["expert_shared_feed_forward_length"] = self._sizes["m"] * keys.get("expert_shared_count", 0)
        for key, width in said.items():
            if not layout.hf_key(key) and keys.get(key, width) != width:
                raise ConfigError(f"{self.architecture}.{key} is {keys[key]}, and only {width} is supported")

    def _heads(self, layout: Layout, keys: dict[str, Any]) -> dict[str, Any]:
        """The size of heads, how much of it is rotated, and the scale of queries."""
        head_dim, heads = self._sizes["h"], keys["attention.head_count"]
        if head_dim < 2 or head_dim % 2:
            raise ConfigError(f"heads of {head_dim} values are not supported; their size must be even")
        found: dict[str, Any] = {}
        if "num_key_value_heads" in layout.known:
            found["num_key_value_heads"] = keys.get("attention.head_count_kv", heads)
        partly, sized = "partial_rotary_factor" in layout.known, "head_dim" in layout.known
        rotated = keys.get("rope.dimension_count", head_dim)
        self._check_head(keys, "attention.value_length", head_dim)
        if not partly:
            self._check_head(keys, "rope.dimension_count", head_dim)
        elif rotated > head_dim:
            raise ConfigError(
                f"{layout.name}.rope.dimension_count is {rotated}, and heads have {head_dim} values"
            )
        else:
            found["partial_rotary_factor"] = rotated / head_dim
        if sized:
            found["head_dim"] = head_dim
        else:
            self._check_head(keys, "attention.key_length", keys["embedding_length"] // heads)
        return found | self._scale(layout, keys)

    def _check_head(self, keys: dict[str, Any], name: str, size: int) -> None:
        if keys.get(name, size) != size:
            raise ConfigError(
                f"{self.architecture}.{name} is {keys[name]}, and only the size of a head, {size}, "
                "is supported"
            )

    def _scale(self, layout: Layout, keys: dict[str, Any]) -> dict[str, Any]:
        """Of queries."""
        head_dim = self._sizes["h"]
        default = float(head_dim**-0.5)
        if layout.by_width == self._layers:
            default = float((keys["embedding_length"] / keys["attention.head_count"]) ** -0.5)
        scale = keys.get("attention.scale") or default
        if "attention_multiplier" in layout.known:
            return {"attention_multiplier": scale}
        if "query_pre_attn_scalar" in layout.known:
            scalar = scale**-2
            whole = isclose(scalar, round(scalar), rel_tol=1e-5)
            return {"query_pre_attn_scalar": round(scalar) if whole else scalar}
        if not isclose(scale, default, rel_tol=1e-5):
            raise ConfigError(
                f"{self.architecture}.attention.scale is {scale:g}, and only 1/sqrt({head_dim}) is supported"
            )
        return {}

    def _latent(self, keys: dict[str, Any]) -> dict[str, Any]:
        sizes, heads = self._sizes, keys["attention.head_count"]
        rotated, rank = keys["rope.dimension_count"], sizes["r"]
        mla = "attention.key_length_mla" in keys
        said = {
            "attention.head_count_kv": 1 if mla else heads,
            "attention.key_length": rank + rotated if mla else sizes["h"],
            "attention.value_length": rank if mla else sizes["y"],
        }
        for key, value in said.items():
            if keys.get(key, value) != value:
                raise ConfigError(f"{self.architecture}.{key} is {keys[key]}, and only {value} is supported")
        if not isclose(scale := keys.get("attention.scale") or 1.0, 1.0):
            raise ConfigError(f"{self.architecture}.attention.scale is {scale:g}, which is not supported")
        found: dict[str, Any] = {
            "num_key_value_heads": heads,
            "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": sizes["g"],
            "v_head_dim": sizes["y"],
        }
        if "topk_method" in self.layout.known:
            grouped = self._value("expert_group_count") > 1
            found["topk_method"] = "group_limited_greedy" if grouped else "greedy"
        return found

    def _windows(self, layout: Layout, keys: dict[str, Any]) -> dict[str, Any]:
        """Which layers have a window."""
        if not layout.windowed:
            return {"sliding_window": None} if "sliding_window" in layout.known else {}
        if self._value("attention.sliding_window") is None:
            if layout.windows_optional:
                return {"layer_types": ["full_attention"] * self._layers}
            return {"sliding_window_pattern": 1} if "sliding_window_pattern" in layout.known else {}
        pattern = keys.get("attention.sliding_window_pattern")
        if pattern is None:
            return {}
        if isinstance(pattern, int) and "sliding_window_pattern" in layout.known:
            return {"sliding_window_pattern": pattern}
        if isinstance(pattern, int):
            pattern = [(i + 1) % pattern for i in range(self._layers)]
        return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in pattern]}

    def _is_float16(self) -> bool:
        """Whether matrices are float16, whose bits bfloat16 cannot keep."""
        return any(len(t.shape) > 1 and type_name(t.type) == "F16" for t in self._tensors.values())

    def _kept_parts(self) -> dict[str, float]:
        """What part of the values of all matrices a CPU keeps in each storage, "" for floating-point numbers;
        empty if none is quantized."""
        values: dict[str, int] = {}
        for t in self._tensors.values():
            if len(t.shape) > 1:
                kind = storage_of(type_name(t.type))
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
            scaling |= self.layout.yarn
            warmer = keys.get("rope.scaling.yarn_log_multiplier", 0.0)
            if warmer:
                scaling["mscale_all_dim"] = 10 * warmer
            stretched = factor > 1 and not self.layout.latent
            scaling["attention_factor"] = attention * (0.1 * log(factor) + 1.0 if stretched else 1.0)
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

    def _check_layers(self) -> None:
        """Raises WeightError if there are not the tensors of as many layers as the metadata says."""
        layers = {
            name.split(".")[1] for name in self._tensors if name.startswith("blk.") and name.count(".") > 1
        }
        if self._keys["block_count"] != len(layers):
            raise WeightError(
                f"{self.architecture}.block_count is {self._keys['block_count']}, and there are tensors of "
                f"{len(layers)} layers"
            )

    def _check_tensors(self) -> None:
        """Raises WeightError naming missing, unexpected and misshapen tensors."""
        expected = {name: self._shape(places) for name, places in self._expected.items()}
        absent = set() if "output.weight" in self._tensors else {"output.weight"}
        misshapen = [
            f"{name} has shape {list(tensor.shape)}, expected {list(expected[name])}"
            for name, tensor in self._tensors.items()
            if name in expected and _cut(expected[name]) != _cut(tensor.shape)
        ]
        missing = [name for name in expected if name not in self._tensors and name not in absent]
        unexpected = [name for name in self._tensors if name not in expected and not self._left_out(name)]
        complaints = (
            _complain("missing", missing)
            + _complain("unexpected", unexpected)
            + _complain("misshapen", misshapen)
        )
        if complaints:
            raise WeightError(f"the tensors do not fit a {self.architecture} model: " + "; ".join(complaints))

    def _left_out(self, name: str) -> bool:
        """Whether a tensor is not used: of layers that guess further tokens, or a table that is read
        otherwise."""
        layer = name.split(".")[1] if name.startswith("blk.") else ""
        return name == "rope_freqs.weight" or (layer.isdecimal() and int(layer) >= self._layers)

    def _shape(self, places: tuple[Place, ...]) -> tuple[int, ...]:
        """Of a tensor with these places, one below the other."""
        shapes = [tuple(self._sizes[dim] for dim in place.dims) for place in places]
        at = 1 if "{e}" in places[0].name else 0
        rows = sum(shape[at] for shape in shapes)
        return *shapes[0][:at], rows, *shapes[0][at + 1 :]

    @cached_property
    def _expected(self) -> dict[str, tuple[Place, ...]]:
        """GGUF name -> the places in HF's class of every tensor that the file must have."""
        expected = {name: stored.places for name, stored in TOP.items()}
        if "attn_norm.bias" not in self.layout.tensors:
            del expected["output_norm.bias"]
        if "rope_freqs.weight" in self._tensors:
            expected["rope_freqs.weight"] = (Place("", "t"),)
        for i in range(self._layers):
            expected |= {
                f"blk.{i}.{name}": tuple(p._replace(name=f"model.layers.{i}.{p.name}") for p in places)
                for name, places in self._expected_of(i).items()
            }
        return expected

    def _expected_of(self, layer: int) -> dict[str, tuple[Place, ...]]:
        kind = "sparse" if self._is_sparse(layer) else "dense"
        found = {
            name: stored.places
            for name, stored in self.layout.tensors.items()
            if stored.layers in ("all", kind) and self._is_there(stored)
        }
        for whole, parts in JOINED.items():
            if f"blk.{layer}.{whole}" in self._tensors and all(part in found for part in parts):
                found[whole] = tuple(place for part in parts for place in found.pop(part))
        halves = "attn_k_b.weight", "attn_v_b.weight"
        other = f"blk.{layer}.{halves[0]}" in self._tensors
        for name in ("attn_kv_b.weight",) if other else halves:
            found.pop(name, None)
        return found

    def _is_sparse(self, layer: int) -> bool:
        if not self.layout.mixture:
            return False
        step = self._value("interleave_moe_layer_step")
        behind: bool = layer >= self._value("leading_dense_block_count")
        return behind and (layer + 1) % step == 0

    def _is_there(self, stored: Stored) -> bool:
        if stored.flag and not self._flags[stored.flag]:
            return False
        if stored.unless and self._sizes[stored.unless]:
            return False
        return all(self._sizes[dim] for place in stored.places for dim in place.dims)

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
        """Every weight under its HF name and in HF's row order, that of each expert for itself. Raises as
        ``config`` does."""
        assert self.config
        for tensor in self._tensors.values():
            if tensor.name in self._expected and tensor.name != "rope_freqs.weight":
                yield from self._parts(tensor, self._expected[tensor.name])

    def _parts(self, tensor: GGUFTensor, places: tuple[Place, ...]) -> Iterator[LazyTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(tensor.type)
        block, size = GGML_QUANT_SIZES[kind]
        shapes = [tuple(self._sizes[dim] for dim in place.dims) for place in places]
        width = 1 if len(shapes[0]) == 1 else shapes[0][-1]  # a vector has rows of one value
        if block > 1 and width == 1 and (len(places) > 1 or self._is_permuted(places[0])):
            raise WeightError(f"{self.path}: {tensor.name} has type {kind.name}, whose values have no order")
        each = "{e}" in places[0].name
        rows = prod(tensor.shape) // width
        start = self._header.data + tensor.offset
        blocks = np.frombuffer(self._map, np.uint8, prod(tensor.shape) // block * size, start)
        blocks = blocks if block > 1 and width == 1 else blocks.reshape(rows, -1)
        at = 0
        for e in range(self._sizes["e"] if each else 1):
            for place, shape in zip(places, shapes):
                shape = shape[1:] if each else shape
                count = prod(shape) // width
                part = blocks if len(places) == 1 and not each else blocks[at : at + count]
                at += count
                if self._is_permuted(place):
                    part = self._halves_apart(part, "q" if place.dims[0] == "q" else "k")
                part = part.reshape(1, -1) if len(shape) == 1 else part
                flat = (prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape
                yield LazyTensor(place.name.replace("{e}", str(e)), kind.name, flat, part, self._shift(place))

    def _is_permuted(self, place: Place) -> bool:
        return self.layout.permuted and (".q_proj." in place.name or ".k_proj." in place.name)

    def _halves_apart(self, rows: NDArray[np.uint8], dim: str) -> NDArray[np.uint8]:
        """Llama files interleave the two rotary halves of each q and k head; HF keeps them apart."""
        heads = self._sizes[dim] // self._sizes["h"]
        halves = rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2)
        return np.ascontiguousarray(halves).reshape(rows.shape)

    def _shift(self, place: Place) -> float:
        """Gemma files hold 1 + w of HF's norm weights w."""
        return -self.layout.shift if place.name.endswith("norm.weight") else 0.0


def _cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading dims of 1, which files leave out."""
    return _cut(shape[1:]) if len(shape) > 1 and shape[0] == 1 else shape


def _complain(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{len(names)} {what}: {', '.join(names[:_NAMED])}{more}"]


def read_gguf(path: str | Path, layouts: Layouts | None = None) -> GGUFFile:
    """Open a GGUF file. Raises ConfigError when it cannot be read."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return GGUFFile(path, layouts or {})

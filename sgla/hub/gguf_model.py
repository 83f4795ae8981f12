"""The model of a GGUF file: its keys in HF's words, and the tensors that it must have for these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgla.errors import ConfigError, WeightError
from sgla.hub.gguf_classes import CLASSES, DENSE, TYPES, of_encoder
from sgla.hub.gguf_deltas import delta_sizes, deltas, layer_widths
from sgla.hub.gguf_gemma import PER_LAYER as PER_LAYER_WIDTH
from sgla.hub.gguf_gemma import check_lists, kinds, layer_sizes, reads, slides, stream_sizes, streams
from sgla.hub.gguf_header import GGUFTensor, type_name
from sgla.hub.gguf_heads import heads, latent, latent_sizes
from sgla.hub.gguf_keys import PICKS, RANKED, read_keys
from sgla.hub.gguf_layout import (
    ALTUP,
    HF_KEYS,
    JOINED,
    MISSING,
    PER_LAYER,
    POSITIONS,
    TOP,
    HFTensor,
    Layout,
    Stored,
)
from sgla.hub.gguf_mimo import check_lists as check_wider
from sgla.hub.gguf_mimo import slides as has_window
from sgla.hub.gguf_mimo import wider, wider_sizes
from sgla.hub.gguf_ropes import FREQS, LONG, SHORT, Tables, rope_scaling
from sgla.hub.gguf_scans import mixer_of, most, scan_sizes, scans

FACTORS = (".scale", ".input_scale")  # ends of names
GROUPED = 160  # experts of the DeepSeek-V2 that has them in groups; smaller ones have not
# Of each pair files have one tensor or both others.
_HALVES = {
    "attn_kv_b.weight": ("attn_k_b.weight", "attn_v_b.weight"),
    "ssm_in.weight": ("attn_qkv.weight", "attn_gate.weight"),
}
_NAMED = 8  # tensor names shown in an error
_GROUPS = (
    "the GGUF metadata lacks {}.expert_group_count, so tokens choose among all experts; in transformers "
    "DeepSeek-V2, V3 and R1 have them in groups and choose some of these first, which gives slightly other "
    "answers; files of newer converters have the key"
)
_BLIND = "{}: what sees is in another file (mmproj), which is not read, so pictures are refused; text alone"
_MAGNITUDE = (
    "a GGUF file does not say short_mscale and long_mscale, so cosines and sines are multiplied by "
    "{}.rope.scaling.attn_factor, {:.4g}; Phi-3.5-MoE has 1.243 in transformers, which gives slightly other "
    "answers"
)


class GGUFModel:
    """``tables``: those of rope scaling. Raises ConfigError for keys that are not
    supported, and WeightError for tensors that do not fit them."""

    def __init__(
        self,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, GGUFTensor],
        layout: Layout,
        tables: Tables,
    ) -> None:
        self.layout, self.architecture = layout, layout.name
        self._tensors, self._tables = tensors, tables
        self.keys = read_keys(metadata, layout)
        if layout.kinds or layout.altup:
            check_lists(layout, self.keys)
        if layout.wider:
            check_wider(layout, self.keys)
        self._check_layers()
        if any(len(values) != self.layers for key, values in self.keys.items() if key.startswith("xielu.")):
            raise ConfigError("xielu.alpha_p, alpha_n, beta and eps have not a value for each layer")

    def _value(self, key: str) -> Any:
        """Of a key in HF's words, also where it is missing."""
        value = self.keys.get(key, self.layout.missing.get(key))
        return MISSING.get(key, value) if value is None or (value == 0 and value is not False) else value

    @cached_property
    def layers(self) -> int:
        """Those behind them, which guess further tokens, are left out."""
        left_out = self._value("nextn_predict_layers")
        count: int = self.keys["block_count"] - left_out
        if count < 1:
            raise ConfigError(
                f"{self.architecture}.nextn_predict_layers is {left_out}, and there are no others"
            )
        return count

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Of the letters of ``HFTensor.dims``."""
        keys, hidden = self.keys, self.keys["embedding_length"]
        if self.layout.scans == "only":
            sizes = {"1": 1, "d": hidden, "v": self._vocab_size()}
            return sizes | scan_sizes(self.layout, keys, self.layers)
        heads, inner = keys["attention.head_count"], most(keys.get("feed_forward_length", 0))
        head_dim = keys.get("attention.key_length", hidden // heads)
        kv_heads = most(keys.get("attention.head_count_kv", heads))
        latent = keys.get("moe_latent_size", 0)
        expert = keys.get("expert_feed_forward_length", inner)
        sizes = {
            "1": 1,
            "d": hidden,
            "f": inner,
            "q": heads * head_dim,
            "Q": 2 * heads * head_dim,
            "k": kv_heads * head_dim,
            "h": head_dim,
            "n": heads,
            "N": kv_heads,
            "t": keys.get("rope.dimension_count", head_dim) // 2,
            "v": self._vocab_size(),
            "e": keys.get("expert_count", 0),
            "m": expert,
            "s": keys.get("expert_shared_feed_forward_length") or expert * self._value("expert_shared_count"),
            "P": keys["context_length"],
            "W": keys.get(PER_LAYER_WIDTH, 0),
            "X": keys.get(PER_LAYER_WIDTH, 0) * self.layers,
            "V": self._rows("per_layer_token_embd.weight"),
            "Y": self._rows(TYPES),
            "C": self._rows(CLASSES),
            "F": self._rows(DENSE[0]),
            "G": self._rows(DENSE[1]),
            "L": latent,
            "E": latent or hidden,
        }
        if self.layout.wider:
            return sizes | wider_sizes(keys, 0)
        if self.layout.altup:
            return sizes | stream_sizes(keys, self._rows("blk.0.laurel_l.weight"))
        if self.layout.deltas:
            sizes |= delta_sizes(self.layout, keys)
        if self.layout.scans or self.layout.convolves:
            return sizes | scan_sizes(self.layout, keys, self.layers)
        return sizes | latent_sizes(self.layout, keys, sizes) if self.layout.latent else sizes

    def sizes_of(self, tensor: str) -> dict[str, int]:
        """The same, as this tensor has them."""
        layer = tensor.split(".")[1] if tensor.startswith("blk.") else ""
        if layer and self.layout.kinds:
            return self.sizes | layer_sizes(self.keys, int(layer))
        if layer and self.layout.wider:
            return self.sizes | wider_sizes(self.keys, int(layer))
        if layer and self.layout.deltas == "channels":
            return self.sizes | layer_widths(self.keys, self.sizes, int(layer))
        return self.sizes

    def _rows(self, name: str) -> int:
        shape = self._tensors[name].shape if name in self._tensors else (0, 0)
        return shape[0] if len(shape) > 1 else 1

    @property
    def notes(self) -> tuple[str, ...]:
        """What the file leaves open."""
        layout, keys = self.layout, self.keys
        if layout.sees:
            return (_BLIND.format(layout.name),)
        if layout.mscales and LONG in self._tables:
            return (_MAGNITUDE.format(layout.name, keys["rope.scaling.attn_factor"]),)
        name = layout.model_type
        grouped = name in ("deepseek_v3", "deepseek_v32") or (
            name == "deepseek_v2" and self.sizes["e"] >= GROUPED
        )
        return (_GROUPS.format(layout.name),) if grouped and "expert_group_count" not in keys else ()

    def config(self) -> dict[str, Any]:
        """What ``config.json`` would say of its shape."""
        layout, keys = self.layout, self.keys
        config: dict[str, Any] = {
            "architectures": [layout.hf_class],
            "model_type": layout.model_type,
            "vocab_size": self.sizes["v"],
            "tie_word_embeddings": "output.weight" not in self._tensors,
        }
        for key in HF_KEYS:
            if name := layout.hf_key(key):
                value = self._value(key)
                if (value is not None or key in MISSING) and config.setdefault(name, value) != value:
                    raise ConfigError(f"{layout.name}.{key} is {value}, and another key says {config[name]}")
        config[layout.hf_key("block_count")] = self.layers
        if self._has_head_bias and not layout.head_bias:
            config["lm_head_bias"] = True
        if layout.encoder:
            config |= of_encoder(layout, keys, self.sizes)
        if "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = 0
        config |= self._flags
        if layout.mixture:
            self._check_widths(layout, keys)
        if layout.kinds:
            return config | self._kinds()
        if layout.wider:
            sparse = [i for i in range(self.layers) if self._is_sparse(i)]
            return config | wider(layout, keys, self.layers, sparse)
        if layout.scans != "only":
            config |= self._heads()
        config |= _windows(layout, keys, self._value("attention.sliding_window"), self.layers)
        sparse = [i for i in range(self.layers) if self._is_sparse(i)]
        config |= scans(layout, keys, self.sizes, self.layers, sparse)
        config |= streams(layout, keys, self.sizes, self.layers) if layout.altup else {}
        config |= deltas(layout, keys, self.sizes, self.layers) if layout.deltas else {}
        if "indexer_types" in layout.known:
            config["indexer_types"] = ["full" if self._picks(i) else "shared" for i in range(self.layers)]
        if not layout.rotates:
            return config
        base = layout.keys.get("rope.freq_base") or layout.names.get("rope_theta", "rope_theta")
        config[base] = keys.get("rope.freq_base", layout.missing.get("rope.freq_base", 1e4))
        config["rope_scaling"] = rope_scaling(layout, keys, self._tables)
        if layout.longrope and (trained := keys.get("rope.scaling.original_context_length")):
            config["original_max_position_embeddings"] = trained
        if "use_parallel_residual" in layout.known:
            config["use_parallel_residual"] = self._value("use_parallel_residual")
        if layout.growing:
            config |= {"rope_parameters": config.pop("rope_scaling") | {"rope_theta": config["rope_theta"]}}
        elif layout.stretched and config["rope_scaling"] is None:
            config["rope_parameters"] = {"rope_type": "default"}  # HF's class would fill in another one
        return config

    def _heads(self) -> dict[str, Any]:
        if not self.layout.latent:
            return heads(self.layout, self.keys, self.sizes, self.layers)
        return latent(self.layout, self.keys, self.sizes, self._value("expert_group_count") > 1)

    @cached_property
    def _flags(self) -> dict[str, bool]:
        """HF's flags: whether any layer has one of their tensors, and then all must have all."""
        return {flag: self._has(flag) for flag in {s.flag for s in self.layout.tensors.values()} - {""}}

    @property
    def _has_head_bias(self) -> bool:
        known = self.layout.head_bias or "lm_head_bias" in self.layout.known
        return known and "output.bias" in self._tensors

    def _has(self, flag: str) -> bool:
        names = {name for name, stored in self.layout.tensors.items() if stored.flag == flag}
        names |= {whole for whole, parts in JOINED.items() if names.intersection(parts)}
        return any(name.partition(".")[2].partition(".")[2] in names for name in self._tensors)

    def _check_widths(self, layout: Layout, keys: dict[str, Any]) -> None:
        """Whether the keys agree on the widths of experts, which not every class has keys for."""
        said = {"expert_feed_forward_length": most(keys.get("feed_forward_length", self.sizes["m"]))}
        said["expert_shared_feed_forward_length"] = self.sizes["m"] * self._value("expert_shared_count")
        for key, width in said.items():
            if not layout.hf_key(key) and keys.get(key, width) != width:
                raise ConfigError(f"{self.architecture}.{key} is {keys[key]}, and only {width} is supported")

    def _kinds(self) -> dict[str, Any]:
        if FREQS not in self._tables:
            raise WeightError(f"the tensors do not fit a {self.architecture} model: 1 missing: {FREQS}")
        whole = (i for i in range(self.layers) if not slides(self.keys, i))
        joined = f"blk.{next(whole, 0)}.attn_v.weight" not in self._tensors
        return kinds(self.layout, self.keys, self.layers, self._tables, joined, self.sizes["V"])

    def _vocab_size(self) -> int:
        if "token_embd.weight" not in self._tensors:
            raise WeightError("the tensor token_embd.weight is missing")
        return self._tensors["token_embd.weight"].shape[0]

    def _check_layers(self) -> None:
        """Raises WeightError if there are not the tensors of as many layers as the metadata says."""
        layers = {
            name.split(".")[1] for name in self._tensors if name.startswith("blk.") and name.count(".") > 1
        }
        if self.keys["block_count"] != len(layers):
            raise WeightError(
                f"{self.architecture}.block_count is {self.keys['block_count']}, and there are tensors of "
                f"{len(layers)} layers"
            )

    def numbers(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Tensors of HF's class with one number, which the metadata has."""
        return _numbers(self.keys)

    def check_tensors(self) -> None:
        """Raises WeightError naming missing, unexpected and misshapen tensors."""
        expected = {name: _shape(targets, self.sizes_of(name)) for name, targets in self.expected.items()}
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
        """Whether a tensor is none of the model's: that of a layer that guesses further tokens, what a
        reranker may answer, which is in the output layer too, or a factor of another one."""
        if name == CLASSES:
            return self.layout.judges and self.keys.get("pooling_type") == RANKED
        guesses = name.startswith("blk.") and name.split(".")[1] in self._guessing
        return guesses or _is_factor(name, self._tensors)

    @cached_property
    def _guessing(self) -> frozenset[str]:
        return frozenset(map(str, range(self.layers, self.keys["block_count"])))

    @cached_property
    def expected(self) -> dict[str, tuple[HFTensor, ...]]:
        """The name of each tensor that the file must have -> the tensors of HF's class that it holds."""
        expected = {
            name: stored.tensors
            for name, stored in (self.layout.top or TOP).items()
            if not stored.given or self.sizes[stored.given]
        }
        return (expected if self.layout.encoder else self._of_decoder(expected)) | {
            f"blk.{i}.{name}": tuple(p._replace(name=f"{self.layout.layers}.{i}.{p.name}") for p in targets)
            for i in range(self.layers)
            for name, targets in self._expected_of(i).items()
        }

    def _of_decoder(self, expected: dict[str, tuple[HFTensor, ...]]) -> dict[str, tuple[HFTensor, ...]]:
        """Of no layer."""
        if "attn_norm.bias" not in self.layout.tensors:
            del expected["output_norm.bias"]
        top = (POSITIONS if self.layout.learned else {}) | (PER_LAYER if self.sizes.get("W") else {})
        top |= ALTUP if self.layout.altup else {}
        expected |= {name: stored.tensors for name, stored in top.items()}
        expected[f"{self.layout.last_norm}.weight"] = expected.pop("output_norm.weight")
        if FREQS in self._tables:
            expected[FREQS] = (HFTensor("", "t"),)
        if self.layout.longrope and (SHORT in self._tables or LONG in self._tables):
            expected |= dict.fromkeys((SHORT, LONG), (HFTensor("", "t"),))
        if self._has_head_bias or self.layout.head_bias:
            expected["output.bias"] = (HFTensor("lm_head.bias", "v"),)
        return expected

    def _expected_of(self, layer: int) -> dict[str, tuple[HFTensor, ...]]:
        kind = "sparse" if self._is_sparse(layer) else "dense"
        mixer = mixer_of(self.layout, self.keys, layer)
        found = {
            name: stored.tensors
            for name, stored in self.layout.tensors.items()
            if (stored.layers in ("all", kind) or self._is_kind(stored.layers, layer))
            and stored.mixer in ("", mixer)
            and self._is_there(stored)
        }
        if self.layout.kinds or self.layout.altup:
            found = {
                name: tensors
                for name, tensors in found.items()
                if not self._may_lack(layer, name) or f"blk.{layer}.{name}" in self._tensors
            }
        for whole, parts in JOINED.items():
            if f"blk.{layer}.{whole}" in self._tensors and all(part in found for part in parts):
                found[whole] = tuple(target for part in parts for target in found.pop(part))
        for joined, halves in _HALVES.items():
            if found.keys() >= {joined, *halves}:
                for name in (joined,) if f"blk.{layer}.{halves[0]}" in self._tensors else halves:
                    del found[name]
        return found

    def _may_lack(self, layer: int, name: str) -> bool:
        """Whether a layer has no keys and values, or one matrix that makes both."""
        if reads(self.keys, self.layers, layer):
            return name.startswith(("attn_k", "attn_v"))
        return self.layout.kinds and name == "attn_v.weight" and not slides(self.keys, layer)

    def _is_kind(self, kind: str, layer: int) -> bool:
        if kind == "slides":
            return has_window(self.keys, layer)
        return layer > 0 if kind == "later" else kind == "picks" and self._picks(layer)

    def _picks(self, layer: int) -> bool:
        """Whether it has an indexer. Where no key says which have, those do whose tensors are there."""
        if "indexer_types" not in self.layout.known:
            return self.layout.indexed
        kinds = self.keys.get(PICKS)
        if kinds is None:
            return f"blk.{layer}.indexer.attn_k.weight" in self._tensors
        if len(kinds) not in (self.layers, self.keys["block_count"]):
            raise ConfigError(f"{self.architecture}.{PICKS} has {len(kinds)} values, not one a layer")
        return bool(kinds[layer])

    def _is_sparse(self, layer: int) -> bool:
        if not self.layout.mixture:
            return False
        if self.layout.scans == "alone":
            return mixer_of(self.layout, self.keys, layer) == "mlp"
        if self.layout.periodic or self.layout.wider:
            return f"blk.{layer}.ffn_gate_inp.weight" in self._tensors
        step = self._value("interleave_moe_layer_step")
        behind: bool = layer >= self._value("leading_dense_block_count")
        return behind and (layer + 1) % step == 0

    def _is_there(self, stored: Stored) -> bool:
        if stored.flag and not self._flags[stored.flag]:
            return False
        if stored.unless and self.sizes[stored.unless]:
            return False
        if stored.given and not self.sizes[stored.given]:
            return False
        return all(self.sizes[dim] for tensor in stored.tensors for dim in tensor.dims)


def _is_factor(name: str, tensors: Mapping[str, GGUFTensor]) -> bool:
    """Of a matrix in NVFP4, or of what it is multiplied by."""
    matrix = tensors.get(f"{name.rpartition('.')[0]}.weight")
    return name.endswith(FACTORS) and matrix is not None and type_name(matrix.type) == "NVFP4"


def _windows(layout: Layout, keys: Mapping[str, Any], window: int | None, layers: int) -> dict[str, Any]:
    """Which layers have a window."""
    if not layout.windowed:
        return {"sliding_window": None} if "sliding_window" in layout.known else {}
    if window is None:
        if layout.windows_optional:
            return {"layer_types": ["full_attention"] * layers}
        return {"sliding_window_pattern": 1} if "sliding_window_pattern" in layout.known else {}
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is None:
        return {}
    if isinstance(pattern, int) and "sliding_window_pattern" in layout.known:
        return {"sliding_window_pattern": pattern}
    if isinstance(pattern, int):
        pattern = [(i if layout.full_first else i + 1) % pattern for i in range(layers)]
    return {"layer_types": ["sliding_attention" if flag else "full_attention" for flag in pattern]}


def _numbers(keys: Mapping[str, Any]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for key, values in keys.items():
        if key.startswith("xielu."):
            part = key.removeprefix("xielu.")
            shape = (1,) if part.startswith("alpha") else ()
            for i, value in enumerate(values):
                yield f"model.layers.{i}.mlp.act_fn.{part}", np.full(shape, value, np.float32)


def _shape(targets: tuple[HFTensor, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Of a tensor with these for targets, one below the other."""
    shapes = [tuple(sizes[dim] for dim in target.dims) for target in targets]
    at = 1 if "{e}" in targets[0].name else 0
    rows = sum(shape[at] for shape in shapes)
    return *shapes[0][:at], rows, *shapes[0][at + 1 :]


def _cut(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading dims of 1, which files leave out."""
    return _cut(shape[1:]) if len(shape) > 1 and shape[0] == 1 else shape


def _complain(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return [f"{len(names)} {what}: {', '.join(name[:100] for name in names[:_NAMED])}{more}"]

"""GGUF files: metadata, HF-style configuration, raw tokenizer tables and tensors under their HF names.

The header is parsed here, because the ``gguf`` package's reader makes numpy views of every token string (seconds for a
large vocabulary, against a tenth of one). Quantized blocks are decoded by the package (``gguf.quants``).
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgla.errors import ConfigError, WeightError

FourBit = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Ends of a turn that some files do not list as eos_token_id, by the token's text.
_END_OF_TURN = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>"}

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_TENSORS = _LAYER_TENSORS | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


class _Cursor:
    """Reads GGUF values from a buffer; ``at`` is the offset of the next byte."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.buffer, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """``count`` length-prefixed strings; the hot loop of the parse (10^5 tokens)."""
        unpack, buffer, at = struct.Struct("<Q").unpack_from, self.buffer, self.at
        found = []
        for _ in range(count):
            end = at + 8 + unpack(buffer, at)[0]
            raw = buffer[at + 8 : end]
            if len(raw) != end - at - 8:
                raise ValueError("a string runs past the end of the file")
            found.append(raw.decode("utf-8", "replace"))
            at = end
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        item, count = self.scalar("I"), self.scalar("Q")
        if item == _STRING:
            return self.strings(count)
        if item == _ARRAY:
            return [self.value(_ARRAY) for _ in range(count)]
        array = np.frombuffer(self.buffer, np.dtype("<" + _SCALARS[item]), count, self.at)
        self.at += array.nbytes
        return array.tolist()


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor in the file. ``shape`` is row-major as in torch; ``type`` a GGML type number; ``offset`` in bytes."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of the file under its HF name, decoded on demand.

    ``blocks`` uint8 ``[n, bytes of a row]``: memory-mapped, rows possibly reordered; ``type_name`` as ``Q4_1``.
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
        """By the ``gguf`` package, except for three simple types, at which this is two to three times as fast."""
        if len(self.shape) == 1:
            return self._dequantize(self.blocks)[0, rows.start : rows.stop]
        if four_bit := self.four_bit(rows):
            return _affine(*four_bit)
        blocks = self.blocks[rows.start : rows.stop]
        if self.type_name == "Q8_0":
            records = blocks.view(np.dtype([("scale", "<f2"), ("quants", "i1", 32)]))
            return _affine(records["quants"].reshape(len(blocks), -1), records["scale"])
        return self._dequantize(blocks)

    def _dequantize(self, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        return dequantize(blocks, GGMLQuantizationType[self.type_name])

    def four_bit(self, rows: range) -> FourBit | None:
        """Quants 0..15 ``[n, k]``, scales and minima ``[n, k / 32]`` of a Q4_0 or Q4_1 matrix; None for other types."""
        constants = {"Q4_0": 1, "Q4_1": 2}.get(self.type_name)
        if constants is None:
            return None
        record = np.dtype([("constants", "<f2", (constants,)), ("quants", "u1", 16)])
        blocks = self.blocks[rows.start : rows.stop].view(record)
        quants = np.concatenate([blocks["quants"] & 15, blocks["quants"] >> 4], axis=-1)
        scale = blocks["constants"][..., 0].copy()
        minimum = blocks["constants"][..., 1].copy() if constants == 2 else scale * np.float16(-8)
        return quants.reshape(len(blocks), -1), scale, minimum


def _affine(
    quants: NDArray[Any], scale: NDArray[np.float16], minimum: NDArray[np.float16] | None = None
) -> NDArray[np.float32]:
    """``quants * scale + minimum`` in groups of 32."""
    values = quants.reshape(*scale.shape, 32).astype(np.float32)
    values *= scale.astype(np.float32)[..., None]
    if minimum is not None:
        values += minimum.astype(np.float32)[..., None]
    return values.reshape(quants.shape)


class GGUFFile:
    """A parsed GGUF file. Raises ConfigError if it is no such file or its architecture is not supported."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self._tensors, self._data = _parse(self._map)
        except (struct.error, ValueError, KeyError, OverflowError, MemoryError) as error:
            raise ConfigError(f"{path} is not a complete GGUF file: {error}") from error
        self.architecture = str(self.metadata.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ConfigError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported; "
                f"supported: {', '.join(sorted(_ARCHITECTURES))}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value ``<architecture>.<key>``."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    @cached_property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` of the same model would say."""
        try:
            heads, hidden = self.get("attention.head_count"), self.get("embedding_length")
            config = {
                "architectures": [_ARCHITECTURES[self.architecture]],
                "model_type": "gemma3_text" if self.architecture == "gemma3" else self.architecture,
                "hidden_size": hidden,
                "intermediate_size": self.get("feed_forward_length"),
                "num_hidden_layers": self.get("block_count"),
                "num_attention_heads": heads,
                "num_key_value_heads": self.get("attention.head_count_kv", heads),
                "head_dim": self.get("attention.key_length", hidden // heads),
                "max_position_embeddings": self.get("context_length"),
                "rms_norm_eps": self.get("attention.layer_norm_rms_epsilon"),
                "vocab_size": self._tensors["token_embd.weight"].shape[0],
                "tie_word_embeddings": "output.weight" not in self._tensors,
                "rope_theta": self.get("rope.freq_base", 1e6 if self.architecture == "gemma3" else 1e4),
                "rope_scaling": self._rope_scaling(),
                "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id"),
                "eos_token_id": self.eos_token_ids,
                "torch_dtype": "float32",
            }
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise ConfigError(f"{self.path}: the GGUF metadata lacks {error}") from error
        if self.architecture == "gemma3":
            config |= self._gemma_config(config)
        return config

    def _gemma_config(self, config: dict[str, Any]) -> dict[str, Any]:
        layers = config["num_hidden_layers"]
        # The 27B model alone scales queries by hidden/heads; the metadata does not say so.
        scalar = (
            config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
        )
        return {
            "query_pre_attn_scalar": scalar,
            "sliding_window": self.get("attention.sliding_window"),
            "sliding_window_pattern": 6,
            "rope_local_base_freq": self.get("rope.freq_base_swa", 10000.0),
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": self.get("final_logit_softcapping"),
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        if factors := self._tensors.get("rope_freqs.weight"):  # Llama 3.x: the scaling comes as a table
            values = np.frombuffer(self._map, "<f4", prod(factors.shape), self._data + factors.offset)
            return {"rope_type": "factors", "factors": values.tolist()}
        kind = self.get("rope.scaling.type", "none")
        if kind == "none":
            return None
        scaling = {"rope_type": kind, "factor": self.get("rope.scaling.factor", 1.0)}
        if original := self.get("rope.scaling.original_context_length"):
            scaling["original_max_position_embeddings"] = original
        return scaling

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Ids that end a generation: eos, eot and well-known end-of-turn tokens of the vocabulary."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        ids = {self.metadata[key] for key in keys if key in self.metadata}
        tokens = self.metadata.get("tokenizer.ggml.tokens", [])
        return sorted(ids | {i for i, token in enumerate(tokens) if token in _END_OF_TURN})

    @cached_property
    def tokenizer_raw(self) -> dict[str, Any]:
        """The vocabulary: model, pre, tokens, token_type, merges, scores, the special ids, flags and chat template.

        Absent entries are ``None``. ``model`` is ``gpt2`` (byte-level BPE) or ``llama`` (SentencePiece).
        """
        raw = {
            key: self.metadata.get(f"tokenizer.ggml.{key}")
            for key in ("model", "pre", "tokens", "token_type", "merges", "scores", "add_space_prefix")
        }
        for short, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("eot", "eot"),
            ("unk", "unknown"),
            ("pad", "padding"),
        ):
            raw[f"{short}_token_id"] = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
        raw["add_bos"] = self.metadata.get("tokenizer.ggml.add_bos_token")
        raw["add_eos"] = self.metadata.get("tokenizer.ggml.add_eos_token")
        raw["chat_template"] = self.metadata.get("tokenizer.chat_template")
        return raw

    def tensors(self) -> Iterator[LazyTensor]:
        """Every weight under its HF name and in HF's row order. Raises WeightError for an unknown or cut tensor."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        for tensor in self._tensors.values():
            if tensor.name == "rope_freqs.weight":
                continue
            try:
                kind = GGMLQuantizationType(tensor.type)
            except ValueError as error:
                raise WeightError(
                    f"{self.path}: tensor {tensor.name} has unknown type {tensor.type}"
                ) from error
            block, size = GGML_QUANT_SIZES[kind]
            rows, row_bytes = prod(tensor.shape[:-1]), tensor.shape[-1] // block * size
            start = self._data + tensor.offset
            if start + rows * row_bytes > len(self._map):
                raise WeightError(
                    f"{self.path}: the file ends before tensor {tensor.name}; is the download complete?"
                )
            blocks = np.frombuffer(self._map, np.uint8, rows * row_bytes, start).reshape(rows, row_bytes)
            name = self._hf_name(tensor.name)
            yield LazyTensor(name, kind.name, tensor.shape, self._reorder(name, blocks), self._shift(name))

    def _hf_name(self, name: str) -> str:
        stem, _, suffix = name.rpartition(".")
        if stem in _TENSORS:
            return f"{_TENSORS[stem]}.{suffix}"
        table = _GEMMA_LAYER_TENSORS if self.architecture == "gemma3" else _LAYER_TENSORS
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if match is None or match[2] not in table:
            raise WeightError(f"{self.path}: unexpected tensor {name} for architecture {self.architecture}")
        return f"model.layers.{match[1]}.{table[match[2]]}.{suffix}"

    def _reorder(self, name: str, blocks: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Llama files interleave the two rotary halves of each q and k head; HF keeps them apart."""
        for projection, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if self.architecture == "llama" and projection in name:
                heads = self.config[key]
                halves = blocks.reshape(heads, -1, 2, blocks.shape[-1]).swapaxes(1, 2)
                return np.ascontiguousarray(halves).reshape(blocks.shape)
        return blocks

    def _shift(self, name: str) -> float:
        """Gemma files hold 1 + w of HF's norm weights w."""
        return -1.0 if self.architecture == "gemma3" and name.endswith("norm.weight") else 0.0


def _parse(buffer: mmap.mmap) -> tuple[dict[str, Any], dict[str, GGUFTensor], int]:
    """Metadata, tensor table by GGUF name, and the offset of the tensor data."""
    cursor = _Cursor(buffer)
    if buffer[:4] != b"GGUF":
        raise ValueError("it does not start with the bytes GGUF")
    cursor.at = 4
    version, tensor_count, count = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
    if version not in (2, 3):
        raise ValueError(f"version {version} is not known (2 and 3, little-endian, are)")
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    tensors = {}
    for _ in range(tensor_count):
        name = cursor.string()
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        tensors[name] = GGUFTensor(name, cursor.scalar("I"), shape, cursor.scalar("Q"))
    align = int(metadata.get("general.alignment", 32))
    return metadata, tensors, -(-cursor.at // align) * align


def read_gguf(path: str | Path) -> GGUFFile:
    """Open a GGUF file. Raises ConfigError when it cannot be read or its architecture is not supported."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return GGUFFile(path)

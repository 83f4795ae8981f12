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
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgla.errors import ConfigError, WeightError
from sgla.hub.gguf_blocks import LazyTensor, storage_of
from sgla.hub.gguf_classes import DENSE
from sgla.hub.gguf_deltas import heads_in_order
from sgla.hub.gguf_header import GGUFTensor, check_places, parse, type_name
from sgla.hub.gguf_keys import CHARSMAP, POOLED, RANKED, SQUEEZED, read_sampling, read_vocabulary, token_id
from sgla.hub.gguf_layout import HFTensor, Layout
from sgla.hub.gguf_model import FACTORS, GGUFModel
from sgla.hub.gguf_ropes import FREQS, LONG, SHORT
from sgla.hub.quantized import parts_of

# Ends of a turn that some files do not list as eos_token_id, by the token's text.
_END_OF_TURN = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_text|>"}
MOST_FACTORS = 1 << 16
BARE = "{}: it lacks the layers behind the pooling, so vectors are llama.cpp's and not sentence-transformers'"

Layouts = Mapping[str, tuple[Layout, ...]]  # by the architecture's name


class Part:
    """A file, with others or alone. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.header = parse(self.map)
        except (OSError, struct.error, ValueError) as error:
            raise ConfigError(f"{path} is not a valid GGUF file: {error}") from error


def metadata_of(parts: list[Part]) -> dict[str, Any]:
    """The first part's, without what says that there are others. Raises ConfigError for parts that do not
    belong together."""
    if len(parts) == 1:
        return parts[0].header.metadata
    first = parts[0].header.metadata
    for index, part in enumerate(parts):
        own = part.header.metadata
        if (own.get("split.no"), own.get("split.count")) != (index, len(parts)):
            raise ConfigError(f"{part.path} does not say that it is part {index + 1} of {len(parts)}")
        if others := [key for key, value in own.items() if key[:6] != "split." and first.get(key) != value]:
            raise ConfigError(f"{part.path} has another {others[0][:99]!r} than the first part")
    count = sum(len(part.header.tensors) for part in parts)
    if first.get("split.tensors.count", count) != count:
        raise ConfigError(f"{parts[0].path}: its parts have {count} tensors together, and it says otherwise")
    return {key: value for key, value in first.items() if not key.startswith("split.")}


class GGUFFile:
    """A parsed GGUF file, or the first of its parts. ``layouts``: the architectures that there are; its
    vocabulary can be read without. Raises ConfigError if it is no such file."""

    def __init__(self, path: Path, layouts: Layouts) -> None:
        self.path, self._layouts = path, layouts
        self._parts = [Part(one) for one in parts_of(path)]
        self.metadata = metadata_of(self._parts)
        homes = {name: part for part in self._parts for name in part.header.tensors}
        if len(homes) < sum(len(part.header.tensors) for part in self._parts):
            raise ConfigError(f"{path}: a tensor is in two of its parts")
        self._homes = homes
        self._tensors = {name: part.header.tensors[name] for name, part in homes.items()}
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
            for part in self._parts:
                check_places(part.header, len(part.map))
            self._model = GGUFModel(self.metadata, self._tensors, layout, self._rope_tables())
            config = self._model.config()
            self._model.check_tensors()
            config["bos_token_id"] = token_id(self.metadata, "bos")
            config["eos_token_id"] = self.eos_token_ids
        except WeightError as error:
            raise WeightError(f"{self.path}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{self.path}: {error}") from error
        config["torch_dtype"] = "float16" if self._is_float16() else "float32"
        if kept := self._kept_parts():
            config["quantization_config"] = {"quant_method": "gguf", "kept": kept}
        return config

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user may want to know of the file. Raises as ``config`` does."""
        assert self.config
        found = [*self._model.notes]
        if DENSE[0] in self.layout.top and not self.dense:
            found.append(BARE.format(self.path.name))
        return tuple(found)

    @property
    def pooled(self) -> str:
        """How hidden states become one vector, as it says; empty for what makes text or classifies. Raises as
        ``config`` does."""
        assert self.config
        kind = self.metadata.get(f"{self.architecture}.pooling_type", 0)
        return POOLED.get(kind, "mean" if self.layout.encoder and not kind else "")

    @property
    def judges(self) -> bool:
        """Whether it is a reranker that makes text. Raises as ``config`` does."""
        kind = self.metadata.get(f"{self.architecture}.pooling_type")
        return bool(self.config) and self.layout.judges and kind == RANKED

    @property
    def dense(self) -> list[tuple[int, int]]:
        """Outputs and inputs of the layers behind the pooling."""
        shapes = (self._tensors[name].shape for name in DENSE if name in self._tensors)
        return [(shape[0], shape[1]) for shape in shapes]

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

    def _rope_tables(self) -> dict[str, list[float]]:
        return {
            name: self._rope_factors(self._tensors[name])
            for name in (FREQS, SHORT, LONG)
            if name in self._tensors
        }

    def _rope_factors(self, table: GGUFTensor) -> list[float]:
        if prod(table.shape) > MOST_FACTORS:
            raise WeightError(f"{table.name} has shape {list(table.shape)}, which is no table of a head")
        return self._positive(table)

    def _positive(self, table: GGUFTensor) -> list[float]:
        """Its numbers, which are above 0. Raises WeightError."""
        if type_name(table.type) != "F32":
            raise WeightError(f"{table.name} has type {type_name(table.type)}, not F32")
        part = self._homes[table.name]
        values = np.frombuffer(part.map, "<f4", prod(table.shape), part.header.data + table.offset)
        if not (np.isfinite(values) & (values > 0)).all():
            raise WeightError(f"{table.name} has values that are no positive numbers")
        factors: list[float] = values.tolist()
        return factors

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

        Absent entries are ``None``. ``model`` is ``gpt2`` (byte-level BPE), ``llama`` (SentencePiece), ``t5``
        (SentencePiece's Unigram) or ``bert`` (WordPiece).
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
            ("cls", "cls"),
            ("sep", "seperator"),
            ("mask", "mask"),
        ):
            raw[f"{short}_token_id"] = keys.get(f"tokenizer.ggml.{name}_token_id")
        raw["charsmap"] = keys.get(CHARSMAP)
        raw["squeezed"] = keys.get(SQUEEZED)
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
            if tensor.name in self._model.expected and tensor.name not in (FREQS, SHORT, LONG):
                yield from self._renamed(tensor, self._model.expected[tensor.name])

    def numbers(self) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Under their HF names, tensors with one number that are none in the file. Raises as ``config``
        does."""
        assert self.config
        return self._model.numbers()

    def _renamed(self, tensor: GGUFTensor, targets: tuple[HFTensor, ...]) -> Iterator[LazyTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(tensor.type)
        block, size = GGML_QUANT_SIZES[kind]
        sizes = self._model.sizes_of(tensor.name)
        shapes = [tuple(sizes[dim] for dim in target.dims) for target in targets]
        width = 1 if len(shapes[0]) == 1 else shapes[0][-1]  # a vector has rows of one value
        if block > 1 and width == 1 and (len(targets) > 1 or self._is_permuted(targets[0])):
            raise WeightError(f"{self.path}: {tensor.name} has type {kind.name}, whose values have no order")
        each = "{e}" in targets[0].name
        factors = self._factors(tensor, shapes[0][0] if each else 1) if kind.name == "NVFP4" else [1.0]
        rows = prod(tensor.shape) // width
        part = self._homes[tensor.name]
        start = part.header.data + tensor.offset
        blocks = np.frombuffer(part.map, np.uint8, prod(tensor.shape) // block * size, start)
        blocks = blocks if block > 1 and width == 1 else blocks.reshape(rows, -1)
        at = 0
        for e in range(shapes[0][0] if each else 1):
            for target, shape in zip(targets, shapes):
                shape = shape[1:] if each else shape
                count = prod(shape) // width
                own = blocks if len(targets) == 1 and not each else blocks[at : at + count]
                at += count
                columns = None
                if (order := self._order(target)) is not None and target.dims == "dj":
                    columns = order
                    if block > 1 and (order[::32] % 32).any():
                        raise WeightError(
                            f"{self.path}: {tensor.name} has type {kind.name}, and heads no multiple of 32"
                        )
                elif order is not None:
                    own = own[order]
                if self._is_permuted(target):
                    own = self._halves_apart(own, "q" if target.dims[0] == "q" else "k")
                own = own.reshape(1, -1) if len(shape) == 1 else own
                flat = (prod(shape[:-1]), shape[-1]) if len(shape) > 2 else shape
                name, shift = target.name.replace("{e}", str(e)), self._shift(target)
                factor = factors[e % len(factors)]
                yield LazyTensor(name, kind.name, flat, own, shift, columns, factor)

    def _factors(self, tensor: GGUFTensor, count: int) -> list[float]:
        """By what a matrix in NVFP4 is multiplied, or each of ``count`` experts', unless the model itself has
        a scale by that name, as Gemma 4 for its experts: converters put one into the other. Raises
        WeightError."""
        table = self._tensors.get(f"{tensor.name.removesuffix('.weight')}{FACTORS[0]}")
        if table is None or table.name in self._model.expected:
            return [1.0]
        if prod(table.shape) not in (1, count):
            raise WeightError(f"{self.path}: {table.name} has shape {list(table.shape)}, expected {[count]}")
        return self._positive(table)

    def _order(self, target: HFTensor) -> NDArray[np.int64] | None:
        """Where the rows or columns of HF's tensor lie in the file's, if not in order."""
        keys, sizes = self._model.keys, self._model.sizes
        apart = self.layout.deltas == "apart" and ".linear_attn." in target.name
        if not apart or target.dims == "p" or keys["ssm.group_count"] == sizes["z"]:
            return None
        return heads_in_order(target.dims[1] if target.dims == "dj" else target.dims[0], keys, sizes)

    def _is_permuted(self, target: HFTensor) -> bool:
        return self.layout.permuted and (".q_proj." in target.name or ".k_proj." in target.name)

    def _halves_apart(self, rows: NDArray[np.uint8], dim: str) -> NDArray[np.uint8]:
        """Llama files interleave the two rotary halves of each q and k head; HF keeps them apart."""
        heads = self._model.sizes[dim] // self._model.sizes["h"]
        halves = rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2)
        return np.ascontiguousarray(halves).reshape(rows.shape)

    def _shift(self, target: HFTensor) -> float:
        """Gemma files hold 1 + w of HF's norm weights w."""
        shifted = target.name.endswith("norm.weight") and ".linear_attn." not in target.name
        return -self.layout.shift if shifted else 0.0


def read_gguf(path: str | Path, layouts: Layouts | None = None) -> GGUFFile:
    """Open a GGUF file. Raises ConfigError when it cannot be read."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"no such file: {path}")
    return GGUFFile(path, layouts or {})

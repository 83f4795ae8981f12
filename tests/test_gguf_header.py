"""Damaged and hostile GGUF files: a typed error that says what is wrong, before any size in them is
believed."""

from __future__ import annotations

import functools
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sgla.errors import ConfigError
from sgla.hub.gguf import read_gguf
from sgla.hub.gguf_header import MOST_ENTRIES, MOST_ITEMS
from sgla.hub.gguf_keys import LAYERS
from sgla.model import limits
from sgla.model.read import read_decoder
from sgla.model.registry import layouts
from sgla.text.tokenizer import load_tokenizer

U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
LAYER = {
    "attn_norm": (8,),
    "attn_q": (8, 8),
    "attn_k": (4, 8),
    "attn_v": (4, 8),
    "attn_output": (8, 8),
    "ffn_norm": (8,),
    "ffn_gate": (16, 8),
    "ffn_up": (16, 8),
    "ffn_down": (8, 16),
}
SHAPES = {"token_embd": (6, 8), "output_norm": (8,)} | {
    f"blk.0.{stem}": shape for stem, shape in LAYER.items()
}


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def key(name: str, kind: int, raw: bytes) -> bytes:
    return text(name) + u32(kind) + raw


def strings(*values: str) -> bytes:
    return u32(STRING) + u64(len(values)) + b"".join(map(text, values))


def tensor(name: str, shape: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    dims = b"".join(u64(size) for size in reversed(shape))
    return text(name) + u32(len(shape)) + dims + u32(kind) + u64(offset)


KEYS = [
    key("general.architecture", STRING, text("llama")),
    key("llama.block_count", U32, u32(1)),
    key("llama.context_length", U32, u32(64)),
    key("llama.embedding_length", U32, u32(8)),
    key("llama.feed_forward_length", U32, u32(16)),
    key("llama.attention.head_count", U32, u32(2)),
    key("llama.attention.head_count_kv", U32, u32(1)),
    key("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
    key("tokenizer.ggml.model", STRING, text("gpt2")),
    key("tokenizer.ggml.pre", STRING, text("gpt-2")),
    key("tokenizer.ggml.tokens", ARRAY, strings("<s>", "</s>", "a", "b", "ab", "aab")),
    key("tokenizer.ggml.token_type", ARRAY, u32(I32) + u64(6) + struct.pack("<6i", 3, 3, 1, 1, 1, 1)),
    key("tokenizer.ggml.merges", ARRAY, strings("a b", "a ab")),
    key("tokenizer.ggml.eos_token_id", U32, u32(1)),
    key("tokenizer.ggml.add_bos_token", BOOL, b"\0"),
]
MORE_KEYS = [
    key("llama.rope.freq_base", F32, struct.pack("<f", 1e4)),
    key("llama.rope.scaling.type", STRING, text("yarn")),
    key("llama.rope.scaling.factor", F32, struct.pack("<f", 4.0)),
    *(entry for entry in KEYS if b"merges" not in entry and b"gpt" not in entry),
    key("tokenizer.ggml.model", STRING, text("llama")),
    key("tokenizer.ggml.scores", ARRAY, u32(F32) + u64(6) + struct.pack("<6f", *range(6))),
]


@functools.cache
def tensors() -> tuple[list[bytes], bytes]:
    """Entries of the table, and the data."""
    entries, data = [], b""
    for name, shape in SHAPES.items():
        entries.append(tensor(f"{name}.weight", shape, len(data)))
        data += b"\0" * (4 * functools.reduce(int.__mul__, shape))
        data += b"\0" * (-len(data) % 32)
    return entries, data


def build(
    keys: list[bytes] = KEYS,
    table: list[bytes] | None = None,
    *,
    counts: tuple[int, int] | None = None,
    version: bytes = u32(3),
) -> bytes:
    """A file; ``counts`` (tensors, keys) other than there are."""
    entries, data = tensors()
    table = entries if table is None else table
    header = (
        b"GGUF" + version + b"".join(map(u64, counts or (len(table), len(keys)))) + b"".join(keys + table)
    )
    return header + b"\0" * (-len(header) % 32) + data


def read(content: bytes) -> None:
    """All that a start reads of the file before and with its weights."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        file = read_gguf(path, layouts())
        read_decoder(file.config)
        for weight in file.tensors():
            weight.numpy()
        load_tokenizer(file.tokenizer_raw)


def test_the_file_that_the_others_spoil_is_good() -> None:
    read(build())
    read(build(MORE_KEYS))


def but(name: str, kind: int, raw: bytes) -> bytes:
    """The good file with another value of one key, or one key more."""
    kept = [entry for entry in KEYS if not entry.startswith(text(name))]
    return build([*kept, key(name, kind, raw)])


def with_tensor(*entry: Any) -> bytes:
    return build(table=[*tensors()[0][1:], tensor("token_embd.weight", *entry)])


HOSTILE: dict[str, tuple[bytes, str]] = {
    "2^31 layers": (but("llama.block_count", U32, u32(2**31 - 1)), "a whole number from 1 to 1024"),
    "a layer more than there may be": (but("llama.block_count", U32, u32(LAYERS + 1)), "from 1 to 1024"),
    "a layer of 6,000 digits": (
        build(
            [KEYS[0], key("llama.block_count", U32, u32(2)), *KEYS[2:]],
            table=[*tensors()[0][:-1], tensor(f"blk.{'9' * 6000}.x", (1,), len(tensors()[1]) - 32)],
        ),
        "unexpected: blk.999",
    ),
    "2^60 keys": (build(counts=(11, 2**60)), f"1152921504606846976 keys; at most {MOST_ENTRIES}"),
    "2^60 tensors": (build(counts=(2**60, 15)), f"1152921504606846976 tensors; at most {MOST_ENTRIES}"),
    "more keys than there are": (build(counts=(11, 60000)), "GGUF file"),
    "more tensors than there are": (build(counts=(60000, 15)), "GGUF file"),
    "a string of 2^60 bytes": (build([u64(2**60)]), "ends within its header"),
    "a string of 2^64 - 1 bytes": (build([u64(2**64 - 1)]), "ends within its header"),
    "an array of 2^60": (but("x.y", ARRAY, u32(U32) + u64(2**60)), f"more than {MOST_ITEMS} items"),
    "an array of 2^60 strings": (
        but("x.y", ARRAY, u32(STRING) + u64(2**60)),
        f"more than {MOST_ITEMS} items",
    ),
    "an array past the end": (but("x.y", ARRAY, u32(U32) + u64(2**20)), "ends within its header"),
    "strings past the end": (but("x.y", ARRAY, u32(STRING) + u64(2**20)), "ends within its header"),
    "nested arrays": (but("x.y", ARRAY, (u32(ARRAY) + u64(1)) * 100_000), "items of type 9"),
    "an unknown type": (but("x.y", 99, b""), "unknown type 99"),
    "2^31 dims": (build(table=[text("token_embd.weight") + u32(2**31)]), "has 2147483648 dims"),
    "no dims": (with_tensor((), 0), "has 0 dims"),
    "a size of 0": (with_tensor((6, 0), 0), "no values"),
    "a size of 2^63": (with_tensor((2**63, 2**63), 0), "ends before tensor"),
    "an offset of 2^63": (with_tensor((6, 8), 2**63), "ends before tensor token_embd.weight"),
    "data in data": (with_tensor((6, 8), 192), "lies in the data of tensor"),
    "a type that is none": (with_tensor((6, 8), 0, 250), "token_embd.weight has type 250"),
    "half a block": (with_tensor((6, 8), 0, 8), "rows of 8 values are not whole blocks of Q8_0"),
    "alignment 0": (but("general.alignment", U32, u32(0)), "alignment is 0"),
    "alignment 48": (but("general.alignment", U32, u32(48)), "alignment is 48"),
    "alignment 2^31": (but("general.alignment", U32, u32(2**31)), "ends before tensor"),
    "alignment as text": (but("general.alignment", STRING, text("32")), "alignment is '32'"),
    "a key twice": (build([*KEYS, KEYS[1]]), "'llama.block_count' is there twice"),
    "a tensor twice": (build(table=[*tensors()[0], tensors()[0][0]]), "'token_embd.weight' is there twice"),
    "version 1": (build(version=u32(1)), "version 1 is not supported"),
    "big-endian": (build(version=struct.pack(">I", 3)), "in big-endian order"),
    "a number as text": (but("llama.block_count", STRING, text("1")), "llama.block_count is '1'"),
    "a number as a list": (but("llama.block_count", ARRAY, u32(U32) + u64(1) + u32(1)), "is a list of 1"),
    "no heads": (but("llama.attention.head_count", U32, u32(0)), "head_count is 0"),
    "more heads than width": (but("llama.attention.head_count", U32, u32(16)), "heads of 0 values"),
    "heads that do not divide": (
        but("llama.attention.head_count", U32, u32(3)),
        "heads of 2 values|has shape",
    ),
    "tokens as numbers": (
        but("tokenizer.ggml.tokens", ARRAY, u32(U32) + u64(1) + u32(1)),
        "ggml.tokens is a list",
    ),
    "a token twice": (
        but("tokenizer.ggml.tokens", ARRAY, strings("<s>", "</s>", "a", "b", "ab", "a")),
        "token twice",
    ),
    "types for fewer tokens": (
        but("tokenizer.ggml.token_type", ARRAY, u32(I32) + u64(1) + u32(1)),
        "1 values for 6 tokens",
    ),
    "a type of token that is none": (
        but("tokenizer.ggml.token_type", ARRAY, u32(I32) + u64(6) + struct.pack("<6i", 3, 3, 1, 1, 1, 77)),
        "token_type has a value",
    ),
    "an end that is no token": (
        but("tokenizer.ggml.eos_token_id", U32, u32(6)),
        "eos_token_id is 6, and there are 6 tokens",
    ),
    "a negative end": (but("tokenizer.ggml.eos_token_id", I32, u32(2**32 - 1)), "eos_token_id is -1"),
    "merges of nothing": (
        but("tokenizer.ggml.merges", ARRAY, strings("nothing")),
        "vocabulary cannot be read",
    ),
    "merges of unknown tokens": (
        but("tokenizer.ggml.merges", ARRAY, strings("x y")),
        "vocabulary cannot be read",
    ),
    "an unknown key of the tokenizer": (
        but("tokenizer.ggml.new", BOOL, b"\1"),
        "tokenizer.ggml.new is not supported",
    ),
    "an unknown split": (but("tokenizer.ggml.pre", STRING, text("new")), "'new' is not known"),
    "another kind of tokenizer": (but("tokenizer.ggml.model", STRING, text("rwkv")), "'rwkv'"),
    "pieces without scores": (but("tokenizer.ggml.model", STRING, text("t5")), "no scores"),
    "words without marks": (but("tokenizer.ggml.model", STRING, text("bert")), r"lacks \[UNK\]"),
    "words beyond the vocabulary": (but("tokenizer.ggml.cls_token_id", U32, u32(6)), "cls_token_id is 6"),
    "a charsmap of texts": (
        but("tokenizer.ggml.precompiled_charsmap", ARRAY, strings("a")),
        "precompiled_charsmap is a list",
    ),
    "a charsmap of merges": (
        but("tokenizer.ggml.precompiled_charsmap", ARRAY, u32(I32) + u64(3) + struct.pack("<3i", 1, 2, 999)),
        "precompiled_charsmap is not supported with tokens of kind 'gpt2'",
    ),
    "a template that is none": (but("tokenizer.chat_template", U32, u32(1)), "chat_template is 1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_the_reason(name: str) -> None:
    content, said = HOSTILE[name]
    with pytest.raises(ConfigError, match=said) as caught:
        read(content)
    assert len(caught.value.message) < 1000


def test_a_header_of_any_length_may_be_missing_its_end() -> None:
    content = build()
    for end in range(0, len(content), 23):
        with pytest.raises(ConfigError):
            read(content[:end])


def test_tokens_whose_merges_take_forever_are_refused() -> None:
    long = "x" * 100_000
    keys = [entry for entry in KEYS if b"tokenizer" not in entry]
    keys.append(key("tokenizer.ggml.model", STRING, text("llama")))
    keys.append(key("tokenizer.ggml.tokens", ARRAY, strings("<s>", "</s>", "a", "b", "ab", long)))
    with pytest.raises(ConfigError, match="too long to find their merges"):
        read(build(keys))


NUMBERS = st.sampled_from([0, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1])
PLACES = st.integers(0, 1400)
MUTATIONS = st.one_of(
    st.tuples(st.just("byte"), PLACES, st.integers(0, 255)),
    st.tuples(st.just("u32"), PLACES, NUMBERS),
    st.tuples(st.just("u64"), PLACES, NUMBERS),
    st.tuples(st.just("cut"), PLACES, st.integers(1, 40)),
    st.tuples(st.just("copy"), PLACES, PLACES),
)


@settings(max_examples=examples(400), deadline=5000)
@given(st.sampled_from([KEYS, MORE_KEYS]), st.lists(MUTATIONS, min_size=1, max_size=4))
def test_no_change_of_a_header_does_anything_but_a_typed_error(
    keys: list[bytes], mutations: list[tuple[str, int, int]]
) -> None:
    content = bytearray(build(keys))
    for kind, at, value in mutations:
        if kind == "byte":
            content[at] = value
        elif kind == "u32":
            content[at : at + 4] = u32(value & 0xFFFFFFFF)
        elif kind == "u64":
            content[at : at + 8] = u64(value)
        elif kind == "cut":
            del content[at : at + value]
        else:
            content[at:at] = content[value : value + 60]
    try:
        read(bytes(content))
    except ConfigError:
        pass


def test_a_file_may_have_as_many_layers_as_a_config() -> None:
    assert LAYERS == limits.LAYERS

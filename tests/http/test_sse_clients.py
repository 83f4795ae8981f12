"""The client side of streams: any cut of the bytes gives the same text, and what is no stream is an error,
not a crash."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from typing import Any

import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from sgla.bench.load import Record, read_stream
from sgla.cli.chat import Remote
from sgla.errors import SglaError

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), max_size=8)
NOISE = st.sampled_from([b": ping\n\n", b"\n", b"event: x\n", b"id: 1\n", b"retry: 5\n", b"\r\n", b":\n"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "text", "usage", "error", "x"]), inner
        )
    ),
    max_leaves=8,
)


def chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode()


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[str], bytes]:
    """The texts of a stream, and its bytes."""
    texts, raw = draw(TEXTS), b""
    end = draw(st.sampled_from([b"\n\n", b"\r\n\r\n"]))
    for text in texts:
        raw += b"".join(draw(st.lists(NOISE, max_size=2))) + chunk(text) + end
    return texts, raw + b"data: [DONE]\n\n"


def measured(raw: bytes, cuts: list[int]) -> Record:
    record = Record(start=0.0)
    places = [0, *sorted(cuts), len(raw)]
    read_stream(record, [(float(i), raw[a:b]) for i, (a, b) in enumerate(pairwise(places))])
    return record


def chatted(raw: bytes) -> str:
    remote = Remote.__new__(Remote)
    remote.name, remote.options = "m", {}
    remote._open = lambda path, body=None: io.BytesIO(raw)  # type: ignore[method-assign]
    return "".join(remote.stream([]))


@given(streams(), st.data())
@settings(max_examples=examples(100), deadline=None)
def test_any_cut_gives_the_same_text(stream: tuple[list[str], bytes], data: st.DataObject) -> None:
    texts, raw = stream
    record = measured(raw, data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    assert (record.text, len(record.chunks), record.error) == ("".join(texts), len(texts), None)
    assert chatted(raw) == "".join(texts)


@given(
    st.lists(
        VALUES.map(lambda value: b"data: " + json.dumps(value).encode()) | st.binary(max_size=9), max_size=6
    )
)
@settings(max_examples=examples(150), deadline=None)
def test_what_is_no_stream_is_an_error(lines: list[bytes]) -> None:
    raw = b"\n\n".join(lines) + b"\n\n"
    record = measured(raw, [])
    try:
        text = chatted(raw)
    except SglaError:
        assert record.error is not None
    else:
        assert isinstance(text, str)


@pytest.mark.parametrize(
    "wrong",
    [b"data: {", b"data: 3", b'data: {"choices": 4}', b'data: {"choices": [{"delta": true}]}', b"data: \xff"],
)
def test_a_malformed_event_is_told(wrong: bytes) -> None:
    raw = chunk("a") + b"\n\n" + wrong + b"\n\n" + chunk("b") + b"\n\n"
    record = measured(raw, [])
    assert record.error is not None
    assert "malformed" in record.error
    with pytest.raises(SglaError):
        chatted(raw)


def test_line_ends_of_unicode_end_no_line() -> None:
    pieces: list[Any] = ["a", "b\n", " \u2028", "\x85c"]
    raw = b"".join(chunk(piece) + b"\n\n" for piece in pieces) + b"data: [DONE]\n\n"
    assert chatted(raw) == "".join(pieces) == measured(raw, [3, 9]).text

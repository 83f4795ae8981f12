"""How much a message may hold, found without decoding it. To decode one takes the loop as long as it has
fields: 3 MB of small ones are a fifth of a second."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from sgla.errors import BadRequest, TooLarge

SMALL = 256 << 10  # bytes that are decoded at once, whatever they hold
MOST = 4 << 20  # bytes of a message, the default of gRPC's own servers
FIELDS = 8192  # of a larger message and all that are in it
DEPTH = 32
VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5  # wire types (protobuf.dev, Encoding)
WIDE = {EIGHT: 8, FOUR: 4}


def check(descriptor: Any, data: bytes) -> None:
    """Raises TooLarge for a message that holds too much, and BadRequest for what is none. Packed numbers and
    strings count as one field each, since they are decoded at once."""
    if len(data) <= SMALL:
        return
    seen = 0
    todo = [(descriptor, memoryview(data), 0)]
    while todo:
        kind, part, depth = todo.pop()
        if depth > DEPTH:
            raise BadRequest(f"messages lie in each other more than {DEPTH} deep")
        for number, value in _fields(part):
            seen += 1
            if seen > FIELDS:
                raise TooLarge(f"the message has more than {FIELDS} fields; pack repeated numbers")
            field = kind.fields_by_number.get(number)
            if value is not None and field is not None and field.type == FieldDescriptor.TYPE_MESSAGE:
                todo.append((field.message_type, value, depth + 1))


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | None]]:
    """Numbers of the fields of a message, and the bytes of those that have some. Raises BadRequest."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == BYTES:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise BadRequest("the message is cut")
            yield tag >> 3, data[at : at + size]
            at += size
            continue
        if wire == VARINT:
            _, at = _varint(data, at)
        elif wire in WIDE:
            at += WIDE[wire]
        else:
            raise BadRequest(f"the message has a field of wire type {wire}, which no protocol here has")
        yield tag >> 3, None


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Its value and where it ends. Raises BadRequest."""
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise BadRequest("the message is cut")

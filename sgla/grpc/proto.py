"""The messages and services of ``protos/*.proto``, read when they are needed: generated code would be bound
to one version of protobuf. They are in a pool of their own, beside what else has messages of these names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf import struct_pb2, text_format, timestamp_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2

FOLDER = Path(__file__).parent / "protos"
# In order of imports.
FILES = ("common.proto", "sglang_scheduler.proto", "vllm_engine.proto", "sgla.proto", "health.proto")
SGLANG, VLLM, OWN = "sglang.grpc.scheduler", "vllm.grpc.engine", "sgla.grpc"
SCALARS = ["double", "float", "int32", "int64", "uint32", "uint64", "bool", "string", "bytes"]

_TOKEN = re.compile(r'"[^"]*"|[\w.]+|[{}=;()<>,]')
_COMMENT = re.compile(r"//.*")


@cache
def pool() -> DescriptorPool:
    made = DescriptorPool()
    for other in (struct_pb2, timestamp_pb2, reflection_pb2):
        made.AddSerializedFile(other.DESCRIPTOR.serialized_pb)
    made.AddSerializedFile(stable(reflection_pb2.DESCRIPTOR).SerializeToString())
    for name in FILES:
        made.AddSerializedFile(parse(name, (FOLDER / name).read_text()).SerializeToString())
    return made


def stable(file: Any) -> FileDescriptorProto:
    """``v1`` of a file that has ``v1alpha``. Of reflection both are the same but for that name."""
    alpha = FileDescriptorProto.FromString(file.serialized_pb)
    return text_format.Parse(str(alpha).replace("v1alpha", "v1"), FileDescriptorProto())


@cache
def message(name: str) -> Any:
    """The class of a message, by its full name."""
    return GetMessageClass(pool().FindMessageTypeByName(name))


def make(package: str, name: str, **fields: Any) -> Any:
    """A message of a package."""
    return message(f"{package}.{name}")(**fields)


def parse(name: str, text: str) -> FileDescriptorProto:
    """A file of proto3 with messages, enums and services, without options."""
    file = FileDescriptorProto(name=name, syntax="proto3")
    words = iter(_TOKEN.findall(_COMMENT.sub("", text)))
    for word in words:
        if word == "package":
            file.package = next(words)
        elif word == "import":
            file.dependency.append(next(words).strip('"'))
        elif word == "message":
            _message(file.message_type.add(), words)
        elif word == "enum":
            _enum(file.enum_type.add(), words)
        elif word == "service":
            _service(file.service.add(), words)
    return file


def _message(made: DescriptorProto, words: Iterator[str]) -> None:
    made.name = next(words)
    choice: int | None = None  # of which ``oneof``
    depth, optional = 0, []
    for word in words:
        if word == "{":
            depth += 1
        elif word == "}":
            depth, choice = depth - 1, None
            if depth == 0:
                break
        elif word == "enum":
            _enum(made.enum_type.add(), words)
        elif word == "oneof":
            choice = len(made.oneof_decl)
            made.oneof_decl.add(name=next(words))
        elif word == "reserved":
            while next(words) != ";":
                pass
        elif word != ";":
            field = _field(made, word, words)
            if choice is not None:
                field.oneof_index = choice
            if word == "optional":
                optional.append(field)
    for field in optional:  # each is the one field of a ``oneof`` behind all others
        field.proto3_optional, field.oneof_index = True, len(made.oneof_decl)
        made.oneof_decl.add(name=f"_{field.name}")


def _field(made: DescriptorProto, word: str, words: Iterator[str]) -> FieldDescriptorProto:
    """``word``: the first of the field."""
    field = made.field.add(label=FieldDescriptorProto.LABEL_OPTIONAL)
    if word == "map":
        _map(made, field, words)
        return field
    if word == "repeated":
        field.label = FieldDescriptorProto.LABEL_REPEATED
    _typed(field, next(words) if word in ("repeated", "optional") else word)
    field.name, field.number = _named(words)
    return field


def _map(made: DescriptorProto, field: FieldDescriptorProto, words: Iterator[str]) -> None:
    """``<KEY, VALUE> NAME = NUMBER``."""
    _, key, _, value, _ = (next(words) for _ in range(5))
    field.name, field.number = _named(words)
    entry = made.nested_type.add(name=field.name.title().replace("_", "") + "Entry")
    entry.options.map_entry = True
    for number, (name, kind) in enumerate((("key", key), ("value", value)), 1):
        part = entry.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
        _typed(part, kind)
    field.label, field.type_name = FieldDescriptorProto.LABEL_REPEATED, entry.name
    field.type = FieldDescriptorProto.TYPE_MESSAGE


def _named(words: Iterator[str]) -> tuple[str, int]:
    name, _, number = (next(words) for _ in range(3))
    return name, int(number)


def _typed(field: FieldDescriptorProto, kind: str) -> None:
    if kind in SCALARS:
        field.type = FieldDescriptorProto.Type.Value(f"TYPE_{kind.upper()}")
    else:
        field.type_name = kind  # which the pool finds, a message or an enum


def _enum(made: EnumDescriptorProto, words: Iterator[str]) -> None:
    made.name = next(words)
    next(words)
    while (name := next(words)) != "}":
        _, number, _ = (next(words) for _ in range(3))
        made.value.add(name=name, number=int(number))


def _service(made: ServiceDescriptorProto, words: Iterator[str]) -> None:
    made.name = next(words)
    for word in words:
        if word == "}":
            break
        if word == "rpc":
            method = made.method.add(name=next(words))
            method.client_streaming, method.input_type = _side(words)
            next(words)  # returns
            method.server_streaming, method.output_type = _side(words)


def _side(words: Iterator[str]) -> tuple[bool, str]:
    """Whether it is a stream, and of what."""
    next(words)
    kind = next(words)
    streams = kind == "stream"
    kind = next(words) if streams else kind
    next(words)
    return streams, kind

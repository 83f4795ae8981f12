"""A scheduler as bytes:
everything that decides its later plans, so that a copy goes on exactly like the original."""

from __future__ import annotations

import io
import pickle
import sys
from array import array
from collections import OrderedDict, deque
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from sgla.cache.tree import Node
from sgla.messages import Repetition, RowSampling, Submit
from sgla.sched.core import Core
from sgla.sched.request import Prompt, Request, State

PACKAGES = ("sgla.sched.", "sgla.cache.", "sgla.messages")  # whose classes a scheduler consists of
# What of a node and of a request is written as it is.
_NODE = ("born", "edge", "hits", "kept", "key", "level", "locks", "state", "touched", "ttl")
_REQUEST = tuple(name for name in Request.fields if name not in ("state", "submit", "tokens"))
_of_node, _of_request = attrgetter(*_NODE), attrgetter(*_REQUEST)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Submit).decode


def freeze(core: Core) -> bytes:
    """Takes about 3 us a node of the tree, and 10 a request.
    Prompts are there as tokens of their requests alone."""
    cache = core._memory.cache
    links = [(node, child) for node in [cache.root, *cache.walk()] for child in node.children.values()]
    buffer = io.BytesIO()
    _Writer(buffer, protocol=5).dump((vars(core), links))
    return buffer.getvalue()


def scheduled(sampling: RowSampling) -> RowSampling:
    """What decides plans: without what the workers alone read, which may be large."""
    return replace(
        sampling,
        logit_bias=[],
        bad_words=[],
        allowed=[],
        grammar=sampling.grammar[:1],  # whether there is one
        grammar_after=(),
        grammar_opener="",
        processors=[],
    )


def thaw(data: bytes) -> Core:
    """The copy. Raises pickle.UnpicklingError for bytes that ``freeze`` has not made;
    runs no code that they name."""
    core = Core.__new__(Core)
    try:
        state, links = _Reader(io.BytesIO(data)).load()
        vars(core).update(state)
        for node, child in links:
            child.parent = node
            node.children[child.edge] = child
    except Exception as error:  # of any kind, where bytes are damaged
        raise pickle.UnpicklingError(str(error)) from error
    return core


def _node(pages: bytes, windows: list[bytes], *values: Any) -> Node:
    node = Node(None, None, b"", array("i", pages), 0, [array("q", tickets) for tickets in windows])
    for name, value in zip(_NODE, values):
        setattr(node, name, value)
    return node


def _request(submit: bytes, tokens: bytes, state: str, *values: Any) -> Request:
    request = Request.__new__(Request)
    request.submit, request.tokens, request.state = _decode(submit), array("I", tokens), State(state)
    for name, value in zip(_REQUEST, values):
        setattr(request, name, value)
    return request


def _write_node(node: Node) -> tuple[Any, ...]:
    """Without its neighbours: a deep tree must not become a deep recursion."""
    return _node, (node.pages.tobytes(), [tickets.tobytes() for tickets in node.windows], *_of_node(node))


def _write_request(request: Request) -> tuple[Any, ...]:
    """Its tokens begin with the prompt's."""
    submit = _encode(replace(request.submit, tokens=[], sampling=scheduled(request.submit.sampling)))
    return _request, (submit, request.tokens.tobytes(), request.state.value, *_of_request(request))


def _write_prompt(prompt: Prompt) -> tuple[Any, ...]:
    """Without its tokens, which its requests have."""
    return Prompt, ([],)


class _Writer(pickle.Pickler):
    dispatch_table = MappingProxyType({Node: _write_node, Prompt: _write_prompt, Request: _write_request})


# Of structs, of arrays.
_REBUILD, _RESTORE = Repetition().__reduce__()[0], array("i").__reduce_ex__(5)[0]
_CALLED: list[Any] = [_node, _request, _REBUILD, _RESTORE, OrderedDict, array, deque]
_KNOWN = {(value.__module__, value.__name__): value for value in _CALLED}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module.startswith(PACKAGES) and module in sys.modules:
            found = getattr(sys.modules[module], name, None)
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise pickle.UnpicklingError(f"a snapshot does not hold a {module}.{name}")

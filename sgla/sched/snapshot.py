"""A scheduler as bytes: everything that decides its later plans, so that a copy goes on exactly like the original."""

from __future__ import annotations

import io
import pickle
import sys
from array import array
from collections import deque
from enum import Enum
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from sgla.cache.radix import EVICTION, Node, RadixCache
from sgla.messages import RowSampling, Submit
from sgla.sched.core import Core
from sgla.sched.request import Prompt

PACKAGES = ("sgla.sched.", "sgla.cache.", "sgla.messages")  # whose classes a scheduler consists of
_FIELDS = ("born", "edge", "hits", "key", "locks", "pages", "touched")  # of a node without its neighbours
_values = attrgetter(*_FIELDS)


def freeze(core: Core) -> bytes:
    """Takes about 10 us a node of the tree, and some more a request. Prompts are there as arrays alone."""
    cache = core._memory.cache
    links = [(node, child) for node in [cache.root, *cache.walk()] for child in node.children.values()]
    buffer = io.BytesIO()
    _Writer(buffer, protocol=5).dump((vars(core) | {"_prompt": Prompt([])}, links))
    return buffer.getvalue()


def thaw(data: bytes) -> Core:
    """The copy. Raises pickle.UnpicklingError for bytes that ``freeze`` has not made; runs no code that they name."""
    state, links = _Reader(io.BytesIO(data)).load()
    core = Core.__new__(Core)
    vars(core).update(state)
    core._memory.cache._sort_key = EVICTION[core.limits.eviction]
    for node, child in links:
        child.parent = node
        node.children[child.edge] = child
    return core


class _Writer(pickle.Pickler):
    """Nodes are written without their neighbours: a deep tree must not become a deep recursion."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Node:
            return _node, _values(value)
        if isinstance(value, RadixCache):
            return _empty, (type(value),), vars(value) | {"_sort_key": None}
        if isinstance(value, Submit):  # ``Request.tokens`` begins with them
            return replace(value, tokens=[]).__reduce__()
        if isinstance(value, Enum):  # Python up to 3.11.3 would name its class and `getattr`
            return type(value), (value.value,)
        return NotImplemented


def _node(*values: Any) -> Node:
    node = Node(None, None, b"", array("i"), 0)
    for name, value in zip(_FIELDS, values):
        setattr(node, name, value)
    return node


def _empty(kind: type[RadixCache]) -> RadixCache:
    return kind.__new__(kind)


_REBUILD, _RESTORE = RowSampling().__reduce__()[0], array("i").__reduce_ex__(5)[0]  # of structs, of arrays
_CALLED: list[Any] = [_node, _empty, _REBUILD, _RESTORE, array, deque, frozenset]
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

"""A radix tree over token ids: the structure alone.

Page granular, as in SGLang's RadixAttention (Zheng et al. 2023): an edge is a run of whole pages. Token ids
come as ``int32`` byte strings, so the first page of a run is a dictionary key and the rest of it is one
``memcmp``. Where a page depends on more than the tokens up to its end, on an image for example, its *mark* is
part of that key, and no run goes on across it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

TOKEN_BYTES = 4
Marks = Mapping[int, bytes]  # of pages, by their index
NO_MARKS: Marks = MappingProxyType({})


def marks_from(marks: Marks, first: int) -> Marks:
    """The marks counted from page ``first`` on."""
    return {i - first: mark for i, mark in marks.items() if i >= first} if marks and first else marks


class Node:
    """A run of pages below ``parent``.
    ``key``: token bytes of the run; ``edge``: its key in ``parent.children``.

    ``locks`` counts the requests that hold this node or one below it. A split keeps this object as the
    *lower* half, so a request's reference goes on meaning the same prefix, and its state the same tokens.
    ``windows``: tickets for as many pages of each group with a window. ``state``: ticket of the checkpoint
    behind it. ``kept``: until when it goes after all that is not kept; 0: it is not. ``ttl``: for how many
    seconds from its last use on it is. ``level``: see ``Leaves``.
    """

    __slots__ = (
        "born",
        "children",
        "edge",
        "hits",
        "kept",
        "key",
        "level",
        "locks",
        "pages",
        "parent",
        "state",
        "touched",
        "ttl",
        "windows",
    )

    def __init__(
        self,
        parent: Node | None,
        edge: object,
        key: bytes,
        pages: array[int],
        born: int,
        windows: list[array[int]] | None = None,
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.key = key
        self.pages = pages
        self.windows = windows or []
        self.children: dict[object, Node] = {}
        self.locks = 0
        self.hits = 0
        self.state = 0
        self.kept = self.ttl = self.level = 0.0
        self.born = self.touched = born

    @property
    def is_leaf(self) -> bool:
        """Nothing hangs below it, and nobody holds it."""
        return not self.locks and not self.children and self.parent is not None


class RadixTree:
    """``nodes``: how many there are, the root aside."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node(None, None, b"", array("i"), 0)
        self.nodes = 0
        self._width = page_size * TOKEN_BYTES

    def walk(self) -> Iterator[Node]:
        """All nodes but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def find(self, namespace: str, tokens: bytes, length: int, marks: Marks = NO_MARKS) -> Node | None:
        """The node that ends with ``tokens[:length]``, which are whole pages, by a split if need be;
        None: the tree lacks some of them."""
        node, at, child, part = self._descend(self.root, namespace, tokens, 0, length, marks)
        if at + part * self._width < length * TOKEN_BYTES:
            return None
        return node if child is None else self._split(child, part)

    def text(self, node: Node) -> tuple[str, bytes, Marks]:
        """What stands in the tree down to ``node``: namespace, tokens and marks."""
        namespace, keys, marks, pages = "", list[bytes](), dict[int, bytes](), 0
        for part in path(node, self.root):
            edge: Any = part.edge
            marked = isinstance(edge, tuple)
            if part.parent is self.root:
                marked = isinstance(edge[0], tuple)
                namespace = edge[0][0] if marked else edge[0]
            if marked:
                marks[pages] = edge[1]
            keys.append(part.key)
            pages += len(part.pages)
        return namespace, b"".join(keys), marks

    def _descend(
        self, node: Node, namespace: str, tokens: bytes, start: int, limit: int, marks: Marks
    ) -> tuple[Node, int, Node | None, int]:
        """Last node matched whole, byte position after it,
        and the child matched in part with its matched pages."""
        width = self._width
        at = start * TOKEN_BYTES
        end = limit // self.page_size * width
        while at < end:
            page = tokens[at : at + width]
            edge: object = page
            if marks or node is self.root:
                edge = self._edge(node, namespace, page, marks.get(at // width))
            child = node.children.get(edge)
            if child is None:
                break
            size = len(child.key)
            stop = min((i * width for i in marks if at < i * width < end), default=end) if marks else end
            if at + size > stop or not tokens.startswith(child.key, at):
                return node, at, child, self._common(child.key, tokens, at, min(size, stop - at) // width)
            node = child
            at += size
        return node, at, None, 0

    def _edge(self, node: Node, namespace: str, page: bytes, mark: object) -> object:
        """The key of a run below ``node`` that begins with ``page``."""
        edge = (namespace, page) if node is self.root else page
        return (edge, mark) if mark else edge

    def _common(self, key: bytes, tokens: bytes, at: int, most: int) -> int:
        """Pages that ``key`` and ``tokens[at:]`` share, by bisection; the first one is known to be equal."""
        width, low = self._width, 1
        while low < most:
            middle = (low + most + 1) // 2
            if key[low * width : middle * width] == tokens[at + low * width : at + middle * width]:
                low = middle
            else:
                most = middle - 1
        return low

    def _split(self, node: Node, keep: int) -> Node:
        """Cut ``node`` after ``keep`` pages; returns the new upper half."""
        cut = keep * self._width
        parent = node.parent
        assert parent is not None
        beside = [tickets[:keep] for tickets in node.windows]
        upper = Node(parent, node.edge, node.key[:cut], node.pages[:keep], node.born, beside)
        upper.locks, upper.hits, upper.touched = node.locks, node.hits, node.touched
        upper.kept, upper.ttl, upper.level = node.kept, node.ttl, node.level
        parent.children[node.edge] = upper
        node.key, node.pages = node.key[cut:], node.pages[keep:]
        node.windows = [tickets[keep:] for tickets in node.windows]
        node.parent, node.edge = upper, node.key[: self._width]
        upper.children[node.edge] = node
        self.nodes += 1
        return upper

    def _add(self, parent: Node, edge: object, tokens: bytes, pages: Sequence[int], born: int) -> Node:
        child = Node(parent, edge, tokens, array("i", pages), born)
        parent.children[edge] = child
        self.nodes += 1
        return child

    def _cut_off(self, node: Node) -> Node:
        """Take ``node`` out; returns its parent."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge]
        node.parent = None
        self.nodes -= 1
        return parent


def path(node: Node, top: Node) -> list[Node]:
    """The nodes below ``top`` down to ``node``."""
    found = []
    while node is not top:
        found.append(node)
        assert node.parent is not None
        node = node.parent
    return found[::-1]


def depth(node: Node) -> int:
    """Pages above ``node``."""
    pages, parent = 0, node.parent
    while parent is not None:
        pages += len(parent.pages)
        parent = parent.parent
    return pages

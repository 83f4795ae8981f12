"""A record on its way through rewrite rules: see ``rules.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sgla.kernels import ops
from sgla.kernels.cuda import skinny_gemm
from sgla.kernels.device import this_device
from sgla.kernels.gpu.record import Node, Record, Ref
from sgla.kernels.trace import Size

ADDED = {ops.rms_norm: ops.add_rms_norm, ops.layer_norm: ops.add_layer_norm}
OTHER = "it is for something else"  # why a rule refuses what it was not made for: nobody is told


class Asked(NamedTuple):
    """What a step is. ``decode``: all rows are decode rows, and this kernel takes q, k and v from the
    projection; ``draws``: the output layer may draw."""

    sizes: dict[str, int]  # of tokens, sampled, rows, gathered
    decode: Any = None
    draws: bool = False
    deterministic: bool = False


@dataclass(slots=True)
class Work:
    """A record on its way through the rules, node by node. Of each value: ``made``, the node that makes it;
    ``uses``, how many nodes read it, of those that the rules have put and those of the record that are still
    to come, and one more if the record returns it; ``left``, those still to come alone."""

    record: Record
    asked: Asked
    nodes: dict[int, Node] = field(default_factory=dict)  # by identity, in order
    made: dict[int, Node] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    overwritten: set[int] = field(default_factory=set)  # values that own the memory
    values: int = 0
    wgmma: bool = field(default_factory=lambda: this_device().wgmma)
    mixtures: bool = False  # layers have mixtures of experts
    e4m3: bool = False  # linear layers have such weights
    drawn: bool = False
    refused: dict[tuple[str, str], int] = field(default_factory=dict)  # by rule and why

    def rows(self, node: Node) -> int:
        rows = node.rows
        return self.asked.sizes[rows.of] * rows.factor if isinstance(rows, Size) else rows

    def value(self) -> int:
        """The number of a new value."""
        self.values += 1
        return self.values - 1

    def input(self, name: str) -> Ref:
        return Ref(self.record.inputs.index(name))

    def few_rows(self, node: Node) -> bool:
        """Whether the kernels of few rows take the linear layers around ``node``."""
        return self.wgmma and self.rows(node) <= skinny_gemm.MAX_ROWS

    @property
    def taken(self) -> Counter[str]:
        """How many nodes each rule has made."""
        return Counter(node.rule for node in self.nodes.values() if node.rule)

    def named(self, op: Any) -> list[Node]:
        return [node for node in self.nodes.values() if node.op == op]

    def maker(self, x: Ref) -> Node | None:
        return self.made.get(x.number)

    def free(self, x: Any) -> bool:
        """Whether nobody reads the value or a view of it later, so that its memory may be written to."""
        memory = self.record.memory(x.number)
        shared = [x.number, memory, *(n for n in self.record.views if self.record.memory(n) == memory)]
        kept = memory < len(self.record.inputs) or any(n in self.record.outputs for n in shared)
        return not kept and not any(self.left.get(n, 0) for n in shared)

    def chain(self, node: Node, pattern: tuple[Any, ...]) -> list[Node] | None:
        """The nodes of the pattern that ends with ``node``, if they can move to its place."""
        found = [node]
        for op in reversed(pattern[:-1]):
            if not found[0].reads:
                return None
            x = found[0].reads[0]
            maker = self.made.get(x)
            if maker is None or maker.op is not op or maker.results[0] != x or self.uses[x] != 1:
                return None
            # Its other results will be made later than now, so nothing that was put may read them:
            # all their readers are to come, or are ``node``, which ``left`` counts no more.
            for n in maker.results[1:]:
                if self.uses.get(n, 0) != self.left.get(n, 0) + node.reads.count(n):
                    return None
            memory = self.record.memory
            if any(memory(n) in self.overwritten and n != maker.overwrites for n in maker.reads):
                return None
            found.insert(0, maker)
        return found

    def drop(self, node: Node) -> None:
        del self.nodes[id(node)]
        for number in node.reads:
            self.uses[number] -= 1
        for number in node.results:
            self.made.pop(number, None)

    def put(self, node: Node) -> None:
        self.nodes[id(node)] = node
        for number in node.reads:
            self.uses[number] = self.uses.get(number, 0) + 1
        for number in node.results:
            self.made[number] = node
        if node.overwrites is not None:
            self.overwritten.add(self.record.memory(node.overwrites))


@dataclass(frozen=True)
class Rule:
    name: str
    pattern: tuple[Any, ...]
    refuses: Callable[..., str | None]  # of the work and the nodes of the chain
    make: Callable[..., list[Node]]  # none if a node that is there does the work, too
    invariant: bool = False  # a row's bits are those of the ops apart, whatever the others are


def rewrite(record: Record, asked: Asked, rules: Mapping[Any, Sequence[Rule]]) -> Work:
    """The nodes of ``record`` with the rules of their ops applied."""
    work = Work(record, asked, values=len(record.dtypes))
    work.mixtures = any(node.op is ops.moe for node in record.nodes)
    work.e4m3 = any(w.kind in ("fp8", "fp8g128") for w in record.weights)
    nodes = _summed(record.nodes)
    work.left = dict(Counter(number for node in nodes for number in node.reads))
    work.uses = dict(work.left)
    for number in record.outputs:
        work.uses[number] = work.uses.get(number, 0) + 1
    for node in nodes:
        for number in node.reads:
            work.left[number] -= 1
        _visit(work, node, rules.get(node.op, ()))
    return work


def _summed(nodes: Sequence[Node]) -> list[Node]:
    """With sums that are copied before their norm as ``add_rms_norm`` or ``add_layer_norm``, and the copies
    behind that."""
    made: list[Node | None] = list(nodes)
    for at, (total, copied, norm) in enumerate(zip(nodes, nodes[1:], nodes[2:])):
        if (total.op, copied.op) != (ops.add, ops.copied) or norm.op not in ADDED:
            continue
        if copied.reads == total.results and norm.reads == copied.results:
            given = norm.given | {"x": total.given["y"], "residual": total.given["x"]}
            joined = Node(ADDED[norm.op], None, given, norm.results + total.results, norm.rows)
            made[at : at + 3] = joined, copied, None
    return [node for node in made if node is not None]


def _plain(work: Work, node: Node) -> str | None:
    """Why no rule may take ``node``, or None."""
    if work.asked.deterministic:
        return "its sums depend on the number of rows or on what is joined, and --deterministic forbids that"
    return None if node.given.get("addend") is None else "no kernel adds an addend on the way"


def _visit(work: Work, node: Node, rules: Sequence[Rule]) -> None:
    """Put ``node``, or what the first rule that is not refused makes of it, behind the others."""
    made = next((found for rule in rules if (found := _apply(work, rule, node)) is not None), None)
    if made is None:
        made = [node.but({"out": work.input("out")} if node.op is ops.logits else {})]
        if node.op in (ops.inplace, ops.copied, ops.all_reduce):
            made[0].overwrites = node.reads[0]
    for new in made:
        work.put(new)
    for number in node.reads:
        work.uses[number] -= 1


def _apply(work: Work, rule: Rule, node: Node) -> list[Node] | None:
    chain = work.chain(node, rule.pattern)
    if chain is None:
        return None
    why = rule.refuses(work, *chain)
    if why == OTHER:
        return None
    why = why if rule.invariant else _plain(work, node) or why
    if why is not None:
        work.refused[rule.name, why] = work.refused.get((rule.name, why), 0) + 1
        return None
    made = rule.make(work, *chain)
    for gone in chain[:-1]:
        work.drop(gone)
    for new in made:
        new.rule = " + ".join(filter(None, (new.rule, rule.name)))
    return made

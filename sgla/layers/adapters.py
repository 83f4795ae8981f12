"""Where layers keep what adapters add to them, and under which names adapters find that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels.lora import Rows, Stack
from sgla.quant.weight import Weight

FUSED = {  # what files call layers whose parts have names of their own here
    "qkv_proj": ("qkv_proj", "q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_up_proj", "gate_proj", "up_proj"),
}
SAMPLED = 64  # rows of a table
EXPERTS = "experts"  # stands for their layers, of which there are many
# Name, full output size, this rank's rows (int64: in this order), their order in a head. A layer whose rows
# lie in several places is a part for each.
AdapterPart = tuple[str, int, range | Tensor, Tensor | None]


class Target(NamedTuple):
    """A linear layer ``[n, k]`` that an adapter may change: part ``part`` of a stack, which has ``rows`` of
    the outputs (int64: in this order) and ``columns`` of the inputs (None: all)."""

    stack: Stack
    part: int
    n: int
    k: int
    rows: range | Tensor
    columns: range | None
    order: Tensor | None
    embedding: bool = False  # k are ids

    def own(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's share of an adapter's a [r, k] and b [n, r]."""
        if self.columns is not None:
            a = a[:, self.columns.start : self.columns.stop]
        b = b[self.rows] if isinstance(self.rows, Tensor) else b[self.rows.start : self.rows.stop]
        if self.order is not None:
            b = b.unflatten(0, (-1, len(self.order)))[:, self.order].flatten(0, 1)
        return a, b


class Mixture(NamedTuple):
    """The experts of a layer, as files hold them that have all in two tensors: so many, of an inner
    ``width``, whose rows of ``parts`` (gate and up) stand in turn, or one behind the other."""

    experts: int
    hidden: int
    width: int
    parts: tuple[str, ...]
    in_turn: bool


@dataclass
class Adapters:
    """For ``places`` adapters of at most ``rank``, in ``dtype``. ``modules``: last names of the layers that
    they may change; empty: all linear layers of the blocks. ``table``: these layers by full name, each with
    all places in which its rows lie. ``beyond``:
    beginnings of the names of those that other stages have; ``sets``: how often there are as many layers as
    this stage has. ``memory`` [places, rank, width]: a place is one piece of it, and an adapter of less than
    the highest rank the beginning of one, so that one copy brings it. ``mixtures``: by the full names of
    their experts; ``absent``: names of experts' layers that other ranks have, with the number of their inputs
    and outputs together; ``tables``: weights of the vocabulary that they may change, and which of their rows
    this rank has; ``samples``: some of these rows, int64[S], and what they hold, float32[S, k], to which
    copies are compared that lie in files of adapters; ``there``: last names of all layers.

    Loading says how checkpoints name them: ``rename`` makes a declared name of a checkpoint's, ``joined`` has
    the layers, and their outputs, behind the name of a matrix that holds several, and ``mend`` puts the rows
    of such a one in the order that they have here.
    """

    places: int
    rank: int
    dtype: torch.dtype
    modules: frozenset[str] = frozenset()
    rows: Rows = field(default_factory=Rows)
    table: dict[str, list[Target]] = field(default_factory=dict)
    stacks: list[Stack] = field(default_factory=list)
    mixtures: dict[str, Mixture] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[Weight, range]] = field(default_factory=dict)
    there: set[str] = field(default_factory=set)
    samples: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    memory: Tensor = field(init=False)
    beyond: tuple[str, ...] = ()
    sets: float = 1.0
    rename: Callable[[str], str] = lambda name: name
    joined: Mapping[str, list[tuple[str, range]]] = field(default_factory=dict)
    mend: Callable[[str, Tensor], Tensor] = lambda _, rows: rows

    def find(self, module: str) -> list[tuple[Target, range | None]]:
        """The targets behind a checkpoint's name of a layer, and which of its outputs each has (None: all);
        [] if no adapter may change it."""
        name = self.rename(module)
        if name in self.table:
            return [(target, None) for target in self.table[name]]
        parts = self.joined.get(name, [])
        return [(target, rows) for part, rows in parts for target in self.table.get(part, ())]

    def leaves(self, module: str) -> bool:
        """Whether another rank has the layer, which looks at what an adapter has for it."""
        name = self.rename(module)
        return name in self.absent or (f"{name}.".startswith(self.beyond) if self.beyond else False)

    def sample(self) -> None:
        """The weights are there. Later they may be away, while the server sleeps, and adapters are read in
        threads of their own."""
        for name, (weight, own) in self.tables.items():
            rows = torch.linspace(own.start, own.stop - 1, SAMPLED, device="cpu").long()
            self.samples[name] = rows, weight.told(rows - own.start)
        self.tables.clear()

    def stack(
        self, k: int, parts: Sequence[AdapterPart], columns: range | None = None, embedding: bool = False
    ) -> Stack | None:
        """For a layer of k inputs, of which this rank has ``columns``; None if no adapter may change it."""
        names = (EXPERTS if ".experts." in name else name.rpartition(".")[2] for name, *_ in parts if name)
        self.there.update(names)
        if embedding and not self.modules:
            return None
        if not any(self._changes(name) for name, *_ in parts):
            return None
        width = k if columns is None else len(columns)
        made = Stack(self.places, width, [len(rows) for _, _, rows, _ in parts], self.width)
        for part, (name, n, rows, order) in enumerate(parts):
            if self._changes(name):
                target = Target(made, part, n, k, rows, columns, order, embedding)
                self.table.setdefault(name, []).append(target)
        self.stacks.append(made)
        return made

    def _changes(self, name: str) -> bool:
        if ".experts." in name:
            return EXPERTS in self.modules
        if not self.modules:
            return "." in name  # a layer of a block
        last = name.rpartition(".")[2]
        return last in self.modules or any(last in FUSED.get(each, ()) for each in self.modules)

    @property
    def width(self) -> int:
        """Of the memory of a place, for each rank."""
        return self.stacks[-1].last if self.stacks else 0

    def allocate(self) -> None:
        """All layers are there. Raises ConfigError for names of layers of which there are none."""
        unknown = {name for name in self.modules if not self.there.intersection(FUSED.get(name, (name,)))}
        if unknown and not self.beyond:
            raise ConfigError(
                f"--lora-target-modules {min(unknown)[:99]}: no layer of this model is called so; there are "
                f"{', '.join(sorted(self.there))}",
                param="lora_target_modules",
            )
        self.memory = torch.zeros(self.places, self.rank, self.width, dtype=self.dtype)
        for stack in self.stacks:
            stack.lie(self.memory)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

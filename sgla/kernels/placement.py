"""Which ranks have which experts of a mixture, where each has whole ones, and some are on several. Loads no
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Homes = Sequence[Sequence[int]]  # the experts of each rank


class Part(NamedTuple):
    """Of a rank: the experts that it has, and of each of these how many copies there are and which this is.
    Copies take turns between tokens."""

    held: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]

    def table(self, experts: int) -> list[int]:
        """A word for each of ``experts``: its place among those here and 1, or 0, in the lowest 16 bits; its
        copies in the next 8; which of them is here in those behind."""
        words = [1 << 16] * experts
        for place, (expert, (count, which)) in enumerate(zip(self.held, self.copies)):
            words[expert] = place + 1 | count << 16 | which << 24
        return words

    def keeping(self, held: Sequence[int]) -> Part:
        """The same in another order: what is among ``held`` stays in its place."""
        copies, places = dict(zip(self.held, self.copies)), dict(enumerate(held))
        coming = (expert for expert in self.held if expert not in held)
        order = [places[i] if places.get(i) in copies else next(coming) for i in range(len(self.held))]
        return Part(tuple(order), tuple(copies[expert] for expert in order))


@dataclass(frozen=True)
class Placement:
    """Of ``ranks``, with ``spare`` copies beside the experts of each layer. ``layers``: by their numbers; the
    others are as if all experts were wanted equally often."""

    ranks: int
    spare: int = 0
    layers: Mapping[int, Homes] = field(default_factory=dict)

    def homes(self, layer: int, experts: int) -> Homes:
        return self.layers.get(layer) or balanced([1] * experts, self.ranks, self.spare)

    def part(self, layer: int, experts: int, rank: int) -> Part:
        homes = self.homes(layer, experts)
        where: dict[int, list[int]] = {}
        for home, held in enumerate(homes):
            for expert in held:
                where.setdefault(expert, []).append(home)
        held = tuple(homes[rank])
        return Part(held, tuple((len(where[e]), where[e].index(rank)) for e in held))


def balanced(counts: Sequence[int], ranks: int, spare: int) -> list[list[int]]:
    """Homes of experts that are chosen so often: each rank has as many, and about as much to do. The
    ``spare`` copies go, one by one, to the expert whose copies have most to do each; then what has most to do
    goes to the rank that has least."""
    copies = [1] * len(counts)
    for _ in range(spare):
        few = [expert for expert in range(len(counts)) if copies[expert] < ranks]
        copies[max(few, key=lambda expert: (counts[expert] / copies[expert], -expert))] += 1
    room = -(-(len(counts) + spare) // ranks)
    each = [count / number for count, number in zip(counts, copies)]
    homes: list[list[int]] = [[] for _ in range(ranks)]
    order = sorted(range(len(counts)), key=lambda expert: (-copies[expert], -each[expert], expert))
    for expert in order:
        for _ in range(copies[expert]):
            _settle(homes, expert, room, each)
    return [sorted(held) for held in homes]


def _settle(homes: list[list[int]], expert: int, room: int, each: Sequence[float]) -> None:
    """Give one more copy a home, of which there is one."""
    free = [held for held in homes if len(held) < room]
    fit = [held for held in free if expert not in held]
    if not fit:  # those with room have it: one of another rank's experts makes way
        held = free[0]
        other = next(full for full in homes if expert not in full)
        moving = next(one for one in other if one not in held)
        other.remove(moving)
        held.append(moving)
        fit = [other]
    min(fit, key=lambda held: (sum(each[one] for one in held), len(held))).append(expert)


def reached(ranks: int, top_k: int) -> float:
    """How many of the ``ranks`` have one of a token's experts, on average, if all are as likely."""
    return ranks * (1 - (1 - 1 / ranks) ** top_k)


def balance(counts: Sequence[int], homes: Homes) -> float:
    """The mean of what ranks have to do, against the most: 1 is best."""
    copies = [sum(expert in held for held in homes) for expert in range(len(counts))]
    work = [sum(counts[expert] / copies[expert] for expert in held) for held in homes]
    return min(sum(work) / len(work) / max(work), 1.0) if any(work) else 1.0

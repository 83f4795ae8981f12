"""What several servers tell of themselves, as one: their metrics, and how often experts were chosen."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? (.+)")


def merged(pages: Mapping[str, str], label: str) -> str:
    """Prometheus' texts as one: each sample gets a ``label`` with the name of its page, and those of a metric
    stand together, as the format has it."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for page, text in pages.items():
        family, known = "", frozenset(heads)
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                family = line.split(" ", 3)[2]
                if family not in known:
                    heads.setdefault(family, []).append(line)
            elif found := _SAMPLE.fullmatch(line):
                name, labels, value = found.groups()
                more = f",{labels}" if labels else ""
                heads.setdefault(family, [])
                samples.setdefault(family, []).append(f'{name}{{{label}="{page}"{more}}} {value}')
    lines = (line for family in heads for line in (*heads[family], *samples.get(family, ())))
    return "".join(f"{line}\n" for line in lines)


class Layer(msgspec.Struct):
    layer: int
    experts: list[int]


class Counts(msgspec.Struct):
    """Of ``/dump_expert_distribution_record``. Who has which experts is each server's own, and left out."""

    layers: list[Layer]


def added_up(bodies: Sequence[bytes]) -> bytes | None:
    """The counts of several servers as one's; None where some are none, or not of one model."""
    try:
        counts = [msgspec.json.decode(body, type=Counts).layers for body in bodies]
    except msgspec.DecodeError:
        return None
    shapes = {tuple((each.layer, len(each.experts)) for each in layers) for layers in counts}
    if len(shapes) != 1 or len(counts) == 1:
        return None
    sums = [
        Layer(same[0].layer, [sum(numbers) for numbers in zip(*(each.experts for each in same))])
        for same in zip(*counts)
    ]
    return msgspec.json.encode(Counts(sums))

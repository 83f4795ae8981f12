"""The metrics of several servers on one page."""

from __future__ import annotations

import re
from collections.abc import Mapping

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

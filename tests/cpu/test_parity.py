"""The table docs/parity.md: it names every architecture, and some of its rows hold today."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from random import Random

from parity import MOST, comparisons, native

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \|$", re.M)
SOME = 2  # comparisons


def test_the_table_names_every_architecture() -> None:
    """Each in three layouts at least, and all within what is allowed."""
    ours, theirs = (dict(ROW.findall(part)) for part in PAGE.read_text().split("## Through"))
    assert ours.keys() == native().keys(), "python tests/cpu/parity.py --write docs/parity.md"
    numbers = {
        name: [float(cell.rpartition(" ")[2]) for cell in row.split("; ")]
        for name, row in (*ours.items(), *theirs.items())
    }
    assert min(map(len, numbers.values())) >= 3
    assert max(map(max, numbers.values())) <= MOST
    assert len(ours) >= 45
    assert len(theirs.keys() - ours.keys()) >= 15


def test_some_rows_hold() -> None:
    """Others each day."""
    today = Random(date.today().toordinal())
    for comparison in today.sample(list(comparisons()), SOME):
        row = comparison.run()
        assert row.holds, row

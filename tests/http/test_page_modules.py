"""The page's modules without a browser: one name that is missing or stands twice, and nothing of it runs."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

import sgla.http.page

FOLDER = Path(sgla.http.page.__file__).parent
MODULES = {path.name: path.read_text() for path in FOLDER.glob("*.js")}
IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([^"]+)";', re.MULTILINE)
DECLARED = re.compile(r"^(export )?(?:async )?(?:function\*?|class|const|let|var) ([\w$]+)", re.MULTILINE)
LATER = re.compile(r"^(?:let|var) ([^=;]*);", re.MULTILINE)  # let one, two;
ID = re.compile(r'\$\("([\w-]+)"\)')


def listed(text: str) -> list[str]:
    return [part.split(" as ")[-1].strip() for part in text.split(",") if part.strip()]


def test_the_page_is_found() -> None:
    assert {"main.js", "talk.js"} <= MODULES.keys()


@pytest.mark.parametrize("name", MODULES)
def test_no_name_stands_twice(name: str) -> None:
    text = MODULES[name]
    names = [part for found, _ in IMPORT.findall(text) for part in listed(found)]
    names += [found for _, found in DECLARED.findall(text)]
    names += [part for found in LATER.findall(text) for part in listed(found)[1:]]
    assert [found for found, times in Counter(names).items() if times > 1] == []


@pytest.mark.parametrize("name", MODULES)
def test_what_is_imported_is_exported(name: str) -> None:
    for found, source in IMPORT.findall(MODULES[name]):
        if not source.startswith("vendor/"):
            exported = {declared for export, declared in DECLARED.findall(MODULES[source]) if export}
            later = re.findall(r"^export let ([^=;]*);", MODULES[source], re.MULTILINE)
            exported |= {part for parts in later for part in listed(parts)}
            assert {part.split(" as ")[0].strip() for part in found.split(",")} - {""} <= exported


@pytest.mark.parametrize("name", [name for name in MODULES if name != "reference.js"])
def test_elements_that_are_looked_up_are_there(name: str) -> None:
    ids = set(re.findall(r'\bid="([\w-]+)"', (FOLDER / "index.html").read_text()))
    ids |= set(re.findall(r'\bid: "([\w-]+)"', MODULES[name]))
    assert set(ID.findall(MODULES[name])) <= ids

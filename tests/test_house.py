"""The shape of the code: no circles between files, functions and classes of a readable length."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from statements import statements

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 110
LAMBDA = r"\[[&=]?\]\([^)]*\bauto\b"  # with a parameter that may be of any type
LONGEST_FUNCTION, LONGEST_CLASS = 45, 350  # lines; a hundredth of the functions may be longer


@cache
def modules() -> dict[str, ast.Module]:
    """Each module of the package by its name; a package is named without ``__init__``."""
    found = {}
    for path in sorted((ROOT / "sgla").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


def imported(tree: ast.Module) -> Iterator[str]:
    """Names of what a module imports, wherever it does so: in functions, for types alone, and by
    ``import_module``, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == "import_module":
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(call: ast.Call) -> str:
    """The last part of the name of what is called; "" if it has none."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def graph(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """For each module those of ``trees`` that it imports."""
    found: dict[str, set[str]] = {}
    for name, tree in trees.items():
        targets = found[name] = set()
        for target in imported(tree):
            while target and target not in trees:
                target = target.rpartition(".")[0]
            targets.add(target)
        targets -= {"", name}
    return found


def circles(edges: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Sets of nodes that reach each other."""
    reached = {name: reachable(name, edges) for name in edges}
    found = {frozenset(other for other in reached[name] if name in reached[other]) for name in edges}
    return {circle for circle in found if circle}


def reachable(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [name]
    while ahead:
        new = edges[ahead.pop()] - seen
        seen |= new
        ahead += new
    return seen


def lengths(*kinds: type[ast.stmt]) -> list[tuple[int, str]]:
    """Lines and name of each definition of these kinds."""
    return [
        (node.end_lineno - node.lineno + 1, node.name)
        for tree in modules().values()
        for node in statements(tree)
        if isinstance(node, kinds)
    ]


def test_circles_are_found() -> None:
    sources = {
        "p": "",
        "p.a": "from p import b",
        "p.b": "def f():\n    import p.c",
        "p.c": "if TYPE_CHECKING:\n    from p.a import name",
        "p.d": "from p.a import name",
        "p.e": "importlib.import_module('p.f').g()",
        "p.f": "from p import e",
    }
    edges = graph({name: ast.parse(source) for name, source in sources.items()})
    assert circles(edges) == {frozenset({"p.a", "p.b", "p.c"}), frozenset({"p.e", "p.f"})}


def test_imports_between_files_go_one_way() -> None:
    found = [sorted(circle) for circle in circles(graph(modules()))]
    assert not found, found


def test_functions_are_short() -> None:
    found = lengths(ast.FunctionDef, ast.AsyncFunctionDef)
    long = sorted((each for each in found if each[0] > LONGEST_FUNCTION), reverse=True)
    assert len(found) > 3000
    assert len(long) <= len(found) // 100, long


def test_classes_are_short() -> None:
    assert not [name for lines, name in lengths(ast.ClassDef) if lines > LONGEST_CLASS]


def test_lines_of_c_and_cuda_are_short() -> None:
    """Those of Python are ruff's."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]
    assert len(sources) > 20
    lines = [(path.name, line) for path in sources for line in path.read_text().splitlines()]
    assert not [(name, line) for name, line in lines if len(line) > COLUMNS]


def test_lambdas_of_cuda_name_their_types() -> None:
    """NVRTC of CUDA 12 takes one that does not for a function of the host."""
    text = "".join(path.read_text() for path in (ROOT / "csrc/cuda").iterdir())
    assert re.search(LAMBDA, "then([&](int i, auto&& x) { return x; })")
    assert not re.findall(LAMBDA, text)


def test_files_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their names alone, and ends if two folders have the same one. Tests import the
    benchmarks in the same way."""
    paths = [path for folder in ("tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    names = [path.name for path in paths if path.name != "conftest.py"]
    assert [name for name, count in Counter(names).items() if count > 1] == []

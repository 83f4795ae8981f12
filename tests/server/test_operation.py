"""A real server process behind TLS; pauses and profiles of a real engine."""

from __future__ import annotations

import json
import math
import shutil
import ssl
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from safetensors import safe_open
from server_process import ServerProcess


@pytest.fixture(scope="module")
def server(tiny_server: ServerProcess) -> ServerProcess:
    return tiny_server


def test_a_paused_server_goes_on_where_it_was(server: ServerProcess) -> None:
    body = {"prompt": "abc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    expected = server.request("POST", "/v1/completions", body)[1]["choices"][0]["text"]
    answers: list[tuple[int, Any]] = []
    long = {**body, "max_tokens": 400}
    running = threading.Thread(target=lambda: answers.append(server.request("POST", "/v1/completions", long)))
    running.start()
    while server.stats()["running"] == 0:
        time.sleep(0.005)
    assert server.request("POST", "/pause_generation", {"mode": "in_place"})[0] == 200
    time.sleep(0.2)
    steps = server.stats()["steps"]
    waiting = threading.Thread(target=lambda: answers.append(server.request("POST", "/v1/completions", body)))
    waiting.start()
    time.sleep(0.3)
    assert server.stats()["steps"] == steps
    assert answers == []
    assert server.request("POST", "/continue_generation")[0] == 200
    running.join(30)
    waiting.join(30)
    assert [status for status, _ in answers] == [200, 200]
    assert all(answer["choices"][0]["text"].startswith(expected) for _, answer in answers)


def test_a_pause_ends_and_begins_while_the_server_sleeps(server: ServerProcess) -> None:
    """What needs no memory of the model is no 503 then: who goes on in the meantime is not left in a pause
    behind it. Its sessions close, too."""

    def ask(answers: list[int]) -> None:
        answers.append(server.request("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 2})[0])

    session = server.request("POST", "/open_session", {"capacity_of_str_len": 100})[1]
    for path, mode in (("/pause_generation", "in_place"), ("/continue_generation", None)):
        if mode is None:
            assert server.request("POST", "/pause_generation", {"mode": "in_place"})[0] == 200
        assert server.request("POST", "/sleep")[0] == 200
        assert server.request("POST", path, {"mode": mode} if mode else {})[0] == 200
        assert server.get("/is_paused")[1] == {"is_paused": mode is not None}
        assert server.request("POST", "/abort_request", {"abort_all": True})[1]["aborted"] == 0
        assert server.request("POST", "/close_session", {"session_id": session})[0] in (200, 404)
        assert server.request("POST", "/wake_up")[0] == 200
        answers: list[int] = []
        asking = threading.Thread(target=ask, args=(answers,))
        asking.start()
        asking.join(0.5 if mode else 30)
        assert answers == ([] if mode else [200])
        assert server.request("POST", "/continue_generation")[0] == 200
        asking.join(30)
        assert answers == [200]


def test_ollamas_clients_see_how_large_the_model_is(server: ServerProcess, tiny_model: Path) -> None:
    with safe_open(tiny_model / "model.safetensors", "np") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 - it is no dict
    count = sum(math.prod(shape) for shape in shapes if len(shape) == 2)
    status, shown = server.request("POST", "/api/show", {"model": "tiny"})
    assert (status, shown["model_info"]["general.parameter_count"]) == (200, count)
    assert shown["details"]["parameter_size"] == f"{count / 1e6:.1f}M"


def test_a_profile_is_written(server: ServerProcess) -> None:
    status, started = server.request("POST", "/start_profile", {})
    assert status == 200, started
    assert server.request("POST", "/start_profile", {})[0] == 400
    assert server.request("POST", "/v1/completions", {"prompt": "abc", "max_tokens": 3})[0] == 200
    status, stopped = server.request("POST", "/stop_profile")
    assert status == 200
    assert "traceEvents" in json.loads(Path(stopped["ranks"][0]["file"]).read_text())
    assert server.request("POST", "/stop_profile")[0] == 400


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
def test_tls_and_json_logs(tiny_model: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"  # noqa: E501
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    process = ServerProcess(
        *("--model", str(tiny_model), "--executor", "fake", "--log-format", "json", "--log-requests"),
        *("--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)),
        *("--grpc-port", "0"),
    )
    try:
        url = listening(process)
        assert url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"{url}/openapi.json", context=context, timeout=10) as response:
            assert response.status == 200
        channel = grpc.ssl_channel_credentials(certificate.read_bytes())
        with grpc.secure_channel(grpc_address(process), channel) as client:
            check = client.unary_unary("/grpc.health.v1.Health/Check")
            assert check(b"", timeout=10, wait_for_ready=True)
        with grpc.insecure_channel(grpc_address(process)) as client, pytest.raises(grpc.RpcError):
            client.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10)
    finally:
        process.stop()
    lines = [json.loads(line) for line in process.lines if line.startswith("{")]
    assert any(line.get("route") == "/openapi.json" and line["status"] == 200 for line in lines)


def grpc_address(process: ServerProcess) -> str:
    return next(line.split("grpc://")[1].split()[0] for line in process.lines if "grpc://" in line)


def listening(process: ServerProcess) -> str:
    for _ in range(300):
        for line in process.lines:
            if "listening on " in line:
                return line.split("listening on ")[1].split()[0]
        assert process.process.poll() is None, process.output
        time.sleep(0.1)
    raise AssertionError(process.output)

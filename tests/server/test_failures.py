"""The server's behaviour when things go wrong: early requests, dead workers, signals, overload."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file
from server_process import SLACK, ServerProcess, serving

SLOW = ("--executor", "fake", "--fake-step-ms", "4", "--context-length", "4096")
LONG = {"prompt": [1, 2, 3], "max_tokens": 100_000, "ignore_eos": True, "temperature": 0}


def in_thread(server: ServerProcess, answers: list[Any], body: dict[str, Any]) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(OSError):
            answers.append(server.request("POST", "/v1/completions", body))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def wait_for(condition: Any, timeout: float = 10) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "condition not reached in time"
        time.sleep(0.02)


def test_port_answers_while_the_model_loads(tiny_model: Path) -> None:
    with serving("--model", str(tiny_model), ready=False) as server:
        server.wait_listening()
        status, body = server.request("POST", "/v1/completions", {"prompt": "x"})
        assert status == 503
        assert body["error"]["code"] == "model_loading"
        assert server.get("/health/ready")[0] == 503
        assert server.get("/health/live")[0] == 200
        server.wait_ready()
        assert server.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200


@pytest.mark.parametrize(
    ("ranks", "flags", "killed"),
    [
        pytest.param(1, (), 0, marks=pytest.mark.slow),
        (2, ("--tp", "2"), 1),
        pytest.param(2, ("--pp", "2"), 0, marks=pytest.mark.slow),
        pytest.param(2, ("--pp", "2"), 1, marks=pytest.mark.slow),
    ],
)
def test_killed_worker_ends_every_request_and_the_process(
    tiny_model: Path, ranks: int, flags: tuple[str, ...], killed: int
) -> None:
    """With two ranks the one that is left waits for the dead one."""
    with serving("--model", str(tiny_model), "--context-length", "4096", *flags) as server:
        answers: list[Any] = []
        threads = [
            in_thread(server, answers, {**LONG, "max_tokens": 4000, "stream": i < 2}) for i in range(4)
        ]
        wait_for(lambda: server.metric("sgla:num_running_reqs") >= 4)
        wait_for(lambda: server.metric("sgla:generation_tokens_total") >= 100)  # each has answered
        family = server.family()
        begun = time.monotonic()
        assert len(server.workers()) == ranks
        server.workers()[killed].send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join(20)
        took = time.monotonic() - begun
        assert server.wait() != 0
        assert took < 1 + SLACK
        assert sorted(status for status, _ in answers) == [200, 200, 503, 503]
        for status, body in answers:
            if status == 200:
                assert "worker_died" in body
            else:
                assert body["error"]["code"] == "worker_died"
                assert "SIGKILL" in body["error"]["message"]
        assert "SIGKILL" in server.output
        wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))


@pytest.mark.parametrize("delay", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_worker_killed_during_start_fails_the_start(tiny_model: Path, delay: float) -> None:
    with serving("--model", str(tiny_model), ready=False) as server:
        server.wait_listening()
        wait_for(lambda: server.workers())
        time.sleep(delay)
        for worker in server.workers():
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGKILL)
        assert server.wait() != 0
        assert "SIGKILL" in server.output or "signal 9" in server.output


def test_broken_tokenizer_ends_the_start_with_its_file(tiny_model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(tiny_model, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with serving("--model", str(broken), ready=False) as server:
        assert server.wait() == 2
        assert f"{broken / 'tokenizer.json'} cannot be read" in server.output
        assert "Traceback" not in server.output
        assert "never retrieved" not in server.output
        assert "was destroyed" not in server.output


def test_sigint_during_start_exits(tiny_model: Path) -> None:
    with serving("--model", str(tiny_model), ready=False) as server:
        server.wait_listening()
        server.signal(signal.SIGINT)
        assert server.wait() == 0


def test_wrong_model_is_one_clear_message(tmp_path: Path) -> None:
    with serving("--model", str(tmp_path / "nothing"), ready=False) as server:
        assert server.wait() == 2
        assert "nothing" in server.output
        assert "Traceback" not in server.output


def test_taken_port_is_one_clear_message(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with serving("--model", str(tiny_model), "--executor", "fake", "--port", port, ready=False) as server:
            assert server.wait() == 2
            assert "--port" in server.output
            assert "Traceback" not in server.output


def test_overload_is_refused_at_once_and_sigterm_drains(tiny_model: Path) -> None:
    flags = ("--max-running-requests", "1", "--max-queued-requests", "1", *SLOW)
    with serving("--model", str(tiny_model), *flags) as server:
        answers: list[Any] = []
        body = {**LONG, "max_tokens": 500}
        threads = [in_thread(server, answers, body)]
        wait_for(lambda: server.metric("sgla:num_running_reqs") >= 1)
        threads.append(in_thread(server, answers, {**LONG, "max_tokens": 2}))
        wait_for(lambda: server.metric("sgla:num_queue_reqs") >= 1)
        status, refused = server.request("POST", "/v1/completions", body)
        assert (status, refused["error"]["code"]) == (429, "overloaded")
        server.signal(signal.SIGTERM)
        wait_for(lambda: server.get("/health/ready")[0] == 503)
        status, refused = server.request("POST", "/v1/completions", {"prompt": "x"})
        assert (status, refused["error"]["code"]) == (503, "draining")
        for thread in threads:
            thread.join(60)
        assert server.wait() == 0
        assert [status for status, _ in answers] == [200, 200]
        assert sorted(body["usage"]["completion_tokens"] for _, body in answers) == [2, 500]


def test_a_broken_input_is_a_typed_error(tiny_model: Path, tmp_path: Path) -> None:
    """Of a model with a NaN in one embedding: for a stream, a whole answer, and several prompts; others are
    served meanwhile."""
    folder = tmp_path / "poisoned"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][13] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with serving("--model", str(folder), "--context-length", "4096") as server:
        body: dict[str, Any] = {"prompt": [40, 13, 41], "max_tokens": 4}
        good = {"prompt": [5, 6, 7], "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        before = server.request("POST", "/v1/completions", good)[1]["choices"][0]["text"]
        for wish in ({}, {"logprobs": 2}, {"temperature": 0}, {"echo": True, "logprobs": 1, "max_tokens": 0}):
            status, answer = server.request("POST", "/v1/completions", body | wish)
            assert (status, answer["error"]["code"]) == (500, "invalid_logits"), answer
            assert "NaN" in answer["error"]["message"]
        status, text = server.request("POST", "/v1/completions", body | {"stream": True})
        assert (
            '"code":"invalid_logits"' in str(text).replace(" ", "")
            or text["error"]["code"] == "invalid_logits"
        )
        assert server.request("POST", "/v1/completions", good)[1]["choices"][0]["text"] == before
        assert server.metric("sgla:invalid_logits_total") == 5

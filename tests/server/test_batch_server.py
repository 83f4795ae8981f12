"""Batches of a real server with a tiny random model: equal to what its routes answer, behind other requests,
and across a SIGKILL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
from server_process import ServerProcess, serving

URL = "/v1/completions"
LINES = 24


def line(i: int, **changes: Any) -> dict[str, Any]:
    seed = {"temperature": 0} if i % 2 else {"temperature": 1, "seed": i}
    body = {"prompt": f"The number {i} is", "max_tokens": 40, "ignore_eos": True, **seed, **changes}
    return {"custom_id": f"c{i}", "method": "POST", "url": URL, "body": body}


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def begun(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h").id


def wait(client: openai.OpenAI, uid: str, completed: int | None = None) -> Any:
    """The batch once so many lines are done, or all."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        batch = client.batches.retrieve(uid)
        if batch.completed_at or (completed is not None and batch.request_counts.completed >= completed):
            return batch
        time.sleep(0.01)
    raise AssertionError(batch)


def texts(client: openai.OpenAI, file: str) -> dict[str, str]:
    answers = map(json.loads, client.files.content(file).text.splitlines())
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers}


def test_a_batch_goes_on_after_a_sigkill_and_answers_as_the_route_does(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = ("--model", str(tiny_model), "--dtype", "float32", "--state-path", str(tmp_path / "state"))
    lines = [line(i) for i in range(LINES)]
    with serving(*flags, "--max-running-requests", "4") as server:
        uid = begun(client_of(server), lines)
        before = wait(client_of(server), uid, completed=3)
        os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with serving(*flags) as server:
        client = client_of(server)
        batch = wait(client, uid)
        assert batch.status == "completed"
        assert (batch.request_counts.completed, batch.request_counts.failed) == (LINES, 0)
        assert server.metric("sgla:batch_lines_total") <= LINES - before.request_counts.completed
        answers = texts(client, batch.output_file_id)
        assert list(answers) == [each["custom_id"] for each in lines]
        for each in lines[:6]:
            assert (
                server.request("POST", URL, each["body"])[1]["choices"][0]["text"]
                == answers[each["custom_id"]]
            )
        assert [file.purpose for file in client.files.list()] == ["batch_output", "batch"]


def test_requests_do_not_wait_behind_a_batch_and_choices_count_as_places(tiny_model: Path) -> None:
    """They end first, however many lines run and wait, and are not refused for want of room. Lines with few
    choices and with many run beside each other; one with more than there are slots is an error at once."""
    flags = ("--model", str(tiny_model), "--executor", "fake", "--fake-step-ms", "5")
    with serving(*flags, "--max-running-requests", "4", "--max-queued-requests", "2") as server:
        client = client_of(server)
        uid = begun(client, [line(i, max_tokens=400) for i in range(12)])
        while server.stats()["running"] < 4:
            time.sleep(0.01)
        statuses: list[int] = []

        def ask(i: int) -> None:
            statuses.append(server.request("POST", URL, line(i, max_tokens=8)["body"])[0])

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == [200] * 6
        assert client.batches.retrieve(uid).request_counts.completed <= 4, "four may have been about to end"
        assert client.batches.cancel(uid).status == "cancelling"
        few = [line(i, max_tokens=8) for i in range(12)]
        many = [line(i, max_tokens=8, n=n) for i, n in enumerate((2, 3, 4, 2), start=20)]
        prompts = [line(30, max_tokens=8, prompt=["a", "b"], n=2)]
        never = [line(40, n=5), line(41, prompt=["a"] * 5), line(42, n=2, prompt=["a"] * 3)]
        batch = wait(client, begun(client, never + few + many + prompts))
        assert (batch.request_counts.completed, batch.request_counts.failed) == (17, 3)
        errors = map(json.loads, client.files.content(batch.error_file_id).text.splitlines())
        for each in errors:
            told = each["response"]
            assert (told["status_code"], told["body"]["error"]["param"]) == (400, "n")
            assert "a line of a batch may have 4 choices" in told["body"]["error"]["message"]
        answers = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
        used = [each["response"]["body"]["usage"] for each in answers]
        assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in used)
        assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in used) > 0


def test_a_file_is_answered_without_a_server(tiny_model: Path, tmp_path: Path) -> None:
    """Lines for several routes, in their order, with errors of their own; nothing else is left."""
    lines = [line(i, max_tokens=3) for i in range(30)]
    lines[7]["url"] = "/v1/nowhere"
    lines[11]["body"]["temperature"] = -1
    asked = {"input": [{"role": "user", "content": "a"}], "max_output_tokens": 3}
    lines.append({"custom_id": "r", "method": "POST", "url": "/v1/responses", "body": asked})
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(each) + "\n" for each in lines) + "\nno json\n")
    command = [sys.executable, "-m", "sgla", "run-batch", "-i", str(given), "-o", str(output)]
    flags = ["--model", str(tiny_model), "--executor", "fake", "--log-level", "warning"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "29 of 32 requests answered, 3 failed" in done.stderr
    assert "run      requests 100% 32/32" in done.stderr
    assert "line 8: url is '/v1/nowhere'" in done.stderr
    answers = [json.loads(each) for each in output.read_text().splitlines()]
    assert [each["custom_id"] for each in answers] == [*(each["custom_id"] for each in lines), None]
    assert [each["error"] and each["error"]["line"] for each in answers] == [*[None] * 7, 8, *[None] * 23, 33]
    assert answers[11]["response"]["status_code"] == 400
    assert answers[30]["response"]["body"]["object"] == "response"
    assert answers[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    missing = subprocess.run(
        [*command[:4], "-i", "none", "-o", str(output), *flags], capture_output=True, text=True
    )
    assert (missing.returncode, missing.stderr) == (2, "sgla: --input-file none: No such file or directory\n")

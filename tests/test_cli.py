"""The command line, driven as a user does; servers are stand-ins on a local port."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import fcntl
import http.server
import io
import json
import os
import pty
import re
import select
import shlex
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import sgla
from sgla import SamplingParams, cli
from sgla.bench import load, report, workloads
from sgla.cli import chat, conversation, doctor, run_batch, serve, show, terminal
from sgla.cli.bench import describe
from sgla.cli.progress import ProgressPrinter
from sgla.cli.serve import ready_text
from sgla.cli.settings import parse_url
from sgla.config import Config
from sgla.defaults import Defaults
from sgla.device import Device
from sgla.errors import ConfigError, SglaError
from sgla.messages import CacheGroup, Event, Facts, Progress, Usage

HEAVY = {"torch", "transformers", "numpy", "aiohttp", "rich", "shtab"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def modules_after(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after ``code``."""
    script = f"import contextlib, sys\nwith contextlib.suppress(SystemExit):\n    {code}\nprint(*sys.modules, file=sys.stderr)"  # noqa: E501
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return {name.split(".")[0] for name in done.stderr.split()}


@pytest.mark.parametrize(
    "code",
    [
        "import sgla",
        "import sgla.cli; sgla.cli.main(['--help'])",
        "import sgla.cli; sgla.cli.main(['serve', '--help'])",
    ],
)
def test_help_and_import_load_nothing_heavy(code: str) -> None:
    assert not modules_after(code) & HEAVY


def test_workers_begin_before_the_device_is_settled_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import what the device needs while the server looks for the model."""
    begun: list[Config] = []
    served: list[Config] = []
    gpu = Config(device="cuda")
    monkeypatch.setattr(serve, "resolve", lambda config: types.SimpleNamespace(config=gpu))
    monkeypatch.setattr(serve, "spawn_early", begun.append)
    monkeypatch.setattr(serve, "setup_logging", lambda *levels: None)
    run = types.SimpleNamespace(run=lambda config, *rest: served.append(config) or 0)
    monkeypatch.setitem(sys.modules, "sgla.http.serve", run)
    assert serve.run(argparse.Namespace(flags={"tp": 2}, config=None)) == 0
    assert begun == [Config(device="cuda", tp=2)]
    assert served == [Config(tp=2)]


def test_main_process_modules_load_no_torch() -> None:
    modules = "sgla.http.serve, sgla.engine, sgla.bench.load, sgla.cli.doctor, sgla.cli.explain"
    assert "torch" not in modules_after(f"import {modules}")


def run(*argv: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of ``sgla argv``."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(argv)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, out.getvalue(), err.getvalue()


def test_version() -> None:
    assert run("--version") == (0, f"sgla {sgla.__version__}\n", "")


def test_nothing_asks_for_help() -> None:
    assert run() == run("--help")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--prot", "1"], "unknown argument --prot; did you mean --port?"),
        (["serve", "--max_running_requests", "1"], "did you mean --max-running-requests?"),
        (["serve", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["serve", "--kv-cache-bytes", "5X"], "'5X' is no size"),
        (["serve", "--port", "70000"], "--port must be from 0 to 65535"),
        (["serve", "--dtype", "fp8"], "invalid choice: 'fp8'"),
        (["explain", "./nowhere"], "no file or folder './nowhere'"),
        (["fly"], "invalid choice: 'fly'"),
        (["srve"], "there is no command 'srve'; did you mean 'sgla serve'?"),
        (["run", "llama3"], "there is no command 'run'; use 'sgla chat'"),
        (["bench", "--url", "http://127.0.0.1:9"], "start one with 'sgla serve'"),
        (["chat", "--url", "http://127.0.0.1:9"], "start one with 'sgla serve'"),
        (["chat", "--url", "ftp://nonsense"], "write http://HOST:PORT"),
        (["chat", "--url", "127.0.0.1:9/v1"], "no answer from http://127.0.0.1:9: Connection refused;"),
        (["bench", "--url", "127.0.0.1:9"], "no server at http://127.0.0.1:9: Connection refused;"),
        (["chat", "--max-tokens", "0"], "--max-tokens must be an integer between 1 and"),
        (["chat", "--temperature", "nan"], "argument --temperature: 'nan' is no number at least 0"),
        (["bench", "--rate", "0"], "argument --rate: '0' is no number greater than 0"),
        (["bench", "--spread", "nan"], "argument --spread: 'nan' is no number between 0 and 1"),
        (["bench", "--temperature", "inf"], "argument --temperature: 'inf' is no number at least 0"),
        (["bench", "--url", "127.0.0.1:9/\u00e9"], "write http://HOST:PORT"),
        (["replay", "x", "--speed", "nan"], "argument --speed: 'nan' is no number at least 0"),
        (["health", "--timeout", "-1"], "argument --timeout: '-1' is no number greater than 0"),
        (["health", "--url", "a b"], "argument --url: 'a b' is no server's address"),
        (["help"], "use 'sgla --help'"),
        (["serve", "--executor", "fake", "--host", "256.0.0.1"], "choose another --host"),
        (["serve", "--served-model-name", "[1]"], "--served-model-name: it begins as a JSON list of strings"),
        (["serve", "--hicache-size", "inf"], "argument --hicache-size: 'inf' is no number"),
        (["serve", "--hicache-size", "nan"], "argument --hicache-size: 'nan' is no number"),
        (["serve", "--admin-api-key", ""], "--admin-api-key is empty"),
        (["serve", ""], "--model and --served-model-name cannot be empty"),
        (["serve", "--config", "~nobody-here/a.yaml"], "~nobody-here/a.yaml: there is no such user"),
        (["serve", "--kv-disk", "~nobody-here/kv:1G"], "~nobody-here/kv: there is no such user"),
        (["explain", "--model", "~nobody-here/m"], "~nobody-here/m: there is no such user"),
    ],
)
def test_mistakes_get_one_line_and_exit_code_2(argv: list[str], message: str) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_port_that_is_taken(host: str, shown: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        taken.bind((host, 0))
        port = str(taken.getsockname()[1])
        said = f"sgla: cannot listen on {shown}:{port}: Address already in use; choose another --port\n"
        assert run("serve", "--executor", "fake", "--host", host, "--port", port) == (2, "", said)


# explain, doctor


def tiny_model(folder: Path) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "vocab_size": 300,
        "max_position_embeddings": 128,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_explain_says_what_windows_bring() -> None:
    """Gemma 3 holds five times as many tokens of a long text as if all layers kept all, and about as many of
    short ones; twice as many where windows have a memory of their own, and it says why."""
    model = str(Path(__file__).parents[1] / "bench" / "models" / "gemma-3-27b")
    flags = ("explain", model, "--load-format", "dummy", "--kv-cache-bytes", "40G", "--device", "cpu")
    code, out, _ = run(*flags)
    assert code == 0
    kept = r"(\d+) tokens if layers with windows kept all"
    found = re.search(
        rf"(\d+) tokens of \d+ bytes in one text, (\d+) in texts shorter than a window; {kept}", out
    )
    assert found is not None, out
    long, places, whole = map(int, found.groups())
    assert long > 5 * whole
    assert places > 0.97 * whole
    code, out, _ = run(*flags, "--kv-cache-dtype", "int8")
    found = re.search(rf"(\d+) tokens of \d+ bytes; {kept}", out)
    assert found is not None, out
    assert int(found[1]) > 2 * int(found[2])
    assert "have a memory each, whose sizes do not change: pages in int8 have scales" in out


def test_explain_shows_every_setting_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 7, "top_p": "all"}')
    argv = ["explain", tiny_model(tmp_path), "--load-format", "dummy", "--api-key", "geheim", "--port", "1"]
    code, out, _ = run(*argv)
    assert code == 0
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert set(Config.__struct_fields__) <= set(lines)
    assert "given" in lines["port"]
    assert "the model's own limit" in lines["context_length"]
    assert "weights" in lines
    assert lines["sampling"].endswith("top_k 7 (generation_config.json)")
    assert "note: generation_config.json: top_p must be a number" in out
    facts = json.loads(run(*argv, "--json")[1])
    assert facts["sampling"] == {"top_k": {"value": 7, "source": "generation_config.json"}}
    assert facts["settings"]["port"] == {"value": 1, "reason": "given"}
    assert facts["memory"]["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2
    assert "geheim" not in out + json.dumps(facts)


@pytest.mark.slow
def test_explain_says_which_kernels_layers_take(tmp_path: Path) -> None:
    code, out, _ = run("explain", tiny_model(tmp_path), "--load-format", "dummy", "--kernels", "--tp", "1")
    assert code == 0
    assert "kernels on" in out
    assert "not 'whole step' (1): " in out
    assert "8192 tokens of prompts: " in out
    assert "not 'tiles' (" in out


@pytest.mark.slow
def test_explain_says_which_kernels_integers_take(tmp_path: Path) -> None:
    flags = ["--load-format", "dummy", "--kernels", "--tp", "1", "--quantization", "int4"]
    code, out, err = run("explain", tiny_model(tmp_path), *flags)
    assert code == 0, err
    assert "norm + few integers + gate" in out
    for rule in ("few integers + added", "integers, unpacked for cuBLAS"):
        assert f" {rule}" in out
    assert "it pays up to 1024 rows" in out


@pytest.mark.slow
def test_explain_says_which_kernels_scans_take(tmp_path: Path) -> None:
    """Of layers that are made without values."""
    mamba = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_d_ssm": 128, "ssm_multipliers": [0.5] * 5}
    tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | mamba
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["FalconH1ForCausalLM"]}))
    code, out, err = run("explain", str(tmp_path), "--load-format", "dummy", "--kernels", "--tp", "1")
    assert code == 0, err
    assert "2 selective_scan" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cpu"], "--kernels says what NVIDIA GPUs run; leave it or --device cpu out"),
        (["--device", "rocm"], "AMD GPUs are not supported yet"),
        (["--deterministic", "--tp", "2"], "--deterministic cannot be honoured with --tp 2"),
    ],
)
def test_kernels_are_explained_of_what_can_be_served(tmp_path: Path, flags: list[str], message: str) -> None:
    code, out, err = run("explain", tiny_model(tmp_path), "--load-format", "dummy", "--kernels", *flags)
    assert (code, out) == (2, "")
    assert message in err


def test_kernels_are_explained_where_triton_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgla.cli.explain.find_spec", lambda name: None)
    code, out, err = run("explain", tiny_model(tmp_path), "--load-format", "dummy", "--kernels")
    assert (code, out) == (2, "")
    assert "--kernels needs Triton: pip install triton" in err


def test_doctor_looks_at_everything() -> None:
    code, out, _ = run("doctor", "--json")
    found = {finding["name"]: finding for finding in json.loads(out)}
    assert code == 0
    assert set(found) >= {
        "cpu",
        "memory",
        "torch",
        "compiler",
        "gpu",
        "shared memory",
        "demo model",
        "packages",
    }
    assert "(missing)" not in found["packages"]["detail"]
    text = run("doctor")[1]
    assert all(name in text for name in found)


@pytest.mark.parametrize(
    ("argv", "word"), [(["explain", "--port", "1"], "given:"), (["doctor"], "shared memory")]
)
def test_tables_of_a_terminal_fold_what_is_long(
    argv: list[str], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.redirect_stdout(Terminal()) as out:
        assert cli.main(argv) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert any(word in line for line in lines)
    if argv[0] == "explain":
        lines = lines[: lines.index("")]
    assert max(map(len, lines)) <= 100


def test_doctor_advises() -> None:
    machine = doctor.Machine(cores=1, torch=None, compiler=None, shm_free=1 << 20)
    found = {finding.name: finding for finding in doctor.examine(machine)}
    assert {name for name, finding in found.items() if finding.status == "broken"} == {"torch"}
    assert {name for name, finding in found.items() if finding.status == "missing"} >= {"cpu", "compiler"}
    assert all(finding.advice for finding in found.values() if finding.status != "ok")
    assert found["shared memory"].status == "ok"  # one process needs none of /dev/shm

    card = Device("cuda", name="H200", memory=141 << 30, arch=(9, 0))
    machine = doctor.Machine(torch="2.12", torch_cuda="13.0", gpus=(card, card), shm_free=1 << 20)
    found = {finding.name: finding for finding in doctor.examine(machine)}
    assert found["shared memory"].status == "missing"
    assert "--shm-size" in found["shared memory"].advice


def test_doctor_looks_for_the_demo_where_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLA_DOWNLOAD_DIR", str(tmp_path / "models"))
    assert f"not in {tmp_path / 'models'};" in run("doctor")[1]
    assert f"not in {tmp_path / 'given'};" in run("doctor", "--download-dir", str(tmp_path / "given"))[1]


# pull, list, rm, completion


def test_models_are_pulled_listed_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "modelscope"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "none"))
    snapshot = tmp_path / "hub" / "models--org--small" / "snapshots" / "0123456789abcdef"
    snapshot.mkdir(parents=True)
    (snapshot / "a-Q4_0.gguf").write_bytes(bytes(1_200_000))
    monkeypatch.setenv("SGLA_DOWNLOAD_DIR", str(tmp_path))
    row = r"org/small:Q4_0 +0123456789ab +1\.2 MB +Q4_0 +huggingface"
    code, out, err = run("list")
    assert (code, err, out.count("\n")) == (0, "", 2)
    assert re.search(row, out)
    with contextlib.redirect_stdout(Terminal()) as terminal:
        show.table(["NAME"], [["x" * 500]])
    assert terminal.getvalue().count("x") == 500
    (one,) = json.loads(run("list", "--json")[1])
    assert (one["name"], one["size"], one["path"]) == (
        "org/small:Q4_0",
        1_200_000,
        str(snapshot / "a-Q4_0.gguf"),
    )
    assert run("pull", one["path"]) == (0, one["path"] + "\n", "")
    assert run("rm", "org/small") == (0, "removed org/small, 1.2 MB\n", "")
    assert run("rm", "org/small")[::2] == (2, "sgla: org/small is not cached; there is nothing\n")
    assert run("list")[1].startswith("no model is cached")
    assert "unknown argument --tp" in run("pull", "--tp", "2")[2]


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_shells_complete_commands_and_flags(shell: str) -> None:
    code, out, _ = run("completion", shell)
    assert code == 0
    assert all(word in out for word in ("serve", "step-tokens", "lpm"))
    assert "max-num-seqs" not in out  # of other servers


def test_bash_completes() -> None:
    script = (
        run("completion", "bash")[1]
        + "\nCOMP_WORDS=(sgla serve --step); COMP_CWORD=2; _shtab_sgla\necho ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--step-tokens", "--step-log"]


# serve

FACTS = Facts(
    groups=[CacheGroup(101)],
    page_size=16,
    slots=8,
    context_len=512,
    vocab_size=300,
    step_tokens=64,
    dtype="bfloat16",
    device="cpu",
    notes=["torch operations"],
)


def test_ready_line_has_a_curl_command_that_parses() -> None:
    config = Config(model="it's", api_key=["k"])
    text = ready_text(config, FACTS, Defaults(), "http://127.0.0.1:1234", 1.25)
    assert text.startswith(
        "ready in 1.2 s: it's on cpu, bfloat16, context 512 tokens, KV cache 1600 tokens\n"
        "steps: 64 tokens of 8 requests at most\n"
    )
    shared = ready_text(Config(pp=2, tp=4, ep=4, dp_attention=True), FACTS, Defaults(), "http://h", 1.0)
    assert (
        "\nsteps: 64 tokens of 8 requests at most, ranks by --pp 2 --tp 4 --ep 4 --dp-attention\n" in shared
    )
    assert "note: torch operations" in text
    assert "sampling: temperature 1, top_p 1 (OpenAI's)\n" in text
    words = shlex.split(text.split("try: ")[1])
    assert words[:2] == ["curl", "http://127.0.0.1:1234/v1/chat/completions"]
    assert "Authorization: Bearer YOUR_KEY" in words
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "it's"
    assert body["messages"][0]["role"] == "user"


def test_a_server_that_reads_pictures_says_who_may_ask_it() -> None:
    facts = structs.replace(FACTS, encodes=True, peer_ports=[31811])
    text = ready_text(Config(model="a/b", host="10.0.0.2"), facts, Defaults(), "http://h", 1.0)
    assert text.endswith("\npictures are read for servers with --encode-url tcp://10.0.0.2:31811")
    assert "curl" not in text
    everywhere = ready_text(Config(model="a/b", host="0.0.0.0"), facts, Defaults(), "http://h", 1.0)
    assert everywhere.endswith(" --encode-url tcp://HOST:31811, where HOST is this machine")


def test_ready_tells_which_files_are_served() -> None:
    snapshot = Path("/c/models--Qwen--Qwen3-0.6B/snapshots/abc")

    def lines(path: Path) -> list[str]:
        return ready_text(Config(), FACTS, Defaults(), "http://h", 1.0, path).splitlines()[1:]

    assert lines(snapshot)[1] == f"model: Qwen/Qwen3-0.6B, revision abc, in {snapshot}"
    assert lines(snapshot / "x-Q4_0.gguf")[1].startswith("model: Qwen/Qwen3-0.6B, revision abc, in /c/")
    assert lines(Path("/m/a.gguf"))[1] == "model: /m/a.gguf"


def progress_of(out: io.StringIO) -> str:
    printer = ProgressPrinter(out)
    for done in range(0, 101):
        printer(Progress(phase="download", message="model.gguf", done=done * 2_000_000, total=200_000_000))
    printer(Progress(phase="load"))
    printer(Progress(phase="warmup", done=3, total=3))
    printer.close()
    return out.getvalue()


def test_progress_without_a_terminal_is_a_few_plain_lines() -> None:
    text = progress_of(io.StringIO())
    assert "\x1b" not in text
    assert [line.split()[0] for line in text.splitlines()] == ["download"] * 5 + ["load", "warmup"]
    assert "100% 200 of 200 MB" in text


def test_progress_on_a_terminal_ends_each_phase_with_its_last_state() -> None:
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", progress_of(Terminal()))
    kept = [line.rstrip() for line in text.replace("\r", "\n").split("\n") if line.strip()][-3:]
    assert [line.split()[0] for line in kept] == ["download", "load", "warmup"]
    assert "200 of 200 MB" in kept[0]
    assert "3/3" in kept[2]


# a stand-in server


TRACES = {"ranks": [{"file": "/traces/0.json"}, {"file": "/traces/1.json"}]}


class StandIn(http.server.BaseHTTPRequestHandler):
    """Answers with the prompt's length, one word a chunk; ``bodies`` keeps the requests."""

    bodies: list[dict[str, Any]] = []
    chat_params: dict[str, Any] = {}  # as our server has them; {}: it is another one

    def do_GET(self) -> None:
        known = {
            "/v1/models": {
                "object": "list",
                "data": [{"id": "stand-in", "object": "model", "owned_by": "test"}],
            },
            "/version": {"version": "9"},
        }
        known["/get_model_info"] = {"model_path": "demo", "chat_params": self.chat_params}
        if not self.chat_params:
            del known["/get_model_info"]
        found = known.get(self.path.partition("?")[0])
        self._send(200 if found else 404, json.dumps(found or {"error": {"message": "no route"}}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.path.endswith("_profile"):
            refused = {"error": {"message": "a profile is being taken already"}}
            taken = body.get("output_dir") == "taken"
            return self._send(400 if taken else 200, json.dumps(refused if taken else TRACES).encode())
        if body["model"] == "wrong":
            return self._send(
                404, json.dumps({"error": {"message": "no such model", "code": "model_not_found"}}).encode()
            )
        chat_route = self.path == "/v1/chat/completions"
        if chat_route and body["messages"][-1]["content"] == "slow":
            return self._stall()
        events: list[Any] = (
            [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}] if chat_route else []
        )
        for number in range(body.get("max_tokens", 3)):
            text = f" w{number}"
            events.append(
                {
                    "choices": [
                        {"delta": {"content": text}} if chat_route else {"text": text, "finish_reason": None}
                    ]
                }
            )
        events.append(
            {
                "choices": [
                    {"delta": {}, "finish_reason": "length"}
                    if chat_route
                    else {"text": "", "finish_reason": "length"}
                ]
            }
        )
        length = len(body["prompt"]) if "prompt" in body else len(body["messages"])
        details = {"prompt_tokens_details": {"cached_tokens": 1}}
        usage = {"prompt_tokens": length, "completion_tokens": len(events) - 1 - chat_route, **details}
        events.append({"choices": [], "usage": usage})
        data = (
            ": ping\n\n" + "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        )
        self._send(200, data.encode())

    def _stall(self) -> None:
        """One word, and then none until the client goes away."""
        self.send_response(200)
        self.end_headers()
        event = b'data: {"choices": [{"delta": {"content": "half an answer"}}]}\n\n'
        with contextlib.suppress(OSError):
            for data in (event, *[b": ping\n\n"] * 100):
                self.wfile.write(data)
                time.sleep(0.1)

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    StandIn.bodies = []
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


# bench


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("workload", ["random", "shared-prefix", "multi-turn"])
def test_bench_prints_one_json_line_a_run(server: str, workload: str, api: str) -> None:
    argv = [
        "bench",
        "--url",
        server,
        "--workload",
        workload,
        "--api",
        api,
        "--requests",
        "3",
        "--input-len",
        "5",
    ]
    code, out, err = run(*argv, "--output-len", "4", "--turns", "2", "--repeat", "2", "--concurrency", "2")
    assert (code, err) == (0, "")
    lines = [json.loads(line) for line in out.splitlines()]
    count = 6 if workload == "multi-turn" else 3
    assert len(lines) == 2
    for line in lines:
        assert (line["engine"], line["version"], line["model"]) == ("test", "9", "stand-in")
        assert (line["requests"], line["errors"], line["out_tokens"]) == (count, 0, 4 * count)
        assert line["cached_tokens"] == count
        assert {
            "machine",
            "w",
            "out_tok_s",
            "in_tok_s",
            "ms_per_tok",
            "ttft_ms",
            "itl_ms",
            "itl_p99_ms",
        } <= set(line)
    assert all(body["ignore_eos"] and body["stream"] for body in StandIn.bodies)


def test_bench_shows_a_bar_on_a_terminal(server: str) -> None:
    argv = ["bench", "--url", server, "--requests", "3", "--input-len", "5", "--output-len", "4"]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(Terminal()) as err:
        assert cli.main(argv) == 0
    assert json.loads(out.getvalue())["requests"] == 3
    assert "3/3" in err.getvalue()
    assert "tok/s in" in err.getvalue()


def test_bench_multi_turn_carries_the_history(server: str) -> None:
    run(
        "bench",
        "--url",
        server,
        "--workload",
        "multi-turn",
        "--requests",
        "1",
        "--turns",
        "3",
        "--output-len",
        "2",
    )
    first, second, third = (body["prompt"] for body in StandIn.bodies)
    assert second.startswith(first + " w0 w1 ")
    assert third.startswith(second + " w0 w1 ")


def test_bench_has_the_server_profiled_and_says_where_the_traces_are(server: str) -> None:
    run_once = ("bench", "--url", server, "--requests", "1", "--profile")
    code, out, err = run(*run_once, "--profile-output-dir", "a", "--profile-num-steps", "5")
    assert (code, len(out.splitlines())) == (0, 1)
    first, *_, last = StandIn.bodies
    assert (first, last) == ({"output_dir": "a", "num_steps": 5}, {})
    assert [line.split()[3] for line in err.splitlines()] == ["/traces/0.json", "/traces/1.json"]
    code, out, err = run(*run_once, "--profile-output-dir", "taken")
    assert (code, out) == (2, "")
    assert "a profile is being taken already" in err


def test_bench_reports_failures(server: str) -> None:
    code, out, err = run("bench", "--url", server, "--model", "wrong", "--requests", "2")
    line = json.loads(out)
    assert (code, line["errors"], line["out_tok_s"]) == (1, 2, 0)
    assert "no such model" in line["first_error"]
    assert "failed" in err


def test_addresses_may_have_names_of_any_script() -> None:
    assert parse_url("http://münchen.de/v1") == "http://münchen.de"


def test_bench_reads_of_a_list_of_models_what_it_needs(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = b'{"data": [{"id": "m", "max_model_len": "4k"}, {"name": "no id"}]}'
    monkeypatch.setattr(StandIn, "do_GET", lambda self: self._send(200, listed))
    found = asyncio.run(describe(server))
    assert (found["model"], found["context"]) == ("m", None)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b'{"error": {"message": "no such route"}}', "no such route"),
        (b"<html>", "<html>"),
        (b'["a"]', '["a"]'),
        (b'{"data": ["a"]}', '{"data": ["a"]}'),
        (b'{"data": []}', '{"data": []}'),
    ],
)
def test_bench_says_what_a_server_of_something_else_answers(
    server: str, monkeypatch: pytest.MonkeyPatch, answer: bytes, said: str
) -> None:
    monkeypatch.setattr(StandIn, "do_GET", lambda self: self._send(200, answer))
    found = run("bench", "--url", server, "--requests", "1")
    assert found == (2, "", f"sgla: {server} is no OpenAI-style server; its /v1/models says: {said}\n")


def test_summary_numbers() -> None:
    records = [
        load.Record(start=0.0, end=1.0, chunks=[0.2, 0.4, 0.6, 1.0], prompt_tokens=10, completion_tokens=4),
        load.Record(start=0.0, end=2.0, chunks=[0.4, 2.0], prompt_tokens=30, completion_tokens=5),
        load.Record(start=0.0, end=9.0, error="HTTP 500"),
    ]
    numbers = report.summarize(records, 2.0)
    assert (numbers["requests"], numbers["errors"], numbers["first_error"]) == (3, 1, "HTTP 500")
    assert numbers["out_tok_s"] == 9 / 2.0
    assert numbers["in_tok_s"] == 40 / 0.4
    assert numbers["ttft_ms"] == pytest.approx(300)
    assert numbers["ms_per_tok"] == pytest.approx((800 / 3 + 400) / 2, abs=1e-3)
    assert numbers["itl_max_ms"] == pytest.approx(1600)
    assert report.median_of([numbers, numbers]) == pytest.approx(numbers)


def test_percentiles() -> None:
    assert [report.percentile([4, 1, 3, 2], share) for share in (0, 0.5, 1)] == [1, 2.5, 4]
    assert report.percentile([], 0.5) == 0


def test_stream_is_read_the_same_however_it_is_split() -> None:
    events = [{"choices": [{"text": text, "finish_reason": None}]} for text in ("a", "", "é", "b")]
    data = (
        b": x\n\n"
        + b"".join(b"data: %s\r\n\r\n" % json.dumps(event).encode() for event in events)
        + b"data: [DONE]\n\n"
    )
    for size in (1, 3, 7, len(data)):
        record = load.Record(start=0.0)
        load.read_stream(record, [(float(at), data[at : at + size]) for at in range(0, len(data), size)])
        assert (record.text, len(record.chunks), record.completion_tokens) == ("aéb", 4, 4)
        assert record.chunks == sorted(record.chunks)


def test_workloads_repeat_and_have_their_lengths() -> None:
    import random

    def make(seed: int) -> list[workloads.Session]:
        return workloads.shared_prefix_sessions(random.Random(seed), 3, 20, 5, 7)

    assert make(1) == make(1) != make(2)
    prompts = [session[0].prompt for session in make(1)]
    assert all(len(prompt) == 25 and prompt[:20] == prompts[0][:20] for prompt in prompts)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    spread = workloads.random_sessions(random.Random(0), 50, 100, 10, spread=0.5)
    assert {50 <= len(session[0].prompt) <= 150 for session in spread} == {True}


def test_a_batch_without_lines_is_found_before_the_model_loads(tmp_path: Path) -> None:
    given, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for text in ("", "\n \n"):
        given.write_text(text)
        message = f"sgla: --input-file {given} has no lines; each line is a request as JSON\n"
        assert run("run-batch", "-i", str(given), "-o", str(output), "no/model") == (2, "", message)
    assert list(tmp_path.iterdir()) == [given]


def test_the_output_of_a_batch_stays_the_kind_of_file_that_it_is(tmp_path: Path) -> None:
    """A pipe or a device is written, not replaced by a file, and of a link what it leads to."""
    file, link, pipe = tmp_path / "real", tmp_path / "link", tmp_path / "pipe"
    file.write_text("old")
    link.symlink_to(file)
    with run_batch.written(str(link)) as output:
        output.write(b"new")
        assert file.read_text() == "old"
    assert (link.is_symlink(), file.read_text()) == (True, "new")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with run_batch.written(str(pipe)) as output:
        output.write(b"line")
    assert (os.read(reader, 9), pipe.is_fifo()) == (b"line", True)
    log = tmp_path / "log"
    log.write_bytes(b"older ")
    with log.open("ab") as stdout, run_batch.written(f"/dev/fd/{stdout.fileno()}") as output:
        output.write(b"line")
    assert log.read_bytes() == b"older line"
    log.unlink()
    os.close(reader)
    with pytest.raises(ConfigError, match="Is a directory"), run_batch.written(str(tmp_path)):
        pass
    assert sorted(tmp_path.iterdir()) == [link, pipe, file]


def test_a_batch_says_why_its_output_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with run_batch.written(str(loop)) as output:
        output.write(b"line")
    assert loop.read_text() == "line"
    with pytest.raises(ConfigError, match="File name too long"), run_batch.written("x" * 300):
        pass

    def refuse(*_: Any, **__: Any) -> Any:  # as in a folder that only others may enter; root may all
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as hidden:
        for name in ("os.stat", "os.lstat", "builtins.open"):
            hidden.setattr(name, refuse)
        with pytest.raises(ConfigError, match="Permission denied"), run_batch.written("there"):
            pass


# chat


def talk(monkeypatch: pytest.MonkeyPatch, text: str, *argv: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run("chat", *argv)


def test_chat_keeps_history_and_resets(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--url", server + "/v1", "--system", "be brief", "--max-tokens", "2", "--temperature", "0"]
    code, out, err = talk(monkeypatch, "one\ntwo\n/reset\n/what\nthree\n/exit\nnever\n", *argv)
    assert (code, err) == (0, "")
    said = ["the conversation is forgotten", "there is no /what", *conversation.HELP.splitlines()]
    assert out.splitlines() == [" w0 w1", " w0 w1", *said, " w0 w1"]
    roles = [[message["role"] for message in body["messages"]] for body in StandIn.bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert StandIn.bodies[1]["messages"][2]["content"] == " w0 w1"
    assert (StandIn.bodies[0]["max_tokens"], StandIn.bodies[0]["temperature"]) == (2, 0)


def test_chat_goes_on_after_an_error_and_tells_scripts_of_it(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = talk(monkeypatch, "one\ntwo\n", "--url", server, "--model", "wrong")
    assert (code, out.strip()) == (1, "")
    assert err.count("no such model") == 2
    assert [len(body["messages"]) for body in StandIn.bodies] == [1, 1]


@pytest.mark.parametrize(
    ("output", "message"),
    [(">/dev/full", "sgla: the output cannot be written: No space left on device\n"), ("| exit", "")],
)
def test_chat_ends_where_its_output_cannot_be_written(server: str, output: str, message: str) -> None:
    chat = f"{shlex.quote(sys.executable)} -m sgla chat --url {server} {output}"
    command = f"echo one | {chat}; exit ${{PIPESTATUS[1]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, message)


def test_chat_asks_our_server_for_an_end_to_every_answer(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {"max_tokens": 2, "repetition_detection": {"max_pattern_size": 9, "min_count": 3}}
    talk(monkeypatch, "one\n", "--url", server)
    assert not StandIn.bodies[-1].keys() & ends
    monkeypatch.setattr(StandIn, "chat_params", ends)
    talk(monkeypatch, "one\n/set max_tokens 4\ntwo\n", "--url", server)
    assert [body["max_tokens"] for body in StandIn.bodies[-2:]] == [2, 4]
    assert StandIn.bodies[-1]["repetition_detection"] == ends["repetition_detection"]


class Mute:
    """A backend that is never asked."""

    name, about, finish = "mute", "", None

    def __init__(self) -> None:
        self.options: dict[str, Any] = {"repetition_detection": {}}

    def stream(self, messages: conversation.Messages) -> Any:
        raise AssertionError


def test_commands_change_the_conversation(tmp_path: Path) -> None:
    talked = conversation.Conversation(Mute(), "be brief")
    hello = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    talked.messages += hello
    assert talked.command("/set temperature 0.5") == "temperature 0.5"
    assert talked.command("/set seed 7") == "temperature 0.5, seed 7"
    assert talked.command("/set colour red").startswith("/set knows temperature")
    assert talked.command("/set top_p many") == "/set: 'many' is no number"
    assert (
        talked.command("/set top_p 2") == "/set: top_p must be a number greater than 0 and at most 1, not '2'"
    )
    assert talked.command("/set seed 0.5").startswith("/set: seed must be an integer")
    assert talked.command(f"/save {tmp_path / 'a.json'}").startswith("3 messages written")
    assert talked.command("/system answer in verse") == "system message set"
    assert talked.messages == [{"role": "system", "content": "answer in verse"}, *hello]
    assert talked.command("/set temperature") == "seed 7"
    assert talked.command("/clear") == "the conversation is forgotten"
    assert talked.messages == [{"role": "system", "content": "answer in verse"}]
    assert talked.command("/system") == "no system message"
    assert talked.messages == []
    assert talked.command(f"/load {tmp_path / 'a.json'}").startswith("3 messages read")
    assert talked.messages == [{"role": "system", "content": "be brief"}, *hello]
    assert talked.backend.options == {"repetition_detection": {}, "temperature": 0.5, "seed": 7}
    assert talked.command(f"/save {tmp_path / 'a.json'}").startswith("3 messages written")
    assert talked.command("/help") == conversation.HELP
    assert talked.command("/nonsense") == f"there is no /nonsense\n{conversation.HELP}"
    with pytest.raises(conversation.Leave):
        talked.command("/exit")


def test_pictures_go_with_the_next_message(tmp_path: Path) -> None:
    talked = conversation.Conversation(Mute())
    (tmp_path / "a.png").write_bytes(b"abc")
    assert talked.command(f"/image {tmp_path / 'a.png'}") == "1 to go with the next message"
    assert talked.command("/image https://x/y") == "2 to go with the next message"
    assert "no name of a picture" in talked.command("/image a.txt")
    assert "No such file" in talked.command("/image nowhere.png")
    for text in ("what is it?", "and now?"):
        talked.say(text)
    urls = ("data:image/png;base64,YWJj", "https://x/y")
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    first, second = talked.messages
    assert first == {"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}
    assert second == {"role": "user", "content": "and now?"}
    assert talked.command(f"/save {tmp_path / 'b.json'}").startswith("2 messages written")
    talked.clear()
    assert talked.command(f"/load {tmp_path / 'b.json'}").startswith("2 messages read")
    assert talked.messages == [first, second]


@pytest.mark.parametrize("content", ["text", "[]", '{"messages": [{"role": "user"}]}', "[" * 9999])
def test_files_that_hold_no_conversation_stay_as_they_are(tmp_path: Path, content: str) -> None:
    talked, path = conversation.Conversation(Mute()), tmp_path / "file"
    path.write_text(content)
    for command in ("/load", "/save"):
        assert "holds no conversation" in talked.command(f"{command} {path}")
    assert path.read_text() == content
    assert talked.command("/load") == "/load: name a file"
    assert "No such file" in talked.command("/load nowhere")


def test_markdown_is_shown_block_by_block_and_without_controls() -> None:
    whole = "# Title\n\nA **bold** word.\n\n```python\nx = 1\n\ny = 2\n```\n\nThe \x1b]0;evil\x07end."
    for size in (1, 7, 1000):
        out = io.StringIO()
        screen = terminal.Screen(file=out, force_terminal=True, width=60, color_system=None)
        screen.answer(whole[i : i + size] for i in range(0, len(whole), size))
        text = out.getvalue()
        assert "\x1b]0" not in text
        assert "\x07" not in text
        for part in ("Title", "A bold word.", "x = 1", "y = 2", "end."):
            assert part in text
    assert terminal.complete_blocks("a\n\n```\nb\n\nc") == ("a\n\n", "```\nb\n\nc")
    assert terminal.complete_blocks("```\nb\n\nc") == ("", "```\nb\n\nc")


PROMPT = b"\x1b[?2004h"  # asks the terminal to mark what is pasted


class Keyboard:
    """``sgla chat`` on a terminal of its own."""

    def __init__(self, url: str, home: Path) -> None:
        self.screen = b""
        self._end, other = pty.openpty()
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        environment = os.environ | {
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "XDG_STATE_HOME": str(home),
        }
        command = [sys.executable, "-m", "sgla", "chat", "--url", url]
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(other)

    def press(self, keys: bytes) -> None:
        os.write(self._end, keys)

    def see(self, text: bytes) -> None:
        """Wait until ``text`` is on the screen, behind what was seen before."""
        end = time.monotonic() + 60
        while text not in self.screen:
            assert time.monotonic() < end, self.screen
            if select.select([self._end], [], [], 1)[0]:
                self.screen += os.read(self._end, 65536)
        self.screen = self.screen.partition(text)[2]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)


def test_chat_on_a_terminal(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several lines, commands, history, Ctrl-C and Ctrl-D, by the keys that a user presses."""
    monkeypatch.setattr(StandIn, "chat_params", {"max_tokens": 3})
    keyboard = Keyboard(server, tmp_path)
    try:
        keyboard.see(b"/help lists the commands")
        keyboard.see(b"SmolLM2-135M-Instruct")
        keyboard.see(PROMPT)
        keyboard.press(b"one\x1b\rtwo\r")
        keyboard.see(b"w0 w1 w2")
        keyboard.see(b"ended by max_tokens")
        assert StandIn.bodies[-1]["messages"] == [{"role": "user", "content": "one\ntwo"}]
        keyboard.see(PROMPT)
        keyboard.press(b"/set temperature 0\r")
        keyboard.see(b"temperature 0, max_tokens 3")
        keyboard.see(PROMPT)
        keyboard.press(b"slow\r")
        keyboard.see(b"half an answer")
        keyboard.press(b"\x03")
        keyboard.see(b"stopped")
        keyboard.see(PROMPT)
        keyboard.press(b"\x1b[A\x1b[A\x1b[A\r")  # up to the first message
        keyboard.see(b"w0 w1 w2")
        said = [message["content"] for message in StandIn.bodies[-1]["messages"]]
        assert said[-2:] == ["half an answer", "one\ntwo"]
        assert StandIn.bodies[-1]["temperature"] == 0
        keyboard.see(PROMPT)
        keyboard.press(b"\x04")
        assert keyboard.process.wait(20) == 0
    finally:
        keyboard.close()
    history = tmp_path / "sgla" / "chat_history"
    assert "+slow" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


class Stopped:
    """A backend whose answer is interrupted by Ctrl-C after its first word."""

    name, about, finish = "stopped", "", None

    def __init__(self) -> None:
        self.closed = 0
        self.options: dict[str, Any] = {}
        self.seen: list[int] = []

    def stream(self, messages: conversation.Messages) -> Any:
        self.seen.append(len(messages))
        try:
            yield "half"
            raise KeyboardInterrupt
        finally:
            self.closed += 1


def test_ctrl_c_stops_the_answer_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\nb\n"))
    backend = Stopped()
    assert chat.talk(backend) == 0
    assert capsys.readouterr().out.splitlines() == ["half [stopped]"] * 2
    assert (backend.closed, backend.seen) == (2, [1, 3])


def test_chat_in_process_uses_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class FakeEngine:
        def __init__(self, **fields: Any) -> None:
            self.on_progress = fields.pop("on_progress")
            self.config = Config(**fields)
            self.closed = False
            made.append(self)

        def __enter__(self) -> FakeEngine:
            return self

        def __exit__(self, *exc: object) -> None:
            self.closed = True

        def sampling(self, **fields: Any) -> Any:
            return SamplingParams(temperature=0.2, **fields)

        chat_params = {"max_tokens": 50, "top_k": 3}

        def stream(self, *, messages: conversation.Messages, sampling: Any) -> Iterator[Event]:
            self.asked = sampling
            for text in ("He", "llo"):
                yield Event(rid="r", index=0, text=text, usage=Usage())

    monkeypatch.setattr("sgla.Engine", FakeEngine, raising=False)
    code, out, _ = talk(monkeypatch, "hi\n", "gemma3-270m", "--threads", "1", "--max-tokens", "9")
    assert (code, out) == (0, "Hello\n")
    assert (made[0].config.model, made[0].config.threads) == ("gemma3-270m", 1)
    assert (made[0].asked.max_tokens, made[0].asked.temperature, made[0].asked.top_k) == (9, 0.2, 3)
    assert made[0].closed


def test_errors_of_servers_are_shown_as_text() -> None:
    assert chat.error_text(b'{"error": {"message": "m"}}') == "m"
    assert chat.error_text(b"<html>") == "<html>"
    assert chat.error_text(b'{"error": "plain"}') == '{"error": "plain"}'


@pytest.mark.parametrize(("words", "name"), [(["rm", "x"], "rm.remove"), (["pull"], "pull.resolve_model")])
def test_files_that_cannot_be_changed_are_named(
    words: list[str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system", "/models/x")

    monkeypatch.setattr(f"sgla.cli.{name}", fail)
    code, _, err = run(*words)
    assert (code, err) == (
        2,
        "sgla: /models/x: Read-only file system; make it writable, or choose another place\n",
    )


def test_exit_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException] = [ConfigError("a"), SglaError("b"), KeyboardInterrupt(), BrokenPipeError()]

    def fail(args: Any) -> int:
        raise errors.pop(0)

    monkeypatch.setattr(doctor, "run", fail)
    codes = []
    while errors:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            codes.append(cli.main(["doctor"]))
        assert not re.search("Traceback", err.getvalue())
    assert codes == [2, 1, 130, 1]


@pytest.mark.parametrize(
    ("words", "unbuffered"), [("--help", ""), ("list", ""), ("explain", ""), ("explain", "1")]
)
@pytest.mark.parametrize(
    ("output", "message"),
    [
        (">/dev/full", "sgla: the output cannot be written: No space left on device\n"),
        (">&-", "sgla: standard output is closed; give it a file, or /dev/null\n"),
    ],
)
def test_an_output_that_cannot_be_written(words: str, unbuffered: str, output: str, message: str) -> None:
    python = f"PYTHONUNBUFFERED={unbuffered} exec {shlex.quote(sys.executable)}"
    command = f"{python} -m sgla {words} {output}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, message)


def test_errors_without_a_place_to_say_them() -> None:
    """They do not go to stdout instead."""
    command = f"exec {shlex.quote(sys.executable)} -m sgla serve --no 2>&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(("words", "stream"), [("--help", "stdout"), ("list", "stdout"), ("--no", "stderr")])
def test_a_reader_that_leaves_is_no_error(words: str, stream: str) -> None:
    """As ``sgla list | head`` does, before anything is written."""
    read, write = os.pipe()
    os.close(read)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, stream: write}
    done = subprocess.run([sys.executable, "-m", "sgla", words], env=environ, **streams)
    os.close(write)
    assert not done.stdout
    assert not done.stderr
    assert done.returncode in (0, 1, 2)

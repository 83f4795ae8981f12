"""What the scripts in ``bench/`` make of their measurements."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from sgla.model.read import read_decoder
from sgla.model.sizes import parameters
from sgla.model.spec import ModelSpec

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def spec_of(model: str) -> ModelSpec:
    return read_decoder(json.loads((BENCH / "models" / model / "config.json").read_text()))


def steps(names: list[str]) -> Any:
    """Each launch starts before the one before ends, but for the last, in front of which nothing runs for 5
    us."""
    import timeline

    begins = [10.0 * i for i in range(len(names))]
    begins[-1] += 7
    return [timeline.Launch(name, at, at + 12) for name, at in zip(names, begins)]


@pytest.mark.parametrize(
    ("model", "layer", "expected"),
    [
        ("qwen3-8b", ["batch_gemm", "nvjet", "cublasLt::splitKreduce_kernel"], {"o": 1, "gate and up": 2}),
        ("qwen3-30b-a3b", ["nvjet", "router", "experts"], {"o": 1, "experts": 1}),
    ],
)
def test_products_are_named_by_their_place(model: str, layer: list[str], expected: dict[str, int]) -> None:
    import timeline

    spec = spec_of(model)
    # Down; q, k and v or the output layer.
    rest = ["batch_gemm"] if spec.moe else ["batch_gemm", "batch_gemm"]
    names = ["_take_rows", "batch_gemm", *["decode_attention", *layer, *rest] * spec.layers, "_bound_scores"]
    found = timeline.table(steps(names), spec, timeline.Load(64, 640, 0))
    operations = found["operations"]
    assert {name: operations[name]["calls"] for name in expected} == {
        name: count * spec.layers for name, count in expected.items()
    }
    assert operations["q, k, v"]["calls"] == spec.layers
    assert operations["output layer"]["calls"] == 1
    assert found["idle_us"] == 5
    assert sum(row["us"] for row in operations.values()) + found["idle_us"] == pytest.approx(found["us"])


def test_a_line_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    import lines

    monkeypatch.setattr(sys, "argv", ["bench/x.py", "--model", "a b"])
    found = json.loads(lines.line({"w": "W1", "machine": "H200"}))
    assert found["w"] == "W1"
    assert found["machine"] == "H200"
    assert found["command"] == "python bench/x.py --model 'a b'"
    assert {"python", "sgla", "torch"} <= found["versions"].keys()
    assert "commit" in found


@pytest.mark.parametrize("gpus", [[], ["01020304", "a1a2a3a4"]])
def test_a_line_tells_gpus_apart(gpus: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As the driver names them; where there is none, a line says nothing of GPUs."""
    import lines

    class Driver:
        def cuInit(self, flags: int) -> int:
            return 0

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = len(gpus)
            return 0

        def cuDeviceGet(self, device: Any, index: int) -> int:
            device._obj.value = index
            return 0

        def cuDeviceGetUuid(self, uuid: Any, device: Any) -> int:
            uuid._obj[:] = bytes.fromhex(gpus[device.value]) + bytes(12)
            return 0

    def load(name: str) -> Driver:
        if not gpus:
            raise OSError(name)
        return Driver()

    monkeypatch.setattr(lines.ctypes, "CDLL", load)
    lines.gpu_ids.cache_clear()
    found = json.loads(lines.line({"w": "W1", "machine": "H200"}))
    assert found.get("gpu_ids", []) == gpus
    assert ("gpu_ids" in found) == bool(gpus)
    lines.gpu_ids.cache_clear()


def test_a_borrowed_tokenizer_has_a_word_for_every_id(tmp_path: Path) -> None:
    import serve

    source, model, folder = (tmp_path / name for name in ("source", "model", "folder"))
    for path in (source, model, folder):
        path.mkdir()
    words = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<end>"}]}
    (source / "tokenizer.json").write_text(json.dumps(words))
    (model / "config.json").write_text(json.dumps({"vocab_size": 6}))
    serve.extend_tokenizer(source, model, folder)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocab["<end>"] == 2
    assert sorted(vocab.values()) == [0, 1, 2, 3, 4, 5]


def test_the_tables_of_performance_are_those_of_the_recorded_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    import plots

    monkeypatch.setattr(sys, "argv", ["plots.py", "--check"])
    assert plots.main() == 0, "python bench/plots.py writes it"


def test_the_command_of_a_line_has_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import lines

    monkeypatch.setattr(sys, "argv", ["bench/serve.py", "--only", "single"])
    for name in [name for name in os.environ if name.startswith("SGLA_")]:
        monkeypatch.delenv(name)
    assert lines.command() == "python bench/serve.py --only single"
    monkeypatch.setenv("SGLA_CPU_ISA", "avx2")
    monkeypatch.setenv("SGLA_API_KEY", "secret")
    assert lines.command() == "SGLA_CPU_ISA=avx2 python bench/serve.py --only single"


def test_plots_are_those_of_the_recorded_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the matplotlib that drew them, in whose place one stands that writes the same words into each."""
    import plots

    names = {path.name for path in plots.PLOTS.glob("*.svg")}
    drawn = dict.fromkeys(names, "Matplotlib v1.0, and what it drew")
    monkeypatch.setattr(plots, "PLOTS", tmp_path)
    monkeypatch.setattr(plots.importlib.metadata, "version", lambda name: "1.0")
    monkeypatch.setattr(
        plots, "draw", lambda *lines: [(lines[-1] / name).write_text(text) for name, text in drawn.items()]
    )
    plots.draw({}, {}, tmp_path)
    assert plots.drawn_alike({}, {})
    (tmp_path / "rates.svg").write_text("Matplotlib v1.0, and what it drew of fewer lines")
    assert not plots.drawn_alike({}, {})
    (tmp_path / "rates.svg").write_text("Matplotlib v0.9, which draws otherwise")
    assert plots.drawn_alike({}, {})


def test_numbers_of_the_readme_are_those_of_the_page() -> None:
    """Of the H200; the page's own come from recorded lines."""
    readme, page = ((BENCH.parent / name).read_text() for name in ("README.md", "docs/performance.md"))
    rows = [
        line.split("|") for line in readme.partition("| | sgla | vLLM |")[2].split("\n\n")[0].splitlines()
    ]
    found = [number for row in rows[2:] for cell in row[2:4] for number in re.findall(r"\d[\d,.]*\d", cell)]
    assert len(found) > 30
    assert [number for number in found if number not in page] == []


def test_other_pages_name_todays_medians() -> None:
    import plots

    figures = plots.medians(plots.gpu_runs())

    def shown(workload: str, *models: str) -> str:
        digits = plots.WORKLOADS[workload][2]
        return " / ".join(f"{figures[workload][model]:,.{digits}f}" for model in models)

    readme, page, todo = (
        " ".join((BENCH.parent / name).read_text().split())
        for name in ("README.md", "docs/performance.md", "docs/open.md")
    )
    for workload in ("W1", "W2", "W3"):
        assert f"**{shown(workload, 'qwen3-0.6b', 'qwen3-8b')}** |" in readme, workload
    for workload in ("W1", "W2"):
        assert f"the same with Llama-3.1-8B | **{shown(workload, 'llama-3.1-8b')}** |" in readme
        assert f"**{shown(workload, 'qwen3-30b-a3b')}**, **" in readme
    assert f"in common: s, Qwen3-8B | **{shown('W4', 'qwen3-8b')}** |" in readme
    assert f"256 out, Qwen3-8B: tok/s | **{shown('W6', 'qwen3-8b')}** |" in readme
    goals = page.partition("## Goals that are missed")[2].partition("## ")[0]
    for goal, workload, model in (
        ("W3 of Qwen3-8B: 44,500 tok/s", "W3", "qwen3-8b"),
        ("W5 of 256 rows, Qwen3-8B: 12.3 ms", "W5 256", "qwen3-8b"),
        ("W1 of Qwen3-0.6B: 31,000 tok/s", "W1", "qwen3-0.6b"),
        ("W2 of Qwen3-0.6B: 0.35 ms", "W2", "qwen3-0.6b"),
    ):
        assert f"| {goal} | {shown(workload, model)}" in goals
        assert shown(workload, model) in todo, goal
    models = (BENCH.parent / "docs/models.md").read_text().partition("## Speed")[2]
    others = {
        name.replace(" ", "-"): (f"{1000 / float(alone):,.0f}", made)
        for name, alone, made in re.findall(
            r"\| ([\w.-]+[^|]*?) \| ([\d.]+) \| [\d.]+ \| \d+ % \| ([\d,]+) \|", page
        )
    }
    others["GLM-4.7-Flash"] = others["GLM-4.7-Flash-30B-A3B"]
    ours = {
        name: (f"{1000 / figures['W2'][model]:,.0f}", shown("W1", model))
        for model, name in plots.MODELS.items()
    }
    named = re.findall(r"\| (\S+)[^|]*, H200 \| ([\d,]+) \| ([\d,]+) \|", models)
    assert {name: tuple(told) for name, *told in named} == {name: (ours | others)[name] for name, *_ in named}
    assert len(named) == 8
    several = re.findall(r"\| Qwen3-(8B|30B-A3B) \| `--[tp]p[^|]*\| ([\d,]+) \| ([\d.]+) \|", page)
    for model, made, times in several:
        one = figures["W1"][f"qwen3-{model.lower()}"]
        assert times == f"{int(made.replace(',', '')) / one:.2f}", (model, made)
    assert len(several) == 6
    assert f"| {several[0][2]} ({several[0][1]}) |" in goals


def test_a_median_takes_all_plain_lines_since_speed_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    import plots

    line = {"engine": "sgla", "w": "W1", "model": "bench/models/qwen3-8b", "commit": "0000000"}
    others = [
        {**line, "out_tok_s": 900.0, "commit": "e78cfc8"},
        {**line, "out_tok_s": 900.0, "args": "--device cuda --quantization fp8"},
        {**line, "out_tok_s": 900.0, "replicas": 1},
        {**line, "out_tok_s": 900.0, "engine": "vllm"},
        {**line, "out_tok_s": 900.0, "command": "python bench/offline.py --extra '{\"tp\": 2}'"},
    ]
    ours = [{**line, "out_tok_s": value} for value in (1.0, 2.0)]
    ours += [{**line, "out_tok_s": 4.0, "command": "offline.py --extra '{\"step_tokens\": 8448}'"}]
    start = {**line, "w": "startup", "extra": '{"quantization": "fp8"}'}
    others += [{**line, "out_tok_s": 900.0, "tag": "tuned"}, start, {**line, "out_tok_s": 900.0}]
    monkeypatch.setattr(plots, "lines", lambda name: [*ours, *others])
    assert plots.gpu_runs() == {"W1": {"qwen3-8b": [1.0, 2.0, 4.0]}}
    assert plots.medians(plots.gpu_runs()) == {"W1": {"qwen3-8b": 2.0}}


def test_two_checkouts_are_compared_turn_by_turn() -> None:
    import overhead

    found = overhead.compared([10.0, 30.0, 22.0, 20.0, 18.0], [20.0, 20.0, 20.0, 20.0, 20.0])
    assert found == {"cpu_us": 20.0, "other_cpu_us": 20.0, "ratio": [1.0, 0.9, 1.1]}
    before = overhead.main_thread_us(os.getpid())
    sum(range(1_000_000))
    assert overhead.main_thread_us(os.getpid()) > before


def test_steps_of_batches_that_wait_for_their_longest() -> None:
    import traffic

    assert traffic.fewer_steps([1] * 255 + [257] + [2] * 256) == round((257 + 2) / (2 + 2), 2)


@pytest.mark.parametrize("status", [200, 503])
def test_requests_that_come_alone_are_timed_if_they_are_answered(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import overhead

    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    monkeypatch.setattr(overhead, "GAP", 0.0)
    args = argparse.Namespace(alone=3, model="m", input_len=4)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        if status == 200:
            assert [*overhead.alone(args, url)] == ["q1_ms", "ms", "p99_ms"]
            assert [(body["max_tokens"], len(body["prompt"])) for body in asked] == [(1, 4)] * 3
        else:
            with pytest.raises(SystemExit, match="503"):
                overhead.alone(args, url)
        server.shutdown()


def test_shares_of_what_users_send_are_of_the_limits_in_their_lines() -> None:
    import more_plots

    line = {"model": "bench/models/qwen3-8b", "w": "W9", "goodput": 90.0, "limit_rate": 100.0}
    document = {"model": "qwen3-8b", "w": "W8", "bs": 8, "tokens": 32768, "in_tok_s": 1.0}
    lines = [
        {**line, "w": "W10", "out_tok_s": 6.0, "limit_out_tok_s": 10.0},
        {**line, "w": "W10", "out_tok_s": 6.0},
        line,
        {**line, "goodput": 80.0},
        {**line, "model": "gpt-oss-20b"},
        *({**document, "limit_in_tok_s": limit} for limit in (2.0, 4.0, 5.0)),
    ]
    found = more_plots.of_users(lines, {"qwen3-8b": "Qwen3-8B"})
    assert found == [("W8 8 x 32,768, Qwen3-8B", 0.25), ("W9, Qwen3-8B", 0.9), ("W10, Qwen3-8B", 0.6)]


def test_what_an_attack_may_not_bring_about_is_named() -> None:
    import attack

    fine = {"attack": "a", "slowest_live_ms": 20.0, "back": True, "statuses": {"200": 1}, "other": {200: 1}}
    for change, fault in (
        ({"slowest_live_ms": 101.0}, "slow"),
        ({"back": False}, "keeps memory"),
        ({"statuses": {"500": 1}}, "500"),
        ({"statuses": {"0": 1}}, "no answer"),
        ({"broken": 1}, "broken streams"),
        ({"other": {429: 1}}, "others suffer"),
        ({"other_s": 60.0}, "others suffer"),
    ):
        assert attack.faults(fine | change) == [fault]
    end = {"attack": "SIGTERM", "seconds": 3.5, "exit": 0}
    assert attack.faults(fine) + attack.faults(end) == []
    assert attack.faults(end | {"seconds": 6.0, "exit": 1}) == ["ends late", "exit code"]


def test_an_answer_counts_by_whole_words_at_its_beginning() -> None:
    import questions

    assert questions.right("It has twelve (12) months.", "12|twelve")
    assert not questions.right("It is 124.", "12|twelve")
    assert not questions.right("x" * 200 + " twelve", "12|twelve")
    line = "one two three four five six seven eight nine "
    assert questions.loops(line * 4)
    assert not questions.loops(line * 3)
    assert {len(part) for part in (questions.EASY, questions.HELD_BACK, questions.OPEN)} == {30}
    sets = [questions.EASY, questions.HELD_BACK, questions.TO_CHOOSE]
    assert len({question for each in sets for question in each}) == sum(map(len, sets))


def test_many_gpus_hold_the_whole_model_and_two_hosts_send_more_than_one() -> None:
    import capacity

    shape = capacity.Shape(json.loads((BENCH / "models" / "deepseek-v3" / "config.json").read_text()))
    counted = parameters(spec_of("deepseek-v3"))
    assert (shape.total, shape.active) == (counted.total, counted.active - shape.table)
    tables = 4 * shape.table
    assert shape.weights(1) == shape.total - 2 * shape.table + tables
    one, two, four = (
        shape.exchange(capacity.H200, gpus, 64, whole=True, shares=capacity.LIMIT) for gpus in (8, 16, 32)
    )
    assert one < two < four
    steps = [capacity.decode(shape, capacity.H200, 16, 64, 1024, shares) for shares in
             (capacity.LIMIT, capacity.OVERLAPPED, capacity.OURS)]  # fmt: skip
    assert steps == sorted(steps)


def test_what_a_cache_could_have_had_of_conversations() -> None:
    import sessions

    from sgla.bench.load import Record

    def talked(*turns: tuple[int, int]) -> sessions.Talk:
        talk = sessions.Talk("system")
        for prompt, cached in turns:
            record = Record(start=0.0, end=2.0, chunks=[1.0, 2.0], prompt_tokens=prompt, completion_tokens=20)
            record.cached_tokens = cached
            talk.records.append(record)
        return talk

    talk = talked((100, 0), (250, 96), (400, 240))
    assert (talk.attainable(False), talk.attainable(True)) == (100 + 250, 120 + 270)
    told = sessions.numbers([talk], 6.0, True)
    assert (told["hit_rate"], told["attainable"]) == (round(336 / 750, 4), round(390 / 750, 4))
    assert (told["working_set"], told["later_ttft_mean_ms"]) == (400, 1000.0)
    others = [talked((100, 48)), talked((100, 32))]
    told = sessions.numbers([talk, *others, sessions.Talk("system")], 6.0, True)
    assert told["attainable"] == round((390 + 2 * 48) / 950, 4), "what first turns begin with is theirs, too"


def test_outputs_of_tools_follow_from_the_seed() -> None:
    from random import Random

    import sessions

    drawn = sessions.sizes(Random(1), 30, 50_000)
    assert drawn == sessions.sizes(Random(1), 30, 50_000)
    assert abs(sum(drawn) - 50_000) < 30
    assert max(drawn) > 3 * sorted(drawn)[15], "most are short"
    call, output = sessions.step(Random(1), 3, 240, plain=False)
    assert call["tool_calls"][0]["id"] == output["tool_call_id"] == "call_3"
    lines = output["content"].splitlines()
    assert (len(lines), sum(1 + len(line.split()) for line in lines)) == (18, 234), (
        "an end of a line is a token"
    )
    assert all(line.startswith(" ") for line in lines), "a word without a space before it is several tokens"
    [said] = sessions.step(Random(1), 3, 240, plain=True)
    assert said["role"] == "user"


def test_two_engines_run_by_turns_and_are_compared_turn_by_turn() -> None:
    import turns

    calls = []
    speeds = {"a": iter([100.0, 120.0, 90.0]), "b": iter([50.0, 50.0, 60.0])}

    def run(command: list[str]) -> list[dict[str, Any]]:
        [name] = command
        calls.append(name)
        speed = next(speeds[name])
        lines = [{"w": "W1", "engine": name, "out_tok_s": speed, "ttft_ms": 1000 / speed, "rep": 0}]
        return [*lines, {"w": "W2", "error": "x"}, *([{"w": "W3", "s": 1.0}] if name == "a" else [])]

    [line] = turns.by_turns(["a"], ["b"], 3, run)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert (line["w"], line["engines"], line["turns"]) == ("W1", ["a", "b"], 3)
    assert line["ratio"] == {"out_tok_s": [2.0, 1.5, 2.4], "ttft_ms": [2.0, 1.5, 2.4]}
    assert (line["ours"]["out_tok_s"], line["theirs"]["out_tok_s"]) == (100.0, 50.0)


def test_a_side_has_the_arguments_of_the_call_and_its_own() -> None:
    import offline
    import turns

    arguments = ["--model", "m", "--beside", "--engine vllm --python p", "--turns=5", "--repeat", "3"]
    mine = turns.without(arguments)
    assert mine == ["--model", "m", "--repeat", "3"]
    other = offline.parse([*mine, "--engine", "vllm", "--python", "p"])
    assert (other.engine, other.python, other.model, other.beside) == ("vllm", "p", "m", None)


def test_limits_of_long_prompts() -> None:
    """One of 32,768 tokens takes Qwen3-8B 1.12 s at 690 TFLOP/s, and a step behind it reads for 4.6 ms."""
    from limits import Limits, seen

    limits = Limits.of(str(BENCH / "models" / "qwen3-8b"), {})
    assert limits.document(32768) == pytest.approx(1.12, abs=0.005)
    assert limits.step([32768 + 128]) == pytest.approx(4.6e-3, abs=5e-5)
    whole = limits.document(60_000)
    assert limits.document(30_000) + limits.document(60_000, 30_000) == pytest.approx(whole)
    for first, last, window in ((0, 10, 0), (0, 10, 4), (2, 10, 4), (6, 10, 4), (3, 4, 9)):
        pairs = sum(min(i + 1, window or last) for i in range(first, last))
        assert seen(first, last, window) == pairs
    rates = [limits.rate(200, 200, gap) for gap in (0.001, 0.004, 0.01, 0.025)]
    assert 0 == rates[0] < rates[1] < rates[2] < rates[3]


def test_traffic_is_the_same_for_each_engine() -> None:
    import traffic

    first, again = (traffic.agents(7, 16, 30, 60_000, 2.0) for _ in range(2))
    assert first == again
    ends = [sum(task.added) for task in first]
    assert 0.38 * 60_000 < min(ends) < 0.6 * 60_000 < max(ends) <= 60_000
    assert all(len(task.added) == len(task.gaps) == 30 for task in first)
    assert traffic.documents(40_960) == [32_768]
    assert traffic.documents(131_072) == [32_768, 65_536, 131_072 - traffic.DOCUMENT_OUT]
    with pytest.raises(ValueError, match="too short"):
        traffic.documents(8192)
    lengths = traffic.chats(0, 2000)
    assert lengths == traffic.chats(0, 2000)
    assert 150 < sum(n for n, _ in lengths) / 2000 < 250
    assert 180 < sum(n for _, n in lengths) / 2000 < 250
    assert traffic.good([400, 600, 400], [20, 20, 30]) == 1


def test_a_tokenizer_for_machines_that_have_none(tmp_path: Path) -> None:
    import words
    from tokenizers import Tokenizer

    words.write_tokenizer(BENCH / "models" / "llama-3.1-8b", tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 128_256
    text = " people through the night, \u00e9!"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode(" people through the night").ids) == 4


def test_a_process_that_dies_ends_a_run_of_several() -> None:
    import clients

    with pytest.raises(EOFError):
        clients.run(None, [], 1, processes=1)  # type: ignore[arg-type]


def test_gaps_of_a_tower_have_names() -> None:
    import picture_stages

    def event(kind: str, name: str, begin: int, end: int) -> dict[str, Any]:
        return {"cat": kind, "name": name, "ts": 1e6 * begin, "dur": 1e6 * (end - begin)}

    events = [
        event("gpu_user_annotation", "tower", 10, 20),
        event("kernel", "a", 10, 15),
        event("kernel", "b", 16, 20),  # 1 s of nothing within the tower
        event("kernel", "a step", 22, 30),
        event("gpu_user_annotation", "tower", 40, 50),
        event("kernel", "a", 40, 50),
        event("kernel", "a step behind the last", 51, 60),
        event("user_annotation", "read a picture", 30, 33),
        event("user_annotation", "tower", 33, 36),
        event("cpu_op", "aten::mm", 20, 21),
        event("cpu_op", "aten::mm", 34, 38),
        {"cat": "kernel", "name": "no length", "ts": 0},
    ]
    assert picture_stages.gaps(events) == pytest.approx(
        {
            "whole_s": 40,
            "tower_s": 19,
            "steps_s": 8,
            "idle_while_it_reads_pictures_s": 3,
            "idle_while_it_launches_the_tower_s": 3,
            "idle_while_it_launches_steps_s": 1 + 2,
            "idle_while_it_waits_for_a_step_s": 1 + 1 + 2,
            "tower_share": 19 / 40,
        }
    )
    assert picture_stages.gaps([]) == {}


def test_imagined_talks() -> None:
    """Every turn has its answer; with a tier no prompt is read again."""
    import imagined

    given = ["--talks=6", "--at=2", "--pool=6000", "--rounds=3", "--question=600", "--answer=4"]
    times = []
    for tier in ("4", "0"):
        world = imagined.World(imagined.parsed([*given, "--tier", tier])[0])
        world.run()
        assert all(0 < turn.start < turn.first <= turn.last for turn in world.turns.values())
        assert [len(talk.tokens) for talk in world.talks] == [3 * 604] * 6
        read = sum(tokens for _, tokens in world.mixed)
        assert (read < 6 * (600 + 640 + 640)) == (tier == "4")
        times.append(imagined.numbers(world)["ttft_mean_ms"])
    assert times[0] < times[1]


def test_steps_beside_copies_are_compared_with_steps_like_them() -> None:
    """Of as many rows, with about as many tokens behind them."""
    import step_times

    def step(kind: str, ms: float, rows: int, behind: int) -> Any:
        return step_times.Step(kind, ms / 1e3, 0.0, 0.0, rows, behind)

    alone = [step("decode", 4.0 + i / 100, 1, 1000 * i) for i in range(1, 101)]
    others = [step("decode", 9.0, 2, 50_000) for _ in range(20)]
    beside = [step("decode in", 4.5 * 1.1, 1, 50_000), step("decode in", 4.9 * 1.1, 1, 90_000)]
    lonely = [step("decode out", 6.0, 3, 50_000), step("decode out", 6.0, 2, 70_000)]
    found = step_times.against_alone([*alone, *others, *beside, *lonely])
    assert found == {"decode in": {"count": 2, "ratio": [pytest.approx(1.1, abs=0.005)] * 2}}

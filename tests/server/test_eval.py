"""``sgla eval``: what lm_eval measures through a server is what transformers computes."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import ServerProcess, serving

from sgla.cli import eval as evaluation
from sgla.cli import main
from sgla.cli.bench import describe
from sgla.config import Config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    with serving(
        "--model", str(tiny_model), "--dtype", "float32", "--served-model-name", "tiny", "--api-key", "key"
    ) as process:
        process.wait_ready()
        yield process


def test_a_missing_lm_eval_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert main(["eval", "demo", "--tasks", "a"]) == 2
    assert "pip install 'sgla[eval]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tasks", "nothing"], "there is no task nothing"),
        (
            ["--tasks", "rivers", "--url", "http://127.0.0.1:9", "--dtype", "float32"],
            "--dtype is for a server",
        ),
        (["--tasks", "rivers", "--include-path", "nowhere"], "there is no folder nowhere"),
        (["--tasks", "rivers", "--output", "nowhere/a"], "--output nowhere/a: No such file"),
        (["--tasks", "rivers", "--url", "http://127.0.0.1:9"], "start one with 'sgla serve'"),
        (["--tasks", "rivers", "--limit", "0"], "--limit above 0"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.chdir(ROOT)
    own = tasks.TaskManager(include_path="tests/eval", include_defaults=False)
    monkeypatch.setattr(tasks, "TaskManager", lambda **options: own)  # lm_eval's own are many
    assert main(["eval", *argv]) == 2
    assert message in capsys.readouterr().err


def test_settings_reach_the_server_that_is_started(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag comes before a variable."""
    monkeypatch.setenv("SGLA_CONTEXT_LENGTH", "100")
    config = Config(
        model=str(tiny_model),
        executor="fake",
        device="cpu",
        context_length=200,
        api_key=["key"],
        served_model_name=["me"],
    )
    with evaluation.started(config) as url:
        facts = asyncio.run(describe(url, "key"))
    assert (facts["model"], facts["context"]) == ("me", 200)


class Oracle:
    """transformers on the CPU in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.inference_mode()
    def loglikelihood(self, context: str, text: str) -> float:
        """Of ``text`` behind ``context``, or behind the first token of a sequence."""
        before = self.ids(context) if context else [self.tokenizer.bos_token_id]
        ids = before + self.ids(context + text)[len(self.ids(context)) :]
        logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(float(logprobs[place - 1, ids[place]]) for place in range(len(before), len(ids)))

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def generated(self, context: str, tokens: int) -> str:
        ids = torch.tensor([self.ids(context)])
        out = self.model.generate(ids, max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
        return str(self.tokenizer.decode(out, skip_special_tokens=True)).split("\n")[0]


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / f"tests/eval/{name}.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_results_are_those_of_transformers(
    server: ServerProcess,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(ROOT)  # the tasks name their files from there
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    output = tmp_path / "results.jsonl"
    argv = ["eval", "--url", server.url, "--api-key", "key", "--include-path", "tests/eval"]
    assert main([*argv, "--tasks", "rivers,sentences,answers", "--output", str(output)]) == 0
    assert "rivers" in capsys.readouterr().out
    found = {(row["task"], row["metric"]): row for row in map(json.loads, output.read_text().splitlines())}
    oracle = Oracle(tiny_model)
    assert found["rivers", "acc"]["samples"] == len(rows("rivers"))

    for metric, length in (("acc", lambda text: 1), ("acc_norm", lambda text: len(text) - 1)):
        right = []
        for row in rows("rivers"):
            question = f"The river {row['river']} flows through the city of"
            choices = [f" {city}" for city in row["cities"]]
            values = [oracle.loglikelihood(question, choice) / length(choice) for choice in choices]
            right.append(values.index(max(values)) == row["answer"])
        assert found["rivers", metric]["value"] == pytest.approx(sum(right) / len(right))

    texts = [row["text"] for row in rows("sentences")]
    total = sum(oracle.loglikelihood("", text) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    assert found["sentences", "bits_per_byte"]["value"] == pytest.approx(
        -total / size / math.log(2), rel=1e-4
    )

    right = []
    for row in rows("answers"):
        prompt = f"The capital of Spain is Madrid.\nThe capital of {row['country']} is"
        right.append(oracle.generated(prompt, 12) == f" {row['capital']}.")
    assert found["answers", "exact_match"]["value"] == pytest.approx(sum(right) / len(right))

"""Beam search, by HTTP and by the Engine, against HF transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from http_site import Site
from vector_models import serving, write_model

from sgla import LLM, BeamSearchParams
from sgla.engine import Engine
from sgla.errors import ContextTooLong, InvalidField

SEP = 3  # ends a text
PROMPTS = [[2, 7, 8, 9], [2, 11, 5], [2, 30, 31, 32, 33, 34]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("beams")
    settings = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    hf = write_model(folder, "qwen3", "AutoModelForCausalLM", **settings)
    with torch.no_grad():
        hf.lm_head.weight[SEP] *= 1.5  # so that some beams end
    hf.save_pretrained(folder)
    return folder, hf


def beams_of(hf: Any, prompt: list[int], width: int, most: int, **options: Any) -> tuple[Any, Any]:
    """Tokens behind the prompt and the score of each beam."""
    out = hf.generate(
        torch.tensor([prompt]),
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=most,
        do_sample=False,
        eos_token_id=SEP,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    rows = [row[len(prompt) :].tolist() for row in out.sequences]
    ended = [row[: row.index(SEP) + 1] if SEP in row else row for row in rows]
    return ended, out.sequences_scores.tolist()


async def search(site: Site, prompt: Any, **body: Any) -> list[Any]:
    asked = {"prompt": prompt, "use_beam_search": True, "return_token_ids": True, **body}
    status, reply = await site.post("/v1/completions", asked)
    assert status == 200, reply
    return list(reply["choices"])


async def test_beams_equal_those_of_transformers(model: tuple[Path, Any]) -> None:
    folder, hf = model
    ends = 0
    async with serving(folder) as (site, _):
        for prompt in PROMPTS:
            for options in (
                {},
                {"length_penalty": 0.0},
                {"length_penalty": 2.0, "early_stopping": "never"},
                {"length_penalty": -1.0},
                {"early_stopping": True},
            ):
                expected, scores = beams_of(hf, prompt, 4, 12, **options)
                asked = {"max_tokens": 12, "n": 4, "logprobs": 2, **options}
                choices = await search(site, prompt, **asked)
                assert [choice["token_ids"] for choice in choices] == expected
                for choice, score in zip(choices, scores):
                    logprobs = choice["logprobs"]["token_logprobs"]
                    length = len(choice["token_ids"]) ** options.get("length_penalty", 1.0)
                    assert sum(logprobs) / length == pytest.approx(score, abs=1e-4)
                    assert choice["finish_reason"] == ("stop" if SEP in choice["token_ids"] else "length")
                    ends += SEP in choice["token_ids"]
    assert ends > 5


async def test_several_prompts_and_fewer_answers_than_beams(
    model: tuple[Path, Any], caplog: pytest.LogCaptureFixture
) -> None:
    folder, hf = model
    caplog.set_level("INFO", "sgla.http.access")
    async with serving(folder) as (site, _):
        for more in ({"best_of": 4}, {"beam_width": 4}):
            choices = await search(site, PROMPTS, max_tokens=6, n=2, **more)
            expected = [row for prompt in PROMPTS for row in beams_of(hf, prompt, 4, 6)[0][:2]]
            assert [choice["token_ids"] for choice in choices] == expected
            assert [choice["index"] for choice in choices] == [*range(6)]
            logged = caplog.records[-1].__dict__["fields"]
            assert (logged["prompt_tokens"], logged["output_tokens"]) == (13, sum(map(len, expected)))
        (echoed,) = await search(site, PROMPTS[0], max_tokens=3, echo=True, logprobs=0, prompt_logprobs=1)
        assert echoed["prompt_token_ids"] == PROMPTS[0]
        assert len(echoed["logprobs"]["tokens"]) == 7
        assert len(echoed["prompt_logprobs"]) == 4
        endless = await search(site, PROMPTS[0], max_tokens=12, n=4, ignore_eos=True)
        assert [len(choice["token_ids"]) for choice in endless] == [12] * 4


def test_the_engine_finds_the_same_beams(model: tuple[Path, Any]) -> None:
    folder, hf = model
    fixed: dict[str, Any] = {"executor": "inline", "native_kernels": False, "kv_cache_bytes": 1 << 20}
    with Engine(model=str(folder), device="cpu", dtype="float32", threads=1, **fixed) as engine:
        for prompt in PROMPTS:
            found = engine.beam_search(prompt, 4, 12, logprobs=1)
            expected, scores = beams_of(hf, prompt, 4, 12)
            assert [output.tokens for output in found] == expected
            for output, score in zip(found, scores):
                total = sum(entry.logprob for entry in output.logprobs or [])
                assert total / len(output.tokens) == pytest.approx(score, abs=1e-4)
                assert (output.finish, output.usage.prompt_tokens) == (
                    "stop" if SEP in output.tokens else "length",
                    len(prompt),
                )
        with pytest.raises(InvalidField, match="width"):
            engine.beam_search(PROMPTS[0], 11)
        with pytest.raises(ContextTooLong):
            engine.beam_search(PROMPTS[0], 2, 1000)


async def test_llm_finds_what_the_server_finds(model: tuple[Path, Any]) -> None:
    folder, _ = model
    async with serving(folder) as (site, _):
        asked: dict[str, Any] = {"max_tokens": 12, "n": 4, "length_penalty": 0.5, "logprobs": 2}
        expected = [await search(site, prompt, **asked) for prompt in PROMPTS]
    fixed: dict[str, Any] = {"executor": "inline", "native_kernels": False, "kv_cache_bytes": 1 << 20}
    with LLM(str(folder), device="cpu", dtype="float32", threads=1, **fixed) as llm:
        whole = BeamSearchParams(
            beam_width=4, max_tokens=12, length_penalty=0.5, include_stop_str_in_output=True
        )
        found = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], whole)
        cut = BeamSearchParams(beam_width=4, max_tokens=12, length_penalty=0.5)
        shorter = llm.beam_search(PROMPTS, cut, concurrency_limit=1)
        with pytest.raises(InvalidField, match="width"):
            llm.beam_search(PROMPTS, BeamSearchParams(beam_width=11, max_tokens=3))
    ends = 0
    for prompt, choices, output, short in zip(PROMPTS, expected, found, shorter, strict=True):
        for choice, one, less in zip(choices, output.sequences, short.sequences, strict=True):
            assert one.tokens == prompt + choice["token_ids"]
            assert one.finish_reason == choice["finish_reason"]
            logprobs = choice["logprobs"]["token_logprobs"]
            assert one.cum_logprob == pytest.approx(sum(logprobs), abs=1e-4)
            assert [entry[token].logprob for entry, token in zip(one.logprobs, choice["token_ids"])] == (
                pytest.approx(logprobs, abs=1e-4)
            )
            assert all(len(entry) >= 8 for entry in one.logprobs)
            ended = one.finish_reason == "stop"
            assert (less.tokens, one.stop_reason) == (
                one.tokens[:-1] if ended else one.tokens,
                SEP if ended else None,
            )
            ends += ended
    assert ends


async def test_a_chat_has_beams(model: tuple[Path, Any], tmp_path: Path) -> None:
    folder, hf = model
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    async with serving(folder, chat_template=str(template)) as (site, _):
        messages = [{"role": "user", "content": "w1 w2"}]
        body = {"messages": messages, "use_beam_search": True, "n": 4, "max_tokens": 6}
        _, reply = await site.post("/v1/chat/completions", {**body, "return_token_ids": True})
        expected, _ = beams_of(hf, reply["prompt_token_ids"], 4, 6)
        assert [choice["token_ids"] for choice in reply["choices"]] == expected
        assert reply["usage"]["completion_tokens"] == sum(map(len, expected))
        assert reply["usage"]["prompt_tokens"] == len(reply["prompt_token_ids"])


async def test_what_a_search_cannot_do_is_refused(model: tuple[Path, Any]) -> None:
    async with serving(model[0]) as (site, system):
        for more, param in (
            ({"stream": True}, "stream"),
            ({"top_p": 0.5}, "top_p"),
            ({"stop": "x"}, "stop"),
            ({"presence_penalty": 1}, "presence_penalty"),
            ({"guided_regex": "a"}, "guided_regex"),
            ({"n": 3, "beam_width": 2}, "beam_width"),
            ({"n": 11}, "beam_width"),
            ({"beam_width": 11}, "beam_width"),
            ({"max_tokens": 0, "echo": True}, "max_tokens"),
            ({"max_tokens": 1000}, "max_tokens"),
            ({"use_beam_search": False, "beam_width": 2}, "beam_width"),
            ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
            ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
        ):
            body = {"prompt": PROMPTS[0], "max_tokens": 4, "use_beam_search": True, **more}
            status, reply = await site.post("/v1/completions", body)
            assert (status, reply["error"]["param"]) == (400, param), reply
        status, reply = await site.post("/v1/responses", {"input": "x", "use_beam_search": True})
        assert (status, reply["error"]["param"]) == (400, "use_beam_search")
        assert system.ingress.open_requests == 0

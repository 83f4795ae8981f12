"""``return_hidden_states`` of /generate, chats and completions, beside transformers with its weights."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from local_server import local_server
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, serving
from tokenizers import Tokenizer, models

from sgla import LLM, SamplingParams
from sgla.engine import Engine
from sgla.errors import ConfigError
from sgla.http.app import make_app
from sgla.http.connections import Runner

TEXT = "The quick brown fox jumps over the lazy dog."
FLAGS = ("--dtype", "float32", "--context-length", "512", "--enable-return-hidden-states")
# How many guesses pay depends on how busy the host is.
GUESSING = ("--speculative-algorithm", "ngram", "--no-speculative-adaptive", "--metrics-compat", "vllm")


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    """One whose other requests guess tokens."""
    with serving("--model", str(tiny_model), *FLAGS, *GUESSING) as process:
        yield process


@pytest.fixture(scope="module")
def hf(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def generate(server: ServerProcess, text: Any = TEXT, **fields: Any) -> Any:
    params = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True} | fields.pop("sampling_params", {})
    body = {"text": text, "return_hidden_states": True, "sampling_params": params}
    status, reply = server.request("POST", "/generate", body | fields)
    assert status == 200, reply
    return reply


def check(hf: Any, result: Any, prompt: list[int]) -> None:
    """The prompt's states in one list, then one for each output token but the last."""
    found, outputs = result["meta_info"]["hidden_states"], result["output_ids"]
    tokens = prompt + outputs[: max(0, result["meta_info"]["completion_tokens"] - 1)]
    assert result["meta_info"]["cached_tokens"] == 0
    assert len(found[0]) == len(prompt)
    with torch.inference_mode():
        expected = hf.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(np.array(found[0] + found[1:]), expected, atol=2e-4, rtol=1e-3)


def ids_of(server: ServerProcess, text: str) -> list[int]:
    ids: list[int] = server.request("POST", "/tokenize", {"prompt": text})[1]["tokens"]
    return ids


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_new_tokens": 1},
        {"max_new_tokens": 0},
        {"temperature": 1, "sampling_seed": 3},
        {"regex": "(ab|cd) is the answer"},
        {"json_schema": '{"const": "all of this is forced"}', "max_new_tokens": 40, "ignore_eos": False},
        {"max_new_tokens": 300},
    ],
)
def test_one(server: ServerProcess, hf: Any, params: dict[str, Any]) -> None:
    for _ in range(2):  # the second time the prompt is in the cache
        check(hf, generate(server, sampling_params=params), ids_of(server, TEXT))


def test_a_stop_string(server: ServerProcess, hf: Any) -> None:
    text = generate(server)["text"]
    result = generate(server, sampling_params={"stop": text[3:5]})
    assert result["meta_info"]["finish_reason"]["matched"] == text[3:5]
    check(hf, result, ids_of(server, TEXT))


def test_several_prompts_and_choices(server: ServerProcess, hf: Any) -> None:
    texts = [TEXT, TEXT[:20], "x" * 200]
    results = generate(server, texts, return_hidden_states=[True, False, True], sampling_params={"n": 2})
    assert len(results) == 6
    for i, result in enumerate(results):
        if i // 2 == 1:
            assert "hidden_states" not in result["meta_info"]
        else:
            check(hf, result, ids_of(server, texts[i // 2]))


def test_the_last_event_of_a_stream_has_all(server: ServerProcess, hf: Any) -> None:
    raw = generate(server, stream=True)
    events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert len(events) > 3
    assert not any("hidden_states" in event["meta_info"] for event in events[:-1])
    check(hf, events[-1], ids_of(server, TEXT))


LIKE_OPENAI: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["The quick brown fox", "A"], "n": 2, "seed": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say all."}]},
}


def ask(server: ServerProcess, path: str, **fields: Any) -> list[dict[str, Any]]:
    """What each choice shows, of a stream all of its chunks together."""
    body = {"max_tokens": 6, "ignore_eos": True, "return_token_ids": True, "return_hidden_states": True}
    status, reply = server.request("POST", path, LIKE_OPENAI[path] | body | fields)
    assert status == 200, reply
    if not fields.get("stream"):
        return [reply | choice for choice in reply["choices"]]
    found: dict[int, dict[str, Any]] = {}
    for line in reply.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line[6:])
            for part in chunk["choices"]:
                one = found.setdefault(part["index"], {"token_ids": []})
                assert "hidden_states" not in one  # it comes with the last chunk
                tokens = one["token_ids"] + (part.get("token_ids") or [])
                one |= {name: value for name, value in chunk.items() if value is not None}
                one |= part.get("delta", {}) | {name: value for name, value in part.items() if value}
                one["token_ids"] = tokens
    return [found[i] for i in sorted(found)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", LIKE_OPENAI)
def test_the_last_state_of_a_choice(server: ServerProcess, hf: Any, path: str, stream: bool) -> None:
    """As SGLang's: of the last token that was computed; none where these were the prompt's alone."""
    choices = ask(server, path, stream=stream)
    assert len(choices) == (4 if path == "/v1/completions" else 1)
    for choice in choices:
        assert len(choice["token_ids"]) == 6
        tokens = choice["prompt_token_ids"] + choice["token_ids"][:-1]
        with torch.inference_mode():
            expected = hf.model(torch.tensor([tokens])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(np.array(choice["hidden_states"]), expected, atol=2e-4, rtol=1e-3)
    assert all(choice["hidden_states"] == [] for choice in ask(server, path, max_tokens=1))
    plain = ask(server, path, max_tokens=1, return_hidden_states=False)
    assert not any("hidden_states" in choice for choice in plain)


@pytest.mark.parametrize("path", LIKE_OPENAI)
def test_beams_have_no_states(server: ServerProcess, path: str) -> None:
    body = {"use_beam_search": True, "return_hidden_states": True, "max_tokens": 2}
    status, reply = server.request("POST", path, LIKE_OPENAI[path] | body)
    assert (status, reply["error"]["param"]) == (400, "return_hidden_states")


def test_more_than_an_answer_may_have_is_refused(server: ServerProcess) -> None:
    body: dict[str, Any] = {"text": ["x"] * 300, "return_hidden_states": True}
    body["sampling_params"] = {"max_new_tokens": 500}
    status, reply = server.request("POST", "/generate", body)
    assert (status, reply["error"]["param"]) == (400, "return_hidden_states")
    body = {"text": "x" * 100, "stream": True, "sampling_params": {"n": 10}, "return_hidden_states": True}
    status, reply = server.request("POST", "/generate", body)
    assert (status, reply["error"]["param"]) == (400, "return_hidden_states")


def test_sessions(server: ServerProcess, hf: Any) -> None:
    session = server.request("POST", "/open_session", {"capacity_of_str_len": 4096})[1]
    first = generate(server, session_params={"id": session})
    going_on = {"id": session, "rid": first["meta_info"]["id"]}
    result = generate(server, " And then?", session_params=going_on)
    prompt = ids_of(server, TEXT) + first["output_ids"] + ids_of(server, " And then?")
    assert result["meta_info"]["prompt_tokens"] == len(prompt)
    check(hf, result, prompt)


async def test_what_a_session_has_counts(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgla.http.request.work.MAX_LOGPROBS", 400)
    async with local_server(model=str(tiny_model), enable_return_hidden_states=True) as local:

        async def ask(text: str, **fields: Any) -> tuple[int, Any]:
            body = {"text": text, "return_hidden_states": True, "sampling_params": {"max_new_tokens": 1}}
            status, reply = await local.post("/generate", body | fields)
            return status, json.loads(reply)

        session = json.loads((await local.post("/open_session", {"capacity_of_str_len": 1000}))[1])
        status, first = await ask("x" * 90, session_params={"id": session})
        assert (status, len(first["meta_info"]["hidden_states"][0])) == (200, 90)
        going_on = {"id": session, "rid": first["meta_info"]["id"]}
        status, reply = await ask("x" * 20, session_params=going_on)
        assert (status, reply["error"]["param"]) == (400, "return_hidden_states")
        assert (await ask("x", session_params=going_on))[0] == 200


async def test_a_server_without_the_flag_names_it(tiny_model: Path) -> None:
    async with local_server(model=str(tiny_model)) as local:
        status, text = await local.post("/generate", {"text": "hi", "return_hidden_states": True})
    assert status == 400
    assert "--enable-return-hidden-states" in text


def test_offline(tiny_model: Path, hf: Any) -> None:
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, hidden_states=True)
    config = {"executor": "inline", "dtype": "float32", "native_kernels": False}
    with LLM(str(tiny_model), enable_return_hidden_states=True, **config) as llm:
        (request,) = llm.generate([TEXT], params)
    (output,) = request.outputs
    assert output.hidden_states is not None
    found = np.frombuffer(b"".join(output.hidden_states), np.float32).reshape(-1, 64)
    with torch.inference_mode():
        tokens = request.prompt_token_ids + output.token_ids[:-1]
        expected = hf.model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-3)


def test_guesses_of_other_requests_are_counted(server: ServerProcess, hf: Any) -> None:
    """Beside one whose states come back."""
    many = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True, "logit_bias": {"7": 100}}
    body = {"text": TEXT, "sampling_params": many}
    status, reply = server.request("POST", "/generate", body)
    assert status == 200, reply
    meta = reply["meta_info"]
    assert 0 < meta["spec_verify_ct"] < 30
    assert meta["spec_accept_length"] == 60 / meta["spec_verify_ct"]
    assert meta["spec_accept_token_num"] == 60 - 1 - meta["spec_verify_ct"] <= meta["spec_draft_token_num"]
    assert meta["spec_accept_rate"] == meta["spec_accept_token_num"] / meta["spec_draft_token_num"]
    asked = {"prompt": TEXT, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "n": 2}
    usage = server.request("POST", "/v1/completions", asked | {"logit_bias": {"7": 100}})[1]["usage"]
    assert set(usage["completion_tokens_details"]) == {
        "accepted_prediction_tokens",
        "rejected_prediction_tokens",
    }
    assert 60 < usage["completion_tokens_details"]["accepted_prediction_tokens"] < 120
    plain = generate(server)
    assert "spec_verify_ct" not in plain["meta_info"]
    check(hf, plain, ids_of(server, TEXT))
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(server.request("GET", "/metrics")[1])
        for sample in family.samples
        if "position" not in sample.labels
    }
    right, guessed = (values[f"sgla:spec_{name}_tokens_total"] for name in ("accepted", "draft"))
    assert 30 < right <= guessed
    assert values["sgla:spec_accept_rate"] == right / guessed
    assert values["sgla:spec_accept_length"] > 1  # how many are guessed depends on how long steps take
    assert values["vllm:spec_decode_num_accepted_tokens_total"] == right


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 128,
}


def write_mixture(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    words = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(300)}, unk_token="<0>"))
    words.save(str(folder / "tokenizer.json"))
    return folder


OF_EXPERTS = "moe_intermediate_size", "mlp_only_layers", "num_experts", "num_experts_per_tok"
LLAMA = {key: value for key, value in MIXTURE.items() if key not in OF_EXPERTS}
LLAMA |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def dummy_engine(folder: Path, **settings: Any) -> Engine:
    both = {"executor": "inline"} | settings
    return Engine(str(folder), device="cpu", load_format="dummy", threads=1, **both)


async def listening(engine: Engine) -> tuple[Runner, str]:
    """The server's routes; runs on its loop."""
    assert engine._system is not None
    runner = Runner(make_app(engine._system.ingress, engine._system.config, engine._system.metrics))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_routed_experts(tmp_path: Path) -> None:
    """As trainers read them, for each token but the last; a cached prompt has the same."""
    folder, prompt = write_mixture(tmp_path), list(range(40))
    settings: dict[str, Any] = {"enable_return_routed_experts": True, "dtype": "float32"}
    with dummy_engine(folder, **settings) as engine:
        runner, url = engine._call(listening(engine))
        sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": prompt, "sampling_params": sampling}
        async with aiohttp.ClientSession() as session:

            async def ask(**fields: Any) -> Any:
                async with session.post(f"{url}/generate", json=body | fields) as answer:
                    return answer.status, await answer.json()

            found = []
            for _ in range(2):
                _, told = await ask(return_routed_experts=True)
                data = b64decode(told["meta_info"]["routed_experts"])
                tokens = len(prompt) + len(told["output_ids"])
                found.append(np.frombuffer(data, np.int32).reshape(tokens - 1, 3, 3))
            assert (found[0] == found[1]).all()
            assert not found[0][:, 1].any(), "that layer has no experts"
            assert all(len(set(chosen)) == 3 for chosen in found[0][:, 2].tolist())
            assert "routed_experts" not in (await ask())[1]["meta_info"]
            for wrong in ({"return_hidden_states": True}, {"sampling_params": sampling | {"n": 2 << 16}}):
                assert (await ask(return_routed_experts=True, **wrong))[0] == 400
        engine._call(runner.cleanup())
    with pytest.raises(ConfigError, match="--pp 2"):
        dummy_engine(folder, **settings, pp=2, executor="procs")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(ConfigError, match="a model without experts"):
        dummy_engine(folder, **settings)

"""Programs of ``sgla.lang`` on a server, on an engine in this process and through OpenAI's API: the same."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import ServerProcess
from torch import Tensor

import sgla.lang as sgl
from sgla.engine import Engine
from sgla.errors import BackendFailed, InvalidField
from sgla.lang.backends.base import Backend, Conversation

HEAD = "A text that is longer than some pages of the cache are. "
CHOICES = (" one", " other", " one more")
METHODS = (
    sgl.token_length_normalized,
    sgl.greedy_token_selection,
    sgl.unconditional_likelihood_normalized,
)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model), executor="inline", device="cpu", threads=1, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def backends(engine: Engine, tiny_server: ServerProcess) -> dict[str, Backend]:
    url = f"{tiny_server.url}/v1"
    return {
        "server": sgl.RuntimeEndpoint(tiny_server.url),
        "engine": sgl.EngineBackend(engine),
        "completions": sgl.OpenAI("tiny", False, base_url=url),
        "chats": sgl.OpenAI("tiny", base_url=url),
    }


@sgl.function
def text(s: Any) -> None:
    s += HEAD + sgl.gen("a", max_tokens=6)
    s += " I say" + sgl.gen("b", max_tokens=4, regex="[a-c]+")


@sgl.function
def chat(s: Any) -> None:
    s += sgl.system(HEAD)
    s += sgl.user("Who?")
    s += sgl.assistant(sgl.gen("a", max_tokens=6, ignore_eos=True))
    s += sgl.user("And?")
    s += sgl.assistant(sgl.gen("b", max_tokens=4, json_schema={"type": "integer", "minimum": 0}))


def test_texts_are_those_of_plain_calls(backends: dict[str, Backend], engine: Engine) -> None:
    found = {
        name: [
            [text.run(backend=backend, temperature=0).text()],
            list(text.run(backend=backend, temperature=0, stream=True).text_iter("b")),
        ]
        for name, backend in backends.items()
        if name != "chats"
    }
    plain = engine.generate(HEAD, engine.sampling(temperature=0, max_tokens=6)).text
    for [whole], pieces in found.values():
        assert whole.startswith(HEAD + plain + " I say")
        assert whole.endswith("".join(pieces))
    assert found["server"][0] == found["engine"][0] == found["completions"][0]


def test_conversations_are_what_the_template_says(backends: dict[str, Backend], engine: Engine) -> None:
    messages = [{"role": "system", "content": HEAD}, {"role": "user", "content": "Who?"}]
    rendered = engine.render(messages)
    expected = [engine.tokenizer.encode(rendered + " So", add_special_tokens=False)]
    for name in ("server", "engine"):
        backend: Any = backends[name]
        assert backend.encode(Conversation(messages, True, " So")) == expected
    sampling = engine.sampling(temperature=0, max_tokens=6, ignore_eos=True)
    answer = engine.chat(messages, sampling).text
    ends = set()
    for name in ("server", "engine", "chats"):
        state = chat.run(backend=backends[name], temperature=0)
        assert state["a"] == answer
        ends.add(state["b"])
    [end] = ends
    assert end.isdigit()


def test_choices_have_the_logprobs_of_hf(backends: dict[str, Backend], tiny_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    backend: Any = backends["engine"]
    head, *wholes = backend.encode(HEAD, ["", *CHOICES])
    means = []
    for ids in wholes:
        with torch.inference_mode():
            values: Tensor = hf(torch.tensor([ids])).logits[0].log_softmax(-1)
        means.append(sum(float(values[at - 1, ids[at]]) for at in range(len(head), len(ids))))
        means[-1] /= len(ids) - len(head)

    @sgl.function
    def choose(s: Any, method: Any) -> None:
        s += HEAD + sgl.select("x", list(CHOICES), choices_method=method)

    picked = set()
    for name in ("server", "engine", "completions"):
        for method in METHODS[: 2 if name == "completions" else 3]:
            state = choose.run(method, backend=backends[name])
            scores = state.get_meta_info("x")["normalized_prompt_logprobs"]
            assert scores == pytest.approx(means, abs=1e-4)
            picked.add((method, state["x"]))
    assert len(picked) == len(METHODS), "the backends do not choose alike"
    assert (METHODS[0], CHOICES[means.index(max(means))]) in picked


def test_what_is_kept_is_read_again(backends: dict[str, Backend]) -> None:
    @sgl.function
    def branches(s: Any, head: str) -> None:
        s += head * 3
        forks = s.fork(2)
        for i, f in enumerate(forks):
            f += f"{i}" + sgl.gen("x", max_tokens=1)
        s["cached"] = [f.get_meta_info("x")["cached_tokens"] for f in forks]

    for name in ("server", "engine"):
        backend, head = backends[name], f"{name}. {HEAD}"
        assert max(branches.run(head, backend=backend)["cached"]) > len(head) * 2
        other = branches.bind(head="other " + head)
        other.cache(backend)
        assert min(other.run(backend=backend)["cached"]) > len(head) * 2
        assert sgl.flush_cache(backend)
        assert min(other.run(backend=backend)["cached"]) == 0
    assert "internal_states" in sgl.get_server_info(backends["server"])


def test_scores_behind_a_cached_text_are_those_of_the_whole(tiny_server: ServerProcess) -> None:
    body: dict[str, Any] = {"text": "Warm. " + HEAD, "sampling_params": {"max_new_tokens": 0}}
    body |= {"return_logprob": True}
    found = []
    for start in (0, 40, 40):
        _, answer = tiny_server.request("POST", "/generate", body | {"logprob_start_len": start})
        found.append(answer["meta_info"])
    cold, *warm = ([row[0] for row in meta["input_token_logprobs"]] for meta in found)
    for values in warm:
        assert values == pytest.approx(cold[40:], abs=1e-4)
    assert found[0]["cached_tokens"] == 0
    assert 0 < found[2]["cached_tokens"] < 40


def test_errors_of_a_server_are_those_of_sgla(backends: dict[str, Backend]) -> None:
    for name in ("server", "engine", "completions"):
        with pytest.raises(InvalidField, match="top_p"):
            text.run(backend=backends[name], top_p=2.0)


@contextmanager
def dying(answer: bytes) -> Iterator[str]:
    """A server that answers every request with ``answer`` and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                while True:
                    with listener.accept()[0] as peer:
                        peer.recv(1 << 16)
                        peer.sendall(answer)
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b'HTTP/1.1 200 OK\r\n\r\ndata: {"text": "a", "meta_info": {}}\n\n',
    ],
    ids=["nothing", "half an answer", "half a stream"],
)
def test_a_dead_server_ends_the_program(answer: bytes) -> None:
    @sgl.function
    def branches(s: Any) -> None:
        s += HEAD
        forks = s.fork(2)
        forks += sgl.gen("x")
        forks.join()

    with dying(answer) as url:
        for stream in (False, True):
            state = text.run(backend=url, stream=True) if stream else None
            with pytest.raises(BackendFailed, match="no answer"):
                list(state.text_iter()) if state is not None else branches.run(backend=url)
    with pytest.raises(BackendFailed, match="refused"):
        branches.run(backend=url)

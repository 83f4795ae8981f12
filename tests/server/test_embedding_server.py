"""``sgla serve`` with an embedding model: the vectors cross the process boundary, and Ctrl-C ends
everything."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import openai
import pytest
from server_process import serving

from sgla import Engine
from sgla.actors.setup import find_model
from sgla.config import Config
from sgla.device import nvidia
from sgla.errors import InvalidField, UnsupportedTask
from sgla.observe.machine import Machine


def test_server_and_engine_give_the_same_vectors(tiny_bert: Path) -> None:
    texts = [f"w{i % 20} w{i % 7} w{i % 3}" * (1 + i % 4) for i in range(100)]
    with serving("--model", str(tiny_bert), "--device", "cpu") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found = [item.embedding for item in client.embeddings.create(model=str(tiny_bert), input=texts).data]
        with pytest.raises(openai.BadRequestError, match="serve a model that generates"):
            client.completions.create(model=str(tiny_bert), prompt="w1")
        server.signal(signal.SIGINT)
        assert server.wait() == 0
        assert "/v1/embeddings" in server.output
        assert "KV cache" not in server.output
    with Engine(str(tiny_bert), device="cpu", executor="inline", threads=1) as engine:
        vectors = engine.embed(texts)
        np.testing.assert_allclose(vectors, found, atol=1e-5)
        assert engine.embed(texts[0]).shape == (32,)
        scores = engine.score(texts[0], texts[1:4])
        np.testing.assert_allclose(scores, vectors[1:4] @ vectors[0], atol=1e-5)
        for query, documents, named in (
            (None, "w1", "query must be a text, got None"),
            ("w1", 5, "documents must be a text or a list of texts, got a value of type int"),
            ("w1", ["w1", None], "documents must have texts alone, got None"),
            (["w1"], "w1", "query must be a text, got"),
        ):
            with pytest.raises(InvalidField, match=named):
                engine.score(query, documents)
        with pytest.raises(UnsupportedTask):
            engine.classify("w1")
        with pytest.raises(UnsupportedTask):
            engine.generate("w1")


def test_a_gpu_is_used_where_there_is_one(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Machine(
        cores=1,
        physical_cores=1,
        memory_available=4 << 30,
        gpus=(nvidia("NVIDIA H200", (9, 0), 132, 140 << 30),),
        torch_cuda="13.0",
    )
    monkeypatch.setattr("sgla.resolve.detect", lambda: gpu)
    for asked, device, dtype in (
        ("auto", "cuda", "bfloat16"),
        ("cuda", "cuda", "bfloat16"),
        ("cpu", "cpu", "float32"),
    ):
        found, _, _ = find_model(Config(model=str(tiny_bert), device=asked), lambda progress: None)
        assert (found.device, found.dtype) == (device, dtype)

"""The routes that answer with vectors, in front of real tiny models, against HF transformers."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from openai import AsyncOpenAI
from test_openapi import fits
from vector_models import serving, tokenizer, write_model

from sgla.http.app import ROUTES
from sgla.http.openapi import document

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10 w11", "w1 w2 w3 w4"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("embedder")
    return folder, write_model(folder, "bert", "AutoModel", "mean_tokens")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("reranker")
    return folder, write_model(folder, "bert", "AutoModelForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("classifier")
    labels = {0: "safe", 1: "toxic", 2: "spam"}
    return folder, write_model(folder, "bert", "AutoModelForSequenceClassification", id2label=labels)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("generator")
    settings = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    return folder, write_model(folder, "qwen3", "AutoModelForCausalLM", **settings)


@torch.no_grad()
def embedding(hf: Any, text: str) -> Any:
    hidden = hf(torch.tensor([tokenizer().encode(text).ids])).last_hidden_state[0].mean(0)
    return (hidden / hidden.norm()).numpy()


@torch.no_grad()
def logits(hf: Any, *texts: str) -> Any:
    encoded = tokenizer().encode(*texts)
    return hf(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids])).logits[0]


def error(answer: tuple[int, Any]) -> tuple[int, str, str | None]:
    status, body = answer
    return status, body["error"]["code"], body["error"]["param"]


async def test_embeddings_of_the_openai_client_equal_transformers(embedder: tuple[Path, Any]) -> None:
    folder, hf = embedder
    async with serving(folder) as (site, _):
        client: AsyncOpenAI = site.lenient
        encoded = await client.embeddings.create(model="tiny", input=TEXTS)  # asks for base64
        plain = await client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
        assert [item.index for item in encoded.data] == [0, 1, 2, 3]
        for text, a, b in zip(TEXTS, encoded.data, plain.data):
            np.testing.assert_allclose(a.embedding, b.embedding, atol=1e-6)
            np.testing.assert_allclose(a.embedding, embedding(hf, text), atol=1e-5)
        count = sum(len(tokenizer().encode(text).ids) for text in TEXTS)
        assert (encoded.usage.prompt_tokens, encoded.usage.total_tokens) == (count, count)
        alone = await client.embeddings.create(model="tiny", input=TEXTS[2])
        np.testing.assert_allclose(alone.data[0].embedding, encoded.data[2].embedding, atol=1e-6)
        ids = [tokenizer().encode(text).ids for text in TEXTS]
        as_ids = await client.embeddings.create(model="tiny", input=ids)
        for a, b in zip(as_ids.data, encoded.data, strict=True):
            np.testing.assert_allclose(a.embedding, b.embedding, atol=1e-6)
        one = await client.embeddings.create(model="tiny", input=ids[0])
        assert len(one.data) == 1
        status, native = await site.post("/encode", {"text": TEXTS})
        assert status == 200
        for a, b in zip(native, encoded.data):
            np.testing.assert_allclose(a["embedding"], b.embedding, atol=1e-6)
        assert native[1]["meta_info"]["prompt_tokens"] == 3
        assert native[1]["meta_info"]["weight_version"] == "default"
        assert (await site.post("/update_weight_version", {"new_version": "two"}))[0] == 200
        status, single = await site.post("/encode", {"input_ids": ids[0]})
        np.testing.assert_allclose(single["embedding"], encoded.data[0].embedding, atol=1e-6)
        assert single["meta_info"]["weight_version"] == "two"


async def test_shape_of_an_answer(embedder: tuple[Path, Any]) -> None:
    folder, _ = embedder
    async with serving(folder) as (site, _):
        async with site.http.post(
            "/v1/embeddings",
            json={"input": "w1", "encoding_format": "base64", "user": "me", "odd": 1},
            headers={"X-Request-Id": "mine"},
        ) as response:
            body = await response.json()
            assert response.headers["x-request-id"] == "mine"
            assert response.headers["x-ignored-fields"] == "odd"
        raw = base64.b64decode(body["data"][0].pop("embedding"))
        assert len(raw) == 4 * 32
        assert np.linalg.norm(np.frombuffer(raw, "<f4")) == pytest.approx(1)
        assert body == {
            "object": "list",
            "data": [{"object": "embedding", "index": 0}],
            "model": "tiny",
            "usage": {"prompt_tokens": 3, "total_tokens": 3},
        }
        _, info = await site.get("/get_model_info")
        assert info["is_generation"] is False
        status, _ = await site.get("/health_generate")
        assert status == 200
        _, raw_vector = await site.post("/v1/embeddings", {"input": "w1", "normalize": False})
        assert np.linalg.norm(raw_vector["data"][0]["embedding"]) > 1.1
        async with site.http.get("/metrics") as response:
            text = await response.text()
        assert 'sgla:num_requests_total{finish_reason="stop",model_name="tiny"} 3.0' in text
        assert 'sgla:max_total_num_tokens{model_name="tiny"} 0.0' in text


async def test_answers_are_as_described(
    embedder: tuple[Path, Any], classifier: tuple[Path, Any], generator: tuple[Path, Any]
) -> None:
    described = document(ROUTES)
    asked: list[tuple[Path, dict[str, Any]]] = [
        (embedder[0], {"/v1/embeddings": {"input": ["w1"]}, "/encode": {"text": ["w1", "w2"]}}),
        (
            embedder[0],
            {"/v1/embeddings": {"input": "w1", "encoding_format": "base64"}, "/encode": {"text": "w1"}},
        ),
        (embedder[0], {"/v1/score": {"text_1": "w1", "text_2": ["w2"]}}),
        (embedder[0], {"/pooling": {"input": ["w1"]}, "/v2/embed": {"texts": ["w1"]}}),
        (embedder[0], {"/v2/embed": {"texts": ["w1"], "embedding_types": ["base64", "binary"]}}),
        (
            embedder[0],
            {
                "/api/embed": {"model": "tiny", "input": "w1"},
                "/api/embeddings": {"model": "tiny", "prompt": "w1"},
            },
        ),
        (embedder[0], {"/v1/rerank": {"query": "w1", "documents": ["w2", "w3"]}}),
        (classifier[0], {"/v1/classify": {"input": "w1"}, "/v1/moderations": {"input": ["w1", "w2"]}}),
        (classifier[0], {"/classify": {"text": "w1"}}),
        (classifier[0], {"/classify": {"text": ["w1", "w2"]}}),
        (generator[0], {"/v1/score": {"query": "w1", "items": ["w2"], "label_token_ids": [3, 4]}}),
        (generator[0], {"/generative_scoring": {"query": "w1", "items": ["w2"], "label_token_ids": [3, 4]}}),
    ]
    for folder, bodies in asked:
        async with serving(folder, moderation_labels=["toxic=harassment"]) as (site, _):
            for path, body in bodies.items():
                status, answer = await site.post(path, body)
                assert status == 200, answer
                content = described["paths"][path]["post"]["responses"]["200"]["content"]
                fits(described, content["application/json"]["schema"], answer)


async def test_embeddings_by_other_names(embedder: tuple[Path, Any]) -> None:
    folder, hf = embedder
    async with serving(folder) as (site, _):
        expected = [embedding(hf, text) for text in TEXTS]
        for path, body in (
            ("/pooling", {"input": TEXTS}),
            ("/pooling", {"input": TEXTS, "task": "embed", "encoding_format": "base64"}),
            ("/invocations", {"input": TEXTS}),
        ):
            _, reply = await site.post(path, body)
            for item, row in zip(reply["data"], expected, strict=True):
                found = item.get("data") or item["embedding"]
                if isinstance(found, str):
                    found = np.frombuffer(base64.b64decode(found), "<f4")
                np.testing.assert_allclose(found, row, atol=1e-5)
        _, raw = await site.post("/pooling", {"input": TEXTS[0], "use_activation": False})
        length = np.linalg.norm(raw["data"][0]["data"])
        assert abs(length - 1) > 0.1
        _, ollama = await site.post("/api/embed", {"model": "tiny:latest", "input": TEXTS})
        np.testing.assert_allclose(ollama["embeddings"], expected, atol=1e-5)
        assert ollama["prompt_eval_count"] == sum(len(tokenizer().encode(text).ids) for text in TEXTS)
        _, old = await site.post("/api/embeddings", {"model": "tiny", "prompt": TEXTS[0]})
        np.testing.assert_allclose(old["embedding"], raw["data"][0]["data"], atol=1e-5)
        status, wrong = await site.post("/api/embed", {"model": "other", "input": "w1"})
        assert (status, list(wrong)) == (404, ["error"])
        long = " ".join(["w1"] * 60)
        assert (await site.post("/api/embed", {"model": "tiny", "input": long}))[0] == 200
        asked = {"model": "tiny", "input": long, "truncate": False}
        assert (await site.post("/api/embed", asked))[0] == 400


async def test_embeddings_of_cohere(embedder: tuple[Path, Any]) -> None:
    folder, hf = embedder
    forms = ["float", "base64", "binary", "ubinary"]
    async with serving(folder) as (site, _):
        body = {"model": "tiny", "input_type": "search_query", "embedding_types": forms, "texts": TEXTS}
        async with site.http.post("/v2/embed", json=body) as response:
            assert response.headers["x-ignored-fields"] == "input_type"
            found = await response.json()
        assert (found["texts"], found["embeddings"].keys()) == (TEXTS, set(forms))
        assert found["meta"]["billed_units"]["input_tokens"] == sum(
            len(tokenizer().encode(text).ids) for text in TEXTS
        )
        for i, text in enumerate(TEXTS):
            row = embedding(hf, text)
            floats, packed, bits, unsigned = (found["embeddings"][form][i] for form in forms)
            np.testing.assert_allclose(floats, row, atol=1e-5)
            np.testing.assert_allclose(np.frombuffer(base64.b64decode(packed), "<f4"), row, atol=1e-5)
            assert np.unpackbits(np.array(unsigned, np.uint8)).tolist() == [int(v >= 0) for v in floats]
            assert [value + 128 for value in bits] == unsigned
        parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
        _, same = await site.post("/v2/embed", {"inputs": parts})
        assert same["embeddings"] == {"float": found["embeddings"]["float"]}
        long = " ".join(["w1"] * 60)
        _, cut = await site.post("/v2/embed", {"texts": [long], "max_tokens": 5})
        assert cut["meta"]["billed_units"]["input_tokens"] == 5
        for wrong, param in (
            ({}, "texts"),
            ({"texts": []}, "texts"),
            ({"texts": ["w1"], "inputs": parts}, "texts"),
            ({"texts": ["w1"], "images": ["x"]}, "images"),
            ({"texts": ["w1"], "truncate": "START"}, "truncate"),
            ({"texts": [long], "truncate": "NONE"}, "input"),
            ({"texts": ["w1"], "truncate": "NONE", "max_tokens": 3}, "max_tokens"),
            ({"texts": ["w1"], "embedding_types": ["int8"]}, "embedding_types"),
            ({"texts": ["w1"], "output_dimension": 8}, "dimensions"),
            ({"inputs": [{"content": [{"type": "image_url"}]}]}, "inputs[0]"),
        ):
            status, reply = await site.post("/v2/embed", wrong)
            assert (status, reply["error"]["param"]) == (400, param), wrong


async def test_bad_inputs_are_refused_by_name(embedder: tuple[Path, Any]) -> None:
    folder, hf = embedder
    long = " ".join(["w1"] * 60)
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": ""}, "invalid_value", "input"),
        ({"input": ["w1", ""]}, "invalid_value", "input"),
        ({"input": [[]]}, "invalid_value", "input"),
        ({"input": ["w1", 3]}, "invalid_value", "input"),
        ({"input": [5, 99]}, "invalid_value", "input"),
        ({"input": [5, -1]}, "invalid_value", "input"),
        ({"input": long}, "context_length_exceeded", "input"),
        ({"input": ["w1", long]}, "context_length_exceeded", "input"),
        ({"input": long * 9}, "context_length_exceeded", "input"),
        ({"input": [1] * 49}, "context_length_exceeded", "input"),
        ({"input": "w1", "dimensions": 8}, "unsupported_parameter", "dimensions"),
        ({"input": "w1", "dimensions": 0}, "invalid_value", "dimensions"),
        ({"input": "w1", "encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": "w1", "truncate_prompt_tokens": -2}, "invalid_value", "truncate_prompt_tokens"),
        ({"input": "w1", "stream": True}, "invalid_value", "stream"),
        ({"input": "w1", "model": "other"}, "model_not_found", "model"),
        ({"input": ["w1"] * 4097}, "invalid_value", "input"),
    ]
    async with serving(folder) as (site, _):
        for body, code, param in cases:
            status = 404 if code == "model_not_found" else 400
            assert error(await site.post("/v1/embeddings", body)) == (status, code, param), body
        _, body = await site.post("/v1/embeddings", {"input": long})
        assert "48 tokens" in body["error"]["message"]
        status, body = await site.post("/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})
        assert body["usage"]["prompt_tokens"] == 48
        expected = embedding(hf, " ".join(["w1"] * 46))
        np.testing.assert_allclose(body["data"][0]["embedding"], expected, atol=1e-5)
        status, _ = await site.post("/v1/embeddings", {"input": "w1", "dimensions": 32})
        assert status == 200


async def test_routes_that_the_model_cannot_answer(
    embedder: tuple[Path, Any], generator: tuple[Path, Any]
) -> None:
    chat = {"messages": [{"role": "user", "content": "w1"}], "max_tokens": 3}
    async with serving(embedder[0]) as (site, _):
        for path, body in {
            "/v1/chat/completions": chat,
            "/v1/completions": {"prompt": "w1"},
            "/v1/responses": {"input": "w1"},
            "/generate": {"text": "w1"},
            "/classify": {"input": "w1"},
            "/v1/moderations": {"input": "w1"},
        }.items():
            status, answer = await site.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "unsupported_task"), path
        status, answer = await site.post("/v1/completions", {"prompt": "w1", "stream": True})
        assert (status, answer["error"]["code"]) == (400, "unsupported_task")
        status, answer = await site.post("/v1/messages", {**chat, "model": "tiny"})
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    async with serving(generator[0]) as (site, _):
        for path, body in {
            "/v1/embeddings": {"input": "w1"},
            "/encode": {"text": "w1"},
            "/rerank": {"query": "w1", "documents": ["w2"]},
            "/v1/score": {"text_1": "w1", "text_2": "w2"},
            "/classify": {"input": "w1"},
            "/v1/moderations": {"input": "w1"},
        }.items():
            status, answer = await site.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "unsupported_task"), path
            assert "--model" in answer["error"]["message"]
        status, _ = await site.post("/v1/completions", {"prompt": "w1", "max_tokens": 3})
        assert status == 200


async def test_rerank_and_score_of_a_cross_encoder_equal_transformers(reranker: tuple[Path, Any]) -> None:
    folder, hf = reranker
    async with serving(folder) as (site, _):
        query, documents = "w20 w21", [*TEXTS, {"text": "w30 w31"}]
        expected = [
            float(torch.sigmoid(logits(hf, query, d if isinstance(d, str) else d["text"])[0]))
            for d in documents
        ]
        order = sorted(range(5), key=lambda i: -expected[i])
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            _, body = await site.post(path, {"query": query, "documents": documents})
            assert [result["index"] for result in body["results"]] == order
            for result in body["results"]:
                assert result["relevance_score"] == pytest.approx(expected[result["index"]], abs=1e-5)
            assert body["results"][0].keys() == {"index", "relevance_score", "document"}
        _, body = await site.post(
            "/rerank", {"query": query, "documents": documents, "top_n": 2, "return_documents": False}
        )
        assert [set(result) for result in body["results"]] == [{"index", "relevance_score"}] * 2
        _, body = await site.post("/v1/score", {"text_1": query, "text_2": TEXTS})
        assert [item["score"] for item in body["data"]] == pytest.approx(expected[:4], abs=1e-5)
        _, body = await site.post("/score", {"text_1": TEXTS, "text_2": TEXTS})
        pairs = [float(torch.sigmoid(logits(hf, text, text)[0])) for text in TEXTS]
        assert [item["score"] for item in body["data"]] == pytest.approx(pairs, abs=1e-5)
        part = {"type": "text", "text": query}
        for pair in (
            {"data_1": query, "data_2": TEXTS},
            {"data_1": {"content": [part]}, "data_2": [{"text": text} for text in TEXTS]},
            {"queries": query, "documents": TEXTS},
            {"queries": [query] * 4, "items": TEXTS},
        ):
            _, body = await site.post("/v1/score", pair)
            assert [item["score"] for item in body["data"]] == pytest.approx(expected[:4], abs=1e-5)
        _, body = await site.post("/v1/score", {"query": query, "items": TEXTS})
        assert body["scores"] == pytest.approx(expected[:4], abs=1e-5)
        long = " ".join(["w2"] * 60)
        rerank = {"query": query, "documents": [long]}
        assert error(await site.post("/rerank", rerank)) == (400, "context_length_exceeded", "input")
        _, body = await site.post("/rerank", {**rerank, "truncate_prompt_tokens": -1})
        cut = float(torch.sigmoid(logits(hf, query, " ".join(["w2"] * 43))[0]))
        assert body["results"][0]["relevance_score"] == pytest.approx(cut, abs=1e-5)
        assert body["usage"]["prompt_tokens"] == 48
        for wrong, param in (
            ({"query": "", "documents": ["w1"]}, "query"),
            ({"query": "w1", "documents": []}, "documents"),
            ({"query": "w1", "documents": [{"title": "w1"}]}, "documents"),
            ({"query": "w1", "documents": ["w1"], "top_n": 0}, "top_n"),
        ):
            assert error(await site.post("/rerank", wrong)) == (400, "invalid_value", param)
        for wrong, param in (
            ({"text_1": ["w1", "w2"], "text_2": ["w1"] * 3}, "text_1"),
            ({"text_1": "w1", "text_2": "w1", "queries": "w1"}, "queries"),
            ({"queries": "w1"}, "documents"),
            ({"data_1": "w1"}, "data_2"),
            ({"data_1": "w1", "data_2": {"content": [{"type": "image_url"}]}}, "data_2"),
        ):
            assert error(await site.post("/v1/score", wrong)) == (400, "invalid_value", param)


async def test_scores_of_an_embedding_model_are_cosines(embedder: tuple[Path, Any]) -> None:
    folder, hf = embedder
    async with serving(folder) as (site, _):
        expected = [float(embedding(hf, "w20 w21") @ embedding(hf, text)) for text in TEXTS]
        _, body = await site.post("/v1/score", {"text_1": "w20 w21", "text_2": TEXTS})
        assert [item["score"] for item in body["data"]] == pytest.approx(expected, abs=1e-5)
        _, body = await site.post("/rerank", {"query": "w20 w21", "documents": TEXTS})
        assert {r["index"]: r["relevance_score"] for r in body["results"]} == pytest.approx(
            dict(enumerate(expected)), abs=1e-5
        )


async def test_classes_and_moderations(classifier: tuple[Path, Any], reranker: tuple[Path, Any]) -> None:
    folder, hf = classifier
    async with serving(folder) as (site, _):
        expected = [logits(hf, text) for text in TEXTS]
        for path in ("/classify", "/v1/classify"):
            _, body = await site.post(path, {"input": TEXTS})
            for item, values in zip(body["data"], expected):
                assert item["probs"] == pytest.approx(values.softmax(-1).tolist(), abs=1e-5)
                assert item["label"] == ["safe", "toxic", "spam"][int(values.argmax())]
                assert item["num_classes"] == 3
        _, body = await site.post("/classify", {"input": TEXTS[0], "use_activation": False})
        assert body["data"][0]["probs"] == pytest.approx(expected[0].tolist(), abs=1e-5)
        _, body = await site.post("/classify", {"text": TEXTS})
        assert body[2]["embedding"] == pytest.approx(expected[2].tolist(), abs=1e-5)
        assert body[2]["meta_info"]["weight_version"] == "default"
        found = await site.client.moderations.create(input=TEXTS, model="tiny")
        for result, values in zip(found.results, expected):
            probabilities = values.softmax(-1).tolist()
            assert result.category_scores.harassment == pytest.approx(probabilities[1], abs=1e-5)
            assert result.categories.harassment is (probabilities[1] >= 0.5)
            assert result.flagged is (max(probabilities[1:]) >= 0.5)
            assert result.category_scores.sexual == 0.0
        part = {"type": "text", "text": TEXTS[0]}
        _, body = await site.post("/v1/moderations", {"input": [part]})
        assert body["results"][0]["category_scores"]["spam"] == pytest.approx(
            float(expected[0].softmax(-1)[2]), abs=1e-5
        )
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        assert error(await site.post("/v1/moderations", {"input": [part, image]}))[2] == "input"
        assert error(await site.post("/rerank", {"query": "w1", "documents": ["w2"]})) == (
            400,
            "unsupported_task",
            "model",
        )
    async with serving(folder, moderation_labels=["safe=", "toxic=hate", "spam="]) as (site, _):
        _, body = await site.post("/v1/moderations", {"input": TEXTS[0]})
        assert body["results"][0]["category_scores"]["hate"] == pytest.approx(
            float(expected[0].softmax(-1)[1]), abs=1e-5
        )
        assert "spam" not in body["results"][0]["categories"]
    async with serving(reranker[0]) as (site, _):
        status, body = await site.post("/v1/moderations", {"input": "w1"})
        assert (status, body["error"]["code"]) == (400, "unsupported_task")
        assert "--moderation-labels" in body["error"]["message"]


async def test_labels_behind_items_and_reranking_by_a_model_of_text(generator: tuple[Path, Any]) -> None:
    folder, hf = generator

    @torch.no_grad()
    def logprobs(text: str) -> Any:
        return hf(torch.tensor([tokenizer().encode(text).ids])).logits[0, -1].log_softmax(-1)

    asked = {"query": "w1 w2 ", "items": ["w3", "w4 w5"], "label_token_ids": [4, 5, 9]}
    async with serving(folder) as (site, _):
        _, body = await site.post("/v1/score", asked)
        assert body["object"] == "scoring"
        for found, text in zip(body["scores"], ("w1 w2 w3", "w1 w2 w4 w5")):
            assert found == pytest.approx(logprobs(text)[[4, 5, 9]].exp().tolist(), abs=1e-5)
        _, body = await site.post("/v1/score", {**asked, "apply_softmax": True})
        assert sum(body["scores"][0]) == pytest.approx(1)
        first = {**asked, "query": " w1 w2", "item_first": True}
        _, body = await site.post("/v1/score", first)
        assert body["scores"][0] == pytest.approx(logprobs("w3 w1 w2")[[4, 5, 9]].exp().tolist(), abs=1e-5)
        _, generative = await site.post("/generative_scoring", {**asked, "items": ["w3", "w4 w5"]})
        for item, text in zip(generative["data"], ("w1 w2 w3", "w1 w2 w4 w5")):
            labels = logprobs(text)[[4, 5, 9]].softmax(-1)
            assert item["score"] == pytest.approx(float(labels[0]), abs=1e-5)
        _, whole = await site.post("/generative_scoring", {**asked, "apply_softmax": False})
        assert whole["data"][0]["score"] == pytest.approx(float(logprobs("w1 w2 w3")[4].exp()), abs=1e-5)
        for labels in ([10_000], [4] * 513):
            wrong = {**asked, "label_token_ids": labels}
            assert error(await site.post("/v1/score", wrong)) == (400, "invalid_value", "label_token_ids")
    async with serving(folder, task="rerank") as (site, _):
        from sgla.text.reranking import prompt

        _, body = await site.post("/rerank", {"query": "w1", "documents": ["w2", "w3"]})
        for result in body["results"]:
            both = logprobs(prompt("w1", ["w2", "w3"][result["index"]]))[[4, 5]]
            assert result["relevance_score"] == pytest.approx(float(both.softmax(-1)[1]), abs=1e-5)


async def test_a_long_list_is_answered_in_parts_and_ends_with_its_client(embedder: tuple[Path, Any]) -> None:
    folder, _ = embedder
    texts = [f"w{i % 40} w{i % 7}" for i in range(1500)]
    async with serving(folder, max_queued_requests=20, max_running_requests=10) as (site, system):
        whole = await site.lenient.embeddings.create(model="tiny", input=texts)
        assert [item.index for item in whole.data] == list(range(1500))
        again = await site.lenient.embeddings.create(model="tiny", input=texts[1490:])
        for a, b in zip(whole.data[1490:], again.data):
            np.testing.assert_allclose(a.embedding, b.embedding, atol=1e-6)
        system.ingress.pause(True)
        with pytest.raises(asyncio.TimeoutError):
            await site.http.post(
                "/v1/embeddings", json={"input": texts}, timeout=aiohttp.ClientTimeout(total=0.3)
            )
        for _ in range(100):
            if not system.ingress.open_requests:
                break
            await asyncio.sleep(0.02)
        assert system.ingress.open_requests == 0
        system.ingress.pause(False)
        await site.lenient.embeddings.create(model="tiny", input=texts[:3])
        status, body = await site.post("/v1/embeddings", {"input": texts[:2], "timeout": 30})
        assert status == 200, body


async def test_a_causal_embedder_reads_its_cache_and_cuts_its_vectors(tmp_path: Path) -> None:
    settings = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    hf = write_model(tmp_path, "qwen3", "AutoModelForCausalLM", "lasttoken", **settings)
    text = " ".join(f"w{i % 40}" for i in range(60))
    with torch.no_grad():
        hidden = hf.model(torch.tensor([tokenizer().encode(text).ids])).last_hidden_state[0, -1]
    async with serving(tmp_path) as (site, system):
        for _ in range(2):
            found = await site.lenient.embeddings.create(model="tiny", input=text)
            np.testing.assert_allclose(found.data[0].embedding, (hidden / hidden.norm()).numpy(), atol=1e-5)
        stats = system.ingress.stats()
        assert stats is not None
        assert stats.hit_tokens == 48
        short = await site.lenient.embeddings.create(model="tiny", input=text, dimensions=8)
        expected = hidden[:8] / hidden[:8].norm()
        np.testing.assert_allclose(short.data[0].embedding, expected.numpy(), atol=1e-5)
        assert error(await site.post("/v1/embeddings", {"input": text, "dimensions": 33})) == (
            400,
            "invalid_value",
            "dimensions",
        )


async def test_the_reward_of_a_conversation(tmp_path: Path) -> None:
    settings = {"num_key_value_heads": 2, "head_dim": 8, "num_labels": 1, "pad_token_id": 0}
    hf = write_model(tmp_path, "llama", "AutoModelForSequenceClassification", **settings)
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    chat = [{"role": "user", "content": "w2 w3"}, {"role": "assistant", "content": "w4"}]
    rendered = tokenizer().encode("user w2 w3 assistant w4", add_special_tokens=False).ids
    with torch.no_grad():
        expected = float(hf(torch.tensor([rendered])).logits[0, 0])
    async with serving(tmp_path) as (site, _):
        status, body = await site.post("/classify", {"messages": chat, "use_activation": False})
        assert status == 200, body
        assert body["data"][0]["probs"] == pytest.approx([expected], abs=1e-5)
        assert body["data"][0]["label"] == "LABEL_0"
        _, native = await site.post("/classify", {"text": "w1 w2"})
        with torch.no_grad():
            alone = float(hf(torch.tensor([tokenizer().encode("w1 w2").ids])).logits[0, 0])
        assert native["embedding"] == pytest.approx([alone], abs=1e-5)

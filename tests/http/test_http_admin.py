"""Models, health, tokenizing, cache, metrics over HTTP."""

from __future__ import annotations

from typing import Any

import pytest
from http_fake import BOS, FakeIngress
from http_site import Serve, Site
from prometheus_client.parser import text_string_to_metric_families

from sgla import __version__


async def test_models(site: Site) -> None:
    models = (await site.client.models.list()).data
    assert [model.id for model in models] == ["fake", "fake-alias"]
    assert models[0].model_extra["max_model_len"] == 4096
    assert (await site.client.models.retrieve("fake-alias")).id == "fake-alias"
    assert (await site.get("/v1/models/other"))[0] == 404
    site.ingress.model_names = ["org/name"]
    for path in ("/v1/models/org/name", "/v1/models/org%2Fname"):
        assert (await site.get(path))[1]["id"] == "org/name"


async def test_health(site: Site) -> None:
    for path in ("/health", "/health/live", "/health/ready", "/health_generate", "/ready", "/ping"):
        assert (await site.get(path))[0] == 200
    assert site.ingress.jobs[0].sampling.max_tokens == 1
    site.ingress.phase = "draining"
    assert (await site.get("/health"))[0] == 503
    assert (await site.get("/health_generate"))[0] == 503
    assert (await site.get("/health/live"))[0] == 200


async def test_facts(serve: Serve) -> None:
    site = await serve(api_key=["sesame"], key="sesame")
    site.http.headers["Authorization"] = "Bearer sesame"
    assert (await site.get("/version"))[1] == {"version": __version__}
    _, info = await site.get("/get_model_info")
    assert info["is_generation"] is True
    assert info["preferred_sampling_params"] == {"temperature": 0.6, "top_k": 50}
    assert set(info["sampling_sources"].values()) == {"generation_config.json"}
    async with site.http.get("/get_server_info") as response:
        text = await response.text()
        info = await response.json()
    assert "sesame" not in text
    assert (info["internal_states"][0]["pages_total"], info["facts"]["slots"]) == (256, 64)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_back(site: Site, prefix: str) -> None:
    _, reply = await site.post(f"{prefix}/tokenize", {"prompt": "h\u00e9", "return_token_strs": True})
    assert reply == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [BOS, 104, 195, 169],
        "token_strs": [f"<{token}>" for token in (BOS, 104, 195, 169)],
    }
    _, back = await site.post(f"{prefix}/detokenize", {"tokens": reply["tokens"][1:]})
    assert back == {"prompt": "h\u00e9", "text": "h\u00e9"}


async def test_tokenize_lists_chats_and_long_texts(site: Site) -> None:
    _, reply = await site.post("/tokenize", {"prompt": ["a", "bc"], "add_special_tokens": False})
    assert (reply["tokens"], reply["count"]) == ([[97], [98, 99]], [1, 2])
    assert (await site.post("/detokenize", {"tokens": [[97], [98, 99]]}))[1]["text"] == ["a", "bc"]
    _, reply = await site.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert bytes(reply["tokens"]) == b"<user>x<assistant>"
    assert (await site.post("/tokenize", {"prompt": "x" * 50_000}))[1]["count"] == 50_001


async def test_flush_cache(site: Site) -> None:
    for path in ("/flush_cache", "/reset_prefix_cache"):
        assert (await site.post(path, b""))[0] == 200
    site.ingress.flushable = False
    status, reply = await site.post("/flush_cache", b"")
    assert (status, reply["error"]["code"]) == (409, "busy")


async def scrape(site: Site) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    async with site.http.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        families: Any = text_string_to_metric_families(await response.text())
    samples = [s for family in families if not family.name.startswith("process_") for s in family.samples]
    assert all(sample.labels.pop("model_name") == "fake" for sample in samples)
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}


async def test_http_metrics(serve: Serve) -> None:
    site = await serve(FakeIngress())
    await site.post("/v1/completions", {"prompt": "x"})
    await site.sse("/v1/completions/", {"prompt": "x", "stream": True})
    await site.post("/v1/completions", {})
    await site.get("/random/path")
    values = await scrape(site)
    assert values["sgla:http_requests_total", (("endpoint", "/v1/completions"), ("method", "POST"))] == 3
    assert values["sgla:http_requests_total", (("endpoint", "unknown"), ("method", "GET"))] == 1
    responses = {key[1]: value for key, value in values.items() if key[0] == "sgla:http_responses_total"}
    post = (("endpoint", "/v1/completions"), ("method", "POST"))
    assert responses == {
        (*post, ("status", "200")): 2,
        (*post, ("status", "400")): 1,
        (("endpoint", "unknown"), ("method", "GET"), ("status", "404")): 1,
    }
    assert values["sgla:http_requests_active", ()] == 1  # the scrape itself
    assert values["sgla:num_running_reqs", ()] == 0
    assert values["sgla:max_total_num_tokens", ()] == 256 * 16
    assert values["sgla:token_usage", ()] == (256 - 200 - 40) / 256

"""Vectors of pictures, in the shapes of vLLM's, SGLang's and Cohere's requests, against transformers."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from http_site import Serve, Site
from PIL import Image
from test_pictures import BASE64, BLUE, DATA, PICTURES, RED, seeing
from vector_models import WORDS, serving, tokenizer

from sgla import LLM
from sgla.messages import Pooling

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 16},
    "crop_size": {"height": 16, "width": 16},
}


def clip(folder: Path) -> Any:
    from transformers import CLIPConfig, CLIPModel

    text = {**SIZES, "vocab_size": len(WORDS), "max_position_embeddings": 20, "eos_token_id": 3}
    text |= {"bos_token_id": 2, "pad_token_id": 0}
    tower = {**SIZES, "patch_size": 4, "image_size": 16}
    torch.manual_seed(0)
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=tower, projection_dim=16)).eval()
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))
    return model


@torch.no_grad()
def of_picture(model: Any, data: bytes) -> Any:
    from transformers import CLIPImageProcessorPil

    shown = Image.open(io.BytesIO(data)).convert("RGB")
    pixels = CLIPImageProcessorPil.from_dict(IMAGES)(images=[shown], return_tensors="pt")["pixel_values"]
    return unit(model.get_image_features(pixels).pooler_output[0].numpy())


@torch.no_grad()
def of_text(model: Any, text: str) -> Any:
    ids = torch.tensor([tokenizer().encode(text).ids])
    return unit(model.get_text_features(ids).pooler_output[0].numpy())


def unit(values: Any) -> Any:
    return values / np.linalg.norm(values)


async def rows(site: Site, body: dict[str, Any]) -> list[Any]:
    status, answer = await site.post("/v1/embeddings", body)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] > 0
    return [entry["embedding"] for entry in answer["data"]]


def said(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def url(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data}}


async def test_a_pair_of_encoders(tmp_path: Path) -> None:
    """Texts and pictures in one list, one in a conversation, and in Cohere's shapes."""
    model = clip(tmp_path)
    text, pictures = of_text(model, "w1 w2"), [of_picture(model, data) for data in (RED, BLUE)]
    async with serving(tmp_path) as (site, _):
        objects = [{"text": "w1 w2"}, {"image": DATA[0]}, {"image": BASE64[1]}]
        for found, expected in zip(await rows(site, {"input": objects}), [text, *pictures], strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        (found,) = await rows(site, {"input": "w1 w2"})
        np.testing.assert_allclose(found, text, atol=1e-5)
        (found,) = await rows(site, {"messages": said(url(DATA[0]))})
        np.testing.assert_allclose(found, pictures[0], atol=1e-5)
        (found,) = await rows(site, {"messages": said({"type": "text", "text": "w1 w2"})})
        np.testing.assert_allclose(found, text, atol=1e-5)
        for body in ({"images": DATA}, {"inputs": [{"content": [url(each)]} for each in DATA]}):
            status, answer = await site.post("/v2/embed", body)
            assert status == 200, answer
            np.testing.assert_allclose(answer["embeddings"]["float"], pictures, atol=1e-5)


WRONG = [
    ({"input": [{"text": "w1", "image": DATA[0]}]}, "input[0]"),
    ({"input": [{"text": "w1"}, {}]}, "input[1]"),
    ({"input": [{"text": "w1"}, "w2"]}, "input[1]"),
    ({"input": [{"image": 5}]}, "input[0]"),
    ({"input": [{"image": "http://127.0.0.1/x.png"}]}, "input[0].image"),
    ({"input": [{"text": "w1"}, {"video": DATA[0]}]}, "input[1].video"),
    ({"input": [{"text": "w1", "depth": "x"}]}, "input[0]"),
    ({"messages": said({"type": "text", "text": "w1"}, url(DATA[0]))}, "messages"),
    ({"input": [{"image": DATA[0]}], "truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
    ({"input": [{"image": DATA[0]}], "mm_processor_kwargs": {"size": 5}}, "mm_processor_kwargs"),
    (
        {"messages": said(url(DATA[0])), "continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
    ),
]


async def test_what_is_no_input(tmp_path: Path) -> None:
    clip(tmp_path)
    async with serving(tmp_path) as (site, _):
        for body, param in WRONG:
            status, answer = await site.post("/v1/embeddings", body)
            assert (status, answer["error"]["param"]) == (400, param), (body, answer)


@pytest.mark.parametrize(
    ("body", "expected", "generates"),
    [
        (
            {"input": [{"text": "a", "image": DATA[0]}]},
            [{"type": "image"}, {"type": "text", "text": "a"}],
            True,
        ),
        ({"input": [{"text": "a"}]}, [{"type": "text", "text": "a"}], True),
        ({"messages": said(url(DATA[0]))}, [{"type": "image"}], False),
        ({"messages": said(url(DATA[0])), "add_generation_prompt": True}, [{"type": "image"}], True),
    ],
)
async def test_conversations(serve: Serve, body: dict[str, Any], expected: Any, generates: bool) -> None:
    """Of a model whose chat template shows pictures."""
    ingress = seeing()
    assert ingress.facts is not None
    ingress.facts.pooling = Pooling(task="embed", kind="last", size=4)
    site = await serve(ingress)
    await site.post("/v1/embeddings", body)
    (job,) = site.ingress.jobs
    assert job.messages == [{"role": "user", "content": expected}]
    assert job.add_generation_prompt is generates
    assert job.pictures == PICTURES[: expected.count({"type": "image"})]


async def test_the_engine_and_llm_take_pictures(tmp_path: Path) -> None:
    model = clip(tmp_path)
    shown = Image.open(io.BytesIO(BLUE))

    def run() -> tuple[Any, Any]:
        how: dict[str, Any] = {"executor": "inline", "device": "cpu", "dtype": "float32", "threads": 1}
        with LLM(str(tmp_path), **how) as llm:
            prompts = ["w1 w2", {"prompt": "", "multi_modal_data": {"image": shown}}]
            both = [made.outputs.embedding for made in llm.embed(prompts)]
            return llm.engine.embed("", image_data=RED), both

    red, both = await asyncio.to_thread(run)
    np.testing.assert_allclose(red, of_picture(model, RED), atol=1e-5)
    for found, expected in zip(both, (of_text(model, "w1 w2"), of_picture(model, BLUE)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)

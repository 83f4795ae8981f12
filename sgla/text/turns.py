"""Tokens of the turns of conversations, which come again with every turn behind them.

A tokenizer cuts a text at its special tokens before it does anything else, and reads what is between them
part by part. So a conversation is the tokens of its parts, and those that it had in its last turn are known.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from threading import Lock
from typing import Any

import tokenizers

LEAST = 4096  # characters of a text, and
LONG = 128  # of a part, that is worth looking for
ROOM = 32 << 20  # bytes of what is kept
ENTRY = 200  # of them for a part, beside its tokens
MOST = 256  # special tokens at which texts are cut

Encode = Callable[[list[str]], Sequence[tokenizers.Encoding]]


class Turns:
    """Parts that were encoded lately, by digests of their texts. Thread-safe."""

    def __init__(self, ids: dict[str, int], encode: Encode, room: int = ROOM) -> None:
        """``ids``: of the tokens at which texts may be cut; ``encode``: parts, without tokens around."""
        longest_first = sorted(ids, key=len, reverse=True)
        self._ids, self._cut = ids, re.compile(f"({'|'.join(map(re.escape, longest_first))})")
        self._encode, self._room = encode, room
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def encode(self, text: str, space: str = "") -> array[int]:
        """The tokens of the text, with none around it. What another ``space`` has had is not known."""
        parts = self._cut.split(text)
        found = [self._found(part, space) for part in parts]
        missing = [i for i, tokens in enumerate(found) if tokens is None]
        for i, made in zip(missing, self._encode([parts[i] for i in missing]) if missing else ()):
            tokens = found[i] = array("i", made.ids)
            self._keep(parts[i], space, tokens)
        whole = array("i")
        for known in found:
            whole += known or array("i")
        return whole

    def _found(self, part: str, space: str) -> array[int] | None:
        if not part:
            return array("i")
        if (token := self._ids.get(part)) is not None:
            return array("i", [token])
        if len(part) < LONG:
            return None
        key = _key(part, space)
        with self._lock:
            if (tokens := self._known.get(key)) is not None:
                self._known.move_to_end(key)
        return tokens

    def _keep(self, part: str, space: str, tokens: array[int]) -> None:
        if len(part) < LONG:
            return
        key = _key(part, space)
        with self._lock:
            if key not in self._known:
                self._known[key] = tokens
                self._bytes += _size(tokens)
            while self._bytes > self._room:
                self._bytes -= _size(self._known.popitem(last=False)[1])


def turns_of(backend: tokenizers.Tokenizer, encode: Encode) -> Turns | None:
    """None if parts may have other tokens than they have in the text, or there is nothing to cut it at."""
    if backend.encode_special_tokens or any(map(_looks_around, _parts_of(backend.pre_tokenizer))):
        return None
    added = backend.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip or token.single_word for token in added.values()):
        return None
    first = [token.content for token in added.values() if not token.normalized and token.content]
    # A token that begins before another one hides it, and so does a longer one that begins with it.
    every, ends = "\0".join(first), {text[i:] for text in first for i in range(1, len(text))}
    ids = {
        token.content: i
        for i, token in sorted(added.items())
        if token.special
        and token.content in first
        and every.count(token.content) == 1
        and not any(token.content[:n] in ends for n in range(1, len(token.content)))
    }
    return Turns(dict(islice(ids.items(), MOST)), encode) if ids else None


def _looks_around(part: dict[str, Any]) -> bool:
    """It treats the beginning of a text in another way."""
    return part["type"] == "Metaspace" and part.get("prepend_scheme", "always") == "first"


def _parts_of(pre_tokenizer: Any) -> Iterator[dict[str, Any]]:
    """As tokenizer.json has them."""
    if pre_tokenizer is not None:
        found = json.loads(pre_tokenizer.__getstate__())
        yield from found.get("pretokenizers", [found])


def _key(part: str, space: str) -> bytes:
    return blake2b(f"{space}\0{part}".encode(errors="surrogatepass"), digest_size=16).digest()


def _size(tokens: array[int]) -> int:
    return ENTRY + tokens.itemsize * len(tokens)

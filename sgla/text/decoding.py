"""How a tokenizer's decoder turns ids into text, taken apart so that it can run one token at a time.

Three decoders cover the language models that are served: byte-level BPE (GPT-2's byte alphabet),
SentencePiece with byte fallback (``<0xNN>`` tokens, ``▁`` for a space, perhaps one leading space stripped)
and plain ``Metaspace``.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Decoding:
    """``kind``: bytes | pieces | other. The rest matters for pieces.

    ``byte_fallback``: ``<0xNN>`` tokens are bytes. ``strip``: leading spaces removed from the whole text.
    ``bare_first``: the first token loses every space (Metaspace). ``other`` is decoded by the library alone.
    """

    kind: str
    byte_fallback: bool = False
    strip: int = 0
    bare_first: bool = False

    @property
    def trims_start(self) -> bool:
        """Whether the first token of a text decodes otherwise than it would in the middle."""
        return self.strip > 0 or self.bare_first

    def piece(self, token: str) -> str | bytes:
        """What one token string adds in the middle of a text:
        str, or raw bytes that may be part of a character."""
        if self.kind == "bytes":
            return _from_byte_alphabet(token)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return token.replace(SPACE, " ") if self.kind == "pieces" else token


def decoding_of(backend: Backend) -> Decoding:
    """Recognize the decoder of a ``tokenizers`` tokenizer."""
    if backend.decoder is None:
        return Decoding("other")
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Decoding("bytes")
    if kinds == ["Metaspace"] and steps[0]["replacement"] == SPACE:
        return Decoding("pieces", bare_first=steps[0].get("prepend_scheme", "always") != "never")
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_space_replacement(steps[0]):
        if len(kinds) == 3:
            return Decoding("pieces", byte_fallback=True)
        strip = steps[3]
        if kinds[3:] == ["Strip"] and strip["content"] == " " and not strip["stop"]:
            return Decoding("pieces", byte_fallback=True, strip=strip["start"])
    return Decoding("other")


def _is_space_replacement(step: dict[str, Any]) -> bool:
    return step["pattern"] == {"String": SPACE} and step["content"] == " "


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: character -> byte."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = byte_alphabet()
CHAR_OF = {byte: char for char, byte in _BYTE_OF.items()}


def _from_byte_alphabet(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:  # an added token in plain text
        return token.encode()

"""Token ids -> text as they come. Whatever the cuts, the pieces add up to the tokenizer's decode of all ids.

Only what later tokens may still change is held back: bytes of an unfinished character and, where the
tokenizer has byte-fallback tokens, a run of them, because the decode of one invalid run replaces each of its
bytes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from sgla.text.decoding import Decoding
from sgla.text.tables import Piece, Table

if TYPE_CHECKING:
    from sgla.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text state of one output."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` complete."""

    def whole(self, ids: Sequence[int]) -> str | None:
        """As ``feed``, if nothing is held back before and behind. Else, or anyway, None: then none of ``ids``
        is taken."""

    def flush(self) -> str:
        """The end of the text: what was held back, incomplete characters as U+FFFD."""

    def held(self, final: bool) -> int:
        """Characters held back; the unfinished one counts if ``final``."""


def make_detokenizer(
    tokenizer: Tokenizer, skip_special_tokens: bool = True, continues: bool = False
) -> Detokenizer:
    """``continues``: text stands before the output,
    so a tokenizer that strips a text's first space leaves it here."""
    kind = tokenizer.decoding.kind
    if kind == "bytes":
        return ByteDetokenizer(tokenizer.byte_table(skip_special_tokens))
    if kind == "pieces":
        return PieceDetokenizer(tokenizer.piece_table(skip_special_tokens), tokenizer.decoding, continues)
    return WindowDetokenizer(tokenizer, skip_special_tokens)


def continues(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether an output behind ``prompt`` keeps its first space, which the tokenizer strips from a text."""
    return tokenizer.decoding.trims_start and any(i not in tokenizer.special_ids for i in reversed(prompt))


class ByteDetokenizer:
    """Byte-level BPE: one byte string, decoded incrementally."""

    __slots__ = ("_rest", "_table")

    def __init__(self, table: Table[bytes]) -> None:
        self._table = table
        self._rest = b""

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        data = self._rest + (table[ids[0]] if len(ids) == 1 else b"".join([table[i] for i in ids]))
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def whole(self, ids: Sequence[int]) -> str | None:
        if self._rest:
            return None
        table = self._table
        data = b"".join([table[i] for i in ids])
        text, used = utf_8_decode(data, "replace", False)
        return text if used == len(data) else None

    def flush(self) -> str:
        text, _ = utf_8_decode(self._rest, "replace", True)
        self._rest = b""
        return text

    def held(self, final: bool) -> int:
        return 1 if final and self._rest else 0


class PieceDetokenizer:
    """SentencePiece: text pieces, with runs of byte tokens between them."""

    __slots__ = ("_bare", "_run", "_strip", "_table")

    def __init__(self, table: Table[Piece], decoding: Decoding, continues: bool) -> None:
        self._table = table
        self._strip = 0 if continues else decoding.strip
        self._bare = decoding.bare_first and not continues
        self._run = b""

    def feed(self, ids: Sequence[int]) -> str:
        table, text = self._table, ""
        for token in ids:
            piece = table[token]
            if piece is None:
                continue
            if isinstance(piece, bytes):
                self._run += piece
                continue
            if self._run:
                text += self._end_run()
            if self._bare:
                piece, self._bare = piece.replace(" ", ""), False
            text += piece
        return self._stripped(text) if self._strip else text

    def whole(self, ids: Sequence[int]) -> str | None:
        return None

    def flush(self) -> str:
        text = self._end_run()
        return self._stripped(text) if self._strip else text

    def held(self, final: bool) -> int:
        return len(utf_8_decode(self._run, "replace", final)[0]) if self._run else 0

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text.startswith(" "):
            text = text[1:]
            self._strip -= 1
        if text:
            self._strip = 0
        return text


class WindowDetokenizer:
    """Any other decoder:
    decode a short window twice, with and without the new ids, and take the difference."""

    __slots__ = ("_ids", "_read", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0  # ids of the window whose text is out

    def feed(self, ids: Sequence[int]) -> str:
        self._ids.extend(ids)
        return self._advance(final=False)

    def whole(self, ids: Sequence[int]) -> str | None:
        return None

    def flush(self) -> str:
        return self._advance(final=True)

    def held(self, final: bool) -> int:
        return 1 if final and self._read < len(self._ids) else 0

    def _advance(self, final: bool) -> str:
        known = self._tokenizer.decode(self._ids[: self._read], self._skip)
        text = self._tokenizer.decode(self._ids, self._skip)
        if not final and (len(text) <= len(known) or text.endswith(REPLACEMENT)):
            return ""
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        return text[len(known) :]

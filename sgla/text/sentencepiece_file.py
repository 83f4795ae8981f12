"""A ``tokenizers`` tokenizer from SentencePiece's ``tokenizer.model``, with the library's ids."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from sgla.errors import ConfigError
from sgla.text.conversion import add_marks, merges_of
from sgla.text.decoding import SPACE
from sgla.text.gguf_vocab import CONTROL, NORMAL, USER_DEFINED

UNIGRAM, BPE = 1, 2
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5  # kinds of fields in a protobuf message
_IDS = {"unk_token": 40, "bos_token": 41, "eos_token": 42, "pad_token": 43}  # their fields in TrainerSpec
_DEFAULT_IDS = {"unk_token": 0, "bos_token": 1, "eos_token": 2, "pad_token": -1}


@dataclass
class SentencePieces:
    """``kind``: how texts are cut; ``types``: as GGUF numbers them; ``ids``: name of a token -> id;
    ``charsmap``: a compiled normalization; ``prefix``: a space goes before a text; ``squeezed``: runs of
    spaces become one, and none is kept at either end."""

    pieces: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    ids: dict[str, int] = field(default_factory=lambda: dict(_DEFAULT_IDS))
    charsmap: bytes = b""
    prefix: bool = True
    squeezed: bool = True

    def of_type(self, kind: int) -> list[str]:
        return [piece for piece, found in zip(self.pieces, self.types) if found == kind]

    def named(self) -> dict[str, str]:
        """Name -> text of the special tokens that there are."""
        return {name: self.pieces[at] for name, at in self.ids.items() if 0 <= at < len(self.pieces)}


def read_sentencepiece(data: bytes) -> SentencePieces:
    """From the file's bytes. Raises ConfigError for what is not served alike, and ValueError, IndexError,
    TypeError or struct.error for a file that is none."""
    found = SentencePieces()
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            found.pieces.append(piece[1].decode())
            found.scores.append(struct.unpack("<f", piece.get(2, bytes(4)))[0])
            found.types.append(piece.get(3, NORMAL))
        elif number == 2:
            _train(found, dict(_fields(value)))
        elif number == 3:
            rules = dict(_fields(value))
            found.charsmap = rules.get(2, b"")
            found.prefix, found.squeezed = bool(rules.get(3, 1)), bool(rules.get(4, 1))
            if not rules.get(5, 1):
                raise ConfigError("tokenizer.model does not write spaces as ▁, which is not supported")
    if not found.pieces or len(set(found.pieces)) < len(found.pieces):
        raise ConfigError("tokenizer.model has no pieces, or one twice")
    return found


def _train(found: SentencePieces, spec: Mapping[int, Any]) -> None:
    found.kind, found.byte_fallback = spec.get(3, UNIGRAM), bool(spec.get(35, 0))
    found.ids = {name: _signed(spec.get(at, _DEFAULT_IDS[name])) for name, at in _IDS.items()}
    if found.kind not in (UNIGRAM, BPE) or spec.get(24, 0):
        raise ConfigError("tokenizer.model cuts texts into words or characters, which is not supported")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind)
        if kind == _BYTES:
            length, at = _varint(data, at)
        if length is None or at + length > len(data):
            raise ValueError("it is cut off, or no protobuf message")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
    raise ValueError("a number has more than 64 bits")


def backend_of(found: SentencePieces, settings: Mapping[str, Any]) -> Tokenizer:
    """``settings``: tokenizer_config.json, whose ``add_bos_token``, ``add_eos_token``, ``add_prefix_space``
    and ``legacy`` count. Pieces of the user are cut out of a text first, but where all scores count together;
    control tokens are special. Raises ConfigError for what is not served alike."""
    tokenizer = Tokenizer(_bpe(found) if found.kind == BPE else _unigram(found))
    prefix = found.prefix and settings.get("add_prefix_space") is not False
    steps: list[Any] = [normalizers.Precompiled(found.charsmap)] if found.charsmap else []
    if found.squeezed:
        steps += [normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    cuts: list[Any] = []
    if prefix and settings.get("legacy") is False:
        cuts.append(pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False))
    elif prefix:
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    own = sorted(found.of_type(USER_DEFINED), key=len, reverse=True)
    changed = [piece for piece in own if found.charsmap and steps[0].normalize_str(piece) != piece]
    if changed:
        raise ConfigError(
            f"tokenizer.model has a symbol of its own, {changed[0]!r}, which its normalization changes, "
            "and that is not supported; give a tokenizer.json"
        )
    if own and found.kind == BPE:
        cuts.append(pre_tokenizers.Split(Regex("|".join(map(re.escape, own))), "isolated"))
    if cuts:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    unknown = found.named().get("unk_token")
    special = [piece for piece in found.of_type(CONTROL) if piece != unknown]
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    begin, end = (found.ids[name] if found.ids[name] >= 0 else None for name in ("bos_token", "eos_token"))
    adds_begin, adds_end = settings.get("add_bos_token", True), settings.get("add_eos_token", False)
    add_marks(tokenizer, begin if adds_begin else None, end if adds_end else None)
    return tokenizer


def _bpe(found: SentencePieces) -> models.BPE:
    vocab = {piece: index for index, piece in enumerate(found.pieces)}
    made = {
        piece: score for piece, score, kind in zip(found.pieces, found.scores, found.types) if kind == NORMAL
    }
    return models.BPE(
        vocab,
        merges_of(made),
        fuse_unk=True,
        byte_fallback=found.byte_fallback,
        unk_token=found.named().get("unk_token"),
        ignore_merges=USER_DEFINED in found.types,
    )


def _unigram(found: SentencePieces) -> models.Unigram:
    """No path may go through a piece that texts do not have (control, bytes) instead of the user's own."""
    scores = [
        _OWN if kind == USER_DEFINED else score if kind == NORMAL else _NEVER
        for score, kind in zip(found.scores, found.types)
    ]
    pieces = list(zip(found.pieces, scores))
    return models.Unigram(pieces, max(0, found.ids["unk_token"]), found.byte_fallback)


_NEVER = -1e9  # score of a piece in no text
_OWN = -0.125  # of one of the user: a power of two, so that sums are exact and the longer last piece is taken

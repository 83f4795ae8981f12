"""What conversions to a ``tokenizers`` tokenizer have in common: merges found again, marks round a text, a
cache of results."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path

from tokenizers import Tokenizer, processors

from sgla.errors import ConfigError, SglaError

log = logging.getLogger(__name__)

VERSION = 4  # of the conversions; part of the cache key
# Characters looked at to find the merges of SentencePiece; Gemma's vocabulary takes 2 * 10^7.
MOST_WORK = 10**9

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{{end}}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{{end}}"
_NOT_HAN = r"&&[^\p{Han}]]"

# Regular expressions of byte-level vocabularies: each match is merged by itself.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
QWEN35 = QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
TEKKEN = _WORD.replace("{end}", "") + r"|\p{N}|" + _SLASH_TAIL
GPT4O = _WORD.replace("{end}", _CONTRACTIONS + "?") + r"|\p{N}{1,3}|" + _SLASH_TAIL
KIMI = (
    r"[\p{Han}]+|"
    + _WORD.replace("{end}", _CONTRACTIONS + "?")
    .replace(_UPPER, _UPPER[:-1] + _NOT_HAN)
    .replace(_LOWER, _LOWER[:-1] + _NOT_HAN)
    + rf"|\p{{N}}{{1,3}}|{_TAIL}"
)


@contextmanager
def readable(complaint: str) -> Iterator[None]:
    """Turns whatever the ``tokenizers`` library raises,
    plain Exceptions and panics of Rust, into ConfigError."""
    try:
        yield
    except (SglaError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        why = " ".join(str(error).split())[:300]  # it may quote the file
        raise ConfigError(f"{complaint}: {why}", param="tokenizer") from error


def cached(digest: str, cache: Path | None, make: Callable[[], Tokenizer]) -> Tokenizer:
    """What ``make`` returns, or the folder ``cache`` has under ``digest``, which names all that it depends
    on."""
    file = cache / f"{digest}.json" if cache is not None else None
    if file is not None and file.is_file():
        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception; a damaged file is made anew
            log.warning("ignoring the cached tokenizer %s: %s", file, error)
    tokenizer = make()
    if file is not None:
        _save(tokenizer, file)
    return tokenizer


def _save(tokenizer: Tokenizer, file: Path) -> None:
    partial = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(partial), pretty=False)
        partial.replace(file)
    except (
        Exception
    ) as error:  # plain Exception of the library, OSError: a read-only or full disk costs time, no more
        log.warning("the converted tokenizer is not cached: %s", error)


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens whose concatenation is a token: best result first, then the longest parts."""
    if sum(len(token) ** 2 for token in scores) > MOST_WORK:
        raise ConfigError("the vocabulary's tokens are too long to find their merges", param="tokenizer")
    merges = []
    for token, score in scores.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in scores and right in scores:
                merges.append((-score, -cut, -len(right), left, right))
    merges.sort(key=itemgetter(0, 1, 2))
    return [(left, right) for *_, left, right in merges]


def add_marks(tokenizer: Tokenizer, begin: int | None, end: int | None) -> None:
    """Have every text begin and end with these tokens; None: with no token of its own."""
    ids = {tokenizer.id_to_token(token): token for token in (begin, end) if token is not None}
    if ids:
        first, last = (None if token is None else tokenizer.id_to_token(token) for token in (begin, end))
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[mark for mark in (first, "$A", last) if mark], special_tokens=list(ids.items())
        )

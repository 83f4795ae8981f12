"""Tokenizers of folders without ``tokenizer.json``: SentencePiece's ``tokenizer.model``, tiktoken files,
Mistral's ``tekken.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from sgla.errors import ConfigError
from sgla.text import sentencepiece_file, tekken_file, tiktoken_file
from sgla.text.conversion import VERSION, cached, readable

MOST_BYTES = 64 << 20
READ = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "added_tokens_decoder")


def backend_from_files(
    folder: Path, settings: Mapping[str, Any], model_type: Any, cache: Path | None
) -> tuple[Tokenizer, dict[str, str]] | None:
    """And the special tokens that the file names; None if there is no such file. ``settings``:
    tokenizer_config.json; ``model_type``: of config.json; ``cache``: folder for the result. Raises
    ConfigError."""
    names = [folder / "tokenizer.model", folder / "tiktoken.model", *sorted(folder.glob("*.tiktoken"))]
    names.append(folder / "tekken.json")
    file = next((path for path in names if path.is_file()), None)
    if file is None:
        return None
    if file.stat().st_size > MOST_BYTES:
        raise ConfigError(f"{file} has more than {MOST_BYTES} bytes", param="tokenizer")
    data = file.read_bytes()
    read = [settings.get(key) for key in READ]
    with readable(f"{file} cannot be read"):
        if data[:1] == b"\n":  # the tag of a SentencePiece file's first field
            found = sentencepiece_file.read_sentencepiece(data)
            digest = _digest(data, read)
            return cached(
                digest, cache, lambda: sentencepiece_file.backend_of(found, settings)
            ), found.named()
        if file.name == "tekken.json":
            tekken = tekken_file.read_tekken(data)
            return cached(_digest(data, []), cache, lambda: tekken_file.backend_from(tekken)), tekken.named()
        pattern = tiktoken_file.pattern_of([settings.get("tokenizer_class"), model_type])
        return cached(_digest(data, [*read, pattern]), cache, lambda: _tiktoken(data, pattern, settings)), {}


def _digest(data: bytes, more: list[Any]) -> str:
    """A name for what the conversion depends on."""
    hasher = hashlib.blake2b(json.dumps([VERSION, more], sort_keys=True).encode(), digest_size=12)
    hasher.update(data)
    return hasher.hexdigest()


def _tiktoken(data: bytes, pattern: str, settings: Mapping[str, Any]) -> Tokenizer:
    ranks = tiktoken_file.read_tiktoken(data)
    tokenizer = tiktoken_file.backend_of(ranks, pattern)
    listed = {
        int(token): entry["content"] for token, entry in settings.get("added_tokens_decoder", {}).items()
    }
    special = tiktoken_file.special_of(len(ranks), pattern, listed)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return tokenizer

"""Text <-> token ids with the ``tokenizers`` library alone;
transformers is imported only for folders without tokenizer.json."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from sgla import clock
from sgla.errors import BadRequest, ConfigError, ContextTooLong, UnsupportedField
from sgla.grammar.protocol import Vocabulary
from sgla.homes import expanded
from sgla.text.conversion import readable
from sgla.text.decoding import Decoding, decoding_of
from sgla.text.gguf_vocab import backend_from_gguf
from sgla.text.tables import Bytes, Piece, Pieces, Table
from sgla.text.turns import LEAST, turns_of
from sgla.text.vocabulary_files import backend_from_files

if TYPE_CHECKING:
    from sgla.config import Config
    from sgla.hub.source import ModelSource
    from sgla.text.process import BoundedTemplate

UNUSED = re.compile("unused|reserved", re.IGNORECASE)  # in the names of pieces that are there for later
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Templates = str | dict[str, str] | None
PROBES = (
    "a",
    "A",
    " ",
    "1",
    "!",
    "\n",
    "é",
    "a ",
    "字",
)  # repeated up to PROBE_LENGTH times, before a full stop
PROBE_LENGTH = 2048
PROBE_SECONDS = 2.0  # for one text, which takes milliseconds; more is a regular expression that backtracks


class Tokenizer:
    """A model's tokenizer. Thread-safe.

    ``special_tokens``: name (``bos_token``, ...) -> text, as chat templates see them. ``chat_template``:
    source, or sources by name. ``eos_ids``: every id that ends a generation.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_template: Templates = None,
        eos_ids: Iterable[int] = (),
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.decoding: Decoding = decoding_of(backend)
        self.special_tokens = special_tokens or {}
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.bos_id, self.eos_id, self.unk_id, self.pad_id = (
            self._id_of(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        )
        own = [] if self.eos_id is None else [self.eos_id]
        self.eos_ids = frozenset([*own, *eos_ids])
        self.adds_bos = self.bos_id is not None and self.bos_id in backend.encode("").ids[:1]
        kept, shown = partial(self.piece, skipped=self.special_ids), self.piece
        size = max([self.vocab_size, *(i + 1 for i in added)])
        self._bytes = Bytes(shown, size), Bytes(kept, size)
        self._pieces = Pieces(shown, size), Pieces(kept, size)
        self._turns = turns_of(backend, partial(self._encode, add_special_tokens=False))

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Raises BadRequest for lone surrogates,
        which no UTF-8 text has, and for what the library cannot encode."""
        return self.encoding(text, add_special_tokens).ids

    def encoding(self, text: str, add_special_tokens: bool = True) -> tokenizers.Encoding:
        """``encode`` before there is a list of its ``ids``, which has other threads wait for some 40 ns a
        token; ``len`` tells how many these are."""
        return self._encode([text], add_special_tokens)[0]

    def conversation(self, text: str, space: str = "") -> tokenizers.Encoding | array[int]:
        """``encoding`` without special tokens around it, of a text that begins as others did: see ``Turns``,
        also for ``space``."""
        if self._turns is None or len(text) < LEAST:
            return self.encoding(text, False)
        return self._turns.encode(text, space)

    def _encode(self, texts: list[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        try:
            # The batch method releases the GIL, ``backend.encode`` does not (tokenizers 0.23).
            return self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise BadRequest("the text is not valid Unicode: it has unpaired surrogates") from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises plain Exception, and panics, which are none
            raise BadRequest(f"the model's tokenizer cannot encode the text: {error}") from error

    def encode_pair(
        self,
        text: str,
        pair: str | None = None,
        add_special_tokens: bool = True,
        most: int | None = None,
        longest: int | None = None,
    ) -> tuple[list[int], int]:
        """Token ids of a text or a pair of texts, and where the second begins if the tokenizer gives it a
        type of its own (else 0). ``most``: cut the texts, the longer one first, so that special tokens and
        all have at most that many.

        Raises BadRequest for lone surrogates, and for more than ``longest`` tokens before anything is cut,
        which has other threads wait for some 80 ns a token.
        """
        texts = [text] if pair is None else [text, pair]
        parts = self._encode(texts, False)
        if longest is not None and (count := sum(map(len, parts))) > longest:
            raise ContextTooLong(
                f"the input has {count} tokens; {longest} is the limit, even where it is to be cut",
                param="input",
            )
        if most is not None:
            special = self.backend.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
            lengths = cut_lengths([len(part) for part in parts], max(0, most - special))
            for part, length in zip(parts, lengths):
                part.truncate(length)
        whole = self.backend.post_process(
            parts[0], parts[1] if pair is not None else None, add_special_tokens
        )
        types = whole.type_ids
        return whole.ids, types.index(1) if pair is not None and 1 in types else 0

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of ``ids``; ids without a token add nothing.

        Decoders of fast tokenizers put no spaces of their own between special tokens, so
        ``spaces_between_special_tokens`` changes nothing, as in transformers. Spaces are never "cleaned up".
        """
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token adds in the middle of a text; ``b""`` for an id without a token."""
        return self.byte_table(False)[token]

    def token_string(self, token: int) -> str | None:
        """The token as the vocabulary writes it, for example ``Ġthe``; None for an id without one."""
        text: str | None = self.backend.id_to_token(token)
        return text

    def piece(self, token: int, skipped: frozenset[int] = frozenset()) -> Piece:
        """What the token adds in the middle of a text:
        text, or raw bytes that may be part of a character, or None for nothing to decode."""
        text = self.backend.id_to_token(token) if token >= 0 and token not in skipped else None
        return None if text is None else self.decoding.piece(text)

    def byte_table(self, skip_special_tokens: bool) -> Table[bytes]:
        """id -> bytes, for any id; special tokens are empty if skipped."""
        return self._bytes[skip_special_tokens]

    def piece_table(self, skip_special_tokens: bool) -> Table[Piece]:
        """id -> ``piece``; special tokens are nothing if skipped."""
        return self._pieces[skip_special_tokens]

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no text has fewer tokens than its length divided by this."""
        return max(map(len, self.backend.get_vocab(with_added_tokens=True)))


def cut_lengths(lengths: list[int], most: int) -> list[int]:
    """Lengths of one or two texts cut to ``most`` tokens together: the longer one first, then both to a half,
    as the ``longest_first`` of HF's tokenizers does it."""
    if sum(lengths) <= most:
        return lengths
    if len(lengths) == 1:
        return [most]
    short, long = sorted(lengths)
    long = max(short, most - short)
    if short + long > most:
        short, long = most // 2, most - most // 2
    return [short, long] if lengths[0] <= lengths[1] else [long, short]


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Of a model with ``size`` logits.
    Raises UnsupportedField for a tokenizer that knows no end of a text, or no text."""
    ends = sorted(token for token in tokenizer.eos_ids if token < size)
    if not ends:
        raise UnsupportedField(
            "the model's tokenizer has no token that ends an output, which a grammar needs"
        )
    read = Bytes(tokenizer.piece, 0)  # keeps nothing
    special = {token for token in tokenizer.special_ids if token < size}.union(ends)
    tokens = [read[token] for token in range(size)]
    if not any(token for i, token in enumerate(tokens) if i not in special):
        raise UnsupportedField("the model's tokenizer has no tokens for text, which a grammar needs")
    return Vocabulary(tokens, sorted(special), ends)


def load_text(config: Config, source: ModelSource) -> tuple[Tokenizer, BoundedTemplate | None]:
    """Tokenizer and chat template of the model, or those that the flags name. Raises ConfigError."""
    from sgla.hub.fetch import resolve_tokenizer
    from sgla.hub.packaged import MODELS
    from sgla.text.process import BoundedTemplate

    path = resolve_tokenizer(config) or source.gguf_path or source.folder
    check_ids(source)
    tokenizer = load_path(path, config.download_dir, source.eos_token_ids)
    bare = not any(tokenizer.byte_table(True)[token] for token in range(tokenizer.vocab_size))
    if bare and source.kind != "dummy":  # transformers makes such a one of no files
        raise ConfigError(
            f"the tokenizer in {path} has no tokens for text: its file, tokenizer.json for most models, is "
            "missing; --tokenizer names another folder or model",
            param="tokenizer",
        )
    with readable(f"the tokenizer in {path} cannot encode ordinary text"):
        probe(tokenizer)
    size, own = source.vocab_size, tokenizer.backend.get_vocab_size(with_added_tokens=False)
    if size is not None and own > size:
        raise ConfigError(
            f"the tokenizer in {path} has {own} tokens and the model {size}: it belongs to another model",
            param="tokenizer",
        )
    packaged = MODELS.get(config.model)
    template = (packaged and packaged.chat_template) or tokenizer.chat_template
    if config.chat_template is not None:
        template = read_template(expanded(config.chat_template))
    if not template:
        return tokenizer, None
    bounded = BoundedTemplate(template, tokenizer.special_tokens, config.default_chat_template_kwargs)
    check_tools(bounded, config)
    return tokenizer, bounded


def check_tools(template: BoundedTemplate, config: Config) -> None:
    """Raise ConfigError for a parser of calls that nobody tells the model to write."""
    from sgla.text.tools.families import BY_NAME, written_as_told

    name = config.tool_call_parser
    family = BY_NAME.get(name) if name is not None else None  # None, too: no parser
    if family is not None and not template.knows_tools() and not written_as_told(family):
        raise ConfigError(
            f"--tool-call-parser {name}: the model's chat template shows no tools, so that this server "
            "tells the model of them, and how to write calls as the parser hermes reads them; leave the "
            "flag out, or give a --chat-template that shows tools",
            param="tool_call_parser",
        )


def check_ids(source: ModelSource) -> None:
    """Raise ConfigError if the files name a first or last token that the model has not."""
    text = source.config.get("text_config")
    files = {
        "generation_config.json": source.generation_config,
        "config.json": source.config | (text if isinstance(text, dict) else {}),
    }
    for file, content in files.items():
        for key in ("bos_token_id", "eos_token_id"):
            value = content.get(key)
            for token in value if isinstance(value, list) else [] if value is None else [value]:
                if type(token) is not int or not 0 <= token < (source.vocab_size or 2**31):
                    raise ConfigError(
                        f"{source.gguf_path or source.folder / file}: {key} is {value!r}, "
                        f"which the model's vocabulary of {source.vocab_size} tokens has not"
                    )


def probe(tokenizer: Tokenizer) -> None:
    """Encode and decode texts of growing length.
    Raises whatever goes wrong, and ConfigError if one takes too long."""
    for piece in PROBES:
        length = 1
        while length <= PROBE_LENGTH:
            begun, spent = clock.now(), clock.spent()
            tokenizer.decode(tokenizer.backend.encode_batch_fast([piece * length + "."])[0].ids)
            took = min(clock.now() - begun, clock.spent() - spent)  # on a busy host, or beside other threads
            if took > PROBE_SECONDS:
                raise ConfigError(
                    f"the tokenizer takes {took:.1f} s for {length * len(piece)} characters",
                    param="tokenizer",
                )
            length *= 2


def load_path(path: Path, download_dir: str | None = None, eos_ids: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer of a folder or a ``.gguf`` file."""
    from sgla.hub.packaged import cache_folder

    cache = cache_folder(download_dir) / "tokenizers"
    if path.is_dir():
        return load_tokenizer(path, cache=cache, eos_ids=eos_ids)
    from sgla.hub.gguf import read_gguf

    file = read_gguf(path)
    raw = file.tokenizer_raw
    try:
        return load_tokenizer(raw, cache=cache, eos_ids=[*file.eos_token_ids, *eos_ids])
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.message}", param=error.param) from error


def load_tokenizer(
    source: Path | dict[str, Any], *, cache: Path | None = None, eos_ids: Iterable[int] = ()
) -> Tokenizer:
    """From a folder in HF layout, or the ``tokenizer_raw`` tables of a GGUF file.

    ``cache``: folder for tokenizers converted from GGUF, SentencePiece or tiktoken.
    ``eos_ids``: more ids that end a generation. Raises ConfigError.
    """
    if isinstance(source, dict):
        return _from_gguf(source, cache, eos_ids)
    return _from_folder(Path(source), cache, eos_ids)


def _from_gguf(raw: dict[str, Any], cache: Path | None, eos_ids: Iterable[int]) -> Tokenizer:
    ids = {name: raw.get(f"{name}_id") for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    named = {name: raw["tokens"][i] for name, i in ids.items() if i is not None}
    more = [] if raw.get("eot_token_id") is None else [raw["eot_token_id"]]
    return Tokenizer(backend_from_gguf(raw, cache), named, raw.get("chat_template"), [*more, *eos_ids])


def _from_folder(folder: Path, cache: Path | None, eos_ids: Iterable[int]) -> Tokenizer:
    file = folder / "tokenizer_config.json"
    settings, more = _read_json(file), _read_json(folder / "special_tokens_map.json")
    backend, own = _load_backend(folder, settings, cache)
    with readable(f"{file} cannot be read"):
        named = own | _named_tokens(settings, more)
        backend = _with_names(backend, settings)
        _add_listed(backend, settings, [*named.values(), *_extra_tokens(settings, more)])
        # Whether texts that are special tokens are read as ordinary text.
        backend.encode_special_tokens = bool(settings.get("split_special_tokens"))
        templates = _folder_templates(folder, settings)
    if not backend.get_vocab_size():
        raise ConfigError(f"the tokenizer in {folder} has no tokens", param="tokenizer")
    config = _read_json(folder / "generation_config.json") or _read_json(folder / "config.json")
    eos = config.get("eos_token_id")
    ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
    with readable(f"the tokenizer in {folder} cannot be used"):
        return Tokenizer(backend, named, templates, [*ends, *eos_ids])


def _load_backend(
    folder: Path, settings: dict[str, Any], cache: Path | None
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """And the special tokens that its file names, by name."""
    file = folder / "tokenizer.json"
    if file.is_file():
        with readable(f"{file} cannot be read"):
            return tokenizers.Tokenizer.from_file(str(file)), {}
    config = _read_json(folder / "config.json")
    if found := backend_from_files(folder, settings, config.get("model_type"), cache):
        return found
    from transformers import AutoTokenizer

    code = ", code of its own is never run," if settings.get("auto_map") else ""
    with readable(f"{folder} has no tokenizer.json{code} and transformers cannot make one"):
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False).backend_tokenizer, {}


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value


def _named_tokens(settings: dict[str, Any], special_map: dict[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens, those that only one model family has (``image_token``) included."""
    named: dict[str, Any] = {name: settings.get(name) or special_map.get(name) for name in NAMED}
    for extra in (settings.get("extra_special_tokens"), settings.get("model_specific_special_tokens")):
        if isinstance(extra, dict):
            named |= extra
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if text}


def _extra_tokens(settings: dict[str, Any], special_map: dict[str, Any]) -> list[str]:
    """The texts of special tokens without a name. The map counts where no list has all added tokens."""
    found = settings.get("extra_special_tokens")
    if not isinstance(found, list) or not found:
        old = "additional_special_tokens"
        mapped = None if "added_tokens_decoder" in settings else special_map.get(old)
        found = settings.get(old) or mapped or []
    return [token["content"] if isinstance(token, dict) else token for token in found]


def _with_names(backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    """With the names that tokenizer_config.json gives to pieces which the vocabulary has for later:
    InternLM2's ``[UNUSED_TOKEN_145]`` is ``<|im_end|>``."""
    names = {}
    for token, entry in settings.get("added_tokens_decoder", {}).items():
        piece, text = backend.id_to_token(int(token)), entry["content"]
        if piece is not None and UNUSED.search(piece) and backend.token_to_id(text) is None:
            names[int(token)] = text
    if not names:
        return backend
    parts = json.loads(backend.to_str())
    vocabulary = parts["model"]["vocab"]
    if isinstance(vocabulary, dict):
        parts["model"]["vocab"] = {names.get(token, piece): token for piece, token in vocabulary.items()}
    else:
        parts["model"]["vocab"] = [
            [names.get(i, piece), score] for i, (piece, score) in enumerate(vocabulary)
        ]
    return tokenizers.Tokenizer.from_str(json.dumps(parts))


def _add_listed(backend: tokenizers.Tokenizer, settings: dict[str, Any], special: list[str]) -> None:
    """Add the tokens that tokenizer_config.json has and tokenizer.json has not; ``special``: their texts.

    Its ``add_bos_token`` is ignored, as transformers 5 does: the post-processor of tokenizer.json decides.
    """
    known = backend.get_added_tokens_decoder()
    listed = {int(i): token for i, token in settings.get("added_tokens_decoder", {}).items()}
    new = [_added(token) for i, token in sorted(listed.items()) if i not in known]
    present = {token.content for token in [*known.values(), *new]}
    new += [
        _added({"content": text, "special": True}) for text in dict.fromkeys(special) if text not in present
    ]
    backend.add_tokens(new)
    for token, entry in listed.items():
        if token not in known and (found := backend.token_to_id(entry["content"])) != token:
            raise ConfigError(
                f"tokenizer_config.json gives {entry['content']!r} the id {token}, and it has {found}: the "
                "file of the vocabulary is another model's",
                param="tokenizer",
            )


def _added(token: dict[str, Any]) -> tokenizers.AddedToken:
    keys = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tokenizers.AddedToken(token["content"], **{key: token[key] for key in keys if key in token})


def _folder_templates(folder: Path, settings: dict[str, Any]) -> Templates:
    """The chat templates of a folder:
    ``.jinja`` files first, then chat_template.json, then tokenizer_config.json."""
    main, named = (
        folder / "chat_template.jinja",
        sorted((folder / "additional_chat_templates").glob("*.jinja")),
    )
    if named:
        templates = {path.stem: path.read_text() for path in named}
        return templates | ({"default": main.read_text()} if main.is_file() else {})
    if main.is_file():
        return main.read_text()
    source = _read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    texts = source.values() if isinstance(source, dict) else [source or ""]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{folder}: the chat template is not text", param="chat_template")
    return source


def read_template(path: Path) -> Templates:
    """The file that ``--chat-template`` names: Jinja source, or JSON with a ``chat_template``.
    Raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"--chat-template: no file '{path}'", param="chat_template")
    if path.suffix == ".json":
        source = _read_json(path).get("chat_template")
        if not source:
            raise ConfigError(f"--chat-template: {path} has no 'chat_template'", param="chat_template")
        return source
    return path.read_text()

"""The workers' side: which tokens may come next, in one request's output."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from sgla.grammar.llg import load_tokenizer, make_matcher
from sgla.grammar.protocol import Vocabulary
from sgla.messages import RowSampling

KEPT = 256  # compiled grammars; copies of them are cheap


class MatchFailed(Exception):
    """The matcher met one of its limits: the request cannot go on."""


class Matchers:
    """All that rank 0 knows of grammars. Control commands, both with a ``path``:

    ``vocabulary``: a file of ``Vocabulary``, before the first request with a grammar. ``grammar``: a source's file, to be
    compiled beside the steps; the answer's ``ready`` says whether that is done.
    """

    def __init__(self) -> None:
        self._tokenizer: LLTokenizer | None = None
        self._tokens: list[bytes] = []
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._pending: dict[str, threading.Thread] = {}

    def control(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        path = Path(args["path"])
        if verb == "vocabulary":
            vocabulary = Vocabulary.read(path)
            self._tokenizer, self._tokens = load_tokenizer(vocabulary), vocabulary.tokens
            return {"ready": True}
        source = path.read_text()
        if source not in self._compiled and source not in self._pending:
            thread = threading.Thread(target=self._compile, args=(source,), name="grammar", daemon=True)
            self._pending[source] = thread
            thread.start()
        return {"ready": source in self._compiled}

    def constraint(self, tokens: NDArray[np.int32], prompt_len: int, sampling: RowSampling) -> Constraint:
        """Of a request whose row of the token table is ``tokens``."""
        assert self._tokenizer is not None, "a grammar came before the vocabulary"
        source = sampling.grammar
        if source not in self._compiled:
            thread = self._pending.get(source)
            thread.join() if thread else self._compile(source)
        self._compiled.move_to_end(source)
        while len(self._compiled) > KEPT:
            self._compiled.popitem(last=False)
        matcher = self._compiled[source].deep_copy()
        return Constraint(matcher, self._encode, self._tokens, tokens, prompt_len, sampling)

    def _encode(self, text: bytes) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.tokenize_bytes(text)

    def _compile(self, source: str) -> None:
        assert self._tokenizer is not None
        matcher = make_matcher(self._tokenizer, source)
        matcher.compute_bitmask()  # what the first one needs is made now, and shared with the copies
        assert not matcher.is_error(), f"a grammar that the compiler accepted: {matcher.get_error()}"
        self._compiled[source] = matcher
        self._pending.pop(source, None)


class Constraint:
    """A rule (``sampling/rules.py``): tokens that the grammar forbids get no chance.

    Reads the outputs so far from the token table, so it needs no word of what was sampled, and a request that takes its
    slot again after a preemption catches up by itself. At the end of the grammar only stop tokens are left.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        encode: Callable[[bytes], list[int]],
        table: list[bytes],
        tokens: NDArray[np.int32],
        prompt_len: int,
        sampling: RowSampling,
    ) -> None:
        self._matcher = matcher
        self._encode = encode
        self._table = table
        self._tokens = tokens
        self._seen = prompt_len  # tokens taken in
        self._stops = [token for token in sampling.stop_ids if token < len(table)]
        self._after = sampling.grammar_after.encode()
        self._free: bytes | None = b"" if self._after else None  # the latest output while anything goes
        self._ended = False
        self._words = np.empty((len(table) + 31) // 32, np.uint32)

    def apply(self, logits: NDArray[np.float32], position: int) -> None:
        """Raises MatchFailed."""
        self._catch_up(position)
        if self._free is not None:
            return
        allowed = self._allowed()
        ids = np.flatnonzero(allowed)
        if 2 * len(ids) < len(allowed):
            values = logits[ids]
            logits.fill(-np.inf)
            logits[ids] = values
        else:
            logits[np.flatnonzero(~allowed)] = -np.inf
        if logits.max() == -np.inf:
            logits[ids] = 0  # another rule has forbidden what must come

    def _catch_up(self, position: int) -> None:
        for token in self._tokens[self._seen : position].tolist():
            if self._free is not None:
                self._look_out(token)
            elif not self._ended:
                self._take(token)
        self._seen = position

    def _take(self, token: int) -> None:
        if self._matcher.try_consume_tokens([token]) == 1:
            return
        if token not in self._stops:
            raise MatchFailed(f"the grammar cannot go on: {self._matcher.get_error() or 'unexpected token'}")
        self._ended = True

    def _look_out(self, token: int) -> None:
        """Begin when the text that ends the free part is complete; it may end inside of a token."""
        assert self._free is not None
        free = self._free + self._table[token]
        at = free.find(self._after)
        if at < 0:
            self._free = free[-len(self._after) :]
            return
        self._free = None
        rest = free[at + len(self._after) :].lstrip()
        if rest:
            self._matcher.try_consume_tokens(self._encode(rest))

    def _allowed(self) -> NDArray[np.bool_]:
        if self._ended:
            allowed = np.zeros(len(self._table), bool)
        else:
            self._matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            if self._matcher.is_error():
                raise MatchFailed(f"the grammar cannot go on: {self._matcher.get_error()}")
            bits = np.unpackbits(self._words.view(np.uint8), bitorder="little", count=len(self._table))
            allowed = bits.view(bool)
        if self._ended or self._matcher.is_accepting():
            allowed[self._stops] = True
        return allowed

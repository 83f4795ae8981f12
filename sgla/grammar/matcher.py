"""The workers' side: which tokens may come next, in one request's output."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from sgla.errors import InvalidField
from sgla.grammar.llg import load_tokenizer, make_matcher
from sgla.grammar.protocol import Vocabulary
from sgla.messages import RowSampling

log = logging.getLogger(__name__)

KEPT = 256  # compiled grammars; copies of them are cheap
KEPT_BYTES = 8 << 20  # of their sources, each byte of which takes about 20 when it is compiled
Words = NDArray[np.uint32]  # a mask of tokens: bit i % 32 of word i // 32 says whether token i may come
TEMPLATES = 2  # of one source, for each thread that makes masks
RUN = 64  # forced tokens of a row that one step's result brings at most: it has to fit its ring


class MatchFailed(Exception):
    """The matcher met one of its limits: the request cannot go on."""


class Compiled:
    """A source's templates. The copies of one share what they find out about it, and a lock."""

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        self._make = make
        self._templates = [make()]
        self.copies = 0

    def lacks(self, most: int) -> bool:
        """There should be another template: there is one for every two copies that were made."""
        return len(self._templates) < min(most, 1 + self.copies // 2)

    def add(self, most: int) -> None:
        while self.lacks(most):
            self._templates.append(self._make())

    def copy(self) -> tuple[LLMatcher, int]:
        """A matcher, and the number of its template: they take turns."""
        number = self.copies % len(self._templates)
        self.copies += 1
        return self._templates[number].deep_copy(), number


class Matchers:
    """All that rank 0 knows of grammars. Where several ``threads`` make masks, sources in demand get several
    templates, so that the threads do not wait for each other. Control commands, both with a ``path``:

    ``vocabulary``: a file of ``Vocabulary``, before the first request with a grammar. ``grammar``: a source's
    file, to be compiled beside the steps; the answer's ``ready`` says whether that is done. Raises
    InvalidField if it failed.
    """

    def __init__(self, threads: int = 1) -> None:
        self._most = 1 if threads == 1 else TEMPLATES * threads
        self._adding: threading.Thread | None = None
        self._tokenizer: LLTokenizer | None = None
        self.tokens: list[bytes] = []
        self._compiled: OrderedDict[str, Future[Compiled]] = OrderedDict()  # by source; done or under way
        self._bytes = 0  # of these sources
        self._beginnings: dict[bytes, NDArray[np.intp]] = {}

    def control(self, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        path = Path(args["path"])
        if verb == "vocabulary":
            vocabulary = Vocabulary.read(path)
            self._tokenizer, self.tokens = load_tokenizer(vocabulary), vocabulary.tokens
            return {"ready": True}
        try:
            source = path.read_text()
        except FileNotFoundError:  # its request was cancelled, and took the file along
            return {"ready": False}
        if not self._look_up(source, beside=True).done():
            return {"ready": False}
        try:
            self._get(source)
        except MatchFailed as error:
            raise InvalidField(str(error)) from error
        return {"ready": True}

    def constraint(self, tokens: NDArray[np.int32], prompt_len: int, sampling: RowSampling) -> Constraint:
        """Of a request whose row of the token table is ``tokens``."""
        try:
            compiled = self._get(sampling.grammar)
        except MatchFailed as error:
            return Unmet(str(error))
        free = FreePart(self, sampling) if sampling.grammar_after else None
        busy = self._adding is not None and self._adding.is_alive()
        matcher, template = compiled.copy()
        if compiled.lacks(self._most) and not busy:
            self._adding = threading.Thread(
                target=compiled.add, args=(self._most,), name="grammar", daemon=True
            )
            self._adding.start()
        return Constraint(self, matcher, template, free, tokens, prompt_len, sampling)

    def encode(self, text: bytes) -> list[int]:
        """Some tokens with these bytes."""
        assert self._tokenizer is not None
        return self._tokenizer.tokenize_bytes(text)

    def beginning(self, text: bytes) -> NDArray[np.intp]:
        """The token that is ``text``; without one, those that begin it or begin with it."""
        found = self._beginnings.get(text)
        if found is None:
            ids = [i for i, token in enumerate(self.tokens) if token == text] or [
                i for i, t in enumerate(self.tokens) if t and (text.startswith(t) or t.startswith(text))
            ]
            found = self._beginnings[text] = np.array(ids, np.intp)
            while len(self._beginnings) > KEPT:
                del self._beginnings[next(iter(self._beginnings))]
        return found

    def _get(self, source: str) -> Compiled:
        """Waits for it. Raises MatchFailed, which is forgotten: another request may have better luck."""
        try:
            return self._look_up(source).result()
        except MatchFailed:
            self._forget(source)
            raise

    def _forget(self, source: str) -> None:
        if self._compiled.pop(source, None) is not None:
            self._bytes -= len(source)

    def _look_up(self, source: str, beside: bool = False) -> Future[Compiled]:
        """What there is of it. What is new is compiled at once, or ``beside`` the steps."""
        assert self._tokenizer is not None, "a grammar came before the vocabulary"
        found = self._compiled.get(source)
        if found is None:
            found = self._compiled[source] = Future()
            self._bytes += len(source)
            while len(self._compiled) > KEPT or (self._bytes > KEPT_BYTES and len(self._compiled) > 1):
                self._forget(next(iter(self._compiled)))
            if beside:
                threading.Thread(
                    target=self._compile, args=(source, found), name="grammar", daemon=True
                ).start()
            else:
                self._compile(source, found)
        self._compiled.move_to_end(source)
        return found

    def _compile(self, source: str, outcome: Future[Compiled]) -> None:
        tokenizer = self._tokenizer
        assert tokenizer is not None

        def make() -> LLMatcher:
            matcher = make_matcher(tokenizer, source)
            matcher.compute_bitmask()  # what the first one needs is made now, and shared with the copies
            if matcher.is_error():
                raise MatchFailed(matcher.get_error())
            return matcher

        try:
            outcome.set_result(Compiled(make))
        except (
            Exception
        ) as error:  # it compiled in a process of its own; what is wrong here concerns its requests alone
            log.exception("a grammar that the compiler accepted does not compile")
            outcome.set_exception(MatchFailed(f"the grammar cannot be compiled: {error}"))


class FreePart:
    """The beginning of an output, to which its grammar does not apply: see ``Grammar.after``."""

    def __init__(self, matchers: Matchers, sampling: RowSampling) -> None:
        self._matchers = matchers
        self._ends = [end.encode() for end in sampling.grammar_after]
        self._opener = sampling.grammar_opener.encode()  # what of it has not been generated
        self._begun = not self._opener
        self._text = b""

    @property
    def open(self) -> bool:
        """Anything may come. Else the opener, or the rest of it, decides."""
        return not self._opener

    def allow(self, words: Words) -> None:
        """While it is not open: what opens it, beside what the grammar wants at its beginning."""
        if self._begun:
            words[:] = 0
        set_bits(words, self._matchers.beginning(self._opener))

    def take(self, token: int) -> bytes | None:
        """The text after the free part, ``b""`` mostly, where ``token`` ends it; None where it does not."""
        data = self._matchers.tokens[token]
        if self._opener:
            if token not in self._matchers.beginning(self._opener):
                return data
            self._begun = True
            self._opener, data = self._opener[len(data) :], data[len(self._opener) :]
        self._text += data
        found = [(at, at + len(end)) for end in self._ends if (at := self._text.find(end)) >= 0]
        if not found:
            self._text = self._text[-max(map(len, self._ends)) :]
            return None
        return self._text[min(found)[1] :].lstrip()


class Constraint:
    """Leaves no other tokens than the grammar allows. Applies behind all rules (``sampling/rules.py``), and
    like them reads the outputs so far from the token table: it needs no word of what was sampled, and a
    request that takes its slot again after a preemption catches up by itself. At the end of the grammar only
    stop tokens are left.
    """

    def __init__(
        self,
        matchers: Matchers,
        matcher: LLMatcher,
        template: int,
        free: FreePart | None,
        tokens: NDArray[np.int32],
        prompt_len: int,
        sampling: RowSampling,
    ) -> None:
        self._matchers = matchers
        self._matcher = matcher
        self.template = template
        self._free = free
        self._tokens = tokens
        self._seen = prompt_len  # tokens taken in
        self._size = len(matchers.tokens)
        self._stops = np.array([token for token in sampling.stop_ids if token < self._size], np.intp)
        self._ended = False
        self._words = np.empty((self._size + 31) // 32, np.uint32)
        self._early = sampling.min_tokens > 0
        self._stop_words = np.zeros_like(self._words)
        set_bits(self._stop_words, self._stops)

    def narrow(
        self, logits: NDArray[np.float32], position: int
    ) -> tuple[NDArray[np.float32], NDArray[np.intp] | None]:
        """Logits of the tokens that may stand at ``position``, and their ids;
        with None, ``logits`` itself, changed.

        All tokens before ``position`` are known. Raises MatchFailed.
        """
        self.catch_up(position)
        if self.open:
            return logits, None
        if self.matcher is not None:
            self.matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        self.complete(self._words)
        bits = np.unpackbits(self._words.view(np.uint8), bitorder="little", count=self._size)
        allowed = bits.view(bool)
        ids: NDArray[np.intp] | None = None
        if 4 * int(np.count_nonzero(allowed)) < len(allowed):
            ids = np.flatnonzero(allowed)
            if not len(ids):
                raise MatchFailed("the grammar leaves no token")
            logits = logits[ids]
        else:
            logits[np.flatnonzero(~allowed)] = -np.inf
        if logits.max() == -np.inf and self.ends(self._words):
            logits[:] = 0 if ids is not None else np.where(allowed, 0, -np.inf)
        return logits, ids

    def catch_up(self, position: int) -> None:
        """Take in the tokens before ``position``, from the token table. Raises MatchFailed."""
        for token in self._tokens[self._seen : position].tolist():
            self._take(token)
        self._seen = position

    @property
    def open(self) -> bool:
        """Any token may come next: there is no mask."""
        return self._free is not None and self._free.open

    @property
    def matcher(self) -> LLMatcher | None:
        """Whose mask ``complete`` wants; None at the end of the grammar."""
        return None if self._ended else self._matcher

    def complete(self, words: Words) -> None:
        """Make of the ``matcher``'s mask (without one, of anything) the mask of the next token.
        Raises MatchFailed."""
        if self._ended:
            words[:] = 0
        elif self._matcher.is_error():
            raise MatchFailed(f"the grammar cannot go on: {self._matcher.get_error()}")
        if self._ended or self._matcher.is_accepting():
            set_bits(words, self._stops)
        if self._free is not None:
            self._free.allow(words)

    def ends(self, words: Words) -> bool:
        """Whether ``words`` leave nothing but stop tokens, for which it may be too early:
        the end of a grammar comes all the same."""
        return self._early and not (words & ~self._stop_words).any()

    def forced(self) -> list[int]:
        """The tokens that must come next, RUN at most. Without asking they would be the same ones: where
        tokens are forced, the mask leaves the first of them only."""
        if self._ended or self._free is not None:
            return []
        return self._matcher.compute_ff_tokens()[:RUN]

    def ahead(self) -> Constraint:
        """One that goes on from here by itself, with guesses that may be wrong."""
        made = copy(self)
        made._matcher, made._words = self._matcher.deep_copy(), np.empty_like(self._words)
        made._free = copy(self._free)
        return made

    def legal(self, guesses: list[int]) -> int:
        """How many of ``guesses`` may come next, as far as it is known."""
        if self._ended or self._matcher.is_error():
            return 0
        if self._free is not None:
            return len(guesses)
        known = next((i for i, token in enumerate(guesses) if token >= self._size), len(guesses))
        return self._matcher.validate_tokens(guesses[:known])

    def take_forced(self, position: int, token: int) -> list[int]:
        """``token`` has been chosen for ``position``. Returns the tokens that are then forced, and goes past
        them: the next position to ask for is the one behind them. Raises MatchFailed."""
        self._take(token)
        run = self.forced()
        for forced in run:
            self._take(forced)
        self._seen = position + 1 + len(run)
        return run

    def _take(self, token: int) -> None:
        if self._ended:
            return
        if self._free is not None:
            rest = self._free.take(token)
            if rest is None:
                return
            was_open, self._free = self._free.open, None
            if was_open:
                self._matcher.try_consume_tokens(self._matchers.encode(rest))
                return
        if self._matcher.try_consume_tokens([token]) == 1:
            return
        if token not in self._stops:
            raise MatchFailed(f"the grammar cannot go on: {self._matcher.get_error() or 'unexpected token'}")
        self._ended = True


class Unmet(Constraint):
    """In place of one whose grammar could not be compiled: its request fails at its first token."""

    def __init__(self, why: str) -> None:
        self._why = why

    def catch_up(self, position: int) -> None:
        raise MatchFailed(self._why)

    def ahead(self) -> Constraint:
        return self


def set_bits(words: Words, ids: NDArray[np.intp]) -> None:
    np.bitwise_or.at(words, ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))

"""The rule beside the sampler, on random logits: what the engine's tests cannot steer."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from sgla.errors import InvalidField
from sgla.grammar import matcher as matcher_module
from sgla.grammar.llg import Wrapper
from sgla.grammar.matcher import TEMPLATES, Constraint, Matchers, MatchFailed
from sgla.grammar.protocol import Vocabulary
from sgla.messages import NewRow, RowSampling
from sgla.sampling.constraints import Constraints

END, THINK, CLOSE, LONG = 256, 257, 258, 259
VOCABULARY = Vocabulary(
    [bytes([i]) for i in range(256)] + [b"<|end|>", b"<think>", b"</think>", b"nk>\n\n12"],
    [END, THINK, CLOSE],
    [END],
)
SIZE = len(VOCABULARY.tokens) + 5  # logits without a token


@pytest.fixture(scope="module")
def matchers(tmp_path_factory: pytest.TempPathFactory) -> Matchers:
    path = tmp_path_factory.mktemp("vocabulary") / "file"
    padded = VOCABULARY.tokens + [b""] * (SIZE - len(VOCABULARY.tokens))
    path.write_bytes(Vocabulary(padded, VOCABULARY.special, VOCABULARY.ends).encoded())
    matchers = Matchers()
    matchers.control("vocabulary", {"path": str(path)})
    return matchers


class Row:
    """One request: a row of the token table, and its constraint."""

    def __init__(
        self, matchers: Matchers, regex: str, outputs: bytes | list[int] = b"", **sampling: object
    ) -> None:
        self.tokens = np.zeros(64, np.int32)
        self.tokens[:3] = [1, 2, 3]
        self.tokens[3 : 3 + len(outputs)] = list(outputs)
        self.length = 3 + len(outputs)
        settings = {"grammar": LLMatcher.grammar_from_regex(regex), "stop_ids": [END]} | sampling
        self.rule: Constraint = matchers.constraint(self.tokens, 3, RowSampling(**settings))  # type: ignore[arg-type]

    def allowed(self) -> set[int]:
        before = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
        logits, ids = self.rule.narrow(before.copy(), self.length)
        kept = np.flatnonzero(logits > -np.inf)
        found = kept if ids is None else ids[kept]
        assert (logits[kept] == before[found]).all()
        return set(found.tolist())

    def add(self, *tokens: int) -> Row:
        for token in tokens:
            self.tokens[self.length] = token
            self.length += 1
        return self


def ids(text: str) -> set[int]:
    return set(text.encode())


def test_a_row_that_comes_back_is_where_it_was(matchers: Matchers) -> None:
    row = Row(matchers, "(ab|ac)d?")
    assert row.allowed() == ids("a")
    row.add(*b"a")
    assert row.allowed() == ids("bc")
    again = Row(matchers, "(ab|ac)d?", b"a")
    assert again.allowed() == ids("bc")
    assert again.add(*b"b").allowed() == ids("d") | {END}


def test_only_stop_tokens_follow_the_end(matchers: Matchers) -> None:
    row = Row(matchers, "a", stop_ids=[END, 7])
    row.add(*b"a")
    assert row.allowed() == {END, 7}
    assert row.add(7).allowed() == {END, 7}
    assert row.add(END).allowed() == {END, 7}


def test_tokens_without_text_and_special_ones_are_never_allowed(matchers: Matchers) -> None:
    assert Row(matchers, r"(?s).{20}").allowed() <= set(range(256)) | {LONG}


def test_of_what_is_forbidden_the_end_of_a_grammar_alone_comes(matchers: Matchers) -> None:
    for regex, outputs, early, expected in (
        ("ab", b"ab", 9, {END}),
        ("ab", b"ab", 0, set()),
        ("ab", b"a", 9, set()),
        ("abc?", b"ab", 9, set()),
        (r"(?s).", b"", 9, set()),
    ):
        row = Row(matchers, regex, outputs, min_tokens=early)
        logits, ids = row.rule.narrow(np.full(SIZE, -np.inf, np.float32), row.length)
        kept = np.flatnonzero(logits == 0)
        assert set((kept if ids is None else ids[kept]).tolist()) == expected


def test_a_grammar_that_becomes_too_complex_fails_alone(matchers: Matchers) -> None:
    row = Row(matchers, "(([a-z]{1,1000}){1,1000}){1,1000}")
    assert row.allowed() == ids("abcdefghijklmnopqrstuvwxyz")
    row.add(*b"a" * 50)
    for _ in range(2):
        with pytest.raises(MatchFailed, match="cannot go on"):
            row.allowed()
    assert Row(matchers, "ab").allowed() == ids("a")


def test_a_token_the_grammar_does_not_know_fails(matchers: Matchers) -> None:
    row = Row(matchers, "ab", b"q")
    with pytest.raises(MatchFailed):
        row.allowed()


def test_the_free_part_may_end_inside_of_a_token(matchers: Matchers) -> None:
    row = Row(matchers, "[0-9]{3}", grammar_after=("</think>",))
    everything = set(range(SIZE))
    assert row.add(*b"hm </thi").allowed() == everything
    assert row.add(LONG).allowed() == ids("0123456789")  # "nk>", newlines, and the first two digits
    assert row.add(*b"3").allowed() == {END}


def test_one_of_several_ends(matchers: Matchers) -> None:
    for end in ("END", "STOP"):
        row = Row(matchers, "a", grammar_after=("END", "STOP"))
        assert len(row.add(*b"x" * 30, *end[:-1].encode()).allowed()) == SIZE
        assert row.add(ord(end[-1])).allowed() == ids("a")


def test_an_opener_of_one_token(matchers: Matchers) -> None:
    row = Row(matchers, "a", grammar_after=("</think>",), grammar_opener="<think>")
    assert row.allowed() == ids("a") | {THINK}
    assert len(row.add(THINK).allowed()) == SIZE
    assert row.add(*b"hm", CLOSE).allowed() == ids("a")
    without = Row(matchers, "a", b"a", grammar_after=("</think>",), grammar_opener="<think>")
    assert without.allowed() == {END}


def test_an_opener_of_many_tokens_is_completed(matchers: Matchers) -> None:
    row = Row(matchers, "a", grammar_after=("]]",), grammar_opener="[[t")
    assert row.allowed() == ids("a[")
    assert row.add(*b"[").allowed() == ids("[")
    assert row.add(*b"[").allowed() == ids("t")
    assert len(row.add(*b"t").allowed()) == SIZE
    assert row.add(*b"x]]").allowed() == ids("a")


def test_a_slow_grammar_is_compiled_beside_the_steps(matchers: Matchers, tmp_path: Path) -> None:
    path = tmp_path / "source"
    path.write_text(LLMatcher.grammar_from_json_schema(json.dumps({"enum": [f"v{i}" for i in range(300)]})))
    ready = matchers.control("grammar", {"path": str(path)})["ready"]
    while not ready:
        ready = matchers.control("grammar", {"path": str(path)})["ready"]
    assert matchers._compiled[path.read_text()].done()


def compiled_beside(matchers: Matchers, source: str, path: Path) -> None:
    path.write_text(source)
    while not matchers.control("grammar", {"path": str(path)})["ready"]:
        time.sleep(0.001)


def test_grammars_of_requests_that_never_came_are_bounded(
    matchers: Matchers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_module, "KEPT", 3)
    for number in range(5):
        compiled_beside(matchers, LLMatcher.grammar_from_regex(f"unused{number}"), tmp_path / "source")
    assert len(matchers._compiled) == 3
    kept = list(matchers._compiled)
    monkeypatch.setattr(matcher_module, "KEPT_BYTES", 2 * len(kept[0]))
    for number in range(2):
        compiled_beside(matchers, LLMatcher.grammar_from_regex(f"larger{number}"), tmp_path / "source")
        assert matchers._bytes == sum(map(len, matchers._compiled)) <= 2 * len(kept[0])
    monkeypatch.setattr(matcher_module, "KEPT_BYTES", 1)
    compiled_beside(matchers, LLMatcher.grammar_from_regex("alone"), tmp_path / "source")
    assert len(matchers._compiled) == 1


def test_a_grammar_that_does_not_compile_fails_those_who_wait_and_is_forgotten(
    matchers: Matchers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LLMatcher.grammar_from_regex("unlucky")

    go_on = threading.Event()
    go_on.set()

    def fail(*args: object) -> None:
        go_on.wait()
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(matcher_module, "make_matcher", fail)
        with pytest.raises(InvalidField, match="cannot be compiled: no memory"):
            compiled_beside(matchers, source, tmp_path / "source")
        go_on.clear()
        (tmp_path / "source").write_text(source)
        matchers.control("grammar", {"path": str(tmp_path / "source")})
        threading.Timer(0.02, go_on.set).start()  # its request comes before it is done
        for _ in range(2):
            row = Row(matchers, "unlucky")
            with pytest.raises(MatchFailed, match="cannot be compiled: no memory"):
                row.allowed()
        sampling = RowSampling(grammar=source)
        ahead = Constraints(np.zeros((1, 8), np.int32), SIZE, matchers, skip_forced=True, pin=False)
        ahead.admit(NewRow(slot=0, tokens=b"", prompt_len=1, pages=[], sampling=sampling))
        slots, positions = np.zeros(1, np.int32), np.ones(1, np.int32)
        failed = [(0, "the grammar cannot be compiled: no memory")]
        assert ahead.masks(slots, positions, torch.device("cpu")) == (None, failed)
        assert ahead.take(slots, positions, slots).failed == failed
        assert source not in matchers._compiled
    assert Row(matchers, "unlucky").allowed() == ids("u")


def test_a_source_in_demand_gets_several_templates(tmp_path: Path) -> None:
    (tmp_path / "vocabulary").write_bytes(VOCABULARY.encoded())
    matchers = Matchers(threads=2)
    matchers.control("vocabulary", {"path": str(tmp_path / "vocabulary")})
    templates, end = set(), time.monotonic() + 20
    while len(templates) < 2 * TEMPLATES and time.monotonic() < end:
        row = Row(matchers, "(ab|ac)d?", b"a")
        narrowed, ids = row.rule.narrow(np.zeros(len(VOCABULARY.tokens), np.float32), row.length)
        assert ids is not None
        assert set(ids.tolist()) == set(b"bc")
        templates.add(row.rule.template)
    assert templates == set(range(2 * TEMPLATES))


def test_greedy_encoding_keeps_the_bytes() -> None:
    wrapper = Wrapper(VOCABULARY)
    for text in ("plain", "a nk>\n\n12 b", "日本", "<think>"):
        assert b"".join(VOCABULARY.tokens[i] for i in wrapper(text)) == text.encode()
    assert LONG in wrapper("nk>\n\n123")


def test_a_source_whose_request_has_gone_is_not_compiled(matchers: Matchers, tmp_path: Path) -> None:
    """The request's file went with it, before a worker that was busy read it."""
    assert matchers.control("grammar", {"path": str(tmp_path / "gone")}) == {"ready": False}

"""Outputs of a random-weight model, through the whole engine: each is what its grammar asks for."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs
import pytest
from llguidance import LLMatcher, LLParserLimits
from schema_cases import CASES, REFUSED

from sgla import Engine
from sgla.engine import Output
from sgla.errors import SglaError
from sgla.grammar import compiler, matcher, processes
from sgla.grammar.matcher import Constraint, MatchFailed
from sgla.messages import Grammar, SamplingParams

Start = Callable[..., Engine]


def json_schema(schema: Any, **more: Any) -> Grammar:
    return Grammar(kind="json_schema", text=json.dumps(schema), **more)


def bias(engine: Engine) -> dict[int, float]:
    """Towards the end: a random model opens more than it closes, and likes space."""
    table = {engine.tokenizer.token_bytes(i): i for i in range(engine.tokenizer.vocab_size)}
    likes = {
        b'"': 4.0,
        b"}": 5.0,
        b"]": 5.0,
        b"<|end|>": 5.0,
        b" ": -3.0,
        b"\n": -4.0,
        b"\t": -4.0,
        b"\r": -4.0,
    }
    return {table[token]: value for token, value in likes.items()}


def params(engine: Engine, grammar: Grammar | None, **changes: Any) -> SamplingParams:
    settings: dict[str, Any] = {"max_tokens": 300, "logit_bias": bias(engine), "grammar": grammar, "seed": 5}
    return SamplingParams(**settings | changes)


def outputs(engine: Engine, grammars: Sequence[Grammar | None], **changes: Any) -> list[Output]:
    return engine.generate(
        [f"prompt {i}" for i in range(len(grammars))],
        [params(engine, g, seed=i, **changes) for i, g in enumerate(grammars)],
    )


def refusal(engine: Engine, grammar: Grammar, **changes: Any) -> SglaError:
    with pytest.raises(SglaError) as caught:
        engine.generate("x", params(engine, grammar, **changes))
    assert (caught.value.status, caught.value.param) == (400, grammar.param)
    return caught.value


def test_every_document_fits_its_schema(engine: Engine) -> None:
    names = list(CASES)
    made = outputs(engine, [json_schema(CASES[name]) for name in names])
    finished = [(name, out) for name, out in zip(names, made) if out.finish == "stop"]
    for name, out in finished:
        validator = jsonschema_rs.validator_for(CASES[name], validate_formats=True)
        document = json.loads(out.text)
        assert validator.is_valid(document), (
            name,
            out.text,
            [e.message for e in validator.iter_errors(document)],
        )
    assert {out.finish for out in made} <= {"stop", "length"}
    assert len(finished) > 0.97 * len(made)
    counts = engine._system.metrics.compiler.counts  # type: ignore[union-attr]
    assert counts["invalid"] == 0


@pytest.mark.parametrize(("schema", "keyword"), REFUSED, ids=[keyword for _, keyword in REFUSED])
def test_a_refusal_names_the_keyword(engine: Engine, schema: Any, keyword: str) -> None:
    error = refusal(engine, json_schema(schema))
    assert f"'{keyword}'" in error.message
    assert error.code == "unsupported_parameter"


def test_json_object(engine: Engine) -> None:
    made = outputs(engine, [Grammar(kind="json_object")] * 20)
    assert all(isinstance(json.loads(out.text), dict) for out in made if out.finish == "stop")
    assert sum(out.finish == "stop" for out in made) > 10


def test_no_whitespace_where_none_is_wanted(engine: Engine) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5}
    for out in outputs(engine, [json_schema(schema, whitespace="")] * 8, logit_bias={}):
        assert re.fullmatch(r"\S+", out.text)
        assert 3 <= len(json.loads(out.text)) <= 5


REGEXES = [
    r"[a-c]{3}-\d{2}",
    r"(yes|no)( (yes|no)){0,3}",
    r"^\w{1,3}@[a-z]{2,4}\.com$",
    r"(?i)hello",
    r"[^a-zA-Z0-9\s]{4}",
    r"a?b?c?",
    r"(é|日|😀){1,3}",
    r"https?://[a-z]{1,5}(/[a-z]{0,3}){0,2}",
    r"\x41\n\tB",
]


@pytest.mark.parametrize("pattern", REGEXES)
def test_regex_matches_in_full(engine: Engine, pattern: str) -> None:
    for out in outputs(engine, [Grammar(kind="regex", text=pattern)] * 4):
        assert out.finish == "stop"
        assert re.fullmatch(pattern, out.text), out.text


def test_choice_is_one_of_the_list(engine: Engine) -> None:
    choices = ["yes", "yes please", "no", 'say "no"\n', "日本", "a/b", "<tool>"]
    made = outputs(engine, [Grammar(kind="choice", text=json.dumps(choices))] * 24, logit_bias={})
    assert {out.text for out in made} <= set(choices)
    assert len({out.text for out in made}) > 2
    assert {out.finish for out in made} == {"stop"}


GBNF = r"""
root ::= term (op term){0,2}  # sums and products
term ::= [0-9]{1,2} | "(" root ")"
op ::= " + " | " * "
"""
LARK = """
start: NAME "=" value
value: NUMBER | "[" NUMBER ("," NUMBER)* "]"
NAME: /[a-z]{1,4}/
NUMBER: /[0-9]{1,2}/
"""


def test_ebnf_in_both_notations(engine: Engine) -> None:
    made = outputs(engine, [Grammar(kind="ebnf", text=GBNF)] * 8, logit_bias={})
    for out in made:
        if out.finish == "stop":
            assert re.fullmatch(r"[0-9()+* ]+", out.text)
            assert out.text.count("(") == out.text.count(")")
    for out in outputs(engine, [Grammar(kind="ebnf", text=LARK)] * 8):
        assert (
            re.fullmatch(r"[a-z]{1,4}=(\d{1,2}|\[\d{1,2}(,\d{1,2})*\])", out.text) or out.finish == "length"
        )
    assert any(out.finish == "stop" for out in made)


def test_structural_tag(engine: Engine) -> None:
    tag = {
        "type": "structural_tag",
        "format": {
            "type": "sequence",
            "elements": [
                {
                    "type": "tag",
                    "begin": "<tool>",
                    "content": {"type": "json_schema", "json_schema": {"type": "boolean"}},
                    "end": "</f>",
                },
                {"type": "const_string", "value": "!"},
            ],
        },
    }
    grammar = Grammar(kind="structural_tag", text=json.dumps(tag))
    for out in outputs(engine, [grammar] * 4, skip_special_tokens=False):
        assert re.fullmatch(r"<tool>(true|false)</f>!", out.text)
        special = engine.tokenizer.backend.token_to_id("<tool>")
        assert out.tokens[0] == special  # the token, not its letters


WRONG = [
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", "[]", "object or a boolean"),
    ("json_schema", '{"type": "strin"}', "strin"),
    ("json_schema", "false", "no document"),
    ("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}', ""),
    ("regex", "(a", "unclosed"),
    ("regex", r"(a)\1", "backreference"),
    ("regex", "(?=a)b", "look"),
    ("choice", "[]", "at least one"),
    ("choice", '["a", 1]', "list of"),
    ("ebnf", "root ::= missing", "missing"),
    ("ebnf", "nonsense", ""),
    ("structural_tag", "{}", "structures"),
    ("structural_tag", '{"format": {"type": "odd"}}', "odd"),
]


@pytest.mark.parametrize(("kind", "text", "words"), WRONG)
def test_what_is_wrong_is_said(engine: Engine, kind: str, text: str, words: str) -> None:
    error = refusal(engine, Grammar(kind=kind, text=text, param="structured_outputs"))
    assert words in error.message
    assert error.message.startswith("structured_outputs: ")


def test_the_end_is_forced_whatever_else_is_asked(engine: Engine) -> None:
    grammar = Grammar(kind="regex", text="ab")
    end = engine.tokenizer.eos_id
    for changes in ({"ignore_eos": True}, {"logit_bias": {end: -100.0}}, {"temperature": 0.0}):
        out = engine.generate("x", params(engine, grammar, **changes))
        assert (out.text, out.finish, out.matched) == ("ab", "stop", end)
    out = engine.generate("x", params(engine, grammar, min_tokens=6))
    assert (out.text, out.finish, len(out.tokens)) == ("ab", "stop", 7)


FORBIDDEN: list[dict[str, Any]] = [
    {"bad_words": ["a", "b", "c", "ab", "bc", "abc"]},
    {"bad_words": ["a", "b", "c", "ab", "bc", "abc"], "temperature": 0.0, "logprobs": 1},
    {"allowed_token_ids": [70, 71]},
]


@pytest.mark.parametrize("changes", FORBIDDEN, ids=str)
def test_a_request_that_forbids_all_that_its_grammar_leaves_ends_alone(
    engine: Engine, changes: dict[str, Any]
) -> None:
    check_ends_alone(engine, changes)


def check_ends_alone(engine: Engine, changes: dict[str, Any]) -> None:
    grammar, wish = Grammar(kind="regex", text="(abc)+"), {"max_tokens": 8}
    calm = params(engine, Grammar(kind="regex", text="[xy]{4}"), **wish)
    streams = [engine.stream("x", calm), engine.stream("x", params(engine, grammar, **wish | changes))]
    with pytest.raises(SglaError, match="what this request forbids is all that its grammar") as caught:
        list(streams[1])
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")
    assert re.fullmatch("[xy]{4}", "".join(event.text for event in streams[0]))


def test_other_stop_tokens_end_a_complete_output(engine: Engine) -> None:
    stop = engine.tokenizer.backend.token_to_id("<|pad|>")
    grammar = Grammar(kind="regex", text="(ab)+")
    out = engine.generate("x", params(engine, grammar, stop_token_ids=[stop], logit_bias={stop: 50.0}))
    assert (out.text, out.finish, out.matched) == ("ab", "stop", stop)


def test_stop_strings_and_length_go_on_working(engine: Engine) -> None:
    grammar = Grammar(kind="regex", text="abc{2}d")
    out = engine.generate("x", params(engine, grammar, stop=["cc"]))
    assert (out.text, out.finish, out.matched) == ("ab", "stop", "cc")
    out = engine.generate("x", params(engine, grammar, max_tokens=1))
    assert out.finish == "length"
    assert "abccd".startswith(out.text)


def test_choices_of_one_request_each_fit(engine: Engine) -> None:
    grammar = Grammar(kind="regex", text="[a-z]{8}")
    made = engine.generate("x", params(engine, grammar, n=6))
    assert all(re.fullmatch("[a-z]{8}", out.text) for out in made)
    assert len({out.text for out in made}) > 1


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    grammar = Grammar(kind="regex", text="[xyz]{4}")
    out = engine.generate("x", params(engine, grammar, logprobs=2))
    free = engine.generate("x", params(engine, None, logprobs=2, max_tokens=1))
    assert out.logprobs is not None
    assert free.logprobs is not None
    assert dict(out.logprobs[0].top) == pytest.approx(dict(free.logprobs[0].top))


NAMES = ["first_of_the_names", "another_long_name", "the_last_name"]
FORCED = json_schema(
    {
        "type": "object",
        "properties": {name: {"enum": ["yes", "no", 7]} for name in NAMES},
        "required": NAMES,
        "additionalProperties": False,
    },
    whitespace="",
)

MIXED = [
    FORCED,
    *(json_schema(schema) for schema in list(CASES.values())[5:60:6]),
    *(Grammar(kind="regex", text=pattern) for pattern in REGEXES[:4]),
    Grammar(kind="choice", text='["yes", "no", "red"]'),
]


def texts(engine: Engine, many: bool, **changes: Any) -> list[tuple[list[int], str | None]]:
    """Half of the batch has a grammar."""
    asked = [
        params(engine, g, seed=i, max_tokens=60, **changes)
        for i, g in enumerate([*MIXED, *[None] * len(MIXED)])
    ]
    prompts = [f"prompt {i}" for i in range(len(asked))]
    made = (
        engine.generate(prompts, asked) if many else [engine.generate(p, a) for p, a in zip(prompts, asked)]
    )
    return [(out.tokens, out.finish) for out in made]


@pytest.mark.native
def test_alone_is_as_in_a_batch(engine: Engine) -> None:
    assert texts(engine, many=True) == texts(engine, many=False)


@pytest.mark.native
@pytest.mark.parametrize("depth", [1, 3])
def test_the_depth_of_the_pipeline_changes_nothing(engine: Engine, start: Start, depth: int) -> None:
    assert texts(start(depth=depth), many=True) == texts(engine, many=True)


@pytest.mark.native
def test_preempted_outputs_go_on_where_they_were(engine: Engine, start: Start) -> None:
    small = start(kv_cache_bytes=40 << 10, context_length=256)
    before = small.stats().preemptions
    changes = {"logit_bias": {}}
    assert texts(small, many=True, **changes) == texts(engine, many=True, **changes)
    assert small.stats().preemptions > before


def one_by_one(self: Constraint, position: int, token: int) -> list[int]:
    return []


@pytest.mark.native
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forced_tokens_come_at_once_and_are_those_that_would_be_sampled(
    start: Start, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    engine = start(depth=depth)
    changes: dict[str, Any] = {"frequency_penalty": 0.3, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3}

    def made(grammars: list[Grammar]) -> tuple[list[tuple[list[int], str | None]], int]:
        before = engine.stats().steps
        greedy = outputs(engine, grammars, temperature=0.0, max_tokens=80, **changes)
        found = greedy + outputs(engine, grammars, max_tokens=80, **changes)
        return [(out.tokens, out.finish) for out in found], engine.stats().steps - before

    with_forced, _ = made(MIXED)
    alone, few = made([FORCED])
    assert alone == with_forced[:: len(MIXED)]
    monkeypatch.setattr(Constraint, "take_forced", one_by_one)
    forced = engine.stats().forced_tokens
    assert made(MIXED)[0] == with_forced
    assert engine.stats().forced_tokens == forced > 100
    without, many = made([FORCED])
    assert without == alone
    assert few < 0.7 * many


@pytest.mark.native
def test_a_forced_run_ends_where_the_request_does(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(**changes: Any) -> Output:
        return engine.generate("x", params(engine, FORCED, **changes))

    whole = made()
    for count in range(1, len(whole.tokens)):
        cut = made(max_tokens=count)
        assert (cut.tokens, cut.finish) == (whole.tokens[:count], "length")
    cut = made(stop=["r_lon"])
    assert (cut.text, cut.matched) == (whole.text[: whole.text.index("r_lon")], "r_lon")
    stopped = made(stop_token_ids=[whole.tokens[5]])
    assert (stopped.tokens, stopped.finish) == (whole.tokens[:6], "stop")
    forced = engine.stats().forced_tokens
    scored = made(logprobs=1)
    assert scored.tokens == whole.tokens
    assert [entry.token for entry in scored.logprobs or []] == whole.tokens
    assert engine.stats().forced_tokens == forced
    monkeypatch.setattr(Constraint, "take_forced", one_by_one)
    assert made(stop=["r_lon"]).tokens == cut.tokens


DEEPER = {"load_format": "dummy", "hf_overrides": {"num_hidden_layers": 2}}


@pytest.mark.parametrize("ranks", [{"tp": 2}, pytest.param({"pp": 2, **DEEPER}, marks=pytest.mark.slow)])
def test_two_ranks(start: Start, ranks: dict[str, Any]) -> None:
    """One of them samples, and alone knows of grammars."""
    two = start(executor="procs", **ranks)
    made = outputs(
        two, [Grammar(kind="regex", text="[0-9]{4}-x"), Grammar(kind="choice", text='["a", "b"]')] * 3
    )
    assert all(re.fullmatch("[0-9]{4}-x|a|b", out.text) for out in made)
    assert refusal(two, Grammar(kind="regex", text="(")).status == 400


def test_a_free_part_first(engine: Engine) -> None:
    close = engine.tokenizer.backend.token_to_id("</think>")
    grammar = Grammar(kind="regex", text="[0-9]{5}", after=("</think>",))
    changes = {"skip_special_tokens": False, "logit_bias": bias(engine) | {close: 4.0}, "ignore_eos": True}
    for seed in range(6):
        out = engine.generate("x", params(engine, grammar, seed=seed, **changes))
        if "</think>" in out.text:
            assert re.fullmatch(r"(?s).*?</think>\d{5}", out.text)


def test_a_free_part_is_optional_where_an_opener_says_so(engine: Engine) -> None:
    ids = {text: engine.tokenizer.backend.token_to_id(text) for text in ("<think>", "</think>")}
    grammar = Grammar(kind="regex", text="[0-9]{3}", after=("</think>",), opener="<think>")
    seen = set()
    for like in (60.0, -100.0):
        likes = {ids["<think>"]: like, ids["</think>"]: 2.0}
        out = engine.generate(
            "x", params(engine, grammar, skip_special_tokens=False, logit_bias=likes, ignore_eos=True)
        )
        thought = out.text.startswith("<think>")
        seen.add(thought)
        pattern = r"(?s)<think>.*?</think>\d{3}" if thought else r"\d{3}"
        assert re.fullmatch(pattern, out.text) or out.finish == "length"
    assert seen == {True, False}


def test_the_prompt_may_have_opened_or_closed_the_free_part(engine: Engine) -> None:
    grammar = Grammar(kind="regex", text="[0-9]{3}", after=("</think>",), opener="<think>")
    closed = engine.generate("<think>\n\n</think>\n", params(engine, grammar, logit_bias={}))
    assert re.fullmatch(r"\d{3}", closed.text)
    opened = engine.generate(
        "<think>\n",
        params(engine, grammar, logit_bias={}, max_tokens=20, ignore_eos=True, skip_special_tokens=False),
    )
    assert not re.match(r"\d{3}", opened.text)


def test_streams_carry_the_same_text(engine: Engine) -> None:
    grammar = json_schema(CASES["object0-property"])
    whole = engine.generate("x", params(engine, grammar))
    assert "".join(event.text for event in engine.stream("x", params(engine, grammar))) == whole.text


def test_a_grammar_that_fails_later_ends_its_own_request_only(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(depth=3)
    narrow = Constraint.narrow

    def fail(self: Constraint, logits: Any, position: int) -> Any:
        if position > 20:
            raise MatchFailed("the grammar cannot go on: too much")
        return narrow(self, logits, position)

    monkeypatch.setattr(Constraint, "narrow", fail)
    long, short = (Grammar(kind="regex", text=text) for text in ("[ac]{60}", "b{6}"))
    asked = [params(engine, g, ignore_eos=True, max_tokens=50) for g in (None, long, short)]
    results: list[Any] = [None] * 3

    def ask(i: int) -> None:
        try:
            results[i] = engine.generate("a", asked[i])
        except SglaError as error:
            results[i] = error

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (results[0].finish, results[2].text) == ("length", "bbbbbb")
    assert (results[1].status, results[1].message) == (400, "the grammar cannot go on: too much")
    assert engine.stats().running == 0


def test_a_grammar_that_the_worker_cannot_compile_ends_its_own_request_only(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "SLOW", 9.0)  # the worker meets it in a step
    unlucky = Grammar(kind="regex", text="unlucky")
    with monkeypatch.context() as patch:
        patch.setattr(
            matcher, "make_matcher", lambda *args: LLMatcher(*args, limits=LLParserLimits(max_grammar_size=1))
        )
        with pytest.raises(SglaError, match="the grammar cannot be compiled") as caught:
            engine.generate("x", params(engine, unlucky))
        assert caught.value.status == 400
    assert engine.generate("x", params(engine, unlucky)).text == "unlucky"


def test_steps_go_on_while_the_worker_compiles_a_new_grammar(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "SLOW", 0.0)
    new, make = Grammar(kind="regex", text="never before"), matcher.make_matcher
    compiling, go_on = threading.Event(), threading.Event()
    done: list[Output] = []

    def held(*args: Any) -> LLMatcher:
        compiling.set()
        assert go_on.wait(60)
        return make(*args)

    monkeypatch.setattr(matcher, "make_matcher", held)
    asks = threading.Thread(target=lambda: done.append(engine.generate("x", params(engine, new))))
    asks.start()
    try:
        assert compiling.wait(60)
        assert engine.generate("y", params(engine, None, max_tokens=20, ignore_eos=True)).finish == "length"
        assert not done
    finally:
        go_on.set()
        asks.join()
    assert done[0].text == "never before"


def test_others_are_served_while_a_hostile_grammar_compiles(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "TIMEOUT", 2.0)
    monkeypatch.setattr(
        processes, "BUSY", 100
    )  # whatever else the machine does, it is the CPU time that counts
    known = params(engine, MIXED[-1])
    engine.generate("warm", known)
    hostile = params(engine, json_schema({"type": "integer", "multipleOf": 99999989}))
    order: list[str] = []

    def ask(name: str, sampling: SamplingParams) -> None:
        try:
            engine.generate("x", sampling)
        except SglaError as error:
            name += f" {error.status}"
        order.append(name)

    threads = [
        threading.Thread(target=ask, args=pair)
        for pair in (("hostile", hostile), ("free", params(engine, None)), ("known", known))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order[-1] == "hostile 400"
    assert sorted(order[:2]) == ["free", "known"]

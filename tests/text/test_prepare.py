"""From jobs to submits: what is refused and why, stop ids, seeds."""

from __future__ import annotations

import random
import sys
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_tokenizers as tiny

from sgla.errors import BadRequest, ContextTooLong, InvalidField, UnsupportedField
from sgla.media.picture import Picture
from sgla.messages import Array, Job, Placed, Prepared, SamplingParams, Thinking, ThinkLimit
from sgla.text.infill import FAMILIES, Marks
from sgla.text.prepare import Preparer, choice_seed, prepare, without
from sgla.text.template import PICTURE, SOUND, ChatTemplate
from sgla.text.tokenizer import Tokenizer
from sgla.text.words import word_tokens

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # noqa: E501


def preparer(tokenizer: Tokenizer, context: int = 64, template: str | None = CHAT, seed: int = 0) -> Preparer:
    limits = SimpleNamespace(context_len=context, vocab_size=tokenizer.vocab_size)
    return Preparer(tokenizer, ChatTemplate(template) if template else None, limits, random.Random(seed))


def job(**fields: Any) -> Job:
    sampling = SamplingParams(**fields.pop("sampling", {}))
    return Job(rid="r", sampling=sampling, **fields)


def test_choices_are_children_with_seeds_of_their_own(byte_level: Tokenizer) -> None:
    made = preparer(byte_level)(
        job(text="the dog", sampling={"n": 3, "seed": 42}, index_base=6, priority=2, cache_ttl=9.0)
    )
    assert [(one.rid, one.parent, one.index) for one in made] == [
        ("r-0", "r", 6),
        ("r-1", "r", 7),
        ("r-2", "r", 8),
    ]
    assert [one.tokens for one in made] == [byte_level.encode("the dog")] * 3
    seeds = [one.sampling.seed for one in made]
    assert seeds[0] == 42
    assert len(set(seeds)) == 3
    assert {(one.priority, one.cache_ttl) for one in made} == {(2, 9.0)}


def test_a_prompt_has_the_logprobs_that_there_is_room_for(byte_level: Tokenizer) -> None:
    prepared, tokens = preparer(byte_level), len(byte_level.encode("the dog"))
    wish = {"prompt_logprobs": 6, "logprob_token_ids": [5]}
    for room in (None, 8 * tokens):
        assert len(prepared(job(text="the dog", sampling=wish, prompt_logprobs=room))) == 1
    with pytest.raises(
        InvalidField, match=f"{8 * tokens} logprobs of the prompt's {tokens} tokens"
    ) as refused:
        prepared(job(text="the dog", sampling=wish, prompt_logprobs=8 * tokens - 1))
    assert refused.value.param == "prompt_logprobs"


def test_a_video_leaves_fewer_tokens_to_answers(byte_level: Tokenizer) -> None:
    """Its 4 tokens take 20 positions."""
    made, steps = preparer(byte_level), Array("steps", "int64", [2], 0, [0, 19])
    shown = Prepared(b"digest", "", [steps], "video")
    made.speller = SimpleNamespace(prompt=lambda *_: ([1] * 10, [Placed(2, 6, shown)]))  # type: ignore[assignment]
    (found,) = made(job(text="<video>", prepared=[shown], sampling={"max_tokens": None}))
    assert found.max_new == 64 - 10 - 16
    with pytest.raises(ContextTooLong):
        made(job(text="<video>", prepared=[shown], sampling={"max_tokens": 39}))


def test_choices_have_the_logprobs_of_the_prompt_each(byte_level: Tokenizer) -> None:
    wish, tokens = {"prompt_logprobs": 6, "n": 3}, len(byte_level.encode("the dog"))
    assert (
        len(preparer(byte_level)(job(text="the dog", sampling=dict(wish), prompt_logprobs=21 * tokens))) == 3
    )
    with pytest.raises(InvalidField, match="fewer choices"):
        preparer(byte_level)(job(text="the dog", sampling=dict(wish), prompt_logprobs=21 * tokens - 1))


def test_an_answer_has_the_hidden_states_that_there_is_room_for(byte_level: Tokenizer) -> None:
    """Counted in tokens, whatever the prompt was made of: three emojis are three characters."""
    limits = SimpleNamespace(context_len=64, vocab_size=byte_level.vocab_size, hidden=4)
    made = Preparer(byte_level, ChatTemplate(CHAT), limits, random.Random(0))
    wish = {"hidden_states": True, "max_tokens": 5, "n": 2}
    chat = {"messages": [{"role": "user", "content": "the dog"}]}
    prompts: list[Any] = [{"text": "\U0001f9e1\U0001f9e2\U0001f9e3"}, {"token_ids": [1, 2, 3]}, chat]
    for prompt in prompts:
        tokens = made(job(sampling=dict(wish), **prompt))[0].tokens
        numbers = (len(tokens) + 5) * 2 * 4
        assert len(made(job(sampling=dict(wish), hidden_states=numbers, **prompt))) == 2
        with pytest.raises(InvalidField, match=f"{numbers} numbers, {numbers - 1} is the limit"):
            made(job(sampling=dict(wish), hidden_states=numbers - 1, **prompt))


def test_choices_share_what_is_made_of_a_long_list(byte_level: Tokenizer) -> None:
    wish = {"n": 3, "allowed_token_ids": [7, 5, 7, 6] * 100, "logit_bias": {9: 1.0, 8: 2.0}}
    first, *others = [one.sampling for one in preparer(byte_level)(job(text="a", sampling=wish))]
    assert first.allowed == [5, 6, 7]
    assert first.logit_bias == [(8, 2.0), (9, 1.0)]
    for other in others:
        assert other.allowed is first.allowed
        assert other.logit_bias is first.logit_bias
        assert other.seed != first.seed


def test_prompts_share_what_is_made_of_their_parameters(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until another request comes."""
    made = Counter[str]()

    def words(given: list[str], tokenizer: Tokenizer) -> list[list[int]]:
        made.update(given)
        return word_tokens(given, tokenizer)

    monkeypatch.setattr("sgla.text.prepare.word_tokens", words)
    prepared = preparer(byte_level)
    params = [SamplingParams(n=2, bad_words=["dog"]), SamplingParams(bad_words=["cat"])]
    submits = [
        prepared(Job(rid=f"r{i}", text=text, sampling=params[i // 3]))[0] for i, text in enumerate("abcde")
    ]
    assert made == {"dog": 1, "cat": 1}
    assert [one.sampling.bad_words[0] for one in submits] == [
        byte_level.encode(word) for word in ["dog"] * 3 + ["cat"] * 2
    ]
    assert [one.tokens for one in submits] == [byte_level.encode(text) for text in "abcde"]
    assert submits[0].sampling_bytes > 0


def test_nothing_of_a_request_stays_behind_it(byte_level: Tokenizer) -> None:
    prepared = preparer(byte_level)
    for text in "ab":
        asked = job(text=text, sampling={"allowed_token_ids": [7, 5, 6]})
        (made,) = prepared(asked)
        assert prepared._latest._kept is not None
    held, before = weakref.ref(asked.sampling), sys.getrefcount(made.sampling.allowed)
    del asked
    after = sys.getrefcount(made.sampling.allowed)
    assert held() is None
    assert prepared._latest._kept is None
    assert after < before


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 + 5])
def test_seeds_fit_in_63_bits(seed: int) -> None:
    assert all(0 <= choice_seed(seed, choice) < 2**63 for choice in range(100))
    assert len({choice_seed(seed, choice) for choice in range(100)}) == 100


def test_requests_without_a_seed_follow_the_servers_own(byte_level: Tokenizer) -> None:
    first, again = preparer(byte_level, seed=7), preparer(byte_level, seed=7)
    drawn = [first(job(text="a"))[0].sampling.seed for _ in range(3)]
    assert drawn == [again(job(text="a"))[0].sampling.seed for _ in range(3)]
    assert len(set(drawn)) == 3


def test_messages_are_rendered_without_a_second_bos(llama2_like: Tokenizer) -> None:
    (made,) = preparer(llama2_like)(job(messages=[{"role": "user", "content": "dog"}]))
    text = "<|im_start|>user\ndog<|im_end|>\n<|im_start|>assistant\n"
    assert made.tokens == llama2_like.encode(text, add_special_tokens=False)


def test_continuing_the_last_message_adds_no_generation_prompt(byte_level: Tokenizer) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the d"}]
    (made,) = preparer(byte_level)(job(messages=messages, continue_final_message=True))
    assert byte_level.decode(made.tokens, skip_special_tokens=False).endswith("assistant\nthe d")


def test_stop_ids(byte_level: Tokenizer) -> None:
    eos = byte_level.eos_id
    both = preparer(byte_level)(job(text="a", sampling={"stop_token_ids": [9]}))[0]
    own = preparer(byte_level)(job(text="a", sampling={"stop_token_ids": [9], "ignore_eos": True}))[0]
    assert both.stop_ids == {eos, 9}
    assert both.sampling.stop_ids == sorted([eos, 9])
    assert own.stop_ids == {9}


def test_length_is_checked_against_the_context(byte_level: Tokenizer) -> None:
    ids = [5] * 60
    prepared = preparer(byte_level, context=64)
    assert prepared(job(token_ids=ids, sampling={"max_tokens": 4}))[0].max_new == 4
    assert prepared(job(token_ids=ids, sampling={"max_tokens": None}))[0].max_new == 4
    for tokens, new, said in (
        (ids, 5, "65 tokens"),
        ([5] * 64, None, "65 tokens"),
        ([5] * 70, None, "70 tokens"),
    ):
        with pytest.raises(ContextTooLong, match="maximum context length is 64 tokens") as caught:
            prepared(job(token_ids=tokens, sampling={"max_tokens": new}))
        assert said in caught.value.message


def test_hopelessly_long_text_is_refused_before_it_is_encoded(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_level, "encoding", None)
    with pytest.raises(ContextTooLong) as refused:
        preparer(byte_level)(job(text="x" * 100_000))
    assert refused.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"token_ids": []}, "prompt"),
        ({"token_ids": [3, 10_000]}, "prompt"),
        ({"token_ids": [3, -1]}, "prompt"),
        ({"text": ""}, "prompt"),
        ({"text": "a", "sampling": {"logit_bias": {10_000: 1.0}}}, "logit_bias"),
        ({"text": "a", "sampling": {"logit_bias": dict.fromkeys(range(4097), 1.0)}}, "logit_bias"),
        ({"text": "a", "sampling": {"stop_token_ids": range(257), "min_tokens": 1}}, "min_tokens"),
        ({"text": "a", "sampling": {"bad_words": ["dog" * 1100]}}, "bad_words"),
        ({"text": "a", "sampling": {"stop_token_ids": [10_000]}}, "stop_token_ids"),
        ({"text": "a", "sampling": {"allowed_token_ids": [3, 10_000]}}, "allowed_token_ids"),
        ({"text": "a", "sampling": {"bad_words": ["dog", " "]}}, "bad_words"),
    ],
)
def test_bad_fields_are_named(byte_level: Tokenizer, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidField) as caught:
        preparer(byte_level)(job(**fields))
    assert caught.value.param == param


def test_bad_words_are_forbidden_alone_and_behind_a_space(byte_level: Tokenizer) -> None:
    (made,) = preparer(byte_level)(job(text="a", sampling={"bad_words": [" dog", "dog"]}))
    assert made.sampling.bad_words == [byte_level.encode(text) for text in ("dog", " dog")]
    assert byte_level.encode("dog") != byte_level.encode(" dog")


@pytest.mark.parametrize(
    ("prompt", "open", "opened"),
    [("a", "<|im_start|>", False), ("a<|im_start|>\n", "<|im_start|>", True), ("a", "", True)],
)
def test_limits_of_reasoning_are_given_in_tokens(
    byte_level: Tokenizer, prompt: str, open: str, opened: bool
) -> None:
    thinking = Thinking(tokens=5, open=open, close="<|im_end|>")
    (made,) = preparer(byte_level)(job(text=prompt, sampling={"thinking": thinking}))
    tags = {tag: byte_level.encode(tag)[0] if tag else -1 for tag in (open, thinking.close)}
    assert made.sampling.thinking == ThinkLimit(5, tags[open], tags[thinking.close], opened)


def test_reasoning_whose_tags_are_no_tokens_cannot_be_limited(byte_level: Tokenizer) -> None:
    thinking = Thinking(tokens=5, open="Here I think:", close="Here I stop:", param="thinking_budget")
    with pytest.raises(UnsupportedField, match="thinking_budget") as caught:
        preparer(byte_level)(job(text="a", sampling={"thinking": thinking}))
    assert caught.value.param == "thinking_budget"
    beyond = Thinking(tokens=5, open="", close="<|im_end|>", param="thinking_budget")
    small = preparer(byte_level)
    small.limits.vocab_size = byte_level.encode(beyond.close)[0]
    with pytest.raises(UnsupportedField, match="thinking_budget"):
        small(job(token_ids=[1], sampling={"thinking": beyond}))


@pytest.mark.parametrize("wrong", [1.5, "a", None])
def test_what_is_no_token_id_is_refused(byte_level: Tokenizer, wrong: Any) -> None:
    for ids in ([1, wrong], [1 << 40, wrong]):
        with pytest.raises(InvalidField, match=f"{wrong!r}, which is no token id"):
            preparer(byte_level)(Job(rid="r", token_ids=ids, sampling=SamplingParams()))
    with pytest.raises(InvalidField, match=f"token id {1 << 40}"):
        preparer(byte_level)(Job(rid="r", token_ids=[1, 1 << 40], sampling=SamplingParams()))


def test_empty_prompt_is_bos_where_the_tokenizer_adds_one(llama2_like: Tokenizer) -> None:
    assert preparer(llama2_like)(job(text=""))[0].tokens == [llama2_like.bos_id]
    with pytest.raises(InvalidField):
        preparer(llama2_like)(job(text="", add_special_tokens=False))


def test_chat_without_a_template_says_what_to_do(byte_level: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="--chat-template"):
        preparer(byte_level, template=None)(job(messages=[{"role": "user", "content": "a"}]))


def test_lone_surrogates_are_a_bad_request(byte_level: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="Unicode"):
        preparer(byte_level)(job(text="a\ud800"))


def test_prepare_is_the_preparer_as_a_function(byte_level: Tokenizer) -> None:
    limits = SimpleNamespace(context_len=64, vocab_size=byte_level.vocab_size)
    one = job(text="the dog", sampling={"n": 2})
    assert prepare(one, byte_level, None, limits, random.Random(1)) == preparer(byte_level, seed=1)(one)


def with_tokens(*texts: str) -> Tokenizer:
    backend = tiny.byte_level()
    backend.add_special_tokens(list(texts))
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("marks", FAMILIES)
def test_a_gap_is_filled_in_the_order_of_the_family(marks: Marks) -> None:
    texts = [text for text in marks[:3] if text]
    tokenizer = with_tokens(*texts)
    (made,) = preparer(tokenizer)(job(text="the dog", suffix="fox"))
    ids = {text: tokenizer.backend.token_to_id(text) for text in texts}
    before, after = (tokenizer.encode(text, add_special_tokens=False) for text in ("the dog", "fox"))
    bos = [tokenizer.bos_id] if tokenizer.adds_bos else []
    parts = (after, before) if marks.suffix_first else (before, after)
    expected = [*bos, ids[marks.first], *parts[0], ids[marks.second], *parts[1]]
    assert made.tokens == expected + ([ids[marks.third]] if marks.third else [])
    assert set(ids.values()) <= made.stop_ids


def test_a_gap_at_the_beginning_has_no_ids_before_it() -> None:
    marks = FAMILIES[0]
    (made,) = preparer(with_tokens(*marks[:3]))(job(text="", suffix="x", add_special_tokens=False))
    assert made.tokens[0] != made.tokens[1]


def test_a_model_without_marks_refuses_a_suffix(byte_level: Tokenizer) -> None:
    with pytest.raises(UnsupportedField, match="suffix is not supported by this model"):
        preparer(byte_level)(job(text="x", suffix="y"))


def test_of_a_prompt_that_no_cut_saves_no_list_is_made(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would hold up all other threads."""
    monkeypatch.setattr("sgla.text.prepare.CUT", 10)
    prepared = preparer(byte_level, context=20)
    assert len(prepared(job(text="1 2 3 " * 4, keep_last=5, sampling={"max_tokens": 4}))[0].tokens) == 5
    encoding = [0] * 31  # has no ``ids``
    monkeypatch.setattr(byte_level, "encoding", lambda text, add_special_tokens: encoding)
    with pytest.raises(ContextTooLong, match="requested 31 tokens"):
        prepared(job(text="1 2 3 " * 5, keep_last=5, sampling={"max_tokens": 4}))


def test_a_long_prompt_loses_its_beginning_or_its_end(byte_level: Tokenizer) -> None:
    prepared = preparer(byte_level, context=20)
    ids = list(range(10, 40))
    sampling = {"max_tokens": 4}
    assert prepared(job(token_ids=ids, keep_last=5, sampling=sampling))[0].tokens == ids[-5:]
    assert prepared(job(token_ids=ids, keep_last=-1, sampling=sampling))[0].tokens == ids[-16:]
    assert prepared(job(token_ids=ids, truncate=5, sampling=sampling))[0].tokens == ids[:5]
    assert prepared(job(token_ids=ids[:3], keep_last=5, sampling=sampling))[0].tokens == ids[:3]


def test_a_long_chat_loses_its_oldest_turns(byte_level: Tokenizer) -> None:
    def chat(turns: list[int]) -> list[dict[str, str]]:
        pairs = [
            [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]
            for i in turns
        ]
        system = {"role": "system", "content": "be kind"}
        return [system, *(message for pair in pairs for message in pair), {"role": "user", "content": "now"}]

    whole = preparer(byte_level, context=10_000)
    lengths = {first: len(whole(job(messages=chat([*range(first, 6)])))[0].tokens) for first in range(7)}
    for first, length in lengths.items():
        (made,) = preparer(byte_level, context=length + 8)(
            job(messages=chat([*range(6)]), drop_turns=True, sampling={"max_tokens": 8})
        )
        assert made.tokens == whole(job(messages=chat([*range(first, 6)])))[0].tokens
    with pytest.raises(ContextTooLong):
        preparer(byte_level, context=lengths[6] + 7)(
            job(messages=chat([*range(6)]), drop_turns=True, sampling={"max_tokens": 8})
        )


def test_texts_that_no_context_holds_are_not_encoded(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, long = preparer(byte_level), "the dog " * 100_000
    encode_pair, lengths = byte_level.encode_pair, []

    def noted(text: str, *more: Any) -> tuple[list[int], int]:
        lengths.append(len(text))
        return encode_pair(text, *more)

    monkeypatch.setattr(byte_level, "encode_pair", noted)
    monkeypatch.setattr(byte_level, "encoding", None)
    for fields in ({"text": long}, {"text": long, "pool": []}, {"text": "x", "pair": long, "pool": []}):
        with pytest.raises(ContextTooLong):
            prepared(job(**fields))
    (cut,) = prepared(job(text=long, pool=[], truncate=5))
    assert cut.tokens == encode_pair(long[:1000], None, True, 5)[0]
    assert max(lengths) <= 2 * 64 * byte_level.longest_token


def test_texts_of_too_many_tokens_are_no_lists(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not they are to be cut: making the list, or cutting it, holds Python's lock."""
    monkeypatch.setattr("sgla.text.prepare.CUT", 10)
    prepared, long = preparer(byte_level), "the dog " * 80
    count = len(byte_level.encode(long))
    assert 64 + 10 < count < 16 * 64
    for fields in ({"text": long}, {"text": "x", "pair": long}, {"text": long, "truncate": 5}):
        with pytest.raises(ContextTooLong, match=rf"{count}|{count + 1}"):
            prepared(job(**fields, pool=[]))


def test_a_suffix_that_no_context_holds_is_refused(
    monkeypatch: pytest.MonkeyPatch, byte_level: Tokenizer
) -> None:
    with pytest.raises(ContextTooLong):
        preparer(byte_level)(job(text="x", suffix="the dog " * 100_000))


def test_turns_that_are_dropped_take_their_pictures_with_them() -> None:
    pictures = [Prepared(bytes([i]), "", []) for i in range(4)]
    contents = [["a", PICTURE], [PICTURE, SOUND], "b", ["c", PICTURE]]
    messages = [{"role": "user", "content": content} for content in contents]
    kept = without(job(messages=messages, prepared=pictures), 1, 3)
    assert kept.messages == [messages[0], messages[3]]
    assert kept.prepared == [pictures[0], pictures[3]]


@pytest.mark.parametrize("cut", [{"keep_last": 5}, {"truncate": 5}])
def test_a_prompt_with_pictures_is_not_cut_between_tokens(byte_level: Tokenizer, cut: dict[str, int]) -> None:
    with pytest.raises(UnsupportedField, match="beside pictures"):
        preparer(byte_level)(job(text="the dog", pictures=[Picture.of(1, 1, b"abc")], **cut))

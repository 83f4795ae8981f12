"""Programs of ``sgla.lang`` over a backend that answers at once, or not at all."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

import sgla.lang as sgl
from sgla.errors import BackendFailed, ConfigError, InvalidField, UnsupportedField
from sgla.lang import INSTEAD
from sgla.lang.backends.base import Backend, Conversation, Piece, Prompt
from sgla.lang.backends.client import refusal
from sgla.lang.choices import Scored
from sgla.lang.sampling import Sampling


class Echo(Backend):
    """Writes how many prompts it has had, and finds later choices more probable. ``broken``: a text in the
    prompts that it fails at. ``gate``: how many must ask before any of them is answered."""

    def __init__(self, broken: str = "\0", gate: int = 1) -> None:
        self.prompts: list[Prompt] = []
        self.asked: list[Sampling] = []
        self.kept: list[Prompt] = []
        self._broken = broken
        self._gate = threading.Barrier(gate)

    def generate(self, prompt: Prompt, sampling: Sampling) -> list[Piece]:
        self._gate.wait(10)
        if self._broken in str(prompt):
            raise BackendFailed("no answer")
        self.prompts.append(prompt)
        self.asked.append(sampling)
        return [(f"<{len(self.prompts)}.{i}>", {"prompt_tokens": 7}) for i in range(sampling.n or 1)]

    def stream(self, prompt: Prompt, sampling: Sampling) -> Iterator[Piece]:
        [(text, meta)] = self.generate(prompt, sampling)
        yield from ((letter, meta) for letter in text)

    def score(self, prompt: Prompt, choices: Sequence[str], alone: bool) -> list[Scored]:
        self.prompts.append(prompt)
        return [Scored([i], [float(i)], [0.0]) for i, _ in enumerate(choices)]

    def cache_prefix(self, prompt: Prompt) -> None:
        self.kept.append(prompt)


@sgl.function
def two_turns(s: Any, first: str, second: str = "And then?") -> str:
    s += sgl.system("Be brief.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("a", max_tokens=5))
    with s.user():
        s += second
    s += sgl.assistant_begin() + "So " + sgl.gen("b", temperature=0) + sgl.assistant_end()
    return "done"


@sgl.function
def plain(s: Any, word: str) -> None:
    s += "One " + word + ": " + sgl.gen("a", stop="\n") + "; "
    s += sgl.select("b", ["x", "y"]) + "."


def test_prompts_are_what_the_program_wrote() -> None:
    backend = Echo()
    state = plain.run("more", backend=backend, temperature=0.5, max_new_tokens=9)
    assert state.text() == "One more: <1.0>; y."
    assert backend.prompts == ["One more: ", "One more: <1.0>; "]
    assert (state["a"], state["b"], "c" in state) == ("<1.0>", "y", False)
    assert backend.asked == [Sampling(stop="\n", temperature=0.5, max_tokens=9)]
    assert state.get_meta_info("a") == {"prompt_tokens": 7}
    assert state.get_meta_info("b")["normalized_prompt_logprobs"] == [0.0, 1.0]


def test_roles_become_messages() -> None:
    backend = Echo()
    state = two_turns.run(first="Why?", backend=backend)
    begun = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    rest = [{"role": "assistant", "content": "<1.0>"}, {"role": "user", "content": "And then?"}]
    assert backend.prompts == [Conversation(begun), Conversation([*begun, *rest], True, "So ")]
    assert state.messages() == [*begun, *rest, {"role": "assistant", "content": "So <2.0>"}]
    assert state.text().splitlines()[1:3] == ["user: Why?", "assistant: <1.0>"]
    assert (state.ret_value, [one.max_tokens for one in backend.asked]) == ("done", [5, None])


def test_python_decides_between_calls() -> None:
    @sgl.function
    def tool(s: Any, n: int) -> None:
        s += "Use" + sgl.gen("tool", choices=[" a", " b"])
        if s["tool"] == " b":
            with s.var_scope("all"):
                s += " with" + sgl.gen("times", n=n)

    state = tool.run(n=2, backend=Echo())  # the program's own argument, not that of sampling
    assert (state["times"], state["all"]) == (["<2.0>", "<2.1>"], " with<2.0>")


def test_branches_run_side_by_side_and_come_back() -> None:
    backend = Echo(gate=3)  # it answers none of them before all have asked

    @sgl.function
    def branches(s: Any) -> None:
        s += "Head."
        forks = s.fork(3)
        forks += lambda i: f" {i}:"
        forks += sgl.gen("x")
        forks.join()
        forks.join("concate_and_append")

    state = branches.run(backend=backend)
    assert sorted(map(str, backend.prompts)) == [f"Head. {i}:" for i in range(3)]
    assert sorted(state["x"]) == ["<1.0>", "<2.0>", "<3.0>"]
    assert state.text() == "Head." + "".join(f" {i}:{x}" for i, x in enumerate(state["x"]))


def test_branches_of_a_message_are_appended_to_it() -> None:
    @sgl.function
    def branches(s: Any, ends: bool) -> None:
        s += sgl.user("Why?") + sgl.assistant_begin() + "So"
        forks = s.fork(2)
        forks += [" a", " b"]
        if ends:
            forks += sgl.assistant_end()
        forks.join("concate_and_append")
        s += sgl.assistant_end()

    assert branches.run(False, backend=Echo()).messages()[1]["content"] == "So a b"
    with pytest.raises(InvalidField, match="end a message"):
        branches.run(True, backend=Echo())


def test_a_failing_branch_ends_the_program() -> None:
    @sgl.function
    def branches(s: Any) -> None:
        forks = s.fork(2)
        forks += ["fine", "bad"]
        forks += sgl.gen("x")
        forks.join()

    with pytest.raises(BackendFailed):
        branches.run(backend=Echo("bad"))


@pytest.mark.parametrize("threads", [True, False])
def test_a_failing_branch_that_nobody_reads_ends_the_program(threads: bool) -> None:
    @sgl.function
    def left(s: Any, careful: bool = False) -> str:
        inner = s.fork(1)[0].fork(1)
        try:
            inner += "bad" + sgl.gen("x")
            if careful:
                inner[0]["x"]
        except BackendFailed:
            if careful:
                return "heard"
        return "unheard"

    state = left.run(True, backend=Echo("bad"), use_thread=threads)
    assert state.ret_value == "heard"
    assert state.error() is None
    if threads:
        with pytest.raises(BackendFailed):
            left.run(backend=Echo("bad"))
        (state,) = left.run_batch([{}], backend=Echo("bad"))
        assert isinstance(state.error(), BackendFailed)
        with pytest.raises(BackendFailed):
            list(left.run(backend=Echo("bad"), stream=True).text_iter())


def test_batches_keep_their_order_and_errors_apart() -> None:
    backend = Echo("bad")
    states = plain.run_batch([{"word": "a"}, ("bad",), {"word": "b"}], backend=backend)
    assert [state.text()[:5] for state in states[::2]] == ["One a", "One b"]
    assert isinstance(states[1].error(), BackendFailed)
    assert states[0].error() is None
    with pytest.raises(BackendFailed):
        states[1]["a"]
    words = ({"word": str(i)} for i in range(100))
    found = plain.run_batch(list(words), backend=backend, generator_style=True)
    assert [state.text()[:6] for state in found][::33] == ["One 0:", "One 33", "One 66", "One 99"]


def test_streams() -> None:
    state = two_turns.run("Why?", backend=Echo(), stream=True)
    assert list(state.text_iter("b")) == list("<2.0>")
    assert "".join(state.text_iter()) == state.text()

    async def read() -> list[Any]:
        state = plain.run("more", backend=Echo(), stream=True)
        found = [pair async for pair in state.text_async_iter("a", return_meta_data=True)]
        return [*found, *[text async for text in state.text_async_iter("b")]]

    assert asyncio.run(read()) == [*((letter, {"prompt_tokens": 7}) for letter in "<1.0>"), "y"]
    broken = plain.run("bad", backend=Echo("bad"), stream=True)
    for name in (None, "a"):
        with pytest.raises(BackendFailed):
            list(broken.text_iter(name))


def test_without_threads_all_is_done_where_it_is_appended() -> None:
    @sgl.function
    def program(s: Any) -> int:
        s += sgl.gen("a")
        return len(s._variables)

    assert program.run(backend=Echo(), use_thread=False).ret_value == 1


def test_traces_end_where_a_program_looks() -> None:
    @sgl.function
    def asks(s: Any, word: str) -> None:
        s += "Head. " + sgl.user_begin() if word == "chat" else "Head. "
        raise AssertionError("the trace went on")

    trace = two_turns.trace()
    assert trace.complete
    assert trace.prefix() == Conversation([{"role": "system", "content": "Be brief."}], replying=False)
    assert plain.trace().prefix() == "One "
    assert plain.trace(word="more").prefix() == plain.bind(word="more").trace().prefix() == "One more: "
    assert (asks.trace().complete, asks.trace().parts) == (False, [])
    backend = Echo()
    plain.cache(backend)
    asks.cache(backend)
    assert backend.kept == ["One "]


def test_what_cannot_be_is_refused() -> None:
    sgl.set_default_backend(None)
    with pytest.raises(ConfigError, match="set_default_backend"):
        plain.run("x")
    for wrong in (
        lambda: sgl.gen("x", temprature=1),
        lambda: sgl.gen(dtype=list),
        lambda: sgl.select("x", []),
        lambda: sgl.select("x", ["a"], temperature=1.0),
        lambda: plain.bind(words="x"),
        lambda: plain.run("x", backend=Echo(), temprature=1),
        lambda: sgl.user("a") + 5,  # type: ignore[operator]
        lambda: sgl.RuntimeEndpoint("localhost:30000"),
    ):
        with pytest.raises(InvalidField):
            wrong()
    with pytest.raises(UnsupportedField):
        sgl.function(None, 5)


def test_pictures_are_parts_of_messages(tmp_path: Path) -> None:
    file, echo = tmp_path / "a.webm", Echo()
    file.write_bytes(b"\x1aE\xdf\xa3")

    @sgl.function
    def seen(s: Any) -> None:
        s += sgl.user("Look: " + sgl.image(b"\xff\xd8x") + sgl.image("https://a/b.png") + " and " + "tell.")
        s += sgl.assistant("It is" + sgl.gen("a"))
        s += sgl.user(sgl.video(file, num_frames=4))
        s += sgl.assistant(sgl.gen("b"))

    state = seen.run(backend=echo)
    first, second = echo.prompts
    assert isinstance(first, Conversation)
    assert isinstance(second, Conversation)
    assert first.messages[0]["content"] == [
        {"type": "text", "text": "Look: "},
        {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,/9h4"}},
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        {"type": "text", "text": " and tell."},
    ]
    assert (first.reply, first.frames, second.frames) == ("It is", None, 4)
    url = "data:video/webm;base64,GkXfow=="
    assert second.messages[2]["content"] == [{"type": "video_url", "video_url": {"url": url}}]
    assert "Look: <image><image> and tell." in state.text()


@pytest.mark.parametrize("mode", ["RGB", "CMYK", "RGBA"])
def test_images_of_pil_are_seen_as_their_files(mode: str) -> None:
    """Upright, and without what PNG has not."""
    image = Image.effect_noise((3, 2), 90).convert(mode)
    image.getexif()[0x0112] = 6
    shown = Image.open(io.BytesIO(base64.b64decode(sgl.image(image).url.partition(",")[2])))
    expected = ImageOps.exif_transpose(image).convert("RGB")
    assert (shown.mode, shown.size, shown.tobytes()) == ("RGB", (2, 3), expected.tobytes())


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (lambda: sgl.image("nowhere.png"), "cannot be read"),
        (lambda: sgl.image(5), "takes a path, a URL, bytes or an image of PIL's, not a value of type int"),
        (lambda: sgl.video(b""), "takes a path, a URL, bytes, not a value of type bytes"),
        (lambda: sgl.video("https://a/b.mp4", 0), "a whole number of frames"),
        (lambda: sgl.image("https://a/b.png") + sgl.gen("a"), "stands inside of user"),
        (lambda: sgl.assistant(sgl.image("https://a/b.png")), "stands inside of user"),
        (
            lambda: sgl.user(sgl.video("https://a/b.mp4", 2) + sgl.video("https://a/c.mp4", 3)),
            "the same num_frames",
        ),
    ],
)
def test_what_is_no_picture_of_a_message(part: Any, why: str) -> None:
    @sgl.function
    def shown(s: Any) -> None:
        s += part()

    with pytest.raises(InvalidField, match=why):
        shown.run(backend=Echo())


@pytest.mark.parametrize(
    "parts",
    [
        sgl.user("a") + "between",
        "before" + sgl.user("a"),
        sgl.user_begin() + sgl.system("a"),
        sgl.user_begin() + sgl.gen("x"),
        sgl.user_end(),
    ],
)
def test_roles_in_disorder_are_refused(parts: Any) -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += parts

    with pytest.raises(InvalidField):
        program.run(backend=Echo())


def test_a_variable_that_there_is_not() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.gen("a")
        s["b"]

    with pytest.raises(KeyError):
        program.run(backend=Echo())
    with pytest.raises(KeyError):
        list(program.run(backend=Echo(), stream=True).text_iter())


def test_methods_choose_as_their_names_say() -> None:
    choices = [
        Scored([1, 2], [-1.0, -3.0], [None, -1.0]),
        Scored([1, 3, 4], [-1.0000001, -2.0, -5.0], [None, -9.0, -9.0]),  # a bit of noise in what is shared
        Scored([5], [-1.5], [-1.5]),
    ]
    assert sgl.token_length_normalized.pick(choices)[0] == 2
    assert sgl.greedy_token_selection.pick(choices)[0] == 1
    assert sgl.unconditional_likelihood_normalized.pick(choices)[0] == 1


def test_types_are_grammars() -> None:
    asked: Any = sgl.gen_int("n", stop=".")
    assert asked.sampling.regex.startswith("[+-]?")
    assert asked.sampling.stop == [".", " ", "\n"]
    schema: Any = sgl.gen("x", json_schema={"type": "object"})
    assert schema.sampling.json_schema == '{"type": "object"}'


def test_refusals_of_servers_keep_their_kind() -> None:
    error = refusal(400, {"error": {"message": "no", "code": "invalid_value", "param": "top_p"}})
    assert (type(error), error.param) == (InvalidField, "top_p")
    assert (refusal(418, "tea").status, refusal(418, "tea").message) == (418, "tea")


@pytest.mark.parametrize("name", INSTEAD)
def test_names_of_sglang_that_are_not_here_say_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no {name}; use "):
        getattr(sgl, name)
    assert not hasattr(sgl, "nothing")


def test_a_name_that_is_used_again_is_read_when_its_new_value_is_there() -> None:
    """A loop that reads what each round wrote."""
    backend = Echo()

    @sgl.function
    def program(s: Any) -> list[str]:
        found = []
        for word in ("one", "two"):
            s += word + sgl.gen("a")
            found += [s["a"], s.get_meta_info("a")["prompt_tokens"]]
        s += sgl.gen("b") + sgl.gen("b") + sgl.select("a", ["x", "y"])
        s += sgl.gen("a")
        return [*found, s["b"], s["a"]]

    state = program.run(backend=backend)
    assert state.ret_value == ["<1.0>", 7, "<2.0>", 7, "<4.0>", "<6.0>"]


def test_a_name_whose_new_value_fails_has_no_old_one() -> None:
    found = []

    @sgl.function
    def program(s: Any) -> None:
        for word in ("", "broken"):
            s += word + sgl.gen("a")
            found.append(s["a"])

    with pytest.raises(BackendFailed, match="no answer"):
        program.run(backend=Echo(broken="broken"))
    assert found == ["<1.0>"]


def test_a_branch_that_shows_a_picture_is_not_appended() -> None:
    """Its text alone would say something else."""

    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user_begin() + "What is this? "
        forks = s.fork(2)
        forks += sgl.image(b"picture") + "It is behind a picture"
        forks.join("concate_and_append")

    with pytest.raises(InvalidField, match="branches that show something"):
        program.run(backend=Echo())

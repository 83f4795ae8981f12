"""What stands for pictures in prompts."""

from __future__ import annotations

import pytest

from sgla.errors import InvalidField, UnsupportedField
from sgla.messages import Array, Job, Placed, Prepared, SamplingParams
from sgla.model.vision.spec import Settings
from sgla.model.vision.table import VISIONS
from sgla.text.pictures import Speller, positions

LLAVA = {"image_token_index": 32, "vision_config": {"patch_size": 14}}
PIXTRAL = {"image_token_index": 1, "spatial_merge_size": 2, "vision_config": {"patch_size": 14}}
SMOLVLM = {"image_token_id": 1, "scale_factor": 2, "vision_config": {"image_size": 16, "patch_size": 4}}


def prepared(*arrays: Array) -> Prepared:
    return Prepared(b"digest", "", list(arrays))


def square(side: int) -> Prepared:
    return prepared(Array("pixel_values", "float32", [1, 3, side, side], 0))


def encode(text: str) -> list[int]:
    """A picture's token is 32 or 1, any other text has a token for each character."""
    tokens = []
    while text:
        word = next((word for word in ("<image>", "[IMG]") if text.startswith(word)), text[0])
        tokens.append({"<image>": 32, "[IMG]": 1}.get(word, ord(word[0])))
        text = text[len(word) :]
    return tokens


def speller(name: str, config: dict[str, object]) -> Speller:
    return Speller(VISIONS[f"{name}ForConditionalGeneration"], config, Settings({}, {}))


def test_each_picture_becomes_as_many_tokens_as_its_size_gives() -> None:
    first, second = square(28), square(42)
    llava = speller("Llava", LLAVA)
    expected = [97, *[32] * 4, 98, *[32] * 9], [Placed(1, 5, first), Placed(6, 15, second)]
    assert llava.in_text("a<image>b<image>", [first, second], encode) == expected
    assert llava.in_tokens([97, 32, 98, 32], [first, second], encode) == expected


def test_rows_of_a_picture_end_with_a_token_of_their_own() -> None:
    picture = prepared(Array("image_sizes", "int64", [1, 2], 0, [56, 84]))
    tokens, placed = speller("Mistral3", PIXTRAL).in_text("a[IMG]", [picture], encode)
    rows = [*[1] * 3, *encode("[IMG_BREAK]"), *[1] * 3]
    assert tokens == [97, *rows, *encode("[IMG_END]")]
    assert placed == [Placed(1, 1 + len(rows), picture)]


def test_tiles_come_row_by_row_with_the_whole_behind_them() -> None:
    picture = prepared(Array("rows", "int64", [1, 1], 0, [1]), Array("cols", "int64", [1, 1], 8, [2]))
    vision = VISIONS["SmolVLMForConditionalGeneration"]
    around, tile = "<fake_token_around_image>", "<image>"
    assert vision.spelled(SMOLVLM, Settings({}, {}), picture) == (
        f"{around}<row_1_col_1>{tile}{around}<row_1_col_2>{tile}\n\n{around}<global-img>{tile}{around}",
        (4, 4, 4),
    )


@pytest.mark.parametrize(("text", "count"), [("no place", 1), ("<image> and <image>", 1), ("<image>", 2)])
def test_as_many_places_as_pictures(text: str, count: int) -> None:
    with pytest.raises(InvalidField, match="places for pictures"):
        speller("Llava", LLAVA).in_text(text, [square(28)] * count, encode)


def test_a_text_has_no_tokens_of_pictures_of_its_own() -> None:
    picture = prepared(Array("image_grid_thw", "int64", [1, 3], 0, [1, 4, 4]))
    qwen = Speller(VISIONS["Qwen2VLForConditionalGeneration"], {"image_token_id": 42}, Settings({}, {}))
    with pytest.raises(InvalidField, match="tokens of its own"):
        qwen.in_text("*<|image_pad|>", [picture], lambda text: encode(text.replace("<|image_pad|>", "*")))


@pytest.mark.parametrize(
    ("param", "sampling"),
    [
        ("prompt_logprobs", SamplingParams(prompt_logprobs=0)),
        ("return_hidden_states", SamplingParams(hidden_states=True)),
    ],
)
def test_what_is_not_tested_beside_pictures_is_refused(param: str, sampling: SamplingParams) -> None:
    job = Job(rid="r", sampling=sampling, text="<image>", prepared=[square(28)])
    with pytest.raises(UnsupportedField, match="with pictures") as caught:
        speller("Llava", LLAVA).prompt(job, lambda job: "", lambda text, special, param: encode(text))
    assert caught.value.param == param


def video(*steps: int) -> Prepared:
    return prepared(Array("steps", "int64", [max(len(steps), 2048)], 0, list(steps)))


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (video(0, 100), "the prompt takes 104 of 104 with them"),
        (video(), "2048 steps in time, of which positions are not known"),
    ],
)
def test_videos_take_positions_that_there_are(shown: Prepared, why: str) -> None:
    """Few frames of a long video, whose positions go by seconds, have more positions than tokens: they would
    be turned by what no table has. Steps that are too many are told to nobody."""
    job, tokens = Job(rid="r", sampling=SamplingParams(), text="<video>"), [0] * 11
    assert positions(job, tokens, [Placed(2, 10, video(0, 1))], 12) == 11
    assert positions(job, tokens, [Placed(2, 10, video(0, 100))], 105) == 104
    with pytest.raises(InvalidField, match=why) as caught:
        positions(job, tokens, [Placed(2, 10, shown)], 104)
    assert caught.value.param == "prompt"
    assert "num_frames" in caught.value.message


def test_a_prompt_that_is_read_as_a_whole_is_cached_for_equal_ones_alone() -> None:
    """PaliGemma's processor puts the beginning behind the pictures, and a line break at the end."""
    config: dict[str, object] = {
        "image_token_index": 32,
        "vision_config": {"image_size": 28, "patch_size": 14},
    }
    paligemma, picture = speller("PaliGemma", config), square(28)

    def prompt(text: str, special: bool = True) -> tuple[list[int], list[Placed]]:
        job = Job(
            rid="r", text=text, prepared=[picture], sampling=SamplingParams(), add_special_tokens=special
        )

        def encoded(text: str, special: bool, param: str) -> list[int]:
            assert not special
            return encode(text)

        return paligemma.prompt(job, lambda job: "", encoded)

    tokens, (whole, placed) = prompt("<image>it")
    assert tokens == [32] * 4 + encode("<bos>it\n")
    assert placed == Placed(0, 4, picture)
    assert (whole.first, whole.end, whole.whole, whole.picture.arrays) == (0, len(tokens), True, [])
    assert prompt("<image>it", special=False)[1][0] == whole
    assert prompt("<image>is")[1][0].picture.digest != whole.picture.digest


@pytest.mark.parametrize(
    ("job", "param"),
    [
        (Job(rid="a", sampling=SamplingParams(), text="no place"), "prompt"),
        (Job(rid="a", sampling=SamplingParams(), token_ids=[97]), "prompt"),
        (Job(rid="a", sampling=SamplingParams(), messages=[{"role": "user", "content": "no"}]), "messages"),
    ],
)
def test_errors_name_the_field_that_a_request_has(job: Job, param: str) -> None:
    job.prepared = [square(28)]
    with pytest.raises(InvalidField, match="places for pictures") as found:
        speller("Llava", LLAVA).prompt(job, lambda job: "no place", lambda text, special, field: encode(text))
    assert found.value.param == param

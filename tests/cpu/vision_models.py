"""Tiny random models that take pictures, and requests with pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from tiny import Transcript, submit

from sgla.hub.source import ModelSource, open_source
from sgla.loading.tower import READ
from sgla.media.film import filmed
from sgla.media.picture import Picture
from sgla.media.prepare import arrays_of, masked_of, prepare, trimmed_of, written
from sgla.media.sound import Sound
from sgla.media.video import Video
from sgla.messages import Array, Prepared, Submit
from sgla.model.vision.served import settings_of
from sgla.model.vision.table import vision_for
from sgla.text.pictures import Speller

TOP, CLOSE = 20, 1e-4  # logprobs that are compared at each token, and how far they may be
TEXT = {
    "vocab_size": 311,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Texts that stand for one token each; others are their bytes.
WORDS = (
    *("<image>", "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<|image_pad|>"),
    *("<|vision_start|>", "<|vision_end|>", "<fake_token_around_image>", "<global-img>", "[IMG]"),
    *("[IMG_BREAK]", "[IMG_END]", "<img>", "<IMG_CONTEXT>", "</img>", "<|video_pad|>"),
    *("<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *("<|video|>", "<|kimi_k25_video_placeholder|>", "<video>"),
    *("<|media_pad|>", "<slice>", "</slice>", "</image>"),
    *("<|image>", "<|image|>", "<image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|vision_bos|>", "<|IMAGE|>", "<|VIDEO|>", "<|vision_eos|>"),
    *("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "<|audio>", "<|audio|>", "<audio|>"),
)
FIRST = 262  # the token of the first of them


def encode(text: str) -> list[int]:
    """A tokenizer for these models."""
    tokens = []
    while text:
        word = next((word for word in WORDS if text.startswith(word)), "")
        tokens.append(FIRST + WORDS.index(word) if word else 3 + text.encode()[0])
        text = text[len(word or text[0]) :]
    return tokens


def token(word: str) -> int:
    return FIRST + WORDS.index(word)


def picture(height: int, width: int, seed: int = 0) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Picture.of(height, width, pixels.tobytes())


class Answer(NamedTuple):
    """Of transformers' module: tokens, and float32[tokens, vocabulary]."""

    tokens: list[int]
    logprobs: torch.Tensor


def answer_of(module: Any, given: dict[str, Any], max_new: int) -> Answer:
    out = module.generate(
        **given,
        do_sample=False,
        max_new_tokens=max_new,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, given["input_ids"].shape[1] :].tolist()
    return Answer(tokens, torch.cat(out.logits).log_softmax(-1))


def check_answers(found: Transcript, answers: dict[str, Answer]) -> None:
    """A request is called as its answer, with more words behind. The tokens of a random model may be the same
    whatever it sees; their logprobs are not."""
    for rid, deltas in found.items():
        expected = answers[rid.split()[0]]
        told = [entry for delta in deltas for entry in delta.logprobs or ()]
        assert [entry.token for entry in told] == expected.tokens, rid
        for entry, row in zip(told, expected.logprobs):
            tokens, values = zip(*entry.top)
            assert len(tokens) == TOP
            torch.testing.assert_close(torch.tensor(values), row[list(tokens)], atol=CLOSE, rtol=0)


class Model(NamedTuple):
    """A checkpoint with the module of transformers that it is of."""

    source: ModelSource
    module: Any
    speller: Speller
    folder: Path

    @property
    def settings(self) -> str:
        return json.dumps(settings_of(self.folder).images)

    def asked(self) -> dict[str, Any]:
        return self.speller.vision.prepares(self.source.config, settings_of(self.folder))

    @property
    def processor(self) -> str:
        return self.speller.vision.processors[0]

    def filmed(self, video: Video) -> dict[str, Any]:
        """What is made of a video, and what of that goes to its tower in transformers."""
        film = self.speller.vision.film
        assert film is not None
        config = self.source.config
        asked = self.asked() | ({} if film.paced is None else {"tokens_per_second": film.paced(config)})
        videos = json.dumps(settings_of(self.folder).videos)
        return filmed(video, film.processor, videos, asked, 1 << 26)

    def heard(self, sound: Sound) -> dict[str, Any]:
        """What is made of a sound."""
        hearing, settings = self.speller.vision.hearing, settings_of(self.folder)
        assert hearing is not None
        make = {"trimmed": trimmed_of, "masked": masked_of}[hearing.heard]
        return make(sound, hearing.processor_of(settings), json.dumps(dict(settings.sounds)))

    def prepared(self, shown: Picture | Video | Sound, several: bool = False) -> Prepared:
        if isinstance(shown, Sound):
            sound = str(self.folder / f"{shown.digest.hex()}.bin")
            arrays = [Array(*fields) for fields in written(self.heard(shown), "sound", sound, 1 << 26)]
            return Prepared(shown.digest, sound, arrays, "audio")
        if isinstance(shown, Video):
            video = str(self.folder / f"{shown.digest.hex()}.bin")
            arrays = [Array(*fields) for fields in written(self.filmed(shown), "video", video, 1 << 26)]
            return Prepared(shown.digest, video, arrays, "video")
        digest = shown.digest + bytes([several])
        file = self.folder / f"{digest.hex()}.bin"
        made = prepare(shown, self.processor, self.settings, self.asked(), several, str(file), 1 << 26)
        return Prepared(digest, str(file), [Array(*fields) for fields in made])

    def submit(
        self, rid: str, text: str, shown: Sequence[Picture | Video | Sound], max_new: int = 32
    ) -> Submit:
        text = text.replace("<image>", self.speller.vision.media)
        if (hearing := self.speller.vision.hearing) is not None:
            text = text.replace("<sound>", hearing.media)
        if (film := self.speller.vision.film) is not None:
            text = text.replace("<video>", film.media.rstrip())
        several = self.speller.vision.alone and len(shown) > 1
        made = [self.prepared(one, several) for one in shown]
        tokens, placed = self.speller.in_text(text, made, encode) if made else (encode(text), [])
        media = [(entry.first, entry.picture.digest) for entry in placed]
        return replace(submit(rid, tokens, max_new, logprobs=TOP), pictures=placed, media=media)

    def given(self, request: Submit, shown: Sequence[Picture | Video]) -> dict[str, Any]:
        """What transformers' module is given for it."""
        several = self.speller.vision.alone and len(shown) > 1
        made = [
            arrays_of(one, self.processor, self.settings, self.asked(), several)
            for one in shown
            if isinstance(one, Picture)
        ]
        videos = [self.filmed(one) for one in shown if isinstance(one, Video)]
        joined = {
            name: torch.from_numpy(side_by_side([arrays[name] for arrays in made]))
            for name in (made[0] if made else {})
            if name in READ and not (name == "pixel_values" and "target_sizes" in made[0])
        }
        if "target_sizes" in joined:  # patches lie behind each other
            joined["pixel_values"] = torch.cat([torch.from_numpy(x["pixel_values"]) for x in made], -1)
        ids = torch.tensor([request.tokens])
        kinds = (ids == self.speller.vision.token_of(self.source.config)).int()
        if self.speller.vision.together and not self.speller.vision.windowed:
            joined["token_type_ids"] = kinds
        if self.speller.vision.prefix:  # else it is causal, as behind a prefix
            joined["token_type_ids"] = torch.full_like(ids, 0 if shown else 1)
        if self.speller.vision.merged is not None or self.speller.vision.windowed:
            joined["mm_token_type_ids"] = kinds
        if videos:
            film = self.speller.vision.film
            assert film is not None
            for ours, theirs in (
                ("pixel_values", "pixel_values_videos"),
                ("image_grid_thw", "video_grid_thw"),
            ):
                joined[theirs] = torch.from_numpy(np.concatenate([video[ours] for video in videos]))
            joined["mm_token_type_ids"] += 2 * (ids == film.token_of(self.source.config)).int()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **joined}

    def answer(self, request: Submit, shown: Sequence[Picture | Video]) -> Answer:
        """What transformers' module makes of it."""
        return answer_of(self.module, self.given(request, shown), request.max_new)


def side_by_side(arrays: list[Any]) -> Any:
    """Pictures of several sizes, or of several numbers of tiles, with zeros behind them."""
    if arrays[0].ndim < 4:
        return np.concatenate(arrays)
    most = [max(sizes) for sizes in zip(*(array.shape for array in arrays))]
    return np.concatenate(
        [np.pad(x, [(0, 0), *((0, to - has) for to, has in zip(most[1:], x.shape[1:]))]) for x in arrays]
    )


def save_model(folder: Path, architecture: str, config: Any, images: dict[str, Any], seed: int = 0) -> Model:
    """A random float32 model in ``folder``. ``images``: its preprocessor_config.json."""
    import transformers

    torch.manual_seed(seed)
    module = getattr(transformers, architecture)._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            shift = (
                1.0
                if "norm" in name and name.endswith("weight") and "gemma" not in config.model_type
                else 0.0
            )
            parameter.normal_(shift, 0.15)
    module.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.eos_token_id = None
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    source = open_source(folder)
    speller = Speller(vision_for(architecture, source.config), source.config, settings_of(folder))
    return Model(source, module, speller, folder)

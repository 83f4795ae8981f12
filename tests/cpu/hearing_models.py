"""Tiny random models that take sounds, sounds, and requests with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from tiny import submit
from vision_models import TEXT, TOP, Answer, answer_of

from sgla.hub.source import ModelSource, open_source
from sgla.media.prepare import (
    chunks_of,
    heard_of,
    prepare_chunks,
    prepare_sound,
    prepare_windows,
    windows_of,
)
from sgla.media.sound import RATE, Sound
from sgla.messages import Array, Prepared, Submit
from sgla.model.hearing import HEARINGS
from sgla.model.vision.served import settings_of
from sgla.text.pictures import Speller

WORDS = (
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "[AUDIO]",
    "[BEGIN_AUDIO]",
    *("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>"),
)
FIRST = 290  # the token of the first of them


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


def sound(seconds: float, seed: int = 0) -> Sound:
    """A voice of three tones whose heights and loudness wander, over some noise."""
    rng, count = np.random.default_rng(seed), int(seconds * RATE)
    at = np.linspace(0, 1, 8)
    made = rng.normal(0, 0.01, count)
    for _ in range(3):
        pitch = np.interp(np.linspace(0, 1, count), at, rng.uniform(80, 2000, 8))
        loud = np.interp(np.linspace(0, 1, count), at, rng.uniform(0, 0.3, 8))
        made += loud * np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    return Sound.of(made.astype(np.float32).tobytes())


# What prepares a sound, and what transformers' module calls what it makes.
PREPARE = {"once": prepare_sound, "windows": prepare_windows, "chunks": prepare_chunks}
NAMES = {
    "once": ({"input_features": "input_features", "attention_mask": "feature_attention_mask"}, heard_of),
    "chunks": ({"input_features": "input_features", "input_features_mask": "input_features_mask"}, chunks_of),
}


def side_by_side(arrays: Sequence[Any]) -> Any:
    """With zeros behind the shorter ones."""
    most = max(array.shape[-1] for array in arrays)
    return np.concatenate([np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, most - x.shape[-1])]) for x in arrays])


class Heard(NamedTuple):
    """A checkpoint with the module of transformers that it is of."""

    source: ModelSource
    module: Any
    speller: Speller
    folder: Path

    @property
    def settings(self) -> str:
        return json.dumps(settings_of(self.folder).images)

    def prepared(self, heard: Sound) -> Prepared:
        file, processor = self.folder / f"{heard.digest.hex()}.bin", self.speller.vision.processors[0]
        made = PREPARE[self.speller.vision.heard](heard, processor, self.settings, str(file), 1 << 26)
        return Prepared(heard.digest, str(file), [Array(*fields) for fields in made], "audio")

    def submit(self, rid: str, text: str, heard: Sequence[Sound], max_new: int = 32) -> Submit:
        text = text.replace("<sound>", self.speller.vision.media)
        tokens, placed = self.speller.in_text(text, [self.prepared(one) for one in heard], encode)
        media = [(entry.first, entry.picture.digest) for entry in placed]
        return replace(submit(rid, tokens, max_new, logprobs=TOP), pictures=placed, media=media)

    def answer(self, request: Submit, heard: Sequence[Sound]) -> Answer:
        """What transformers' module makes of it."""
        processor = self.speller.vision.processors[0]
        given: dict[str, Any] = {}
        if self.speller.vision.heard == "windows" and heard:
            windows = [windows_of(one, processor, self.settings) for one in heard]
            given["input_features"] = torch.from_numpy(np.concatenate(windows))
        elif heard:
            names, make = NAMES[self.speller.vision.heard]
            made = [make(one, processor, self.settings) for one in heard]
            for name, as_module in names.items():
                given[as_module] = torch.from_numpy(side_by_side([arrays[name] for arrays in made]))
        ids = torch.tensor([request.tokens])
        given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return answer_of(self.module, given, request.max_new)


def save_model(folder: Path, architecture: str, config: Any, extractor: dict[str, Any]) -> Heard:
    """A random float32 model in ``folder``. ``extractor``: its preprocessor_config.json."""
    import transformers

    torch.manual_seed(0)
    module = getattr(transformers, architecture)._from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.15)
    module.save_pretrained(folder)
    module.generation_config.eos_token_id = None
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    source = open_source(folder)
    vision = HEARINGS[architecture]
    return Heard(source, module, Speller(vision, source.config, settings_of(folder)), folder)


TOWER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 16,
    "max_source_positions": 100,
}
# Two seconds instead of thirty.
EXTRACTOR = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16, "chunk_length": 2}


def qwen2_audio(folder: Path) -> Heard:
    from transformers import Qwen2AudioConfig

    config = Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **TOWER},
        text_config={"model_type": "qwen2", **TEXT},
        audio_token_index=token("<|AUDIO|>"),
    )
    return save_model(folder, "Qwen2AudioForConditionalGeneration", config, EXTRACTOR)


def voxtral(folder: Path) -> Heard:
    from transformers import VoxtralConfig

    tower = {
        "hidden_size": 32,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_mel_bins": 16,
        "max_source_positions": 100,
    }
    text = {"model_type": "llama", **TEXT, "head_dim": 8, "rope_theta": 1e4}
    config = VoxtralConfig(audio_config=tower, text_config=text, audio_token_id=token("[AUDIO]"))
    return save_model(folder, "VoxtralForConditionalGeneration", config, EXTRACTOR)


def qwen3_asr(folder: Path) -> Heard:
    from transformers import Qwen3ASRConfig

    tower = {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "num_mel_bins": 16,
        "output_dim": 48,
        "n_window_infer": 200,
        "downsample_hidden_size": 8,
    }
    text = {"model_type": "qwen3", **TEXT, "head_dim": 8, "tie_word_embeddings": True}
    config = Qwen3ASRConfig(audio_config=tower, text_config=text, audio_token_id=token("<|audio_pad|>"))
    extractor = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 16, "n_window": 50}
    return save_model(folder, "Qwen3ASRForConditionalGeneration", config, extractor)


SPECIALS = (
    *("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>"),
    *("<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
END = 258  # behind two words that are not bytes


def special(word: str) -> int:
    return END + SPECIALS.index(f"<|{word}|>")


def whisper(folder: Path, seed: int = 0) -> tuple[ModelSource, Any]:
    """A tiny random Whisper, which hears two seconds at a time, with transformers' module."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        **TOWER,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_target_positions=64,
        vocab_size=special("notimestamps") + 1 + 101,
        decoder_start_token_id=special("startoftranscript"),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), END),
        begin_suppress_tokens=None,
    )
    torch.manual_seed(seed)
    module = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.normal_(1.0, 0.15)
            elif "encoder.embed_positions" not in name:
                parameter.normal_(0.0, 0.15 if "embed" in name else 0.5)
    module.generation_config = GenerationConfig(
        decoder_start_token_id=special("startoftranscript"),
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), END),
        lang_to_id={f"<|{name}|>": special(name) for name in ("en", "de", "fr")},
        task_to_id={name: special(name) for name in ("transcribe", "translate")},
        is_multilingual=True,
        no_timestamps_token_id=special("notimestamps"),
        prev_sot_token_id=special("startofprev"),
        suppress_tokens=[5, 9, special("startofprev"), special("startoftranscript")],
        begin_suppress_tokens=[35, END],
        max_initial_timestamp_index=50,
        alignment_heads=[[0, 1], [1, 0], [1, 3]],
        max_length=64,
        return_timestamps=False,
    )
    module.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    return open_source(folder), module


def write_tokenizer(folder: Path) -> None:
    """That of ``whisper``: bytes, and the tokens behind them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġa", "th"]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.add_tokens([AddedToken(f"<|{i / 50:.2f}|>", special=False) for i in range(101)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))

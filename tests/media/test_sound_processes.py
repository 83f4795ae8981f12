"""Sounds in the processes that decode and prepare them, with their limits."""

from __future__ import annotations

import io
import json
import os
import wave
from pathlib import Path

import numpy as np
import pytest

from sgla.actors.ingress import PROCESS
from sgla.actors.pictures import PictureRoom
from sgla.config import Config
from sgla.engine.pictures import Loader, Shown, prompt_given
from sgla.errors import InvalidField
from sgla.media.arrays import BLOCK, LEVELS, PIXELS
from sgla.media.picture import Picture
from sgla.media.pool import Pool
from sgla.media.prepare import heard_of, trimmed_of
from sgla.media.sound import RATE, Hearable, Sound
from sgla.messages import Facts
from sgla.model.hearing.qwen2_audio import QWEN2_AUDIO
from sgla.model.vision.omni import QWEN2_5_OMNI
from sgla.model.vision.spec import Settings

EXTRACTOR = {"feature_size": 16, "chunk_length": 2}


def wav(samples: np.ndarray) -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.astype("<i2").tobytes())
    return out.getvalue()


async def test_a_file_becomes_what_a_tower_reads() -> None:
    samples = np.random.default_rng(0).integers(-9000, 9000, RATE)
    pool = Pool(processes=1, memory=PROCESS, modules=["sgla.media.decode"])
    room = PictureRoom(QWEN2_AUDIO, {}, Settings(EXTRACTOR, {}, sounds=EXTRACTOR))
    try:
        asked = "sgla.media.listen:sound", wav(samples), "file", Hearable(1 << 20, 10.0)
        heard = await pool.run(*asked, result=Sound)
        assert heard == Sound.of((samples / 32768).astype(np.float32).tobytes())
        with pytest.raises(InvalidField, match="no sound of a kind"):
            await pool.run(asked[0], b"no", "file", asked[3], result=Sound)
        first, again = await room.prepare([heard, heard], "a")
        assert first is again
        data = Path(first.file).read_bytes()
        expected = heard_of(heard, "WhisperFeatureExtractor", '{"feature_size": 16, "chunk_length": 2}')
        for array in first.arrays:
            whole = np.frombuffer(data, array.dtype, int(np.prod(array.shape)), array.first)
            np.testing.assert_allclose(whole.reshape(array.shape), expected[array.name], atol=1e-4)
        assert next(array.values for array in first.arrays if array.name == "frames") == [100]
        assert os.path.exists(first.file)
    finally:
        await pool.close()
        await room.close()


async def test_sounds_are_prepared_beside_pictures() -> None:
    """Whose sizes are nothing to them."""
    patches = {"patch_size": 4, "min_pixels": 64, "max_pixels": 512}
    room = PictureRoom(QWEN2_5_OMNI, {}, Settings(patches, {}, sounds=EXTRACTOR))
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    picture = Picture.of(20, 30, pixels.tobytes())
    heard = Sound.of(np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32).tobytes())
    try:
        shown, sound = await room.prepare([picture, heard], "a", {"max_pixels": 256})
        assert [shown.kind, sound.kind] == ["image", "audio"]
        assert {array.name for array in shown.arrays} == {PIXELS, LEVELS, BLOCK, "image_grid_thw"}
        assert sound.digest == heard.digest
        expected = trimmed_of(heard, "WhisperFeatureExtractor", json.dumps(EXTRACTOR))
        data = Path(sound.file).read_bytes()
        for array in sound.arrays:
            whole = np.frombuffer(data, array.dtype, int(np.prod(array.shape)), array.first)
            np.testing.assert_allclose(whole.reshape(array.shape), expected[array.name], atol=1e-4)
    finally:
        await room.close()


async def test_samples_of_callers_are_a_sound() -> None:
    """As vLLM has them: with their rate, of any type, several channels or one."""
    pool = Pool(processes=1, memory=PROCESS, modules=["sgla.media.decode"])
    sizes = {"page_size": 16, "slots": 1, "context_len": 16, "vocab_size": 9, "step_tokens": 16}
    facts = Facts(groups=[], **sizes, dtype="float32", device="cpu", media={"audio": ""})
    loader = Loader(Config(), facts, pool, None)
    samples = np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
    stereo, whole = np.stack([samples * 2, samples * 0]), (samples * 2**14).astype(np.int16)
    expected = Sound.of(samples.tobytes())
    try:
        shown = Shown(audio=[samples, (samples, RATE), (stereo, float(RATE)), (stereo.T, RATE)])
        assert await loader.load(prompt_given("a", shown)) == [expected] * 4
        assert await loader.load(prompt_given("a", Shown(audio=(samples, RATE)))) == [expected]
        assert Shown(audio=(samples, RATE)).each(2)[1].audio[1] == RATE
        (heard,) = await loader.load(prompt_given("a", Shown(audio=(whole, RATE))))
        assert heard == Sound.of((whole / 2**15).astype(np.float32).tobytes())
        (slow,) = await loader.load(prompt_given("a", Shown(audio=[(samples, RATE // 2)])))
        assert slow.seconds == pytest.approx(2, abs=0.01)
        for wrong in ((samples, "16k"), (samples[None, None], RATE), (samples > 0, RATE), 3.5):
            with pytest.raises(InvalidField, match="audio_data: a sound"):
                await loader.load(prompt_given("a", Shown(audio=[wrong])))
    finally:
        await pool.close()

"""Videos in the processes that look at their files, and that decode and prepare them, with their limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from video_files import clip

from sgla.actors.ingress import PROCESS
from sgla.actors.pictures import PictureRoom
from sgla.errors import BadRequest, InvalidField
from sgla.media.film import filmed
from sgla.media.pool import Pool
from sgla.media.video import Video, Watchable
from sgla.messages import Prepared
from sgla.model.vision.gemma4 import GEMMA4
from sgla.model.vision.glm4v import GLM4V
from sgla.model.vision.idefics3 import SMOLVLM
from sgla.model.vision.qwen2_vl import QWEN2_5_VL
from sgla.model.vision.spec import Settings, Vision

FILES = Settings({"min_pixels": 56 * 56, "max_pixels": 1 << 20}, {}, {"min_pixels": 56 * 56, "fps": 4.0})
WATCH, LIMITS = "sgla.media.watch:video", Watchable(1 << 20, 1 << 20, 60.0, 1000)


async def test_a_file_becomes_what_a_tower_reads() -> None:
    """As large as the model's files or the request say, of which the latter counts for more. What cannot be
    decoded, or takes too long, costs its request alone."""
    pool = Pool(processes=1, memory=PROCESS, modules=["sgla.media.decode"])
    room = PictureRoom(QWEN2_5_VL, {}, FILES)
    try:
        shown = await pool.run(WATCH, clip(), "file", LIMITS, result=Video)
        assert shown == Video.of(clip(), "mp4", 8, 4.0, 48, 64)
        with pytest.raises(InvalidField, match="no video of a kind"):
            await pool.run(WATCH, b"no", "file", LIMITS, result=Video)
        first, again = await room.prepare([shown, shown], "a")
        assert first is again
        assert first.kind == "video"
        data = Path(first.file).read_bytes()
        expected = filmed(
            shown,
            "Qwen2VLVideoProcessor",
            '{"min_pixels": 3136, "fps": 4}',
            {"tokens_per_second": 4},
            1 << 26,
        )
        assert [array.name for array in first.arrays] == list(expected)
        for array in first.arrays:
            whole = np.frombuffer(data, array.dtype, int(np.prod(array.shape)), array.first)
            np.testing.assert_array_equal(whole.reshape(array.shape), expected[array.name])
        size = {"size": {"shortest_edge": 56 * 56, "longest_edge": 56 * 112}, "num_frames": 2}
        (less,) = await room.prepare([shown], "a", size)
        assert less.digest != first.digest
        assert next(array.values for array in less.arrays if array.name == "image_grid_thw") == [1, 4, 4]
        with pytest.raises(InvalidField, match="fps and num_frames"):
            await room.prepare([shown], "a", {"fps": 1, "num_frames": 2})
        broken = Video.of(bytes(100), "mp4", 8, 4.0, 48, 64)
        with pytest.raises(BadRequest, match="cannot be decoded"):
            await room.prepare([broken], "a")
        assert len(await room.prepare([shown], "a")) == 1
    finally:
        await pool.close()
        await room.close()


@pytest.mark.parametrize("vision", [SMOLVLM, GEMMA4, GLM4V])
async def test_frames_are_chosen_by_files_and_requests(vision: Vision) -> None:
    """Of 10 s: so many frames as the model's files say, or else a request."""
    assert vision.film is not None
    files = Settings({}, {}, {"fps": 2.0} if vision is not GEMMA4 else {"num_frames": 5})
    room = PictureRoom(vision, {}, files, processes=1)
    shown = Video.of(clip(frames=20, rate=2), "mp4", 20, 2.0, 48, 64)

    def seconds(made: Prepared) -> list[int]:
        return next(array.values for array in made.arrays if array.name == "seconds")

    try:
        (usual,) = await room.prepare([shown], "a")
        (few,) = await room.prepare([shown], "a", {"num_frames": 4})
        (slow,) = await room.prepare([shown], "a", {"fps": 0.2})
        assert len(seconds(usual)) == {SMOLVLM: 20, GEMMA4: 5, GLM4V: 10}[vision]
        assert len(seconds(few)) == (2 if vision is GLM4V else 4)
        assert len(seconds(slow)) == (1 if vision is GLM4V else 2)
        assert seconds(usual) == sorted(seconds(usual))
        assert len(vision.film.spelled({}, files, few).counts) == len(seconds(few))
    finally:
        await room.close()


def test_what_prepares_media_is_imported_without_pyav() -> None:
    """As where only pictures are wanted."""
    without = "import sys; sys.modules['av'] = None; import sgla.media.film, sgla.media.listen"
    subprocess.run([sys.executable, "-c", without], check=True)

"""Sounds on a GPU: what the CPU answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from hearing_models import whisper
from test_hearing import MAKERS, SOUNDS, TEXTS
from test_omni import MAKERS as OMNI
from test_omni import SHOWN
from test_transcribing import Served, requests, reread, times
from tiny import make_core, run, tiny_config

from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner


@pytest.mark.parametrize("name", MAKERS)
def test_equal_to_the_cpu(name: str, tmp_path: Path) -> None:
    """Together, and again with what the first time has left in the cache."""
    model = MAKERS[name](tmp_path)
    requests = [model.submit(str(count), text, SOUNDS[:count], 12) for count, text in TEXTS.items()]

    def made(make: Any, **settings: Any) -> Any:
        config = tiny_config(step_tokens=256, **settings)
        return make(config, model.source, 0, 1, "", lambda progress: None)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = run(made(cpu_runner), requests).tokens()
        runner = made(cuda_runner, device="cuda", kv_cache_bytes=64 << 20)
        assert runner.facts.media["audio"]
        core = make_core(runner.facts)
        assert run(runner, requests, core).tokens() == expected
        assert run(runner, requests, core).tokens() == expected


@pytest.mark.parametrize("name", OMNI)
def test_beside_pictures(name: str, tmp_path: Path) -> None:
    model = OMNI[name](tmp_path)
    asked = [model.submit(rid, text, shown, 12) for rid, (text, shown) in SHOWN.items()]

    def made(make: Any, **settings: Any) -> Any:
        config = tiny_config(step_tokens=512, **settings)
        return make(config, model.source, 0, 1, "", lambda progress: None)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        expected = run(made(cpu_runner), asked).tokens()
        runner = made(cuda_runner, device="cuda", kv_cache_bytes=64 << 20)
        assert runner.facts.media.keys() == {"image", "video", "audio"}
        core = make_core(runner.facts)
        assert run(runner, asked, core).tokens() == expected
        assert run(runner, asked, core).tokens() == expected


def test_whisper_writes_as_on_the_cpu(tmp_path: Path) -> None:
    """Together, with decode steps as graphs, and alone in small steps."""
    source, _ = whisper(tmp_path)

    def made(make: Any, **settings: Any) -> Any:
        return make(tiny_config(**settings), source, 0, 1, "", lambda progress: None)

    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        on_cpu = made(cpu_runner)
        asked = requests(Served(source, on_cpu))
        expected = run(on_cpu, asked).tokens()
        runner = made(cuda_runner, device="cuda", kv_cache_bytes=64 << 20)
        assert run(runner, asked).tokens() == expected
        for request in asked:
            found = run(runner, [request], step_tokens=3, prefix_cache=False)
            assert found.tokens()[request.rid] == expected[request.rid]
        again = [reread(request, expected[request.rid]) for request in asked[:3]]
        said = times(run(on_cpu, again))
        assert len(said) == 3
        found_times = times(run(runner, [*again, *asked[3:]]))
        assert found_times.keys() == said.keys()
        for rid, places in said.items():
            assert found_times[rid] == pytest.approx(places, abs=1), rid

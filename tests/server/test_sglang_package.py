"""SGLang's own published frontend package against a server, beside ``sgla.lang``: the same programs give the
same. The package comes from the index (39 MB), or, unpacked, from the folder that ``SGLANG_PACKAGE`` names:
``pytest -m slow tests/server/test_sglang_package.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from server_process import serving
from sglang_programs import CHOICES

PACKAGE = "sglang==0.5.23"
PARTS = ("sglang/lang/", "sglang/utils.py")


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the language."""
    if "SGLANG_PACKAGE" in os.environ:
        return Path(os.environ["SGLANG_PACKAGE"])
    folder = tmp_path_factory.mktemp("sglang")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*pip, "--dest", folder, PACKAGE], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be had: {done.stderr[-200:]}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder, [name for name in files.namelist() if name.startswith(PARTS)])
    return folder


@pytest.mark.slow
@pytest.mark.real
def test_programs_are_those_of_sglangs_package(sglang: Path, tiny_llava: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    Image.effect_noise((20, 14), 60).convert("RGB").save(picture)
    flags = ["--load-format", "dummy", "--random-seed", "1", "--device", "cpu", "--dtype", "float32"]
    flags += ["--threads", "1", "--allowed-media-path", str(tmp_path)]
    with serving("--model", str(tiny_llava), *flags) as server:

        def run(module: str) -> dict[str, Any]:
            script = Path(__file__).with_name("sglang_programs.py")
            command = [sys.executable, str(script), module, server.url, str(picture)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr
            found: dict[str, Any] = json.loads(done.stdout)
            return found

        theirs, ours = run(str(sglang)), run("sgla.lang")
        # Their templates are written by the client, and ours by the server.
        whole, answer = theirs.pop("chat")
        asked = whole[: whole.rindex(answer)]
        sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        body = {"text": asked, "image_data": str(picture), "sampling_params": sampling}
        assert "<image>" in asked
        assert answer
        assert server.request("POST", "/generate", body)[1]["text"] == answer
        assert ours.pop("chat")[1]
        # It counts the last two tokens of the prompt among those of a choice, here and with nothing in front.
        for found in (theirs, ours):
            assert found.pop("unconditional_likelihood_normalized") in CHOICES
        assert theirs == ours
        assert theirs["again"]
        assert "Traceback" not in server.output

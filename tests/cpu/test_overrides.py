"""--hf-overrides: keys of config.json with other values are read as if the file had them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import probing
import pytest
import torch
from checkpoints import Eager, save_checkpoint

from sgla.cli import main
from sgla.config import Config
from sgla.errors import ConfigError
from sgla.loading.load import load_model
from sgla.loading.source import configured_source, overridden

PROMPT = [3 + 7 * i % 83 for i in range(40)]
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(path, "llama")
    return path


def read(folder: Path, overrides: dict[str, Any]) -> Any:
    return configured_source(folder, Config(model=str(folder), hf_overrides=overrides))


def test_an_override_equals_the_same_words_in_the_file(folder: Path, tmp_path: Path) -> None:
    text = json.loads((folder / "config.json").read_text())
    edited = text | {"rope_parameters": text["rope_parameters"] | LINEAR, "rms_norm_eps": 1e-3}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    overridden, file, plain = (
        Eager(load_model(source)).prompt_logprobs([PROMPT])
        for source in (
            read(folder, {"rope_parameters": LINEAR, "rms_norm_eps": 1e-3}),
            read(tmp_path, {}),
            read(folder, {}),
        )
    )
    assert torch.equal(overridden, file)
    assert not torch.equal(overridden, plain)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"rope_parameters": {"rope_type": "magic"}}, "magic"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"architectures": ["NoSuchForCausalLM"]}, "NoSuchForCausalLM"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ],
)
def test_an_override_is_refused_as_the_file_would_be(
    overrides: dict[str, Any],
    words: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probing.fork_probes(monkeypatch)
    assert main(["explain", str(folder), "--json-model-override-args", json.dumps(overrides)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if " is --hf-overrides " not in line]
    assert words in line


def test_what_is_no_object_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("[1]", "{", '{"a":' * 100_000):
        with pytest.raises(SystemExit, match="2"):
            main(["explain", str(folder), "--hf-overrides", text])
        assert "is no JSON object" in capsys.readouterr().err


def test_a_key_that_nobody_would_look_at_is_refused() -> None:
    config = {"model_type": "gemma3", "text_config": {"rope_theta": 1e6, "hidden_size": 8}}
    with pytest.raises(ConfigError, match=r"rope_theta stands in text_config here; give '\{\"text_config\""):
        overridden(config, {"rope_theta": 1e4})
    changed = overridden(config, {"text_config": {"rope_theta": 1e4}})
    assert changed["text_config"] == {"rope_theta": 1e4, "hidden_size": 8}
    assert config["text_config"]["rope_theta"] == 1e6

"""sgla debug: the first layer that differs is named."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_checkpoint
from parity import GENERIC, LAYOUTS
from safetensors.torch import load_file, save_file

from sgla.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(path, "llama", num_hidden_layers=4)
    return path


def changed(folder: Path, to: Path, name: str) -> Path:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + torch.randn(tensors[name].shape) * 0.05
    (to / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("kernels", ["--native-kernels", "--no-native-kernels"])
def test_a_right_model_equals_transformers(
    folder: Path, kernels: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["debug", "compare", str(folder), kernels, "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:5]] == [["layer", str(index)] for index in range(4)]
    assert lines[-1] == "all 5 states equal those of transformers within 0.001"


def test_layers_that_pass_several_streams_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    more = {"v_head_dim": 16, "index_head_dim": 16, "mlp_layer_types": ["dense"] * 3}
    save_checkpoint(tmp_path, "hy_v4", **sizes, **more, num_key_value_heads=6)
    assert main(["debug", "compare", str(tmp_path), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all 4 states equal those of transformers within 0.001"


# Sums of a whole layer (Gemma 4), streams of Gemma 3n, infinities as transformers writes them (Mamba 2),
# layers that are two of ours (LongCat), and one that runs through transformers' module.
ODD = ("gemma4_text", "gemma3n_text", "mamba2", "longcat_flash", "granite_swa")
APART = {"bailing_moe", "deepseek", "exaone", "mimo"}  # classes that transformers lacks
SHAPES = GENERIC | {name: layouts.shared for name, layouts in LAYOUTS.items()}


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=[] if name in ODD else pytest.mark.slow)
        for name in sorted(SHAPES.keys() - APART)
    ],
)
def test_every_family_is_compared(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint(tmp_path, model_type, **deepcopy(SHAPES[model_type]))
    assert main(["debug", "compare", str(tmp_path), "--device", "cpu"]) == 0
    assert "states equal those of transformers" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.embed_tokens.weight", "first difference from {}: embedding "),
        ("model.layers.2.mlp.down_proj.weight", "first difference from {}: layer 2 "),
        ("lm_head.weight", "the layers equal those of {}; what follows them"),
    ],
)
def test_the_first_difference_is_named(
    name: str, words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    dump, other = str(tmp_path / "ours.npz"), str(tmp_path / "theirs.npz")
    device = ["--device", "cpu", "--no-native-kernels"]
    assert main(["debug", "dump", str(folder), "--out", dump, *device]) == 0
    wrong = changed(folder, tmp_path, name)
    assert main(["debug", "compare", str(wrong), "--with", dump, *device]) == 1
    assert words.format(dump) in capsys.readouterr().out
    assert main(["debug", "dump", str(wrong), "--reference", "--out", other]) == 0
    assert main(["debug", "compare", dump, "--with", other]) == 1
    assert words.format(other) in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "none.npz", a=np.zeros(2))
    (tmp_path / "text.npz").write_text("text")
    dump = str(tmp_path / "a.npz")
    assert main(["debug", "dump", str(folder), "--out", dump, "--length", "5", "--device", "cpu"]) == 0
    longer = str(tmp_path / "b.npz")
    assert main(["debug", "dump", str(folder), "--out", longer, "--device", "cpu"]) == 0
    for words, given in {
        "is no dump of sgla debug": [dump, "--with", str(tmp_path / "none.npz")],
        "text.npz is no dump": [str(tmp_path / "text.npz"), "--with", dump],
        "different tokens": [dump, "--with", longer],
        "two dumps are compared by": [dump],
        "from dummy files": [str(folder), "--load-format", "dummy", "--device", "cpu"],
        "must be at least 1": [str(folder), "--length", "0"],
    }.items():
        assert main(["debug", "compare", *given]) == 2
        assert words in capsys.readouterr().err

"""Weights that PyTorch pickled: as safetensors in one file and several, and no code of a pickle is run."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Eager, random_prompts, save_checkpoint
from safetensors.torch import load_file

from sgla.cli import main
from sgla.config import Config
from sgla.errors import ConfigError, WeightError
from sgla.hub.fetch import check_folder, weight_patterns
from sgla.loading import pickles
from sgla.loading.load import load_model
from sgla.loading.pickles import unpickled
from sgla.loading.source import configured_source, open_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safe")
    save_checkpoint(path, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    return path


def write(folder: Path, to: Path, **files: dict[str, torch.Tensor]) -> Path:
    """``folder`` with other files of weights."""
    to.mkdir(exist_ok=True)
    (to / "config.json").write_text((folder / "config.json").read_text())
    for name, tensors in files.items():
        torch.save(tensors, to / name)
    return to


def logprobs(folder: Path, load_format: str = "auto") -> torch.Tensor:
    return Eager(load_model(open_source(folder, load_format))).prompt_logprobs(random_prompts([20]))


def test_one_file_and_several_equal_safetensors(folder: Path, tmp_path: Path) -> None:
    expected = logprobs(folder)
    tensors = load_file(folder / "model.safetensors")
    one = write(folder, tmp_path / "one", **{"pytorch_model.bin": tensors, "optimizer.bin": {}})
    assert open_source(one).kind == "pt"
    assert torch.equal(logprobs(one), expected)
    assert torch.equal(logprobs(one, "pt"), expected)
    names = sorted(tensors)
    halves = {
        f"pytorch_model-0000{i + 1}-of-00002.bin": {name: tensors[name] for name in names[i::2]}
        for i in (0, 1)
    }
    several = write(folder, tmp_path / "several", **halves)
    assert torch.equal(logprobs(several), expected)
    index = {name: file for file, held in halves.items() for name in held}
    (several / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert torch.equal(logprobs(several), expected)
    other = write(folder, tmp_path / "other", **{"weights.pt": {"state_dict": tensors}})
    assert torch.equal(logprobs(other), expected)
    old = write(folder, tmp_path / "old")
    torch.save(tensors, old / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(logprobs(old), expected)
    (several / min(halves)).unlink()
    with pytest.raises(ConfigError, match="names files that are not there"):
        open_source(several)


def test_safetensors_come_first_and_each_format_can_be_asked_for(folder: Path, tmp_path: Path) -> None:
    both = write(folder, tmp_path, **{"pytorch_model.bin": {}})
    with pytest.raises(ConfigError, match=r"has no .safetensors file \(found pytorch_model.bin\)"):
        open_source(both, "safetensors")
    (both / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert (open_source(both).kind, open_source(both, "pt").kind) == ("safetensors", "pt")
    with pytest.raises(ConfigError, match=r"lacks weights: it has no .bin or .pt or .pth file .found model"):
        check_folder(folder, "pt")
    files = ["config.json", "pytorch_model.bin"]
    assert weight_patterns("auto", files)[0] == weight_patterns("pt", ["a.safetensors"])[0] == "*.bin"
    assert weight_patterns("auto", [*files, "a.safetensors"]) == ["*.safetensors"]


class Asks:
    """Unpickles to what ``call`` returns."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def zipped(path: Path, data: bytes) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3\n")


HOSTILE: dict[str, Any] = {
    "code": {"a": Asks(os.system, "touch RUN")},
    "code beside weights": {"a": torch.ones(2), "b": Asks(eval, "open('RUN', 'w')")},
    "a list": [torch.ones(2)],
    "a number": {"a": 5},
    "no name": {7: torch.ones(2)},
    "repeated": {"a": torch.ones(1).expand(1 << 40)},
    "sparse": {"a": torch.eye(3).to_sparse()},
    "complex": {"a": torch.ones(2, dtype=torch.complex64)},
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("new", [True, False])
def test_a_pickle_that_asks_for_more_is_refused(
    name: str, new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(HOSTILE[name], tmp_path / "a.bin", _use_new_zipfile_serialization=new)
    with pytest.raises(WeightError, match=r"a\.bin") as caught:
        unpickled(tmp_path / "a.bin")
    assert "\n" not in caught.value.message
    assert "code" not in name or "which is not run" in caught.value.message
    assert not (tmp_path / "RUN").exists()


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\x03\x04", b"PK\x03\x04" + bytes(100), b"\x80\x02" + b"(" * 10_000, bytes(1000), b"text"],
)
def test_a_file_that_is_none_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(data)
    with pytest.raises(WeightError, match="no file of PyTorch's with tensors alone"):
        unpickled(tmp_path / "a.bin")
    zipped(tmp_path / "a.bin", data)
    with pytest.raises(WeightError, match="no file of PyTorch's with tensors alone"):
        unpickled(tmp_path / "a.bin")


def rewritten(path: Path, to: Path, compression: int = zipfile.ZIP_STORED, **records: Any) -> Path:
    """The archive with other records, by the ends of their names."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w", compression) as new:
        for name in old.namelist():
            data = old.read(name)
            change = records.get(re.sub(r"\W", "_", name.partition("/")[2]))
            new.writestr(name, data if change is None else change(data))
    return to


def test_a_file_that_grows_as_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"a": torch.zeros(7)}, tmp_path / "a.bin")
    grown = b"\x80\x02cbuiltins\nbytearray\n\x8a\x05" + (3 << 30).to_bytes(5, "little") + b"\x85R."
    old = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.\x80\x02" + b"]" * 3000
    (tmp_path / "old.bin").write_bytes(old)
    monkeypatch.setattr(pickles.Pickled, "left", 1000)
    monkeypatch.setattr(pickles, "PICKLE_BYTES", 2000)
    lists = b"\x80\x02" + b"]" * 3000 + b"."
    for file, words in {
        tmp_path / "old.bin": "its pickle has more than",
        rewritten(tmp_path / "a.bin", tmp_path / "b.bin", zipfile.ZIP_DEFLATED): "is compressed",
        rewritten(tmp_path / "a.bin", tmp_path / "c.bin", data_pkl=lambda _: grown): "asks for bytearray",
        rewritten(tmp_path / "a.bin", tmp_path / "d.bin", data_pkl=lambda _: lists): "a pickle of 3003 bytes",
    }.items():
        with pytest.raises(WeightError, match=words):
            unpickled(file)
    (tmp_path / "old.bin").write_bytes(grown)
    with pytest.raises(WeightError, match="asks for bytearray"):
        unpickled(tmp_path / "old.bin")


def test_a_tensor_that_the_file_has_in_part_is_refused(tmp_path: Path) -> None:
    """PyTorch would take what comes behind it in the file."""
    torch.save({"a": torch.ones(7), "b": torch.zeros(3)}, tmp_path / "a.bin")
    path = rewritten(tmp_path / "a.bin", tmp_path / "b.bin", data_0=lambda data: data[:8])
    with pytest.raises(WeightError, match="fewer bytes of a tensor than its shape takes"):
        unpickled(path)


def test_a_cut_off_file_is_refused(folder: Path, tmp_path: Path) -> None:
    write(folder, tmp_path, **{"pytorch_model.bin": load_file(folder / "model.safetensors")})
    data = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightError, match="no file of PyTorch's"):
        load_model(open_source(tmp_path))


class Packed(torch.Tensor):
    """As torchao's, which are made where the library has been imported."""


def test_tensors_of_other_classes_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2).as_subclass(Packed)}, tmp_path / "a.bin")
    with pytest.raises(WeightError, match=r"asks for test_pickles\.Packed, which is not run"):
        unpickled(tmp_path / "a.bin")
    with (
        torch.serialization.safe_globals([Packed]),
        pytest.raises(WeightError, match="a is a Packed, which is read from safetensors alone"),
    ):
        unpickled(tmp_path / "a.bin")


def test_a_plain_pickle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(pickle.dumps(Asks(os.system, "touch RUN")))
    with pytest.raises(WeightError, match="no file of PyTorch's"):
        unpickled(tmp_path / "a.bin")


def test_the_command_refuses_a_format_that_is_not_there(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(folder), "--load-format", "pt"]) == 2
    assert "lacks weights" in capsys.readouterr().err
    assert configured_source(folder, Config(model=str(folder))).kind == "safetensors"

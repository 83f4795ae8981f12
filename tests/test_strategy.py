"""``--parallel auto``: which way it takes, and that it says why."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sgla.cli.parallel import settled
from sgla.cli.settings import load_config
from sgla.config import Config
from sgla.device import nvidia
from sgla.errors import ConfigError
from sgla.observe import machine
from sgla.observe.machine import Machine
from sgla.resolve import resolve
from sgla.strategy import AXES, DATA, choose, flags_of

MODELS = Path(__file__).parents[1] / "bench/models"
NVLINK = 450e9
HOSTS: dict[str, Any] = {"nnodes": 2, "dist_init_addr": "a", "dist_secret": "s"}
FP8: dict[str, Any] = {"quantization": "fp8"}


def host(gpus: int) -> Machine:
    gpu = nvidia("NVIDIA H200", (9, 0), 132, 141 << 30)
    return Machine(
        cores=16,
        physical_cores=16,
        memory_available=1 << 37,
        torch="2.11",
        torch_cuda="13.0",
        gpus=(gpu,) * gpus,
    )


def chosen(
    model: str, gpus: int, link: float = NVLINK, network: float = 0.0, **settings: Any
) -> tuple[dict[str, int], str]:
    """The axes that are not 1, and what was said."""
    config = Config(model=model, parallel="auto", **settings)
    read = json.loads((MODELS / model / "config.json").read_text())
    found, why = choose(config, host(gpus), read, link, network)
    assert found.parallel == "given"
    return {
        axis: size for axis in AXES if (size := getattr(found, axis)) != getattr(Config(), axis)
    }, "\n".join(why)


@pytest.mark.parametrize(
    ("model", "gpus", "settings", "axes"),
    [
        ("qwen3-8b", 1, {}, {}),
        ("qwen3-8b", 2, {}, {"dp": 2}),
        ("qwen3-8b", 2, {"goal": "latency"}, {"tp": 2}),
        ("llama-3.1-70b", 2, {}, {"tp": 2}),  # one on each GPU has little room for requests
        ("llama-3.1-70b", 2, {"link": 0.0}, {"pp": 2}),
        ("llama-3.1-70b", 8, {}, {"dp": 4, "tp": 2}),
        ("llama-3.1-70b", 8, {"pp": 2, "goal": "latency"}, {"pp": 2, "tp": 4}),
        ("llama-3.1-70b", 2, {"link": 0.0, "kv_host_bytes": 1 << 30}, {"tp": 2}),
        ("qwen3-8b", 2, {"kv_disk": "/tmp:1G"}, {"tp": 2}),
        ("qwen3-30b-a3b", 8, {"goal": "latency"}, {"tp": 8, "ep": 8}),
        ("llama-3.1-70b", 2, HOSTS, {"dp": 2, "tp": 2}),
        ("deepseek-v3", 8, HOSTS | FP8, {"dp": 2, "tp": 8}),  # one host holds it
        ("deepseek-v3", 4, HOSTS | FP8 | {"network": 200e9}, {"tp": 8, "ep": 8, "dp_attention": True}),
        ("deepseek-v3", 4, HOSTS | FP8, {"pp": 2, "tp": 4, "ep": 4, "dp_attention": True}),  # links are slow
        ("deepseek-v3", 4, HOSTS | FP8 | {"network": 200e9, "goal": "latency"}, {"pp": 2, "tp": 4}),
        ("deepseek-v3", 4, HOSTS | FP8 | {"network": 200e9, "kv_disk": "/tmp:1G"}, {"pp": 2, "tp": 4}),
        ("deepseek-v3", 8, FP8 | {"dp_attention": True}, {"tp": 8, "ep": 8, "dp_attention": True}),
        ("deepseek-v3", 8, {"quantization": "fp8"}, {"tp": 8}),
    ],
)
def test_ways(model: str, gpus: int, settings: dict[str, Any], axes: dict[str, int]) -> None:
    found, why = chosen(model, gpus, **settings)
    assert found == axes
    assert why.startswith(f"parallel: {flags_of(dict.fromkeys(AXES, 1) | {DATA: False} | axes)} for ")


def test_narrow_experts_are_whole() -> None:
    """Of 768 columns, 8 ranks have 96 each."""
    found, _ = chosen("qwen3-30b-a3b", 8, tp=8)
    assert found == {"tp": 8, "ep": 8}


def test_what_is_left_out_is_told() -> None:
    _, why = chosen("llama-3.1-70b", 2, kv_host_bytes=1 << 30)
    assert "- --pp 2: refused: --kv-host-bytes cannot be honoured with --pp 2" in why
    _, why = chosen("llama-3.1-70b", 2, quantization="fp8", kv_disk="/tmp:1G")
    assert "- --dp 2: refused: --kv-disk" in why
    with pytest.raises(ConfigError, match="there is no way") as caught:
        chosen("deepseek-v3", 2)
    assert "- --tp 2: weights and a KV cache do not fit a GPU" in caught.value.message
    assert caught.value.param == "parallel"


def test_an_encoder_is_not_cut() -> None:
    bert = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 99, "hidden_size": 32}
    bert |= {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    bert |= {"max_position_embeddings": 64, "type_vocab_size": 2}
    found, why = choose(Config(parallel="auto"), host(2), bert, NVLINK)
    assert (found.dp, found.tp) == (2, 1)
    assert "not cut" in why[0]


def test_a_cpu_has_one_rank(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((MODELS / "qwen3-0.6b/config.json").read_text())
    said: list[str] = []
    config = Config(model=str(tmp_path), load_format="dummy", device="cpu", parallel="auto")
    found = settled(config, said.append, download=False)
    assert (found.parallel, found.tp, found.dp) == ("given", 1, 1)
    assert said == ["parallel: one rank, which has all cores (--device cpu)"]
    assert settled(found, said.append) is found
    two = settled(replace(config, tp=2, pp=2), said.append, download=False)
    assert (two.tp, two.pp, said[1:]) == (2, 2, ["parallel: --pp 2 --tp 2, as given (--device cpu)"])


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="--parallel auto is for sgla serve"):
        resolve(Config(parallel="auto", device="cpu"))
    with pytest.raises(ConfigError, match="--parallel is auto, or a number"):
        settled(Config(parallel="fast"), print)
    with pytest.raises(ConfigError, match="for one model"):
        settled(Config(parallel="auto", models=["a=b"]), print)
    with pytest.raises(ConfigError, match="sgla pull"):
        settled(Config(parallel="auto", model="nobody/has-this"), print, download=False)


def test_a_number_is_that_of_llama_cpp(capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config({"parallel": "8"}, environ={})
    assert (config.parallel, config.max_running_requests) == ("given", 8)
    assert "--max-running-requests 8" in capsys.readouterr().err


class Library:
    """NVML with two links up."""

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            if name == "nvmlDeviceGetNvLinkState":
                given[2]._obj.value = int(given[1] < 2)
                return int(given[1] > 9)  # there is no such link
            if name == "nvmlDeviceGetNvLinkVersion":
                given[2]._obj.value = 4
            return 0

        return call


def test_links_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert machine.nvlink_rate() == 50e9

    def none(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert machine.nvlink_rate() == 0


def test_the_network_is_what_devices_tell(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert machine.network_rate(tmp_path) == 0
    write("net/lo/speed", "99000\n")
    write("net/eth0/speed", "10000\n")
    write("net/eth0/device/vendor", "")
    write("net/down/speed", "-1\n")
    write("net/down/device/vendor", "")
    assert machine.network_rate(tmp_path) == 1.25e9
    for card, state in (("a", "4: ACTIVE"), ("b", "4: ACTIVE"), ("c", "1: DOWN")):
        write(f"infiniband/{card}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
        write(f"infiniband/{card}/ports/1/state", state)
    assert machine.network_rate(tmp_path) == 100e9

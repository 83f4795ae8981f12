"""What a device says of itself, and which kinds of devices there are."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, PathDistribution
from pathlib import Path

import pytest
from tiny import run, submit, tiny_config, tiny_source

from sgla import device, packages
from sgla.config import Config
from sgla.device import OTHERS, Device, nvidia
from sgla.errors import ConfigError
from sgla.executor.procs import runner_of
from sgla.observe.machine import Machine
from sgla.resolve import resolve
from sgla.worker.cpu import CpuRunner

# bf16, fp8, tma, wgmma, pdl; KiB of shared memory of a block
FACTS = {
    "T4": ((7, 5), (False, False, False, False, False), 99),
    "A100": ((8, 0), (True, False, False, False, False), 163),
    "L40S": ((8, 9), (True, True, False, False, False), 99),
    "H100": ((9, 0), (True, True, True, True, True), 227),
    "B200": ((10, 0), (True, True, True, False, True), 227),
    "RTX 5090": ((12, 0), (True, True, True, False, True), 99),
}


@pytest.mark.parametrize("name", FACTS)
def test_what_gpus_have(name: str) -> None:
    arch, has, shared = FACTS[name]
    gpu = nvidia(name, arch, 100, 1 << 35)
    assert (gpu.bf16, gpu.fp8, gpu.tma, gpu.wgmma, gpu.pdl) == has
    assert (gpu.kind, gpu.shared, gpu.memory) == ("cuda", shared << 10, 1 << 35)


def test_a_cpu_is_a_device() -> None:
    cpu = Device("cpu", "any")
    assert cpu.bf16
    assert not any((cpu.fp8, cpu.tma, cpu.wgmma, cpu.pdl, cpu.shared))


@pytest.mark.parametrize("kind", [*OTHERS, "abacus"])
def test_other_kinds_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {kind}: .*; give --device cpu") as caught:
        resolve(Config(device=kind), Machine())
    assert caught.value.param == "device"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("third_device:LOST", "cannot be loaded: AttributeError: .*LOST"),
        ("lost_device:PLATFORM", "cannot be loaded: ModuleNotFoundError: .*lost_device"),
        ("third_device:ThirdRunner", "is no sgla.device.Platform but of type ABCMeta"),
    ],
)
def test_a_broken_package_is_named(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    package = PathDistribution(Path("acme_third-1.0.dist-info"))
    monkeypatch.setattr(PathDistribution, "name", "acme-third")
    entry = EntryPoint("broken", value, "sgla.devices")
    vars(entry)["dist"] = package
    monkeypatch.setattr(packages, "entry_points", lambda group, name: [entry])
    told = f"--device broken: {value} of the package acme-third {message}.*; mend or remove it, or give --device cpu"  # noqa: E501
    with pytest.raises(ConfigError, match=told) as caught:
        resolve(Config(device="broken"), Machine())
    assert caught.value.param == "device"
    assert "broken" not in device.PLATFORMS


@pytest.fixture
def third(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package has registered a third kind."""
    entry = EntryPoint("third", "third_device:PLATFORM", "sgla.devices")
    monkeypatch.setattr(packages, "entry_points", lambda group, name: [entry] if name == entry.name else [])
    monkeypatch.setattr(device, "PLATFORMS", dict(device.PLATFORMS))


@pytest.mark.usefixtures("third")
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_a_third_device_runs_by_torch_bodies(quantization: str | None) -> None:
    config = tiny_config(device="third", quantization=quantization)
    module, _, name = runner_of(config).partition(":")
    make = getattr(importlib.import_module(module), name)
    requests = [submit("greedy", [5, 9, 2], 12), submit("drawn", [7] * 30, 12, temperature=0.9, seed=3)]
    runner = make(config, tiny_source(), 0, 1, "", lambda p: None)
    assert (runner.facts.device, runner.place.free()) == ("Third 1", 1 << 30)
    tokens = run(runner, requests).tokens()
    config = tiny_config(native_kernels=False, quantization=quantization)
    own = CpuRunner(config, tiny_source(), 0, 1, "", lambda p: None)
    assert tokens == run(own, requests).tokens()


@pytest.mark.usefixtures("third")
def test_a_third_device_is_settled_and_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(Config(device="third"), Machine()).config.device == "third"
    assert resolve(Config(device="third", quantization="fp8"), Machine()).config.quantization == "fp8"
    monkeypatch.setitem(device.PLATFORMS, "third", device.PLATFORMS["third"]._replace(find=tuple))
    with pytest.raises(ConfigError, match="--device third: this machine shows none"):
        resolve(Config(device="third"), Machine())
    monkeypatch.setitem(device.PLATFORMS, "third", device.PLATFORMS["third"]._replace(find=lambda: (1 // 0,)))
    with pytest.raises(ConfigError, match="--device third: .* failed .*: ZeroDivisionError"):
        resolve(Config(device="third"), Machine())

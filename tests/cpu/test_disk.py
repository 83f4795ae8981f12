"""Prefixes on a disk: what comes back is what was computed, whatever becomes of the files."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from config_cases import LONGROPE, deepseek, gemma3, qwen3_next
from fsspec.implementations.local import LocalFileSystem
from tiny import Transcript, make_core, run, submit, tiny_config, tiny_source

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.messages import KEY, Copy, Moved, int32
from sgla.observe.machine import Machine
from sgla.resolve import check_features
from sgla.sched.core import Core
from sgla.worker.cpu import CpuRunner
from sgla.worker.disk import UnitFile, identity_of, places_of
from sgla.worker.tiers import SUM, FileTier, HostMemory, Job, checksum

TEXTS = [[(a * i + a) % 300 for i in range(100)] for a in (7, 11, 13)]


def start(
    folder: Path | None, size: str = "1M", config: dict[str, Any] | None = None, **model: Any
) -> CpuRunner:
    disk = {} if folder is None else {"kv_disk": f"{folder}:{size}"}
    settings = tiny_config(**{"max_running_requests": 2} | disk | (config or {}))
    return CpuRunner(settings, tiny_source(**model), 0, 1, "", lambda progress: None)


def play(
    runner: CpuRunner, core: Core | None = None, ask: int = 3, **limits: Any
) -> tuple[list[float], list[int]]:
    """Three texts, one after the other, on a device with room for one: the tokens behind them and their
    logprobs, and how many tokens of each were cached."""
    core = core or few(runner, **limits)
    told, cached = list[float](), list[int]()
    for i, text in enumerate(TEXTS[:ask]):
        rid = f"r{core.stats().steps}"
        answer = run(runner, [submit(rid, [*text, i], 3, logprobs=3)], core)
        for delta in answer[rid]:
            told += delta.tokens
            told += [entry.logprob for entry in delta.logprobs or ()]
        cached.append(answer[rid][0].cached_tokens)
    return told, cached


def few(runner: CpuRunner, **limits: Any) -> Core:
    return make_core(runner.facts, pages=160 // runner.facts.page_size, **limits)


@pytest.fixture(scope="module")
def cold() -> Any:
    """Sums depend on how a text is cut, in their last bits."""
    return pytest.approx(play(start(None))[0], abs=1e-5)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, cold: Any) -> Path:
    """Files of a server that has seen the texts."""
    folder = tmp_path_factory.mktemp("disk")
    runner = start(folder)
    core = few(runner)
    assert play(runner, core) == (cold, [0, 0, 0])
    assert play(runner, core) == (cold, [96, 96, 96]), "evicted from the device, and here again"
    assert [(t.name, t.failed) for t in core.stats().tiers] == [("disk", 0)]
    runner.close()
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "disk"))


def test_a_server_that_starts_anew_has_all_of_it(folder: Path, cold: Any) -> None:
    assert play(start(folder)) == (cold, [96, 96, 96])


@pytest.mark.parametrize(
    "other",
    [{"config": {"random_seed": 2}}, {"model": {"rope_theta": 99.0}}, {"config": {"page_size": 8}}],
)
def test_other_weights_and_layouts_begin_anew(
    folder: Path, other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = other.get("model", {})
    runner = start(folder, config=other.get("config"), **model)
    assert "its files are of another model, version or settings of KV, and are removed" in caplog.text
    assert not any(map(any, runner.facts.found[0]))
    assert play(runner)[0] == play(start(None, config=other.get("config"), **model))[0]


def test_what_begins_anew_with_another_context(tmp_path: Path) -> None:
    """Beyond its training longrope rotates all positions otherwise."""
    rope = LONGROPE | {"original_max_position_embeddings": 128}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [9.0] * 8}
    for context, anew in ((128, True), (120, False), (200, True)):
        runner = start(tmp_path, config={"context_length": context}, rope_scaling=rope)
        assert any(map(any, runner.facts.found[0])) is not anew
        told = play(runner)[0]
        runner.close()
        cold = start(None, config={"context_length": context}, rope_scaling=rope)
        assert told == pytest.approx(play(cold)[0], abs=1e-5)


def test_what_is_deterministic_reads_nothing_else(folder: Path) -> None:
    asked = {"deterministic": True, "native_kernels": True}
    assert not any(map(any, start(folder, config=asked).facts.found[0]))


def damage(folder: Path, name: str, how: str) -> None:
    path = folder / "kv-0of1" / name
    data = bytearray(path.read_bytes())
    if how == "cut":
        data = data[: len(data) // 40]
    elif how == "noise":
        data[:: 1 << 10] = bytes(x ^ 0xFF for x in data[:: 1 << 10])
    elif how == "moved":
        data = data[len(data) // 2 :] + data[: len(data) // 2]
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["0.data", "0.index"])
@pytest.mark.parametrize("how", ["cut", "noise", "moved"])
def test_damaged_files_cost_time_alone(
    folder: Path, cold: Any, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(folder, name, how)
    runner = start(folder)
    core = few(runner)
    told, cached = play(runner, core)
    assert told == cold
    assert min(cached) < 96
    assert core.stats().tiers[0].failed or name == "0.index"
    assert play(runner, core) == (cold, [96, 96, 96]), "what was computed has been written again"
    assert len(caplog.records) <= 1


def test_files_of_another_model_are_not_read(folder: Path, tmp_path: Path) -> None:
    """Somebody has copied them into the folder of this one, whose units are as large."""
    other = tmp_path / "other"
    start(other, config={"random_seed": 2}).close()
    for name in ("0.data", "0.index"):
        shutil.copyfile(folder / "kv-0of1" / name, other / "kv-0of1" / name)
    runner = start(other, config={"random_seed": 2})
    assert any(map(any, runner.facts.found[0]))
    expected = play(start(None, config={"random_seed": 2}))[0]
    assert play(runner) == (pytest.approx(expected, abs=1e-5), [0, 0, 0])


def test_files_of_ranks_that_are_exchanged_are_not_read(tmp_path: Path) -> None:
    """Keys are the same on all ranks, and so are the sizes of units."""
    places = places_of("model", 0, 2, 2) + places_of("model", 1, 2, 2)
    assert len(set(places)) == 4
    [first, second] = [UnitFile(tmp_path, g, 2, 8, place) for g, place in enumerate(places[:2])]
    first.write(1, b"k" * KEY, b"8 bytes.")
    assert first.read(1, b"k" * KEY) == b"8 bytes."
    for name in ("data", "index"):
        shutil.copyfile(tmp_path / f"0.{name}", tmp_path / f"1.{name}")
    assert second.keys() == first.keys()
    with pytest.raises(OSError, match="has been changed"):
        second.read(1, b"k" * KEY)


@pytest.mark.parametrize("size", [40, 4096 * 3 + 5, 1 << 18])
def test_whatever_changes_in_a_unit_changes_its_sum(size: int) -> None:
    draw = np.random.default_rng(size)
    unit, key = draw.integers(1, 256, size, dtype=np.uint8), b"k" * KEY
    right, half = checksum(key, unit.data), size // 16 * 8
    changed = [unit.copy() for _ in range(40)]
    for i, other in enumerate(changed[:20]):
        for place in draw.integers(size, size=1 + i % 2):
            other[place] ^= 1 << (i % 8)
    for other in changed[20:30]:
        begin = draw.integers(size - 16)
        other[begin : begin + 16] = 0
    for i, other in enumerate(changed[30:], 1):
        other[:] = np.roll(unit, i * half // 10 or 1)
    changed += [np.concatenate([unit[half:], unit[:half]]), unit[:-1], np.append(unit, np.uint8(0))]
    whole = size // 4096 * 4096
    for i in range(1, size // 4096):  # blocks of a disk that are exchanged
        blocks = unit[:whole].reshape(-1, 4096).copy()
        blocks[[0, i]] = blocks[[i, 0]]
        changed.append(np.concatenate([blocks.ravel(), unit[whole:]]))
    sums = {checksum(key, other.data) for other in changed if other.tobytes() != unit.tobytes()}
    assert right not in sums
    assert len(sums) > 20
    assert checksum(b"l" * KEY, unit.data) != right != checksum(key, unit.data, b"place")


def test_blocks_of_large_units_that_are_exchanged_change_its_sum() -> None:
    """Two that lie as far apart as both widths divide."""
    unit = np.random.default_rng(1).integers(1, 256, (576, 4096), dtype=np.uint8)
    other, key = unit.copy(), b"k" * KEY
    other[[3, 3 + 509]] = other[[3 + 509, 3]]
    assert checksum(key, unit.reshape(-1).data) != checksum(key, other.reshape(-1).data)


def test_no_more_of_a_folder_is_removed_than_was_made(tmp_path: Path) -> None:
    theirs = tmp_path / "kv-notes-of-1995"
    theirs.mkdir()
    (tmp_path / "kv-0of4").mkdir()
    (tmp_path / "elsewhere").write_text("a file of somebody")
    start(tmp_path)
    assert theirs.is_dir()
    assert not (tmp_path / "kv-0of4").exists()
    for name in ("lock-0", "kv-0of1/0.data"):
        path = tmp_path / "linked" / name
        path.parent.mkdir(parents=True)
        path.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "linked/kv-0of1").mkdir(exist_ok=True)
        (tmp_path / "linked/kv-0of1/identity").write_text(identity(tmp_path))
        with pytest.raises(ConfigError, match="Too many levels of symbolic links"):
            start(tmp_path / "linked")
        assert (tmp_path / "elsewhere").read_text() == "a file of somebody"
        path.unlink()
        shutil.rmtree(tmp_path / "linked")


def identity(folder: Path) -> str:
    return (folder / "kv-0of1" / "identity").read_text()


def test_a_disk_with_less_room_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path, "1M").close()
    assert not caplog.records
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 18))
    start(tmp_path, "1M")
    assert "what finds no room is not kept" in caplog.text


def test_a_slow_disk_is_waited_for_while_it_brings_something(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by copies that no thread has taken yet."""
    now = 0.0
    monkeypatch.setattr("sgla.worker.tiers.clock", SimpleNamespace(now=lambda: now))
    read = list[float]()

    def slow(*units: Any) -> None:
        nonlocal now
        now += 29
        read.append(now)

    kept: Any = SimpleNamespace(read_all=slow, close=lambda: None)
    tier = FileTier("--kv-disk", [kept], [HostMemory([np.zeros((9, 4), np.uint8)])])
    ends = int32([1, 2, 3])
    first, second = (
        Job(Copy(n, "disk", "device", [ends], [ends], [b"k" * 3 * KEY]), None, 0.0) for n in (1, 2)
    )
    tier._under_way = [first, second]
    tier._load(first)
    assert (first.moved, len(read)) == (87, 3)
    now = 116.0
    assert tier.ended() == []
    now = 118.0
    assert tier.ended() == [Moved(1, ok=False), Moved(2, ok=False)]
    tier._load(first)
    assert len(read) == 3, "nobody wants it any more"


def test_what_is_flushed_while_a_disk_hangs_is_forgotten_when_it_is_back() -> None:
    """And before anything else takes its place."""
    done = list[tuple[str, int]]()
    kept: Any = SimpleNamespace(
        erase=lambda unit: done.append(("erase", unit)),
        write_all=lambda units, keys, rows: done.extend(("write", unit) for unit in units),
        close=lambda: None,
    )
    tier = FileTier("--kv-disk", [kept], [HostMemory([np.zeros((9, 4), np.uint8)])])
    none, ends, hangs = int32([]), int32([1, 2]), Job(Copy(1, "disk", "device", [], []), None, 0.0)
    tier._stuck = [hangs]
    tier.begin(Copy(2, "", "disk", [none], [ends]))
    assert tier.ended() == [Moved(2, ok=False)]
    hangs.done.set_result([])
    tier.begin(Copy(3, "device", "disk", [ends], [ends], [b"k" * 2 * KEY]))
    tier._under_way[0].done.result(20)
    assert done == [("erase", 1), ("erase", 2), ("write", 1), ("write", 2)]
    tier.close()


def test_a_copy_that_nobody_wants_is_given_up() -> None:
    """What it has written to the device is nobody's."""
    begun, goes_on, written = Event(), Event(), list[int]()

    def read(*units: Any) -> None:
        begun.set()
        goes_on.wait(20)

    kept: Any = SimpleNamespace(read_all=read, close=lambda: None)
    memory: Any = SimpleNamespace(mark=str, wait=print, room=bool, batch=1)
    memory.write = lambda units, rows: written.append(units)
    tier = FileTier("--kv-disk", [kept], [memory])
    ends = int32([1, 2, 3])
    tier.begin(Copy(7, "disk", "device", [ends], [ends], [b"k" * 3 * KEY]))
    begun.wait(20)
    for transfer in (6, 7):
        tier.drop(transfer)
    assert tier.ended() == []
    goes_on.set()
    tier._under_way[0].done.result(20)
    assert tier.ended() == [Moved(7, ok=False)]
    assert not written
    tier.close()


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_other_policies_write_less(policy: str, tmp_path: Path, cold: Any) -> None:
    runner = start(tmp_path)
    core = few(runner, write_policy=policy)
    for _ in range(3):
        assert play(runner, core)[0] == cold
    assert core.stats().tiers[0].saved < 18
    assert (policy == "write_back") == (core.stats().tiers[0].loaded > 0)
    assert core.stats().tiers[0].failed == 0


def test_a_damaged_identity_begins_anew(folder: Path, cold: Any) -> None:
    (folder / "kv-0of1" / "identity").write_bytes(b"\xff\xfe")
    assert play(start(folder)) == (cold, [0, 0, 0])


def test_files_that_change_under_a_running_server(folder: Path, cold: Any) -> None:
    runner = start(folder)
    core = few(runner)
    for name in ("0.data", "0.index"):
        os.truncate(folder / "kv-0of1" / name, 100)
    assert play(runner, core) == (cold, [0, 0, 0])
    shutil.rmtree(folder)
    assert play(runner, core)[0] == cold


@pytest.mark.parametrize("broken", ["_write", "read_all"])
def test_a_disk_that_fails(
    folder: Path,
    cold: Any,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is full, or cannot be read."""

    def fail(self: UnitFile, *rest: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if broken == "_write":
        shutil.rmtree(folder)
    runner = start(folder)
    core = few(runner)
    monkeypatch.setattr(UnitFile, broken, fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert play(runner, core) == (cold, [0, 0, 0])
    assert core.stats().tiers[0].failed >= (2 if broken == "_write" else 3)
    if broken == "_write":
        monkeypatch.undo()
        monkeypatch.setattr("sgla.sched.saving.AGAIN", 1)
        assert play(runner, core) == (cold, [0, 0, 0])
        assert play(runner, core) == (cold, [96, 96, 96]), "there is room again"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_disk_that_is_full_keeps_what_comes_last(
    tmp_path: Path, cold: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has room for nine of the pages that it was to have room for."""
    write = UnitFile._write

    def bounded(file: UnitFile, fd: int, data: bytes, at: int) -> None:
        if fd == file._data and at + len(data) > 9 * len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, fd, data, at)

    monkeypatch.setattr(UnitFile, "_write", bounded)
    runner = start(tmp_path)
    core = few(runner)
    for _ in range(3):
        assert play(runner, core)[0] == cold
    [tier] = core.stats().tiers
    assert (tier.total, tier.failed) == (9, 1)
    assert 3 <= tier.cached <= 9
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    core.check()
    runner.close()
    last = start(tmp_path)
    rest = run(last, [submit("r", [*TEXTS[-1], 2], 1)], few(last))
    assert rest["r"][0].cached_tokens == 96


def test_a_disk_with_room_again_is_filled_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time it is tried with twice as much, until it is full again."""
    write, most = UnitFile._write, [9]

    def bounded(file: UnitFile, fd: int, data: bytes, at: int) -> None:
        if fd == file._data and at + len(data) > most[0] * len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, fd, data, at)

    monkeypatch.setattr(UnitFile, "_write", bounded)
    runner = start(tmp_path, "8M")
    core = few(runner)
    whole = core.stats().tiers[0].total
    assert whole > 900
    play(runner, core)
    assert core.stats().tiers[0].total == 9
    most[0] = 200
    monkeypatch.setattr("sgla.sched.saving.AGAIN", 1)
    monkeypatch.setattr("sgla.sched.saving.MORE", 1)
    core._memory.transfers.saving.lack(0, [b""])
    totals = list[int]()
    for i in range(100):
        run(runner, [submit(f"{i}", [(i + 3) * j % 300 for j in range(60)], 1)], core)
        totals.append(core.stats().tiers[0].total)
    assert totals[8] > 200, "more than it takes to fill what there is"
    assert max(totals) == whole
    assert totals[-1] < 300
    core.check()


def test_its_bytes_are_bounded_and_what_was_used_last_stays(tmp_path: Path, cold: Any) -> None:
    runner = start(tmp_path, "70K")  # eight pages
    core = few(runner)
    assert play(runner, core)[0] == cold
    size = sum(path.stat().st_size for path in tmp_path.rglob("*.*") if path.is_file())
    assert 50_000 < size <= 70 << 10
    assert play(runner, core, ask=1)[1] == [0]
    runner.close()
    last = start(tmp_path, "70K")
    assert run(last, [submit("r", [*TEXTS[0], 0], 1)], few(last))["r"][0].cached_tokens == 96


def test_what_is_flushed_does_not_come_back(folder: Path) -> None:
    runner = start(folder)
    core = few(runner)
    core.flush_cache()
    answers = run(runner, [submit("r", [1, 2], 1)], core)
    assert answers.finish() == {"r": "length"}
    runner.close()
    assert not any(map(any, start(folder).facts.found[0]))


def test_salts_and_adapters_are_part_of_the_key(folder: Path) -> None:
    runner = start(folder)
    request = submit("r", [*TEXTS[0], 0], 1)
    request.namespace = "salt"
    answer: Transcript = run(runner, [request], few(runner))
    assert answer["r"][0].cached_tokens == 0


def test_two_servers_do_not_share_a_folder(folder: Path) -> None:
    runner = start(folder)
    with pytest.raises(ConfigError, match="another server has it"):
        start(folder)
    runner.close()
    start(folder)


def test_a_disk_that_is_full_at_the_start_is_no_fault_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, at: int, count: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ConfigError, match="No space left on device; make room there"):
        start(tmp_path)


@pytest.mark.parametrize(
    ("folder", "size", "words"),
    [
        ("/proc/none", "1M", "may write to"),
        ("disk", "1K", "give .*K at least"),
        ("disk", "much", "PATH:BYTES"),
    ],
)
def test_what_cannot_be_had_is_refused(tmp_path: Path, folder: str, size: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        start(tmp_path / folder, size)
    assert caught.value.param == "kv_disk"


@pytest.mark.parametrize(
    ("changes", "vectors", "words"),
    [
        ({}, True, "answers with vectors"),
        ({"prefix_cache": False}, False, "no-prefix-cache"),
        ({"executor": "fake"}, False, "--executor fake"),
        ({"kv_disk": "/tmp"}, False, "takes PATH:BYTES"),
    ],
)
def test_what_it_cannot_be_combined_with(changes: dict[str, Any], vectors: bool, words: str) -> None:
    config = Config(**{"device": "cpu", "kv_disk": "/tmp/none:1G"} | changes)
    with pytest.raises(ConfigError, match=words) as caught:
        check_features(config, Machine(), config.device, vectors, encoder=False)
    assert caught.value.param == "kv_disk"


@pytest.mark.parametrize("role", ["both", "prefill"])
def test_a_policy_without_a_tier_is_refused(role: Any) -> None:
    config = Config(device="cpu", kv_write_policy="write_back", role=role, kv_transfer_secret="secret")
    with pytest.raises(ConfigError, match="needs --kv-host-bytes, --kv-disk or --kv-store") as caught:
        check_features(config, Machine(), config.device, vectors=False, encoder=False)
    assert caught.value.param == "kv_write_policy"


def of(model: dict[str, Any], folder: Path | None) -> CpuRunner:
    disk = {} if folder is None else {"kv_disk": f"{folder}:8M"}
    source = tiny_source()
    source.config.clear()
    source.config.update(model)
    return CpuRunner(tiny_config(**disk), source, 0, 1, "", lambda progress: None)


@pytest.mark.parametrize("group", ["window", "latent", "states"])
def test_other_cache_groups_come_back(group: str, tmp_path: Path) -> None:
    model = {
        "window": gemma3(vocab_size=331, num_hidden_layers=3, sliding_window=40, layer_types=...),
        "latent": deepseek(2, vocab_size=331),
        "states": qwen3_next(vocab_size=331),
    }[group]
    cold = pytest.approx(play(of(model, None), prefix_cache=False)[0], abs=1e-5)
    runner = of(model, tmp_path)
    core = few(runner)
    assert play(runner, core)[0] == cold
    told, cached = play(runner, core)
    assert (told, cached) == (cold, [96, 96, 96])
    runner.close()
    assert play(of(model, tmp_path)) == (cold, [96, 96, 96])


def store(url: object, **config: Any) -> CpuRunner:
    settings = tiny_config(**{"max_running_requests": 2, "kv_store": str(url), "page_size": 8} | config)
    return CpuRunner(settings, tiny_source(), 0, 1, "", lambda progress: None)


@pytest.fixture
def eight() -> Any:
    """What the texts give with pages of eight tokens."""
    return pytest.approx(play(start(None, config={"page_size": 8}))[0], abs=1e-5)


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For short texts, too."""
    monkeypatch.setattr("sgla.worker.store.ASKED", 32)


@pytest.mark.usefixtures("asks")
@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_two_servers_share_a_store(scheme: str, tmp_path: Path, eight: Any) -> None:
    first, second = store(f"{scheme}{tmp_path}"), store(f"{scheme}{tmp_path}")
    one, other = few(first), few(second)
    assert play(first, one) == (eight, [0, 0, 0])
    assert play(second, other) == (eight, [96, 96, 96])
    assert [(tier.loaded, tier.failed) for tier in other.stats().tiers] == [(36, 0)]
    assert play(store(f"{scheme}{tmp_path}", random_seed=3))[1] == [0, 0, 0]


@pytest.mark.usefixtures("asks")
@pytest.mark.parametrize("how", ["changed", "cut", "empty"])
def test_damaged_objects_are_computed_and_written_again(
    how: str, tmp_path: Path, eight: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert play(store(tmp_path))[0] == eight
    for path in [path for path in tmp_path.rglob("*") if path.is_file()][::5]:
        data = path.read_bytes()
        path.write_bytes({"changed": data[:-1] + b"?", "cut": data[:-1], "empty": b""}[how])
    assert play(store(tmp_path)) == (eight, [0, 0, 0])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert play(store(tmp_path)) == (eight, [96, 96, 96])


@pytest.mark.usefixtures("asks")
def test_objects_of_another_model_are_not_read(tmp_path: Path, eight: Any) -> None:
    """Somebody has given their folder the name of this one."""
    play(store(tmp_path, random_seed=2))
    [theirs] = tmp_path.iterdir()
    play(store(tmp_path))
    [ours] = set(tmp_path.iterdir()) - {theirs}
    shutil.rmtree(ours)
    theirs.rename(ours)
    assert play(store(tmp_path)) == (eight, [0, 0, 0])


@pytest.mark.usefixtures("asks")
def test_no_more_of_an_object_is_read_than_a_unit_has(
    tmp_path: Path, eight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may write to a store, and their checksums may be right."""
    assert play(store(tmp_path))[0] == eight
    objects = [path for path in tmp_path.rglob("*") if path.is_file()]
    size = objects[0].stat().st_size
    [place] = places_of(next(tmp_path.iterdir()).name, 0, 1, 1)
    for path in objects:
        data = path.read_bytes()[SUM:] + bytes(1 << 20)
        path.write_bytes(checksum(bytes.fromhex(path.name), data, place) + data)
    read, sizes = LocalFileSystem.cat_file, list[int]()

    def counted(*args: Any) -> bytes:
        found: bytes = read(*args)
        sizes.append(len(found))
        return found

    monkeypatch.setattr(LocalFileSystem, "cat_file", counted)
    assert play(store(tmp_path)) == (eight, [0, 0, 0])
    assert max(sizes) == size + 1


@pytest.mark.usefixtures("asks")
@pytest.mark.parametrize("method", ["exists", "cat_file"])
def test_a_store_that_hangs_is_left_alone(
    method: str, tmp_path: Path, eight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for it computes, and what comes too late is nobody's."""
    assert play(store(tmp_path))[0] == eight
    answers = Event()
    monkeypatch.setattr("sgla.worker.tiers.PATIENCE", 0.05)
    runner, ask = store(tmp_path), getattr(LocalFileSystem, method)

    def late(*args: Any, **kwargs: Any) -> Any:
        answers.wait(20)
        return ask(*args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, method, late)
    core = few(runner)
    assert play(runner, core) == (eight, [0, 0, 0])
    answers.set()
    monkeypatch.undo()
    for job in runner.copies._sources["store"]._stuck:
        job.done.exception()
    assert play(runner, few(runner)) == (eight, [96, 96, 96])


@pytest.mark.usefixtures("asks")
@pytest.mark.parametrize("method", ["exists", "cat_file", "pipe_file"])
def test_a_store_that_may_not_be_used_any_more(
    method: str, tmp_path: Path, eight: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is asked or written to in vain, one warning says so, and metrics count it; later it may be again."""
    if method != "pipe_file":
        play(store(tmp_path))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    runner = store(tmp_path)
    core = few(runner)
    with monkeypatch.context() as patch:
        patch.setattr(LocalFileSystem, method, refuse)
        assert play(runner, core) == (eight, [0, 0, 0])
    [tier] = core.stats().tiers
    assert tier.unanswered + tier.failed >= 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert play(runner, core)[0] == eight
    assert play(store(tmp_path)) == (eight, [96, 96, 96])


@pytest.mark.parametrize("url", ["", " "])
def test_a_store_without_an_address_is_not_the_folder_where_a_server_starts(url: str) -> None:
    with pytest.raises(ConfigError, match="takes a folder, or an address") as caught:
        check_features(tiny_config(kv_store=url), Machine(), "cpu", vectors=False, encoder=False)
    assert caught.value.param == "kv_store"


def test_a_store_that_is_not_there_is_refused() -> None:
    for url, word in (("nothing://x", "nothing"), ("/proc/none", "/proc/none")):
        with pytest.raises(ConfigError, match=word) as caught:
            store(url)
        assert caught.value.param == "kv_store"


def test_a_package_of_a_store_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=r"s3fs.*pip install 'sgla\[remote\]'") as caught:
        store("s3://bucket/kv")
    assert caught.value.param == "kv_store"


def test_the_identity_is_made_of_values_alone(tmp_path: Path) -> None:
    """An address would be another one after a restart. A file that is written anew is another file."""
    with pytest.raises(TypeError):
        identity_of(Config(), tiny_source(at=print), [])
    path = tmp_path / "model.safetensors"
    found = []
    for content in (b"one", b"one", b"two"):
        path.write_bytes(content)
        os.utime(path, ns=(1, 1 if content == b"one" else 2))
        found.append(identity_of(Config(), replace(tiny_source(), files=(path,)), []))
    assert found[0] == found[1] != found[2]

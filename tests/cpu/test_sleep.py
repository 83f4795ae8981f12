"""Memory that is given back while nobody needs the model, and weights that become others."""

from __future__ import annotations

import asyncio
import gc
import json
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import LLAMA, make_core, run, submit, tiny_config, tiny_source

from sgla.actors.ingress import Ingress
from sgla.actors.resting import FEW
from sgla.config import Config
from sgla.device import Device
from sgla.errors import ConfigError, InvalidField, Loading, SglaError, UnsupportedField
from sgla.executor.fake import fake_facts
from sgla.loading.source import open_source
from sgla.memory import resident
from sgla.messages import Control
from sgla.worker.cpu import CpuRunner
from sgla.worker.encoder import EncoderRunner
from sgla.worker.profile import Profiler
from sgla.worker.runner import CHANGES

TEXT = [(7 * i) % 300 for i in range(100)]
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 128}
WAKE = Control(verb="wake", args={"kv": True, "weights": True})


@pytest.fixture(autouse=True)
def few_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Garbage is looked for among what a test makes: who goes to sleep looks through all objects of the
    process, which takes half a second where other tests have imported much."""
    gc.freeze()
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


def sleep(weights: str = "files") -> Control:
    return Control(verb="sleep", args={"kv": True, "weights": weights})


SLEEP = sleep()


def start(config: dict[str, Any] | None = None, **model: Any) -> CpuRunner:
    settings = tiny_config(**(config or {}))
    return CpuRunner(settings, tiny_source(**model), 0, 1, "", lambda progress: None)


def answer(runner: CpuRunner) -> list[int]:
    return run(runner, [submit("r", TEXT, 5)]).tokens()["r"]


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("weights", ["", "host", "files"])
def test_answers_are_the_same_after_a_sleep(weights: str, native: bool) -> None:
    runner = start({"native_kernels": native})
    first = answer(runner)
    assert any(bool(layer.k.any()) for layer in runner.kv)
    for _ in range(2):
        runner.control(sleep(weights))
    assert not any(bool(layer.k.any() | layer.v.any()) for layer in runner.kv)
    assert hasattr(runner, "model") is (weights != "files")
    runner.control(WAKE)
    runner.control(WAKE)
    assert answer(runner) == first


def test_the_memory_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    runner = start({"kv_cache_bytes": 8 << 20}, **WIDE)
    answer(runner)
    awake = resident()
    runner.control(SLEEP)
    weights = runner.facts.ledger["weights"]
    assert weights > 80 << 20
    assert awake - resident() > 0.9 * weights


def test_prefixes_on_a_disk_stay(tmp_path: Path) -> None:
    runner = start({"kv_disk": f"{tmp_path}:1M"})
    first = run(runner, [submit("r", TEXT, 5)])
    runner.control(SLEEP)
    runner.control(WAKE)
    keys = [file.keys() for file in runner.copies._sources["disk"]._kept]
    runner.facts.found = [keys]
    again = run(runner, [submit("r", TEXT, 5)])
    assert again.tokens() == first.tokens()
    assert again["r"][0].cached_tokens == 96


@pytest.mark.parametrize("tier", ["kv_disk", "kv_store"])
def test_prefixes_are_of_the_weights_that_are_read_again(tier: str, tmp_path: Path) -> None:
    model, before = tmp_path / "model", tmp_path / "before"
    model.mkdir()
    save(model, seed=1)
    runner = of(model, **{tier: f"{tmp_path / 'kv'}{':1M' if tier == 'kv_disk' else ''}"})
    runner.control(SLEEP)
    model.rename(before)
    model.mkdir()
    save(model, seed=2)
    with pytest.raises(ConfigError, match="files have changed") as caught:
        runner.control(WAKE)
    assert caught.value.param == "model"
    assert not hasattr(runner, "model")
    model.rename(tmp_path / "other")
    before.rename(model)
    runner.control(WAKE)
    assert len(answer(runner)) == 5


def test_weights_that_cannot_be_read_again_stay() -> None:
    for config in ({"speculative_algorithm": "ngram"}, {"enable_lora": True}):
        runner = start(config)
        with pytest.raises(UnsupportedField, match="KV cache alone"):
            runner.control(SLEEP)
        runner.control(sleep(""))
        runner.control(WAKE)
        assert len(answer(runner)) == 5


async def test_nobody_comes_while_the_server_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgla.actors.resting.TRIES", 2)
    told, full = list[Control](), [True]
    ingress: Any = Ingress(Config())

    async def control(command: Control) -> None:
        told.append(command)
        if len(told) == 2:
            raise UnsupportedField("not here")

    facts = fake_facts(tiny_config(), tiny_source())
    ingress.connect(
        object(), facts, lambda: None, control, lambda tiers: not full[0], lambda: "", lambda paused: None
    )
    assert not await ingress.sleep(True, "files")
    assert (ingress.phase, told) == ("ready", [])
    full[0] = False
    assert await ingress.sleep(True, "files")
    assert not ingress.ready
    assert "/wake_up" in ingress.trouble
    with pytest.raises(Loading, match="/wake_up"):
        ingress.require_ready()
    told.clear()
    await ingress.wake()
    assert (ingress.phase, [one.verb for one in told]) == ("ready", ["wake"])
    with pytest.raises(UnsupportedField):
        await ingress.sleep(True, "")
    assert ingress.ready


async def test_parts_come_back_one_by_one() -> None:
    """A trainer that shares the device has the weights back, changes them, and then the KV cache."""
    told = list[Any]()

    async def control(command: Control) -> None:
        told.append((command.verb, command.args.get("kv"), command.args.get("weights")))

    ingress = resting(control)
    assert await ingress.sleep(True, "")
    assert await ingress.sleep(False, "either")
    await ingress.wake(["weights"])
    assert (ingress.phase, ingress.asleep) == ("sleeping", {"kv_cache"})
    await ingress.wake(["kv_cache"])
    assert (ingress.phase, ingress.asleep) == ("ready", set())
    assert told == [
        ("sleep", True, ""),
        ("sleep", False, "either"),
        ("wake", False, True),
        ("wake", True, False),
    ]


async def test_ranks_wake_where_one_cannot_sleep() -> None:
    told = list[str]()

    async def control(command: Control) -> None:
        told.append(command.verb)
        if command.verb == "sleep":
            raise UnsupportedField("not here")

    ingress = resting(control)
    with pytest.raises(UnsupportedField):
        await ingress.sleep(True, "host")
    assert (ingress.phase, ingress.asleep, told) == ("ready", set(), ["sleep", "wake"])


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize(
    ("name", "args", "asked"),
    [
        ("sleep", (True, "host"), {"weights": "host"}),
        ("update_weights", ("/w", None), {"path": "/w"}),
        ("take_tensors", ([b"x"], None), {"path": ""}),
        ("take_from_servers", ({"CPU-0": "ipc://x"}, None), {"path": ""}),
        ("take_from_trainer", ("group", [], None), {"path": ""}),
    ],
)
async def test_no_request_ends_for_what_cannot_be_done(
    name: str, args: tuple[Any, ...], asked: dict[str, str], refused: bool
) -> None:
    told = list[Any]()

    async def control(command: Control) -> None:
        told.append(command.args if command.verb == "may_change" else command.verb)
        if refused:
            raise UnsupportedField("not here")

    async def clear() -> None:
        told.append(ingress.phase)
        del ingress._open["r"]

    ingress = resting(control)
    ingress.config = Config(weight_folders=["/"])
    ingress._renew = lambda weights: True
    ingress._open["r"] = object()
    if refused:
        with pytest.raises(UnsupportedField):
            await getattr(ingress, name)(*args, clear=clear)
        assert (told, ingress.phase, [*ingress._open]) == ([asked], "ready", ["r"])
        return
    with suppress(SglaError):  # of a folder that is none
        await getattr(ingress, name)(*args, clear=clear)
    resting_as = "sleeping" if name == "sleep" else "updating"
    assert told[:2] == [asked, resting_as], "nobody comes once requests are ended"
    assert len(told) > 2


@pytest.mark.parametrize("name", ["sleep", "update_weights", "doze"])
async def test_copies_that_take_long_are_waited_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk still has to write what requests left, which have been ended for this. Who sleeps because
    nobody came gives up soon instead: the next request would wait for that."""
    monkeypatch.setattr("sgla.actors.resting.TRY", 0.0)
    told, looks = list[str](), chain([False] * (2 * FEW), repeat(True))

    async def control(command: Control) -> None:
        told.append(command.verb)

    ingress = resting(control)
    ingress.config = Config(weight_folders=["/"])
    ingress._flush = ingress._renew = lambda _: next(looks)
    if name == "doze":
        assert not await ingress.doze()
        assert (told, ingress.phase) == ([], "ready")
        assert [next(looks) for _ in range(FEW + 1)] == [False] * FEW + [True]
        return
    with suppress(SglaError):  # of a folder that is none
        assert await getattr(ingress, name)(*(("/w", None) if name == "update_weights" else (True, "files")))
    assert told[0] == ("weights_update" if name == "update_weights" else "sleep")


def test_a_step_under_way_is_waited_for() -> None:
    """Its request has ended, and too early to leave a page in the tree."""
    runner = start({"native_kernels": False})
    core = make_core(runner.facts, depth=2)
    core.offer(submit("r", [1, 2, 3], 9), 0.0)
    plans = [plan for _ in range(2) if (plan := core.plan(0.0)) is not None]
    core.cancel("r", "abort")
    assert len(plans) == 2
    for plan in plans:
        assert not core.flush_cache(tiers=False)
        core.retire(runner.execute(plan), 0.0)
    assert core.flush_cache(tiers=False)


def resting(control: Any) -> Any:
    ingress: Any = Ingress(Config())
    facts = fake_facts(tiny_config(), tiny_source())
    ingress.connect(object(), facts, dict, control, lambda tiers: True, str, lambda paused: None)
    return ingress


@pytest.mark.parametrize("later", ["draining", "dead"])
async def test_a_server_that_ends_meanwhile_is_not_ready_again(later: str) -> None:
    async def control(command: Control) -> None:
        ingress.phase = later
        raise UnsupportedField("not here")

    for name, args in (("sleep", (True, "host")), ("wake", ()), ("update_weights", ("/w", None))):
        ingress = resting(control)
        ingress.config = Config(weight_folders=["/"])
        ingress.phase = "sleeping" if name == "wake" else "ready"
        with pytest.raises(UnsupportedField):
            await getattr(ingress, name)(*args)
        assert ingress.phase == later


async def test_who_goes_leaves_a_server_that_sleeps() -> None:
    """The workers do what they were told, so requests may not come; a wake waits for that."""
    told, goes = list[str](), asyncio.Event()

    async def control(command: Control) -> None:
        told.append(command.verb)
        await goes.wait()

    ingress = resting(control)
    asks = asyncio.ensure_future(ingress.sleep(True, "files"))
    await asyncio.sleep(0)
    wakes = asyncio.ensure_future(ingress.wake())
    await asyncio.sleep(0)
    asks.cancel()
    await asyncio.wait([asks])
    assert (asks.cancelled(), ingress.phase, told) == (True, "sleeping", ["sleep"])
    goes.set()
    await wakes
    assert (ingress.phase, told) == ("ready", ["sleep", "wake"])


def save(folder: Path, seed: int, **changes: Any) -> None:
    """A random checkpoint of Llama."""
    config = LLAMA | changes
    random = torch.Generator().manual_seed(seed)
    wide, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes = {"model.embed_tokens": (vocab, wide), "lm_head": (vocab, wide), "model.norm": (wide,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}_layernorm": (wide,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (wide, wide) for name in "qo"}
        shapes |= {f"{layer}.self_attn.{name}_proj": (wide // 2, wide) for name in "kv"}
        shapes |= {f"{layer}.mlp.{name}_proj": (inner, wide) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (wide, inner)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=random) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two sets of weights of one model, another model, and broken files."""
    made = {}
    for name, seed, changes in (("one", 1, {}), ("two", 2, {}), ("deeper", 1, {"num_hidden_layers": 5})):
        made[name] = tmp_path_factory.mktemp(name)
        save(made[name], seed, **changes)
    made["broken"] = tmp_path_factory.mktemp("broken")
    for path in made["one"].iterdir():
        (made["broken"] / path.name).write_bytes(path.read_bytes())
    weights = made["broken"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return made


def of(folder: Path, **config: Any) -> CpuRunner:
    return CpuRunner(tiny_config(**config), open_source(folder), 0, 1, "", lambda progress: None)


def update(path: object) -> Control:
    return Control(verb="weights_update", args={"path": str(path)})


def test_updated_weights_are_those_of_a_new_server(folders: dict[str, Path]) -> None:
    one, two = (answer(of(folders[name], native_kernels=True)) for name in ("one", "two"))
    assert one != two
    runner = of(folders["one"], native_kernels=True)
    runner.control(update(folders["two"]))
    assert answer(runner) == two
    runner.control(SLEEP)
    runner.control(WAKE)
    assert answer(runner) == two, "what is read again is what was updated"
    runner.control(update(""))
    assert answer(runner) == one
    runner.control(update(""))
    assert answer(runner) == one, "and there it ends"


def test_weights_that_cannot_be_had_leave_the_old_ones(folders: dict[str, Path]) -> None:
    runner = of(folders["one"])
    before = answer(runner)
    for name, word in (("deeper", "another model"), ("broken", "old weights stay"), ("none", "none")):
        with pytest.raises(InvalidField, match=word) as caught:
            runner.control(update(folders.get(name, Path("/none"))))
        assert caught.value.param == "model_path"
        assert answer(runner) == before
    runner.control(update(""))
    assert answer(runner) == before


def test_a_fault_that_nobody_knows_leaves_the_old_weights(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = of(folders["one"])
    before = answer(runner)
    take = runner._take

    def fails(source: Any, sound: bool = True) -> None:
        take(source, sound)
        if source is not runner.source:
            raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(runner, "_take", fails)
    with pytest.raises(InvalidField, match="RuntimeError: what nobody thought of; the old weights stay"):
        runner.control(update(folders["two"]))
    assert answer(runner) == before


def test_old_weights_stay_beside_an_output_layer_that_they_lack(tmp_path: Path) -> None:
    """Where their files have gone meanwhile."""
    for name in ("served", "next"):
        (tmp_path / name).mkdir()
        save(tmp_path / name, seed=1, tie_word_embeddings=True)
    path = tmp_path / "served" / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if name != "lm_head.weight"}, path)
    runner = of(tmp_path / "served")
    before = answer(runner)
    path.unlink()
    with pytest.raises(InvalidField, match="an output layer of their own.*; the old weights stay"):
        runner.control(update(tmp_path / "next"))
    assert answer(runner) == before


def test_old_weights_stay_although_their_files_have_gone(tmp_path: Path) -> None:
    for name in ("served", "next"):
        (tmp_path / name).mkdir()
        save(tmp_path / name, seed=1 if name == "served" else 2)
    runner = of(tmp_path / "served")
    before = answer(runner)
    path = tmp_path / "next" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, path)
    (tmp_path / "served" / "model.safetensors").unlink()
    with pytest.raises(InvalidField, match="old weights stay"):
        runner.control(update(tmp_path / "next"))
    assert answer(runner) == before


def test_weights_beside_what_is_made_for_them_are_not_updated(folders: dict[str, Path]) -> None:
    with pytest.raises(UnsupportedField, match="cannot be updated beside adapters"):
        of(folders["one"], enable_lora=True).control(update(folders["two"]))
    runner = of(folders["one"])
    runner.config = msgspec.structs.replace(runner.config, role="prefill")
    with pytest.raises(UnsupportedField, match="--role prefill, whose servers have the same weights"):
        runner.control(update(folders["two"]))


def test_weights_are_shown_as_they_are(folders: dict[str, Path]) -> None:
    runner = of(folders["one"])
    name = "model.layers.0.self_attn.q_proj.weight"
    show = Control(verb="weights_show", args={"name": name, "rows": 3})
    values = load_file(folders["one"] / "model.safetensors")[name][:3].float().tolist()
    assert runner.control(show) == {"values": values}
    runner.control(update(folders["two"]))
    assert runner.control(show) != {"values": values}
    with pytest.raises(InvalidField, match="no tensor 'x' that can be told"):
        runner.control(Control(verb="weights_show", args={"name": "x", "rows": 3}))
    random = start()
    told: Any = random.control(show)
    random.control(sleep("host"))
    assert random.control(show) == told != {"values": values}


async def test_the_ingress_takes_weights_of_its_folders_alone(folders: dict[str, Path]) -> None:
    told, fails = list[Any](), list[bool]()
    ingress: Any = Ingress(Config(weight_folders=[str(folders["two"].parent)]))

    async def control(command: Control) -> None:
        told.append(command.args["path"])
        if fails:
            fails.pop()
            raise InvalidField("broken", param="model_path")

    facts = fake_facts(tiny_config(), tiny_source())
    ingress.connect(object(), facts, dict, control, lambda tiers: True, str, lambda paused: None)
    with pytest.raises(InvalidField, match="--weight-folders"):
        await ingress.update_weights("/elsewhere", None)
    assert await ingress.update_weights(str(folders["two"]), "second")
    assert (ingress.weight_version, told) == ("second", [str(folders["two"])])
    assert folders["two"] / "model.safetensors" in ingress.files.values()
    told.clear()
    fails.append(True)
    with pytest.raises(InvalidField, match="broken"):
        await ingress.update_weights(str(folders["one"]), "third")
    assert told == [str(folders["one"]), ""], "ranks that have taken them go back"
    assert (ingress.weight_version, ingress.ready) == ("second", True)


@pytest.mark.parametrize("verb", [verb for verb in CHANGES if verb not in ("sleep", "wake")])
def test_an_encoder_says_why_nothing_changes(verb: str) -> None:
    runner: Any = EncoderRunner.__new__(EncoderRunner)
    runner.facts, runner.profiler = SimpleNamespace(grammars=False), Profiler(0)
    runner.place = SimpleNamespace(device=Device("cpu", "cpu"))
    with pytest.raises(UnsupportedField, match="memory and weights of such a model cannot be changed"):
        runner.control(Control(verb=verb))

"""Weights that come as tensors: in place, all or none, beside requests that are paused."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
import sys
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save
from test_sleep import TEXT, answer, of, sleep
from test_sleep import save as save_model
from tiny import LLAMA, make_core, run, submit
from torch import Tensor

from sgla.actors.resting import in_memory
from sgla.errors import InvalidField, UnsupportedField, WeightError
from sgla.loading.tensors import packed, received
from sgla.messages import Control
from sgla.worker.cpu import CpuRunner

QKV = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for seed, name in enumerate(("one", "two")):
        made[name] = tmp_path_factory.mktemp(name)
        save_model(made[name], seed)
    return made


@pytest.fixture(scope="module")
def tensors(folders: dict[str, Path]) -> dict[str, dict[str, Tensor]]:
    return {name: load_file(folder / "model.safetensors") for name, folder in folders.items()}


def bring(runner: CpuRunner, data: bytes, keep: bool = True) -> None:
    with in_memory(data) as path:
        runner.control(Control(verb="weights_receive", args={"paths": [path]}))
    runner.control(Control(verb="weights_take", args={"keep": keep}))


@pytest.mark.parametrize(
    "settings", [{}, {"native_kernels": True}, {"native_kernels": True, "quantization": "int8"}]
)
def test_tensors_make_the_model_of_a_file_with_them(
    folders: dict[str, Path], tensors: dict[str, dict[str, Tensor]], settings: dict[str, Any]
) -> None:
    """In several parts, some of which layers have joined."""
    one, two = (answer(of(folders[name], **settings)) for name in ("one", "two"))
    assert one != two
    runner = of(folders["one"], **settings)
    names = list(tensors["two"])
    bring(runner, save(tensors["two"]), keep=False)
    assert answer(runner) == one
    for part in (names[::3], names[1::3], names[2::3]):
        bring(runner, save({name: tensors["two"][name] for name in part}))
    assert answer(runner) == two
    runner.control(sleep())
    runner.control(Control(verb="wake", args={"kv": True, "weights": True}))
    assert answer(runner) == two, "what is in no file stays"
    with pytest.raises(UnsupportedField, match="in no file"):
        runner.control(Control(verb="weights_show", args={"name": names[0], "rows": 1}))
    broken = folders["one"].parent / "broken"
    broken.mkdir(exist_ok=True)
    save_model(broken, 1, num_hidden_layers=LLAMA["num_hidden_layers"])
    poisoned = tensors["one"] | {
        "model.norm.weight": torch.full_like(tensors["one"]["model.norm.weight"], torch.nan)
    }
    (broken / "model.safetensors").write_bytes(save(poisoned))
    with pytest.raises(InvalidField, match="no number"):
        runner.control(Control(verb="weights_update", args={"path": str(broken)}))
    assert answer(runner) == two
    runner.control(Control(verb="weights_update", args={"path": str(folders["one"])}))
    assert answer(runner) == one


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model.x": torch.zeros(3)}, "1 unexpected: model.x"),
        ({QKV[0]: torch.zeros(3, 3)}, "misshapen"),
        ({QKV[1]: None}, "not finite: " + QKV[1]),
        ({"model.norm.weight": torch.zeros(48, dtype=torch.int64)}, "no float: model.norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_change_nothing(
    folders: dict[str, Path], tensors: dict[str, dict[str, Tensor]], change: dict[str, Any], word: str
) -> None:
    runner = of(folders["one"])
    before = answer(runner)
    broken = tensors["two"][QKV[1]].clone()
    broken[-1, -1] = float("inf")
    wrong = {name: broken if tensor is None else tensor for name, tensor in change.items()}
    with pytest.raises(InvalidField, match=word) as caught:
        bring(runner, save(tensors["two"] | wrong))
    assert caught.value.param == "serialized_named_tensors"
    assert answer(runner) == before


def test_a_dead_sender_changes_nothing(folders: dict[str, Path]) -> None:
    runner = of(folders["one"])
    for data in (b"", b"x" * 100, save({"model.norm.weight": torch.ones(48)})[:-1], b"\x80\x05."):
        with pytest.raises(InvalidField, match="cannot be read"):
            bring(runner, data)
    with pytest.raises(InvalidField, match="cannot be read"):
        runner.control(Control(verb="weights_receive", args={"paths": ["/none"]}))


def test_tensors_do_not_come_beside_what_is_made_of_others(folders: dict[str, Path], tmp_path: Path) -> None:
    for settings in ({"kv_disk": f"{tmp_path}:1M"}, {"enable_lora": True}):
        with pytest.raises(UnsupportedField, match="cannot be updated"):
            bring(of(folders["one"], **settings), b"")


def through(data: bytes) -> dict[str, Tensor]:
    with in_memory(data) as path:
        return received(path, rank=1)


def test_pickles_make_tensors_and_nothing_else() -> None:
    pairs = [("a", torch.randn(3, 4, dtype=torch.bfloat16)), ("b", torch.nn.Parameter(torch.randn(2)))]
    for data in (packed(pairs), pickle.dumps(pairs)):
        found = through(data)
        assert sorted(found) == ["a", "b"]
        assert all(torch.equal(found[name], tensor) for name, tensor in pairs)

    class Evil:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            return print, ("run",)

    for wrong in ([("a", Evil())], Evil(), [("a", 3)], [("a", torch.ones(1))] * 2, [(1, torch.ones(1))], 5):
        with pytest.raises(WeightError):
            through(pickle.dumps(wrong))


def test_what_sglangs_clients_wrap_tensors_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes are known by name; these are ours in their place."""

    module: Any = ModuleType("sglang.weights")
    for name in ("LocalSerializedTensor", "FlattenedTensorMetadata"):
        setattr(module, name, type(name, (SimpleNamespace,), {"__module__": module.__name__}))
    for name in ("sglang", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    a, b = torch.randn(2, 3), torch.randn(4).bfloat16()
    ranks = module.LocalSerializedTensor(values=[pickle.dumps(torch.zeros(2, 3)), pickle.dumps(a)])
    assert torch.equal(through(pickle.dumps([("a", ranks)]))["a"], a)
    flat = torch.cat([a.flatten().view(torch.uint8), b.view(torch.uint8)])
    places = [
        module.FlattenedTensorMetadata(
            name="a", shape=a.shape, dtype=a.dtype, start_idx=0, end_idx=24, numel=6
        ),
        module.FlattenedTensorMetadata(
            name="b", shape=b.shape, dtype=b.dtype, start_idx=24, end_idx=32, numel=4
        ),
    ]
    found = through(pickle.dumps({"flattened_tensor": flat, "metadata": places}))
    assert torch.equal(found["a"], a)
    assert torch.equal(found["b"], b)


def test_paused_requests_go_on_and_nobody_finds_old_prefixes(
    folders: dict[str, Path], tensors: dict[str, dict[str, Tensor]]
) -> None:
    runner = of(folders["one"])
    fresh = answer(of(folders["two"]))
    core = make_core(runner.facts)
    run(runner, [submit("old", TEXT, 3)], core)
    core.offer(submit("paused", TEXT, 12), 0.0)
    core.offer(submit("waits", TEXT, 5), 0.0)
    tokens: dict[str, list[int]] = {"paused": [], "waits": [], "new": []}

    def step() -> None:
        plan = core.plan(0.0)
        if plan is not None:
            assert core.renew() is False, "a step is under way"
            for delta in core.retire(runner.execute(plan), 0.0):
                tokens[delta.rid] += delta.tokens

    for _ in range(4):
        step()
    assert 0 < len(tokens["paused"]) < 12
    assert core.renew()
    bring(runner, save(tensors["two"]))
    core.offer(submit("new", TEXT, 5), 0.0)
    while not core.idle:
        step()
    assert len(tokens["paused"]) == 12
    assert tokens["new"] == fresh
    core.check()


def trainer(port: int, tensors: list[Tensor], dies: bool) -> None:
    """In a process of its own, as trainers make their groups."""
    import torch.distributed.distributed_c10d as c10d

    store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=timedelta(seconds=20)))
    store = dist.PrefixStore("trainer", store)
    limit = timedelta(seconds=20)
    group, _ = c10d._new_process_group_helper(
        2, 0, [], dist.Backend("gloo"), store, group_name="trainer", timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    for tensor in tensors:
        dist.broadcast(tensor, 0, group)
    if not dies:
        store.get("end")


def wait(made: Any) -> None:
    if isinstance(made, Future):
        made.result(20)


@pytest.mark.parametrize("dies", [False, True])
def test_a_trainer_sends_weights(
    folders: dict[str, Path], tensors: dict[str, dict[str, Tensor]], dies: bool
) -> None:
    runner = of(folders["one"])
    one, two = answer(runner), answer(of(folders["two"]))
    names = list(tensors["two"])
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    sent = [tensors["two"][name] for name in (names[:3] if dies else names)]
    process = multiprocessing.get_context("fork").Process(
        target=trainer, args=(port, sent, dies), daemon=True
    )
    process.start()
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    wait(runner.control(Control(verb="trainer_join", args={"group": "trainer", "backend": "gloo", **place})))
    told = [(name, list(tensors["two"][name].shape), "float32") for name in names]
    receive = Control(verb="weights_receive", args={"group": "trainer", "tensors": told})
    if dies:
        with pytest.raises(InvalidField, match="old weights stay"):
            wait(runner.control(receive))
        with pytest.raises(InvalidField, match="no group"):
            runner.control(receive)
        assert answer(runner) == one
    else:
        wait(runner.control(receive))
        assert answer(runner) == one
        runner.control(Control(verb="weights_take", args={"keep": True}))
        assert answer(runner) == two
        with pytest.raises(InvalidField, match="already"):
            runner.control(
                Control(verb="trainer_join", args={"group": "trainer", "backend": "gloo", **place})
            )
        with pytest.raises(InvalidField, match="use gloo"):
            runner.control(Control(verb="trainer_join", args={"group": "x", "backend": "nccl", **place}))
        runner.control(Control(verb="trainer_leave", args={"group": "trainer"}))
    process.kill()
    process.join(10)

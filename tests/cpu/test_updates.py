"""Weights that come as tensors: in place, all or none, beside requests that are paused."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import pickle
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import chain, islice
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq
from forked import ForkedExecutor
from safetensors.torch import load_file, save, save_file
from servers import TEXTS, begin, same_text, tell
from test_gptq import checkpoints, compressed, gptq
from test_sleep import TEXT, answer, of, sleep
from test_sleep import save as save_model
from tiny import LLAMA, VOCAB, make_core, run, submit
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.multiprocessing import reductions

from sgla.actors.ingress import Ingress
from sgla.actors.resting import announced, in_memory
from sgla.config import Config
from sgla.dist.trainer import Rendezvous
from sgla.engine import Engine
from sgla.engine.params import SamplingParams
from sgla.errors import InvalidField, UnsupportedField, WeightError
from sgla.executor import procs
from sgla.loading.tensors import packed, received
from sgla.messages import Control
from sgla.worker.cpu import CpuRunner
from sgla.worker.trainers import Trainers
from sgla.worker.weight_sums import CHUNK, total

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


def show_all(runner: CpuRunner, tensors: dict[str, Tensor], rounded: bool) -> None:
    """What the model computes with is told under the names of files."""
    for name, tensor in tensors.items():
        told: Any = runner.control(Control(verb="weights_show", args={"name": name, "rows": 5}))
        torch.testing.assert_close(
            torch.tensor(told["values"]), tensor[:5].float(), rtol=0, atol=0.02 if rounded else 1e-6
        )
    with pytest.raises(InvalidField, match="has no tensor"):
        runner.control(Control(verb="weights_show", args={"name": "model.x", "rows": 1}))


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
    show_all(runner, tensors["two"], "quantization" in settings)
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
    ("config", "settings"),
    [
        (gptq(), {"native_kernels": True, "quantization": "checkpoint"}),
        (gptq(), {}),
        (compressed(sym=False), {"native_kernels": True, "quantization": "checkpoint"}),
    ],
)
def test_tensors_of_quantized_files_make_the_model_of_a_file_with_them(
    config: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Each layer with all that it has; what does not fit, or would be floats, changes nothing."""
    stored = {}
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        checkpoints(tmp_path / name, config, "llama")
        stored[name] = load_file(tmp_path / name / "packed/model.safetensors")
    assert any(not tensor.is_floating_point() for tensor in stored["two"].values())
    folders = [tmp_path / name / "packed" for name in stored]
    plain = load_file(tmp_path / "two/plain/model.safetensors")
    for tensor in stored["two"].values():  # ``checkpoints`` has drawn the same numbers again
        if tensor.dtype == torch.float16 and tensor.dim() == 2:
            tensor.mul_(1.5)
    save_file(stored["two"], folders[1] / "model.safetensors", {"format": "pt"})
    one, two = (answer(of(folder, **settings)) for folder in folders)
    assert one != two
    runner = of(folders[0], **settings)
    layer = "model.layers.1.self_attn.q_proj."
    names = [name for name in stored["two"] if name.startswith(layer)]
    wrong = {
        f"{names[0]} is missing|is missing beside": {names[-1]: stored["two"][names[-1]]},
        "q_proj.weight is quantized in the model's files; send": {f"{layer}weight": plain[f"{layer}weight"]},
        "not finite": {"model.norm.weight": torch.full_like(stored["two"]["model.norm.weight"], torch.nan)},
        "has shape|expected": {name: stored["two"][name][1:] for name in names},
    }
    for message, tensors in wrong.items():
        with pytest.raises(InvalidField, match=message):
            bring(runner, save(tensors))
    assert answer(runner) == one
    for i in range(4):  # layer by layer, then the rest
        part = [
            name for name in stored["two"] if (f"layers.{i}." in name if i < 3 else "layers." not in name)
        ]
        bring(runner, save({name: stored["two"][name] for name in part}))
    assert answer(runner) == two


def check(runner: CpuRunner, action: str) -> dict[str, Any]:
    told = runner.control(Control(verb="weights_check", args={"action": action}))
    assert isinstance(told, dict)
    return told


@pytest.mark.parametrize(
    "settings", [{}, {"native_kernels": True}, {"native_kernels": True, "quantization": "int8"}]
)
def test_a_checker_tells_whether_weights_are_what_they_were(
    folders: dict[str, Path], tensors: dict[str, dict[str, Tensor]], settings: dict[str, Any]
) -> None:
    """After random ones and an update they are; one bit of one tensor is told by its name."""
    runner = of(folders["one"], **settings)
    before = answer(runner)
    with pytest.raises(InvalidField, match="no snapshot"):
        check(runner, "compare")
    told = check(runner, "snapshot")
    assert check(runner, "compare") == check(runner, "checksum") == told
    assert check(runner, "reset_tensors") == {}
    assert answer(runner) != before
    with pytest.raises(InvalidField, match="tensors are not those of the snapshot: embed"):
        check(runner, "compare")
    bring(runner, save(tensors["one"]))
    assert check(runner, "compare") == told
    assert answer(runner) == before
    name = "model.layers.1.input_layernorm.weight"
    changed = tensors["one"][name].clone()
    changed.view(torch.int16)[-1] ^= 1
    bring(runner, save({name: changed}))
    with pytest.raises(InvalidField, match=r"1 of \d+ tensors are not those of the snapshot: blocks.1.\S+$"):
        check(runner, "compare")


def test_sums_tell_what_differs_and_where() -> None:
    """Of tensors of any type and size, in whatever order they lie."""
    plain = torch.arange(99, dtype=torch.float32).view(9, 11)
    assert total(plain) == total(plain.t().contiguous().t())
    for i in (0, 50, 98):
        other = plain.clone()
        other.view(-1)[i] += 1
        assert total(other) != total(plain)
    swapped = plain.clone()
    swapped[[0, 1]] = plain[[1, 0]]
    assert total(swapped) != total(plain)
    odd = torch.arange(13, dtype=torch.uint8)
    assert total(odd) != total(odd.flip(0))
    assert total(odd[:0]) != total(odd[:1])
    large = torch.zeros(CHUNK + 7, dtype=torch.int64)
    large[0] = 1
    assert total(large) != total(large.roll(CHUNK))


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
    with pytest.raises(UnsupportedField, match="cannot be updated beside adapters"):
        bring(of(folders["one"], enable_lora=True), b"")


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
            assert core.renew("2") is False, "a step is under way"
            for delta in core.retire(runner.execute(plan), 0.0):
                tokens[delta.rid] += delta.tokens

    for _ in range(4):
        step()
    assert 0 < len(tokens["paused"]) < 12
    assert core.renew("2")
    bring(runner, save(tensors["two"]))
    core.offer(submit("new", TEXT, 5), 0.0)
    while not core.idle:
        step()
    assert len(tokens["paused"]) == 12
    assert tokens["new"] == fresh
    core.check()


@pytest.fixture
def in_shared_memory() -> Iterator[Callable[[Tensor], SharedMemory]]:
    """Puts the bytes of a tensor there."""
    made: list[SharedMemory] = []

    def put(tensor: Tensor) -> SharedMemory:
        made.append(SharedMemory(create=True, size=tensor.nbytes))
        torch.frombuffer(made[-1].buf, dtype=torch.uint8)[: tensor.nbytes] = tensor.flatten().view(
            torch.uint8
        )
        return made[-1]

    yield put
    gc.collect()  # views of what is closed
    for memory in made:
        memory.close()
        memory.unlink()


def test_tensors_lie_in_shared_memory(in_shared_memory: Callable[[Tensor], SharedMemory]) -> None:
    """As torch's own handles of them (sharing strategy file_system), or by a name."""
    tensor = torch.randn(6, 4, dtype=torch.bfloat16)
    memory = in_shared_memory(tensor)
    storage = (torch.storage.TypedStorage, b"", f"/{memory.name}".encode(), 24, torch.bfloat16)
    of_storage = Rebuilt(reductions.rebuild_storage_filename, storage)
    handle = (reductions.rebuild_tensor, (Tensor, of_storage, (4, torch.Size([5, 4]), (4, 1), False)))
    with in_memory(pickle.dumps([{"CPU-0": handle}])) as path:
        found = received(path, names=["a"], places=["CPU-0"])
        assert torch.equal(found["a"], tensor[1:])
        for names, places in ((["a", "b"], ["CPU-0"]), (["a"], ["GPU-1"])):
            with pytest.raises(WeightError):
                received(path, names=names, places=places)
    for name in ("../passwd", "nothing-of-this-name", "/x/y"):
        wrong = Rebuilt(reductions.rebuild_storage_filename, (*storage[:2], name.encode(), *storage[3:]))
        with pytest.raises(WeightError):
            through(pickle.dumps([("a", wrong)]))
    with pytest.raises(WeightError):  # more than there is
        through(pickle.dumps([("a", Rebuilt(SharedMemory, (memory.name, False, 1 << 20)))]))


class Rebuilt:
    """Pickled as a call."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


class Server:
    """checkpoint-engine's side: what it says, a message a turn, and the answers that it has ``heard``."""

    def __init__(self, folder: Path, said: Iterable[Any]) -> None:
        self.address, self.heard = f"ipc://{folder}/server", list[bytes]()
        self._thread = threading.Thread(target=self._run, args=(said,), daemon=True)
        self._thread.start()

    def _run(self, said: Iterable[Any]) -> None:
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, 20_000)
            socket.bind(self.address)
            for message in said:
                socket.send_pyobj(message)
                self.heard.append(socket.recv())
                if self.heard[-1]:
                    socket.setsockopt(zmq.LINGER, 1000)
                    socket.send_pyobj(RuntimeError("some rank has failed"))
                    break

    def end(self) -> None:
        self._thread.join(20)


def buckets(
    tensors: dict[str, Tensor], memory: SharedMemory, size: int = 4, **wrong: Any
) -> Iterator[list[dict[str, Any]]]:
    """Puts tensors into the buffer, in one half and then the other, and tells where, ``wrong`` aside."""
    names, buffer = list(tensors), torch.frombuffer(memory.buf, dtype=torch.uint8)
    for start in range(0, len(names), size):
        at, told = start // size % 2 * (memory.size // 2), []
        for name in names[start : start + size]:
            tensor = tensors[name]
            buffer[at : at + tensor.nbytes] = tensor.flatten().view(torch.uint8)
            where = {"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": at}
            told.append(where | wrong)
            at += -(-tensor.nbytes // 256) * 256
        yield told


def fetch(runner: CpuRunner, server: Server) -> None:
    told = {"servers": {"GPU-0": "ipc:///none", "CPU-0": server.address}}
    try:
        wait(runner.control(Control(verb="weights_receive", args=told)))
    finally:
        server.end()


def test_a_parameter_server_broadcasts_weights(
    folders: dict[str, Path],
    tensors: dict[str, dict[str, Tensor]],
    tmp_path: Path,
    in_shared_memory: Callable[[Tensor], SharedMemory],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bucket by bucket, in a buffer that is written to again: the model is that of a file with them. What
    does not fit, or a server that dies, changes nothing."""
    monkeypatch.setattr("sgla.loading.buckets.PATIENCE", 5.0)
    runner = of(folders["one"])
    one, two = answer(runner), answer(of(folders["two"]))
    memory = in_shared_memory(torch.zeros(1 << 19, dtype=torch.uint8))
    broken = tensors["two"] | {"model.norm.weight": torch.full((48,), torch.nan)}
    lost = tensors["two"] | {"model.x": torch.ones(3)}
    for said, words in (
        (buckets(broken, memory), "not finite: model.norm.weight"),
        (buckets(lost, memory), "unexpected: model.x"),
        (buckets(tensors["two"], memory, shape=(3, 3)), "misshapen"),
        (buckets(tensors["two"], memory, offset=memory.size), "not in the buffer"),
        (buckets(tensors["two"], memory, size=1, name=QKV[0]), "twice|misshapen"),
        ([*buckets(tensors["two"], memory), RuntimeError("a trainer is dead")], "given up"),
        ([["?"]], "not in the buffer"),
        (islice(buckets(tensors["two"], memory), 2), "is gone"),
    ):
        server = Server(tmp_path, chain([memory], said))
        with pytest.raises(InvalidField, match=words) as caught:
            fetch(runner, server)
        assert caught.value.param == "zmq_handles"
        assert words in ("given up", "is gone") or server.heard[-1], "it is told"
        runner.control(Control(verb="weights_take", args={"keep": False}))
        assert answer(runner) == one
    with pytest.raises(InvalidField, match="no handle of a tensor"):
        fetch(runner, Server(tmp_path, [5]))
    with monkeypatch.context() as patch:
        patch.setattr("sgla.worker.trainers.available_bytes", lambda: 1 << 30)
        with pytest.raises(InvalidField, match="do not fit beside the old ones"):
            fetch(runner, Server(tmp_path, chain([memory], buckets(tensors["two"], memory))))
    server = Server(tmp_path, chain([memory], buckets(tensors["two"], memory), [None]))
    fetch(runner, server)
    assert set(server.heard) == {b""}
    assert answer(runner) == one
    runner.control(Control(verb="weights_take", args={"keep": True}))
    assert answer(runner) == two


async def test_the_ingress_has_servers_of_this_host_alone(
    folders: dict[str, Path],
    tensors: dict[str, dict[str, Tensor]],
    tmp_path: Path,
    in_shared_memory: Callable[[Tensor], SharedMemory],
) -> None:
    runner, ingress = of(folders["one"]), Ingress(Config())
    two = answer(of(folders["two"]))

    async def control(command: Control) -> Any:
        made = runner.control(command)
        return await asyncio.wrap_future(made) if isinstance(made, Future) else made

    ingress.connect(Any, runner.facts, dict, control, lambda tiers: True, str, lambda paused: None)  # type: ignore[arg-type]
    with pytest.raises(InvalidField, match="on this host"):
        await ingress.take_from_servers({"CPU-0": "tcp://10.0.0.1:1"}, None)
    memory = in_shared_memory(torch.zeros(1 << 19, dtype=torch.uint8))
    server = Server(tmp_path, chain([memory], buckets(tensors["two"], memory), [None]))
    assert await ingress.take_from_servers({"CPU-0": server.address}, "second")
    server.end()
    assert (ingress.weight_version, ingress.ready) == ("second", True)
    assert answer(runner) == two
    handles = [{"CPU-0": tensors["one"][name]} for name in tensors["one"]]
    assert await ingress.take_tensors([pickle.dumps(handles)], None, [*tensors["one"]])
    assert answer(runner) == answer(of(folders["one"]))


def test_a_parameter_server_is_known_by_the_device(folders: dict[str, Path]) -> None:
    with pytest.raises(InvalidField, match="nothing is told to CPU-0, but to GPU-1"):
        of(folders["one"]).control(Control(verb="weights_receive", args={"servers": {"GPU-1": "ipc:///x"}}))


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


@pytest.mark.parametrize("how", ["well", "dies", "no room"])
def test_a_trainer_sends_weights(
    folders: dict[str, Path],
    tensors: dict[str, dict[str, Tensor]],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dies = how == "dies"
    if how == "no room":
        monkeypatch.setattr("sgla.worker.trainers.available_bytes", lambda: 1 << 30)
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
    if how != "well":
        words = (
            "has not sent.*old weights stay" if dies else "do not fit beside the old ones.*old weights stay"
        )
        with pytest.raises(InvalidField, match=words):
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


def test_who_waits_for_a_trainer_that_says_nothing_waits_so_long_and_no_longer(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group can be joined then, by the same name, too."""
    monkeypatch.setattr("sgla.dist.trainer.PATIENCE", 0.2)
    runner = of(folders["one"])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = {"master_address": "127.0.0.1", "master_port": silent.getsockname()[1], "world_size": 2}
        join = Control(verb="trainer_join", args={"group": "g", "backend": "gloo", "rank_offset": 1, **place})
        for _ in range(2):
            with pytest.raises(InvalidField, match="not all of it have met at 127.0.0.1"):
                wait(runner.control(join))


def test_a_second_join_by_the_same_name_leaves_the_first_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it comes while the first waits for the others."""
    met = threading.Event()
    monkeypatch.setattr("sgla.worker.trainers.TrainerGroup", lambda meeting: met.wait(20))
    trainers = Trainers(lambda: None)
    first, second = (trainers.join(Rendezvous("127.0.0.1", 1, 1, 2, "g", "gloo")) for _ in range(2))
    met.set()
    assert first.result(20) == {}
    with pytest.raises(InvalidField, match="there is a group 'g' already") as caught:
        second.result(20)
    assert caught.value.param == "group_name"


def test_whatever_is_wrong_with_a_join_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*meeting: Rendezvous) -> None:
        if threading.current_thread().name == "trainer-join":
            raise KeyError("no such device")

    monkeypatch.setattr("sgla.worker.trainers.TrainerGroup", fail)
    for each in (fail, lambda: None):
        with pytest.raises(InvalidField, match="cannot be joined: 'no such device'"):
            Trainers(each).join(Rendezvous("127.0.0.1", 1, 1, 2, "g", "gloo")).result(20)


async def test_ranks_leave_a_group_that_not_all_have_met_although_the_client_has_gone(
    folders: dict[str, Path],
) -> None:
    verbs, met, left = [], asyncio.Event(), asyncio.Event()

    async def control(command: Control) -> Any:
        verbs.append(command.verb)
        if command.verb == "trainer_join":
            met.set()
            await asyncio.sleep(0.05)
            raise InvalidField("not all of it have met", param="master_address")
        left.set()

    ingress, facts = Ingress(Config()), of(folders["one"]).facts
    ingress.connect(Any, facts, dict, control, lambda tiers: True, str, lambda paused: None)  # type: ignore[arg-type]
    client = asyncio.ensure_future(ingress.join_trainer("g"))
    await met.wait()
    client.cancel()
    await asyncio.wait_for(left.wait(), 5)
    assert verbs == ["trainer_join", "trainer_leave"]


def test_a_trainer_sends_packed_layers(tmp_path: Path) -> None:
    checkpoints(tmp_path, gptq())
    folder = tmp_path / "packed"
    runner = of(folder)
    one = answer(runner)
    sent = {
        name: x * 2 if x.dtype == torch.float16 else x
        for name, x in load_file(folder / "model.safetensors").items()
    }
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    process = multiprocessing.get_context("fork").Process(
        target=trainer, args=(port, list(sent.values()), False), daemon=True
    )
    process.start()
    place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    wait(runner.control(Control(verb="trainer_join", args={"group": "trainer", "backend": "gloo", **place})))
    kinds = [str(x.dtype) for x in sent.values()]
    told = announced(list(sent), kinds, [list(x.shape) for x in sent.values()])
    wait(runner.control(Control(verb="weights_receive", args={"group": "trainer", "tensors": told})))
    runner.control(Control(verb="weights_take", args={"keep": True}))
    assert {"torch.int32", "torch.float16"} < set(kinds)
    save_file(sent, folder / "model.safetensors", {"format": "pt"})
    assert answer(runner) == answer(of(folder)) != one
    process.kill()
    process.join(10)


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"quantization": "int8", "native_kernels": True}, marks=pytest.mark.slow)]
)
def test_ranks_take_weights_together(
    folders: dict[str, Path],
    tensors: dict[str, dict[str, Tensor]],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each its part, whole from tensors or a folder; what does not fit changes nothing."""
    monkeypatch.setattr(procs, "ProcsExecutor", ForkedExecutor)
    two = {"tp": 2, "executor": "procs"}
    settings = {"load_format": "auto"} | settings
    one, other = (with_words(folders[name], tmp_path / name) for name in ("one", "two"))
    with begin(other, **settings, **two) as engine:
        expected = tell(engine, TEXTS[:1])
    with begin(one, **settings, **two) as engine:
        before = tell(engine, TEXTS[:1])
        engine.check_weights("snapshot")
        with pytest.raises(InvalidField, match="misshapen"):
            engine.update_weights_from_tensor([("model.norm.weight", torch.ones(3))])
        assert len(engine.check_weights("compare")) == 2
        assert engine.update_weights_from_tensor(tensors["two"].items())
        assert same_text(tell(engine, TEXTS[:1]), expected)
        for name in (QKV[2], QKV[2].replace("v_proj", "o_proj"), "lm_head.weight", "model.norm.weight"):
            told = torch.tensor(engine.get_weights_by_name(name, 1 << 20))
            torch.testing.assert_close(told, tensors["two"][name].float(), rtol=0, atol=0.02)
        assert engine.update_weights_from_disk(str(one))
        engine.check_weights("compare")
        assert same_text(tell(engine, TEXTS[:1]), before)


def test_tiers_keep_prefixes_of_other_weights_apart(
    folders: dict[str, Path], tensors: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Nobody finds what is of others, also behind a restart; an update that fails changes nothing."""
    one, other = (with_words(folders[name], tmp_path / name) for name in ("one", "two"))
    settings: dict[str, Any] = {"load_format": "auto", "kv_disk": f"{tmp_path / 'disk'}:8M"}
    settings |= {"kv_store": str(tmp_path / "store"), "kv_cache_bytes": 256 << 10, "context_length": 200}
    with begin(other, load_format="auto") as engine:
        expected = tell(engine, TEXTS)
    with begin(one, **settings) as engine:
        before = tell(engine, TEXTS)
        assert cached(tell(engine, TEXTS)) > 300
        with pytest.raises(InvalidField, match="misshapen"):
            engine.update_weights_from_tensor([("model.norm.weight", torch.ones(3))])
        assert cached(tell(engine, TEXTS)) > 300
        assert engine.update_weights_from_tensor(tensors["two"].items())
        found = tell(engine, TEXTS)
        assert (same_text(found, expected), cached(found)) == (True, 0)
        again = tell(engine, TEXTS)
        assert same_text(again, expected)
        assert cached(again) > 300, "tiers have what is of the new ones"
    with begin(one, **settings) as engine:
        found = tell(engine, TEXTS)
        assert same_text(found, before)
        assert cached(found) > 300


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_tiers_keep_nothing_of_requests_that_go_on_with_other_weights(
    policy: str, folders: dict[str, Path], tensors: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Their KV is of both. A request that still waits begins with the new ones."""
    one, other = (with_words(folders[name], tmp_path / name) for name in ("one", "two"))
    settings: dict[str, Any] = {"load_format": "auto", "kv_disk": f"{tmp_path / 'disk'}:8M"}
    settings |= {"kv_cache_bytes": 256 << 10, "context_length": 200, "kv_write_policy": policy}
    with begin(other, load_format="auto") as engine:
        expected = tell(engine, TEXTS)
    with ThreadPoolExecutor() as threads, begin(one, **settings, max_running_requests=1) as engine:
        whole = SamplingParams(max_tokens=40, ignore_eos=True)
        stream = engine.stream(TEXTS[0], whole)
        text = list(next(stream).tokens)
        engine.pause_generation()
        waits = threads.submit(tell, engine, TEXTS[1:2])
        while engine._system.ingress.open_requests < 2:  # type: ignore[union-attr]
            time.sleep(0.01)
        assert engine.update_weights_from_tensor(tensors["two"].items())
        engine.continue_generation()
        text += [token for event in stream for token in event.tokens]
        assert same_text(waits.result(60), expected[1:2])
        assert len(text) == 40
        assert same_text(tell(engine, TEXTS), expected)
        tell(engine, [[(a * i + 1) % 300 for i in range(150)] for a in (17, 19, 23, 29)])  # push it out
        engine.pause_generation()
        engine._call(forgets(engine))
        assert engine.update_weights_from_tensor(tensors["two"].items()), "a disk forgets in a pause, too"
        engine.continue_generation()
        assert same_text(tell(engine, TEXTS), expected)
    mixed = [*TEXTS[0], *text]
    with begin(one, load_format="auto") as engine:
        before = tell(engine, [mixed])
    with begin(one, **settings) as engine:
        found = tell(engine, [mixed])
        assert (same_text(found, before), cached(found)) == (True, 0)


async def forgets(engine: Engine) -> bool:
    assert engine._system is not None
    return await engine._system.ingress.flush_cache()


def cached(told: list[Any]) -> int:
    return sum(usage.cached_tokens for _, usage, *_ in told)


def with_words(folder: Path, place: Path) -> Path:
    """A copy of a model, with a tokenizer."""
    shutil.copytree(folder, place)
    words = {f"<{i}>": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="<0>")).save(str(place / "tokenizer.json"))
    return place

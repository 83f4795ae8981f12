"""Keys, pauses, profiles, load, logs and other servers' metrics."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import json
import logging
import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla.bench.load import Target
from sgla.bench.replay import send
from sgla.config import Config
from sgla.errors import ConfigError
from sgla.http import bodies, control, weights
from sgla.http.access import AT_ONCE, AccessLines
from sgla.http.app import ROUTES
from sgla.http.middleware import ADMIN, ADMIN_OF_V1, OWN, SECRET
from sgla.http.serve import shorten_parse_error
from sgla.hub import fetch
from sgla.hub.remote import files_of
from sgla.hub.source import ModelSource
from sgla.messages import MOST_PROFILED, Control
from sgla.observe import requests
from sgla.observe.log import JsonFormatter, LineFormatter, LineHandler
from sgla.observe.requests import RequestDump, read_dump

FILES = ("/weights", "/weights/{id}")


def bearer(key: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}"}}


async def test_several_keys(serve: Serve) -> None:
    site = await serve(api_key=["one", "two"])
    for key, status in (("one", 200), ("two", 200), ("three", 401), ("", 401), ("one,two", 401)):
        assert (await site.get("/v1/models", **bearer(key)))[0] == status
    assert (await site.get("/v1/models", headers={"x-api-key": "two"}))[0] == 200


async def test_admin_keys(serve: Serve) -> None:
    site = await serve(api_key=["user"], admin_api_key=["root"])
    for key, user_status, admin_status in (("user", 200, 403), ("root", 200, 200), ("none", 401, 401)):
        assert (await site.get("/v1/models", **bearer(key)))[0] == user_status
        for route in sorted({f"/{first}" for first in ADMIN - {"weights"}} | ADMIN_OF_V1):
            bare = "lora" in route or route in ("/collective_rpc", "/update_weights")  # it has no name
            bare |= "_weights" in route and "destroy" not in route and "post" not in route
            bare |= route in ("/weights_checker", "/update_weight_version")
            wanted = 400 if admin_status == 200 and bare else admin_status
            async with site.http.post(route, json={}, **bearer(key)) as response:
                assert response.status == wanted
    open_site = await serve(admin_api_key=["root"])
    assert (await open_site.get("/v1/models"))[0] == 200
    for route in sorted(ADMIN | OWN):
        assert (await open_site.post(f"/{route}", b""))[0] == 401
    assert (await open_site.post("/abort_request", {"abort_all": True}, **bearer("root")))[0] == 200


CHANGING = control.__name__, weights.__name__


def test_each_route_that_changes_the_server_is_for_administrators() -> None:
    handlers = {(path, handler) for path, methods in ROUTES.items() for handler in methods.values()}
    changing = {path for path, handler in handlers if handler.__module__ in CHANGING}
    assert changing - {"/is_paused", "/is_sleeping", "/get_world_size"} == {
        *(f"/{first}" for first in (ADMIN | OWN) - {"weights"}),
        *ADMIN_OF_V1,
        *FILES,
    }


async def test_api_keys_alone_change_nothing_for_other_clients(serve: Serve) -> None:
    """Each route of the table, with a client's key and with none where there are none."""
    keyed, bare = await serve(api_key=["user", "other"]), await serve()
    refused = set()
    for path, methods in ROUTES.items():
        for method in methods:
            for site in (keyed, bare):
                asked = {"json": {}} if method == "POST" else {}
                route = path.replace("{id}", "x").replace("{item}", "y")
                async with site.http.request(method, route, **asked, **bearer("user")) as response:
                    assert response.status != 401
                    if response.status == 403:
                        assert "--admin-api-key" in (await response.json())["error"]["message"]
                        refused.add((path, site is bare))
    secret = {*(f"/{first}" for first in SECRET if first != "weights"), *FILES}
    assert refused == {
        *((f"/{first}", False) for first in ADMIN - {"weights"}),
        *((path, False) for path in ADMIN_OF_V1),
        *((path, bare) for path in secret for bare in (False, True)),
    }
    assert not keyed.ingress.paused


async def test_pause_and_continue(site: Site) -> None:
    site.ingress.manual = True
    request = site.http.post("/generate", json={"text": "x"})
    running = await_task(request)
    while not site.ingress.open_jobs:
        await site.get("/health")
    for path, body in (("/pause_generation", {"mode": "in_place"}), ("/pause?mode=keep", {})):
        assert (await site.post(path, body))[0] == 200
        assert (await site.get("/is_paused"))[1] == {"is_paused": True}
        assert len(site.ingress.open_jobs) == 1
    assert (await site.post("/pause_generation", {"mode": "retract"}))[0] == 400
    assert (await site.post("/pause_generation", b""))[1]["aborted"] == 1
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await site.post("/continue_generation", b""))[0] == 200
    assert (await site.get("/is_paused"))[1] == {"is_paused": False}


async def test_sleep_and_wake(site: Site) -> None:
    for path, body in (
        ("/sleep", b""),
        ("/sleep?level=2", b""),
        ("/wake_up", b""),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}),
        ("/release_memory_occupation", {"tags": ["weights", "kv_cache"]}),
        ("/release_memory_occupation", b""),
        ("/resume_memory_occupation", {"tags": ["weights"]}),
        ("/wake_up?tags=weights&tags=kv_cache", b""),
        ("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]}),  # slime's
        ("/sleep?mode=abort", b""),
    ):
        assert (await site.post(path, body)) == (200, {"success": True})
    assert site.ingress.slept == [
        (True, "host"),
        (True, "files"),
        ["weights", "kv_cache"],
        (True, ""),
        (True, "either"),
        (True, "either"),
        ["weights"],
        ["weights", "kv_cache"],
        ["kv_cache"],
        (True, "host"),
    ]
    assert (await site.get("/is_sleeping"))[1] == {"is_sleeping": False}
    site.ingress.phase = "sleeping"
    assert (await site.get("/is_sleeping"))[1] == {"is_sleeping": True}
    assert (await site.post("/resume_memory_occupation", {"tags": ["kv_cache"]}))[0] == 200
    assert site.ingress.slept[-1] == ["kv_cache"]
    site.ingress.flushable, site.ingress.phase = False, "ready"
    assert (await site.post("/sleep", b""))[0] == 409
    for path, body in (
        ("/sleep?level=3", b""),
        ("/sleep?mode=keep", b""),
        ("/wake_up?tags=graph", b""),
        ("/release_memory_occupation", {"tags": ["graph"]}),
    ):
        assert (await site.post(path, body))[0] == 400


async def test_requests_run_on_where_a_change_is_refused(serve: Serve) -> None:
    site, key = await serve(FakeIngress(), admin_api_key=["boss"]), bearer("boss")
    site.ingress.manual = True
    running = await_task(site.http.post("/generate", json={"text": "x"}, headers=key["headers"]))
    while not site.ingress.open_jobs:
        await site.get("/health")
    clears = {"abort_all_requests": True}
    changes: list[tuple[str, Any]] = [
        ("/sleep?mode=abort", b""),
        ("/update_weights_from_disk", clears | {"model_path": "/new"}),
        ("/update_weights_from_tensor", clears | {"serialized_named_tensors": ["eHk="]}),
        ("/update_weights_from_ipc", clears | {"zmq_handles": {"GPU-1": "ipc://x"}}),
        (
            "/update_weights_from_distributed",
            clears | {"names": ["a"], "dtypes": ["float32"], "shapes": [[2]]},
        ),
    ]
    site.ingress.refuses = True
    for path, body in changes:
        assert (await site.post(path, body, **key))[0] == 400
        assert len(site.ingress.open_jobs) == 1
    site.ingress.refuses, site.ingress.phase = False, "loading"
    assert (await site.post("/update_weight_version", clears | {"new_version": "2"}, **key))[0] == 503
    assert len(site.ingress.open_jobs) == 1
    site.ingress.phase = "ready"
    assert (await site.post("/update_weight_version", clears | {"new_version": "2"}, **key))[0] == 200
    assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"


METHOD = {"method": "update_weights_from_ipc"}
HANDLES = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]], "ipc_handles_pickled": "eHk="}


async def test_weights_are_updated_and_shown(serve: Serve) -> None:
    site = await serve(FakeIngress(), admin_api_key=["boss"])
    key, route = bearer("boss"), "/update_weights_from_disk"
    body = {"model_path": "/new", "weight_version": "two", "abort_all_requests": True, "is_async": False}
    status, told = await site.post(route, body, **key)
    assert (status, told["success"]) == (200, True)
    assert (await site.post("/generate", {"text": "x"}, **key))[1]["meta_info"]["weight_version"] == "two"
    assert (await site.get("/model_info", **key))[1]["weight_version"] == "two"
    renamed = await site.post("/update_weight_version", {"new_version": "2b"}, **key)
    assert (renamed[0], renamed[1]["new_version"]) == (200, "2b")
    for path in ("/get_weight_version", "/weight_version"):
        assert (await site.get(path, **key)) == (200, {"weight_version": "2b"})
    assert (await site.post("/post_process_weights", {"post_process_quantization": True}, **key))[0] == 200
    tensors = "/update_weights_from_tensor"
    status, told = await site.post(
        tensors, {"serialized_named_tensors": ["eHk="], "weight_version": "3"}, **key
    )
    assert (status, told["success"], site.ingress.brought) == (200, True, [b"xy"])
    assert site.ingress.weight_version == "3"
    for wrong in ({"serialized_named_tensors": [text]} for text in ("?", "eA=", None)):
        assert (await site.post(tensors, wrong, **key))[0] == 400
    sent = {"names": ["a"], "dtypes": ["torch.float32"], "shapes": [[2, 3]]}
    for route_, body_, brought in (
        (
            "/init_weights_update_group",
            {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2},
            [
                "weight_update_group",
                {
                    "master_address": "h",
                    "master_port": 1,
                    "rank_offset": 1,
                    "world_size": 2,
                    "backend": "nccl",
                },
            ],
        ),
        (
            "/update_weights_from_distributed",
            sent | {"group_name": "g", "flush_cache": False},
            ["g", ("a", [2, 3], "float32")],
        ),
        ("/destroy_weights_update_group", {"group_name": "g"}, ["g"]),
        ("/update_weights_from_ipc", {"zmq_handles": {"GPU-1": "ipc://x"}}, [{"GPU-1": "ipc://x"}]),
        ("/init_weight_transfer_engine", {"init_info": {}}, [{"GPU-1": "ipc://x"}]),
        ("/start_weight_update", {"is_checkpoint_format": True}, [{"GPU-1": "ipc://x"}]),
        ("/update_weights", {"update_info": HANDLES}, [b"xy", "a"]),
        ("/finish_weight_update", b"", [b"xy", "a"]),
        ("/collective_rpc", METHOD | {"args": [{"GPU-2": "ipc://y"}]}, [{"GPU-2": "ipc://y"}]),
    ):
        assert (await site.post(route_, body_, **key))[0] == 200
        assert site.ingress.brought == brought
    for wrong in ({"dtypes": ["complex64"]}, {"shapes": []}, {"shapes": [[0]]}, {"names": ["a", "a"]}):
        status, _ = await site.post("/update_weights_from_distributed", sent | wrong, **key)
        assert status == 400, wrong
    for route_, wrong in (
        ("/update_weights_from_ipc", {"zmq_handles": {}}),
        ("/update_weights_from_ipc", {"zmq_handles": {"GPU-1": "ipc://x"}, "torch_empty_cache": True}),
        ("/collective_rpc", {"method": "reset_prefix_cache"}),
        ("/collective_rpc", METHOD | {"args": [{"GPU-1": 2}]}),
        ("/collective_rpc", METHOD | {"args": ["x"]}),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "h"}}),
        ("/start_weight_update", {"is_checkpoint_format": False}),
        ("/update_weights", {"update_info": HANDLES | {"packed": True}}),
        ("/update_weights", {"update_info": HANDLES | {"shapes": []}}),
        ("/update_weights", {"update_info": HANDLES | {"ipc_handles_pickled": "?"}}),
    ):
        assert (await site.post(route_, wrong, **key))[0] == 400, wrong
    assert (await site.get("/get_world_size", **key)) == (200, {"world_size": 1})
    shown = await site.post("/get_weights_by_name", {"name": "x", "truncate_size": 2}, **key)
    assert shown == (200, [[0.5], [0.5]])
    checked = await site.post("/weights_checker", {"action": "compare"}, **key)
    assert checked[1] == {
        "success": True,
        "message": "the weights are those of the snapshot",
        "ranks": [{"tensors": 3, "checksum": "compare"}],
    }
    assert (await site.post("/weights_checker", {"action": "reset_tensors"}, **key))[0] == 200
    assert (await site.post("/weights_checker", {"action": "x"}, **key))[0] == 400
    for wrong in ({"flush_cache": False}, {"is_async": True}, {"load_format": "auto"}, {"model_path": 1}):
        assert (await site.post(route, body | wrong, **key))[0] == 400, wrong
    site.ingress.flushable = False
    assert (await site.post(route, body, **key))[0] == 409


def await_task(request: Any) -> Any:
    async def answer() -> Any:
        async with request as response:
            return await response.json()

    return asyncio.ensure_future(answer())


async def test_profiles_go_to_the_servers_folder(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    site = await serve(profile_folder="traces")
    folder = Path("traces").resolve()
    for body, args in (
        ({}, {"folder": str(folder), "steps": MOST_PROFILED}),
        ({"output_dir": "a/b", "num_steps": 5}, {"folder": str(folder / "a/b"), "steps": 5}),
        ({"output_dir": str(folder / "c")}, {"folder": str(folder / "c"), "steps": MOST_PROFILED}),
    ):
        assert await site.post("/start_profile", body) == (200, {"verb": "profile_start", **args})
    folder.mkdir()
    (folder / "loop").symlink_to("loop")
    outside = [{"output_dir": name} for name in ("/etc", "../a", "a\0", "loop/../../a", "x" * 5000)]
    for body in (*outside, {"num_steps": 0}):
        status, reply = await site.post("/start_profile", body)
        assert (status, reply["error"]["param"]) == (400, next(iter(body)))
    assert (await site.post("/stop_profile", b""))[1] == {"verb": "profile_stop"}


async def test_counts_of_experts_are_of_all_stages(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    site = await serve()
    assert await site.post("/start_expert_distribution_record", b"") == (200, {"success": True})
    assert await site.post("/stop_expert_distribution_record", b"") == (200, {"success": True})
    ranks = [{"experts": {3: [1, 2]}}, {}, {"experts": {12: [0, 4]}}]

    async def told(command: Control) -> dict[str, Any]:
        assert command.verb == "experts_dump"
        return {"ranks": ranks}

    monkeypatch.setattr(site.ingress, "control", told)
    layers = [{"layer": 3, "experts": [1, 2]}, {"layer": 12, "experts": [0, 4]}]
    assert await site.post("/dump_expert_distribution_record", b"") == (200, {"layers": layers})
    status, reply = await site.post("/rebalance_experts", b"")
    assert (status, reply["layers"][0]["balance"]) == (200, 1.0)


async def test_the_step_log_is_for_admins(serve: Serve) -> None:
    for site in (await serve(), await serve(api_key=["user"])):
        status, reply = await site.get("/step_log", **bearer("user"))
        assert (status, "--admin-api-key" in reply["error"]["message"]) == (403, True)
    site = await serve(api_key=["user"], admin_api_key=["root"])
    for key, allowed in (("user", 403), ("root", 200)):
        async with site.http.get("/step_log", **bearer(key)) as response:
            assert (response.status, await response.read() == b"steps") == (allowed, key == "root")


async def test_a_server_copies_the_files_of_another(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = await serve(api_key=["user"], admin_api_key=["root"])
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.model", "model.safetensors", "private.key"):
        (model / name).write_bytes(name.encode() * 50_000)
    source = ModelSource("safetensors", model, (model / "model.safetensors",), {}, {})
    monkeypatch.setattr(site.ingress, "files", files_of(source))
    address = site.url
    config = Config(model=address, load_format="remote-instance", download_dir=str(tmp_path / "cache"))
    for key in ("user", ""):
        monkeypatch.setenv("SGLA_REMOTE_KEY", key)
        with pytest.raises(ConfigError, match="cannot be read: 40[13].*; SGLA_REMOTE_KEY must have"):
            await asyncio.to_thread(fetch.resolve_model, config)
    monkeypatch.setenv("SGLA_REMOTE_KEY", "root")
    folder = await asyncio.to_thread(fetch.resolve_model, config)
    names = {"config.json", "tokenizer.model", "model.safetensors"}
    assert {path.name for path in folder.iterdir() if path.name[0] != "."} == names
    assert all((folder / name).read_bytes() == (model / name).read_bytes() for name in names)
    for name in ("private.key", "..%2fmodel%2fprivate.key", "%2e%2e/private.key"):
        async with site.http.get(f"/weights/{name}", **bearer("root")) as response:
            assert response.status == 404


async def test_requests_are_dumped_and_sent_again(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    site = await serve(dump_requests=str(path), api_key=["secret"])
    bodies: list[Any] = [
        {"prompt": "caf\u00e9\n", "max_tokens": 3, "unknown": 1},
        {"prompt": "x", "stream": True},
        {"prompt": "x", "top_p": 7},
    ]
    for i, body in enumerate(bodies):
        headers = bearer("secret")["headers"] | {"X-Request-Id": f"r{i}"}
        async with site.http.post("/v1/completions", data=json.dumps(body, indent=2), headers=headers):
            pass
    await site.post("/v1/completions", b"not JSON", **bearer("secret"))
    await site.post("/v1/completions", bodies[0])  # without the key
    assert site.metrics.dump is not None
    site.metrics.dump.flush(10)
    assert b"secret" not in path.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    dumped = read_dump(str(path))
    assert [(d.rid, d.path, json.loads(bytes(d.body))) for d in dumped] == [
        ("r0", "/v1/completions", bodies[0]),
        ("r1", "/v1/completions", bodies[1]),
    ]
    again = await serve()
    numbers = await send(Target(url=again.url), dumped, speed=0)
    assert (numbers["requests"], numbers["statuses"]) == (2, {"200": 2})
    assert [job.text for job in again.ingress.jobs] == [job.text for job in site.ingress.jobs]
    with pytest.raises(ConfigError, match="dump-requests"):
        await serve(dump_requests=str(tmp_path / "no" / "folder"))


async def test_a_full_disk_costs_no_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site = await serve(dump_requests="/dev/full")
    for _ in range(3):
        assert (await site.post("/v1/completions", {"prompt": "x"}))[0] == 200
    dump = site.metrics.dump
    assert dump is not None
    dump.flush(10)
    monkeypatch.setattr(requests, "BACKLOG_BYTES", 5)
    assert (await site.post("/v1/completions", {"prompt": "x"}))[0] == 200
    assert dump.dropped == 4
    assert b"undumped_requests_total" in site.metrics.text()
    (record,) = [record for record in caplog.records if record.name == "sgla.observe.requests"]
    assert "No space left on device" in record.getMessage()


def test_a_line_that_does_not_fit_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = RequestDump(str(tmp_path / "requests.jsonl"))
    dump.add("a", "POST", "/x", b'{"a":\r\n1}')
    dump.flush(10)
    monkeypatch.setattr(requests, "SLICE", 4)
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if b"much" in data:
            raise OSError(errno.ENOSPC, "full")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    dump.add("b", "POST", "/x", b'{"a":"..much"}')
    dump.add("c", "POST", "/x", b'{"a":2222222}')
    dump.flush(10)
    assert [(line.rid, bytes(line.body)) for line in read_dump(str(tmp_path / "requests.jsonl"))] == [
        ("a", b'{"a":  1}'),
        ("c", b'{"a":2222222}'),
    ]
    assert dump.dropped == 1


@pytest.mark.parametrize("formatter", [LineFormatter(colours=False), JsonFormatter()])
def test_control_characters_do_not_reach_the_log(formatter: logging.Formatter) -> None:
    sent = "\x1b]0;owned\x07\x00\x7f\x9b31m\u2028\u202e\ud800\r\n"
    try:
        raise ValueError(sent)
    except ValueError as error:
        info = (ValueError, error, None)
    record = logging.LogRecord("sgla.x", logging.ERROR, "", 1, "it %s", (sent,), info)
    record.fields = {"route": sent}
    line = formatter.format(record)
    assert [char for char in line.replace("\n    ", "") if not char.isprintable()] == []
    if isinstance(formatter, JsonFormatter):
        told = json.loads(line)
        assert (told["message"], told["route"]) == (f"it {sent}", sent)
        assert sent in told["exception"]
    else:
        assert line.count(r"\x1b]0;owned\x07") == 2


def test_what_is_no_http_is_logged_without_its_headers() -> None:
    error = LineTooLong("Authorization: Bearer secret", "8190")
    info = (LineTooLong, error, None)
    record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 1, "Error from %s", ("1.2.3.4",), info)
    assert shorten_parse_error(record)
    assert JsonFormatter().format(record).count("secret") == 0
    assert record.getMessage() == "Error from 1.2.3.4: LineTooLong"


async def test_headers_and_slow_bodies_are_limited(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count, size in (("Authorization", 1, 20_000), ("X-Many", 2000, 1)):
        headers = [(name, "a" * size)] * count
        async with site.http.get("/version", headers=headers) as response:
            assert response.status == 431
    monkeypatch.setattr(bodies, "BODY_SECONDS", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{")
    assert b" 408 " in await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    assert (await site.post("/v1/completions", {"prompt": "x"}))[0] == 200


async def test_allowed_origins(serve: Serve) -> None:
    site = await serve(allowed_origins=["https://a.example", "https://b.example"])
    for origin, echoed in (
        ("https://b.example", "https://b.example"),
        ("https://c.example", None),
        (None, None),
    ):
        headers = {} if origin is None else {"Origin": origin}
        for method, path in (("GET", "/v1/models"), ("OPTIONS", "/v1/models")):
            async with site.http.request(method, path, headers=headers) as response:
                assert response.headers.get("Access-Control-Allow-Origin") == echoed
                assert response.headers["Vary"] == "Origin"
    site = await serve(allowed_origins=["*"])
    async with site.http.get("/v1/models", headers={"Origin": "https://c.example"}) as response:
        assert response.headers["Access-Control-Allow-Origin"] == "*"


async def test_load(site: Site) -> None:
    assert (await site.get("/load"))[1] == {
        "server_load": 0,
        "running": 0,
        "waiting": 0,
        "kv_usage": 16 / 256,
    }
    (entry,) = (await site.get("/get_load"))[1]
    assert entry == {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 256}
    site.ingress.load = {"running": 1, "waiting": 2, "held": 4}
    told = (await site.get("/load"))[1]
    assert (told["server_load"], told["running"], told["waiting"]) == (7, 1, 6), "a prefix is waited for, too"
    (entry,) = (await site.get("/get_load"))[1]
    assert (entry["num_reqs"], entry["num_waiting_reqs"]) == (7, 6)


async def test_tokenizer_info(site: Site) -> None:
    info = (await site.get("/tokenizer_info"))[1]
    assert (info["eos_token"], info["bos_token"], info["pad_token"]) == ("<eos>", "<bos>", None)
    assert info["chat_template"] == "{{ messages }}"


@pytest.fixture
def access() -> Iterator[Callable[[], list[Any]]]:
    """The lines of the access log so far, as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("sgla.http.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_access_log_tells_tokens_and_the_first_one(
    serve: Serve, access: Callable[[], list[Any]], stream: bool
) -> None:
    site = await serve(log_requests=True)
    body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 5, "stream": stream}
    async with site.http.post("/v1/completions", json=body) as response:
        text = await response.read()
    assert response.status == 200
    (line,) = access()
    assert (line["prompt_tokens"], line["output_tokens"], line["cached_tokens"]) == (7, 20, 6)
    assert 0 < line["ttft_ms"] <= line["ms"]
    assert "output_tokens=20" in line["message"]
    assert text


async def test_what_is_polled_is_not_logged_unless_it_fails(
    serve: Serve, access: Callable[[], list[Any]]
) -> None:
    site = await serve(log_requests=True)
    facts = site.ingress.facts
    for path, there, status in (
        ("/metrics", facts, 200),
        ("/health", facts, 200),
        ("/health", None, 503),
        ("/v1/models", facts, 200),
        ("/version", facts, 200),
    ):
        site.ingress.facts = there
        site.ingress.phase = "load" if there is None else "ready"
        async with site.http.get(path) as response:
            assert response.status == status
    site.ingress.phase = "draining"
    async with site.http.get("/health") as response:
        assert response.status == 503
    assert [(line["route"], line["status"]) for line in access()] == [("/version", 200), ("/health", 503)]


async def test_the_access_log_as_json(serve: Serve, access: Callable[[], list[Any]]) -> None:
    site = await serve(log_requests=True)
    body = {"prompt": "abc", "max_tokens": 1 << 30}
    async with site.http.post("/v1/completions", json=body) as response:
        assert response.status == 400
    async with site.http.get("/v1/models/nothing", headers={"X-Request-Id": "abc"}) as response:
        assert response.status == 404
    refused, line = access()
    assert "prompt_tokens" not in refused
    assert line["client"] == "127.0.0.1"
    assert {name: line[name] for name in ("level", "logger", "method", "route", "status", "request_id")} == {
        "level": "info",
        "logger": "sgla.http.access",
        "method": "GET",
        "route": "/v1/models/{id}",
        "status": 404,
        "request_id": "abc",
    }
    assert line["time"].endswith("Z")


def test_a_log_that_nobody_reads_holds_up_nobody() -> None:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as stream:
        handler = LineHandler(stream)
        handler.setFormatter(LineFormatter(colours=False))
        for number in range(100):
            record = logging.LogRecord(
                "sgla.x", logging.WARNING, "", 0, f"line {number} {'x' * 80}", None, None
            )
            handler.emit(record)
        early = os.read(reader.fileno(), 1 << 16).decode().splitlines()
        handler.emit(record)
        missing, last = os.read(reader.fileno(), 1 << 16).decode().splitlines()
        with handler.gathering():
            for _ in range(100):
                handler.emit(record)
        some = os.read(reader.fileno(), 1 << 16).decode().splitlines()
        with handler.gathering():
            handler.emit(record)
        more = os.read(reader.fileno(), 1 << 16).decode().splitlines()
    assert 0 < len(early) < 100
    assert f"{100 - len(early)} lines are missing here" in missing
    assert 0 < len(some) < 100
    assert f"{100 - len(some)} lines are missing here" in more[0]
    assert len(more) == 2
    assert "line 99 x" in last


async def test_lines_of_a_crowd_are_written_a_part_in_each_turn(
    monkeypatch: pytest.MonkeyPatch, access: Callable[[], list[Any]]
) -> None:
    """In their order, and in few pieces, of which none is larger than what a pipe takes at once."""
    pieces: list[str] = []
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", pieces.append)
    handler = LineHandler(stream)
    handler.setFormatter(LineFormatter(colours=False))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    lines, ids = AccessLines(), [f"request-{i}" for i in range(3 * AT_ONCE + 1)]
    for uid in ids:
        lines.add(("::1", "GET", "/a", 200, 1.0, uid), {})
    assert not access()
    await asyncio.sleep(0)
    assert len(access()) == AT_ONCE
    await asyncio.sleep(0)
    assert len(access()) == 2 * AT_ONCE
    await lines.close(web.Application())
    assert [line["request_id"] for line in access()] == ids
    assert [line.split()[-1] for line in "".join(pieces).splitlines()] == ids
    assert len(pieces) < len(ids) / 8
    assert max(map(len, pieces)) <= select.PIPE_BUF


def test_a_traceback_stays_in_its_json_line() -> None:
    try:
        raise ValueError("a\nb")
    except ValueError as error:
        record = logging.LogRecord("sgla.x", logging.ERROR, "", 1, "it %s", ("broke\n",), None)
        record.exc_info = (ValueError, error, error.__traceback__)
    text = JsonFormatter().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["message"], line["level"]) == ("it broke\n", "error")
    assert "ValueError: a\nb" in line["exception"]

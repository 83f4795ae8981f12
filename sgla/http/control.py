"""Routes that change what the server does: aborts, the cache, pauses, profiles."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from os.path import join
from typing import Any

from aiohttp import web

from sgla.actors.adapters import inside
from sgla.actors.placing import counts_of
from sgla.actors.resting import Clear, named_parts
from sgla.errors import InvalidField, NotFound
from sgla.http import answer_types as to
from sgla.http.clients import CLIENT
from sgla.http.errors import Busy
from sgla.http.models import MODELS
from sgla.http.operation import BINARY, TEXT, operation
from sgla.http.request.intake import intake, optional_intake
from sgla.http.request.schema import (
    AbortRequest,
    JoinTrainerRequest,
    LeaveTrainerRequest,
    LoadAdapterRequest,
    MemoryRequest,
    PauseRequest,
    ProfileRequest,
    Schema,
    ShowWeightsRequest,
    UnloadAdapterRequest,
    UpdateFromTrainerRequest,
    UpdateTensorsRequest,
    UpdateWeightsRequest,
    unsupported,
)
from sgla.http.server import ASKED, TAKEN
from sgla.http.wire import json_response
from sgla.kernels.placement import balance
from sgla.messages import MOST_PROFILED, Control

ABORT = Schema(AbortRequest)
PAUSE = Schema(PauseRequest)
MEMORY = Schema(MemoryRequest)
UPDATE = Schema(UpdateWeightsRequest)
TENSORS = Schema(UpdateTensorsRequest)
FROM_TRAINER = Schema(UpdateFromTrainerRequest)
JOIN = Schema(JoinTrainerRequest)
LEAVE = Schema(LeaveTrainerRequest)
SHOW = Schema(ShowWeightsRequest)
PROFILE = Schema(ProfileRequest)
LOAD = Schema(LoadAdapterRequest)
UNLOAD = Schema(UnloadAdapterRequest)
KEEPING = ("in_place", "keep")  # SGLang's and vLLM's word


@operation("SGLang, vLLM: empty the prefix cache", answer=to.Done)
async def flush_cache(request: web.Request) -> web.Response:
    if not await request[ASKED].ingress.flush_cache():
        raise Busy("requests are running, so the cache was not flushed; try again when they are done")
    return json_response({"success": True, "message": "the prefix cache is empty"})


@operation("SGLang: end requests", AbortRequest, to.Aborted)
async def abort_request(request: web.Request) -> web.Response:
    """End running requests: their clients get an ``abort`` finish (native) or an error (OpenAI). An API key
    ends those with the same key alone."""
    fields = await intake(request, ABORT, resting=True)
    if not fields.rid and not fields.abort_all:
        raise InvalidField("give rid, or abort_all: true", param="rid")
    rid = None if fields.abort_all else fields.rid
    every = (request[ASKED],) if request.pop(TAKEN, None) is None else request.app[MODELS].servers
    aborted = sum([await server.abort(rid, request[CLIENT]) for server in every])
    return json_response({"success": True, "aborted": aborted})


@operation("SGLang, vLLM: stop generating", PauseRequest, to.Aborted, query=("mode",), optional=True)
async def pause(request: web.Request) -> web.Response:
    """Stop generating. Running requests are aborted, or wait with ``mode: in_place``; new ones wait."""
    server = request[ASKED]
    fields = await optional_intake(request, PAUSE, resting=True)
    mode = fields.mode or request.query.get("mode") or "abort"
    if mode not in ("abort", *KEEPING):
        raise unsupported("mode", f" as {mode[:40]!r}: it is abort or in_place")
    aborted = 0 if mode in KEEPING else await server.abort(None)
    server.ingress.pause(True)
    return json_response({"status": "paused", "success": True, "aborted": aborted})


@operation("SGLang, vLLM: go on generating", answer=to.Done)
async def resume(request: web.Request) -> web.Response:
    request[ASKED].ingress.pause(False)
    return json_response({"status": "running", "success": True})


@operation("SGLang: load a LoRA adapter", LoadAdapterRequest, to.LoadedAdapters)
async def load_adapter(request: web.Request) -> web.Response:
    """In SGLang's shape, with all adapters that are loaded now."""
    await _load(request)
    return json_response(_adapters(request))


@operation("vLLM: load a LoRA adapter", LoadAdapterRequest, media=TEXT)
async def load_adapter_text(request: web.Request) -> web.Response:
    """As vLLM answers."""
    return web.Response(text=f"Success: LoRA adapter '{await _load(request)}' added successfully.")


async def _load(request: web.Request) -> str:
    server = request[ASKED]
    server.ingress.require_ready()
    fields = await intake(request, LOAD)
    if fields.load_inplace:
        raise unsupported("load_inplace", ": unload the adapter first")
    await server.ingress.adapters.load(fields.lora_name, fields.lora_path, bool(fields.pinned))
    return fields.lora_name


@operation("SGLang: forget a LoRA adapter", UnloadAdapterRequest, to.LoadedAdapters)
async def unload_adapter(request: web.Request) -> web.Response:
    """When the requests that have it are done."""
    await _unload(request)
    return json_response(_adapters(request))


@operation("vLLM: forget a LoRA adapter", UnloadAdapterRequest, media=TEXT)
async def unload_adapter_text(request: web.Request) -> web.Response:
    """As vLLM answers."""
    return web.Response(text=f"Success: LoRA adapter '{await _unload(request)}' removed successfully.")


async def _unload(request: web.Request) -> str:
    server = request[ASKED]
    server.ingress.require_ready()
    fields = await intake(request, UNLOAD)
    await server.ingress.adapters.unload(fields.lora_name)
    return fields.lora_name


def _adapters(request: web.Request) -> dict[str, Any]:
    loaded = request[ASKED].ingress.adapters.loaded
    return {"success": True, "loaded_adapters": {name: loaded[name].folder for name in loaded}}


@operation("vLLM: whether generating is stopped", answer=to.Paused)
async def is_paused(request: web.Request) -> web.Response:
    return json_response({"is_paused": request[ASKED].ingress.paused})


@operation("vLLM: give memory back", answer=to.Done, query=("level", "mode"))
async def sleep(request: web.Request) -> web.Response:
    """vLLM's levels: 1 gives back the KV cache, and what weights take of a GPU, 2 drops the weights. Running
    requests are aborted with ``mode`` ``abort``; else they are a 409."""
    level, mode = request.query.get("level", "1"), request.query.get("mode")
    if level not in ("1", "2"):
        raise InvalidField("level must be 1 or 2; /pause stops generating alone", param="level")
    if mode not in (None, "abort"):
        raise unsupported("mode", f" as {mode[:40]!r}: it is abort; leave it out, and try again after a 409")
    clear = None if mode is None else partial(request[ASKED].abort, None)
    await _sleep(request, kv=True, weights="files" if level == "2" else "host", clear=clear)
    return json_response({"success": True})


@operation("SGLang: give memory back", MemoryRequest, to.Done, optional=True)
async def release_memory(request: web.Request) -> web.Response:
    """SGLang's tags, weights and kv_cache; none means both. What cuda_graph names takes no memory."""
    tags = named_parts((await optional_intake(request, MEMORY, resting=True)).tags)
    await _sleep(request, kv="kv_cache" in tags, weights="either" if "weights" in tags else "")
    return json_response({"success": True})


async def _sleep(request: web.Request, kv: bool, weights: str, clear: Clear | None = None) -> None:
    if not await request[ASKED].ingress.sleep(kv, weights, clear):
        raise Busy(
            "requests are open, or what they left is being written, so no memory was given back; try again "
            "when they are done"
        )


@operation("vLLM: have it again", answer=to.Done, query=("tags",))
async def wake_up(request: web.Request) -> web.Response:
    """vLLM's ``tags``; none means all. Requests are accepted when all is there."""
    return await _wake(request, named_parts(request.query.getall("tags", [])))


@operation("SGLang: have it again", MemoryRequest, to.Done, optional=True)
async def resume_memory(request: web.Request) -> web.Response:
    """SGLang's ``tags``; none means all."""
    return await _wake(request, named_parts((await optional_intake(request, MEMORY, resting=True)).tags))


async def _wake(request: web.Request, parts: Collection[str]) -> web.Response:
    await request[ASKED].ingress.wake(parts)
    return json_response({"success": True})


@operation("vLLM: whether memory is given back", answer=to.Sleeping)
async def is_sleeping(request: web.Request) -> web.Response:
    return json_response({"is_sleeping": request[ASKED].ingress.phase == "sleeping"})


@operation("SGLang, vLLM: record what the workers do", ProfileRequest, optional=True)
async def start_profile(request: web.Request) -> web.Response:
    """Record what the workers do, until ``/stop_profile`` or for ``num_steps``. The traces go to a folder
    that the server's owner chose, or into one inside of it."""
    server = request[ASKED]
    fields = await optional_intake(request, PROFILE)
    owned = server.config.profile_folder
    folder = inside(join(owned, fields.output_dir or ""), [owned], "output_dir", "--profile-folder")
    args = {"folder": str(folder), "steps": fields.num_steps or MOST_PROFILED}
    return json_response(await server.ingress.control(Control(verb="profile_start", args=args)))


@operation("SGLang: count which experts tokens choose", answer=to.Done)
async def start_experts(request: web.Request) -> web.Response:
    """From 0 on, until they are stopped. On GPUs steps are slower meanwhile."""
    await request[ASKED].ingress.count_experts("experts_start")
    return json_response({"success": True})


@operation("SGLang: count no more", answer=to.Done)
async def stop_experts(request: web.Request) -> web.Response:
    """What has been counted stays."""
    await request[ASKED].ingress.count_experts("experts_stop")
    return json_response({"success": True})


@operation("SGLang: tell what has been counted")
async def dump_experts(request: web.Request) -> web.Response:
    """For each layer with experts how often each was chosen, since the start or the last dump."""
    counts, homes = counts_of(await request[ASKED].ingress.count_experts("experts_dump"))
    layers = [_counted(layer, numbers, homes.get(layer)) for layer, numbers in counts.items()]
    return json_response({"layers": layers})


def _counted(layer: int, numbers: list[int], homes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"layer": layer, "experts": numbers}
    return found if homes is None else found | {"ranks": homes, "balance": round(balance(numbers, homes), 4)}


@operation("Give experts to ranks by how often they were chosen")
async def rebalance_experts(request: web.Request) -> web.Response:
    """By the counts since the recording began, or the last dump; requests wait meanwhile, and go on. For each
    layer the experts of each rank, and how well these were and are balanced: what they have to do on average,
    against the most."""
    return json_response({"layers": await request[ASKED].ingress.place_experts()})


@operation("SGLang, vLLM: write the recording")
async def stop_profile(request: web.Request) -> web.Response:
    """Write the traces."""
    return json_response(await request[ASKED].ingress.control(Control(verb="profile_stop")))


@operation("The scheduler's last steps, for 'sgla replay'", media=BINARY)
async def step_log(request: web.Request) -> web.Response:
    """The scheduler's last steps, for ``sgla replay``. They hold everybody's prompts."""
    server = request[ASKED]
    server.ingress.require_ready()
    if server.ingress.step_log is None:
        raise NotFound("the server keeps no steps; start it with --step-log 1000")
    return web.Response(body=server.ingress.step_log("asked for"), content_type="application/octet-stream")

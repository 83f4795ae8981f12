"""Routes that bring other weights, and those that show them. What SGLang calls an update is one request; what
vLLM calls one begins, comes in parts, each of which is taken or refused whole, and ends."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable
from functools import partial
from html import escape
from typing import Any
from urllib.parse import quote

from aiohttp import web

from sgla.actors.resting import announced
from sgla.errors import InvalidField, NotFound
from sgla.http import answer_types as to
from sgla.http.errors import Busy
from sgla.http.operation import BINARY, HTML, operation
from sgla.http.request.intake import intake, optional_intake
from sgla.http.request.schema import (
    CallRequest,
    CheckWeightsRequest,
    JoinTrainerRequest,
    LeaveTrainerRequest,
    NameWeightsRequest,
    PrepareWeightsRequest,
    Schema,
    ShowWeightsRequest,
    TransferEngineRequest,
    TransferPartRequest,
    TransferRequest,
    UpdateFromServersRequest,
    UpdateFromTrainerRequest,
    UpdateTensorsRequest,
    UpdateWeightsRequest,
    WeightChange,
    unsupported,
)
from sgla.http.server import ASKED, PATH_ID, Server
from sgla.http.wire import json_response

UPDATE = Schema(UpdateWeightsRequest)
TENSORS = Schema(UpdateTensorsRequest)
FROM_TRAINER = Schema(UpdateFromTrainerRequest)
FROM_SERVERS = Schema(UpdateFromServersRequest)
JOIN = Schema(JoinTrainerRequest)
LEAVE = Schema(LeaveTrainerRequest)
SHOW = Schema(ShowWeightsRequest)
NAME = Schema(NameWeightsRequest)
PREPARE = Schema(PrepareWeightsRequest)
CHECK = Schema(CheckWeightsRequest)
CALL = Schema(CallRequest)
ENGINE = Schema(TransferEngineRequest)
TRANSFER = Schema(TransferRequest)
PART = Schema(TransferPartRequest)


@operation("SGLang: take other weights of the same model", UpdateWeightsRequest, to.Updated)
async def update_weights(request: web.Request) -> web.Response:
    """Other weights of the same model, from a folder; the prefix cache is empty then."""
    server = request[ASKED]
    fields = await intake(request, UPDATE, resting=True)
    for name in ("load_format", "is_async", "keep_pause", "recapture_cuda_graph", "torch_empty_cache"):
        if getattr(fields, name):
            raise unsupported(name, "; leave it out")
    if fields.flush_cache is False:
        raise unsupported("flush_cache", " as false: KV of old weights is of no use")
    change = partial(server.ingress.update_weights, fields.model_path, fields.weight_version)
    return await _changed(server, fields, change)


@operation("SGLang: take tensors in place of weights", UpdateTensorsRequest, to.Updated)
async def update_tensors(request: web.Request) -> web.Response:
    """Other weights of the same model, some or all, that the request has, or that lie on this GPU."""
    server = request[ASKED]
    fields = await intake(request, TENSORS, resting=True)
    payloads = [
        await asyncio.to_thread(_unarmored, text, "serialized_named_tensors")
        for text in fields.serialized_named_tensors
    ]
    change = partial(server.ingress.take_tensors, payloads, fields.weight_version)
    return await _changed(server, fields, change)


@operation("SGLang: take what the trainer sends in place of weights", UpdateFromTrainerRequest, to.Updated)
async def update_from_trainer(request: web.Request) -> web.Response:
    """What the trainer of a group broadcasts, in the order of the names."""
    server = request[ASKED]
    fields = await intake(request, FROM_TRAINER, resting=True)
    tensors = announced(fields.names, fields.dtypes, fields.shapes)
    version = fields.weight_version
    change = partial(server.ingress.take_from_trainer, fields.group_name, tensors, version)
    return await _changed(server, fields, change)


@operation("SGLang: take what a parameter server broadcasts", UpdateFromServersRequest, to.Updated)
async def update_from_servers(request: web.Request) -> web.Response:
    """What checkpoint-engine brings to the device of each rank, through memory that both see."""
    server = request[ASKED]
    fields = await intake(request, FROM_SERVERS, resting=True)
    if fields.torch_empty_cache:
        raise unsupported("torch_empty_cache", "; leave it out")
    change = partial(server.ingress.take_from_servers, fields.zmq_handles, fields.weight_version)
    return await _changed(server, fields, change)


@operation("vLLM: have the workers do something", CallRequest, to.Called)
async def call(request: web.Request) -> web.Response:
    """``update_weights_from_ipc``, as checkpoint-engine calls it; no other method can be called."""
    server = request[ASKED]
    fields = await intake(request, CALL, resting=True)
    if fields.method != "update_weights_from_ipc":
        raise unsupported("method", f" as {fields.method[:40]!r}: it is update_weights_from_ipc")
    handles = fields.args[0] if fields.args else fields.kwargs.get("zmq_handles")
    if len(fields.args) > 1 or not isinstance(handles, dict):
        raise InvalidField("args has one object: the address of each device's server", param="args")
    if not all(isinstance(address, str) for address in handles.values()):
        raise InvalidField("addresses are texts", param="args")
    await _changed(server, WeightChange(), partial(server.ingress.take_from_servers, handles, None))
    return json_response({"results": [None] * server.config.tp})


@operation("vLLM: how weights are going to come", TransferEngineRequest, to.Transferred)
async def begin_transfers(request: web.Request) -> web.Response:
    """As handles of tensors on this host's devices (vLLM's backend ipc), which need no introduction."""
    fields = await intake(request, ENGINE, resting=True)
    if fields.init_info:
        raise unsupported(
            "init_info",
            f".{min(fields.init_info)[:40]}: it is of the backend nccl; send handles (backend ipc), or use "
            "/init_weights_update_group",
        )
    return json_response({"message": "handles of tensors are taken"})


@operation("vLLM: weights are going to come", TransferRequest, to.Transferred, optional=True)
async def start_transfer(request: web.Request) -> web.Response:
    fields = await optional_intake(request, TRANSFER, resting=True)
    if fields.is_checkpoint_format is False:
        raise unsupported("is_checkpoint_format", " as false: tensors are named as in the model's files")
    request[ASKED].ingress.require_ready(resting=True)
    return json_response({"message": "parts of the weights may come"})


@operation("vLLM: take a part of the weights", TransferPartRequest, to.Transferred)
async def take_part(request: web.Request) -> web.Response:
    """Tensors that others have in memory of this host: of a GPU by CUDA's handles, else in shared memory."""
    server = request[ASKED]
    fields = await intake(request, PART, resting=True)
    info = fields.update_info
    if info.packed:
        raise unsupported("update_info", ".packed; leave it out: each tensor has a handle of its own")
    if not len(info.names) == len(info.shapes) == len(info.dtype_names) or len(set(info.names)) < len(
        info.names
    ):
        raise InvalidField(
            "names, dtype_names and shapes must be as many, no name twice", param="update_info"
        )
    data = await asyncio.to_thread(_unarmored, info.ipc_handles_pickled, "update_info")
    await _changed(server, WeightChange(), partial(server.ingress.take_tensors, [data], None, info.names))
    return json_response({"message": "the weights are updated"})


@operation("vLLM: all weights have come", TransferRequest, to.Transferred, optional=True)
async def finish_transfer(request: web.Request) -> web.Response:
    await optional_intake(request, TRANSFER, resting=True)
    return json_response({"message": "the weights are updated"})


@operation("vLLM: how many ranks there are", answer=to.WorldSize)
async def world_size(request: web.Request) -> web.Response:
    config = request[ASKED].config
    return json_response({"world_size": config.tp * config.pp})


@operation("SGLang: join a trainer", JoinTrainerRequest, to.Told)
async def join_trainer(request: web.Request) -> web.Response:
    fields = await intake(request, JOIN, resting=True)
    where = {"master_address": fields.master_address, "master_port": fields.master_port}
    where |= {"rank_offset": fields.rank_offset, "world_size": fields.world_size, "backend": fields.backend}
    await request[ASKED].ingress.join_trainer(fields.group_name, **where)
    return json_response({"success": True, "message": f"joined the group {fields.group_name}"})


@operation("SGLang: leave a trainer", LeaveTrainerRequest, to.Told)
async def leave_trainer(request: web.Request) -> web.Response:
    fields = await optional_intake(request, LEAVE, resting=True)
    await request[ASKED].ingress.leave_trainer(fields.group_name)
    return json_response({"success": True, "message": f"left the group {fields.group_name}"})


def _unarmored(text: str, name: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidField(f"{name} must be base64: {error}", param=name) from error


async def _changed(
    server: Server, fields: WeightChange, change: Callable[..., Awaitable[bool]]
) -> web.Response:
    """``change``: where requests are to be ended, with what ends them as ``clear``."""
    ended = 0

    async def clear() -> None:
        nonlocal ended
        ended = await server.abort(None)

    if not await (change(clear=clear) if fields.abort_all_requests else change()):
        raise Busy(
            "requests are open, or what they left is being written, so the weights were not updated; try "
            "again when they are done, or pause generating (mode in_place), so that they go on with the new "
            "weights"
        )
    told = {"success": True, "message": "the weights are updated", "num_paused_requests": ended}
    return json_response(told)


@operation("SGLang: give the weights another name", NameWeightsRequest, to.NamedWeights)
async def name_weights(request: web.Request) -> web.Response:
    """Answers that begin from now on say it; the weights stay."""
    server = request[ASKED]
    fields = await intake(request, NAME, resting=True)
    server.ingress.require_ready(resting=True)
    if fields.abort_all_requests:
        await server.abort(None)
    server.ingress.name_weights(fields.new_version)
    told = {"success": True, "message": "the weights have this name", "new_version": fields.new_version}
    return json_response(told)


@operation("slime: before and after an update of quantized weights", PrepareWeightsRequest, to.Told)
async def prepare_weights(request: web.Request) -> web.Response:
    """There is nothing to do: updates take tensors as files have them, and lay them out anew by
    themselves."""
    await intake(request, PREPARE, resting=True)
    return json_response({"success": True, "message": "updates lay weights out by themselves"})


@operation("SGLang: rows of a tensor", ShowWeightsRequest, list[Any])
async def show_weights(request: web.Request) -> web.Response:
    """The first rows of a tensor, by its name in the model's files."""
    fields = await intake(request, SHOW)
    return json_response(await request[ASKED].ingress.show_weights(fields.name, fields.truncate_size))


@operation("SGLang: whether weights are what they were", CheckWeightsRequest, (to.Checked, to.Updated))
async def check_weights(request: web.Request) -> web.Response:
    """``snapshot`` keeps checksums of all that the model computes with, ``reset_tensors`` puts random weights
    in its place, ``compare`` is a 400 that names what differs from the snapshot, ``checksum`` tells."""
    fields = await intake(request, CHECK)
    ingress = request[ASKED].ingress
    if fields.action == "reset_tensors":
        return await _changed(request[ASKED], WeightChange(), ingress.scramble_weights)
    ranks = await ingress.check_weights(fields.action)
    message = "the weights are those of the snapshot" if fields.action == "compare" else fields.action
    return json_response({"success": True, "message": message, "ranks": ranks})


@operation("Links to the model's files, for a server that copies them", media=HTML)
async def links(request: web.Request) -> web.Response:
    """A page of links to the model's files, as ``--load-format remote-instance`` of another server reads
    it."""
    server = request[ASKED]
    server.ingress.require_ready()
    links = "".join(f'<a href="{quote(name)}">{escape(name)}</a>\n' for name in sorted(server.ingress.files))
    return web.Response(text=f"<!doctype html><title>weights</title>\n{links}", content_type="text/html")


@operation("One of these files", media=BINARY)
async def file(request: web.Request) -> web.FileResponse:
    server = request[ASKED]
    server.ingress.require_ready()
    path = server.ingress.files.get(request[PATH_ID])
    if path is None:
        raise NotFound("the model has no such file; /weights lists those that it has")
    return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

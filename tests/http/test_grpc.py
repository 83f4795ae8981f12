"""gRPC by real clients, beside HTTP: equal answers, typed statuses, limits."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from http_fake import FakeIngress, make_event
from http_site import Serve, Site

from sgla.cli.serve import others
from sgla.config import Config
from sgla.errors import BadRequest, ConfigError
from sgla.grpc import require
from sgla.grpc.calls import Call
from sgla.grpc.exchange import Exchange
from sgla.grpc.proto import OWN, SGLANG, VLLM, make, message, pool
from sgla.grpc.server import start
from sgla.http.bodies import Share
from sgla.http.clients import Client
from sgla.http.server import SERVER
from sgla.messages import Event, Pooling, Rejected, Usage

SCHEDULER, ENGINE = f"/{SGLANG}.SglangScheduler", f"/{VLLM}.VllmEngine"
Code = grpc.StatusCode
# What the classes of smg-grpc-proto 0.4.28 write.
REQUEST = "0a01721205120301ac0222160d0000003f400772027b7db201080a0135150000c03f800100880101"
REQUEST_VLLM = "1a0268692209aa01030a0161c00103"


class Calls:
    """A client of a server, and the server's ingress."""

    def __init__(self, site: Site, channel: grpc.aio.Channel, target: str) -> None:
        self.site, self.ingress, self.channel, self.target = site, site.ingress, channel, target

    def open(self, path: str, request: Any, answer: str, **options: Any) -> Any:
        """A call that has one message to send, as generated stubs make it."""
        kind = message(f"{path.split('/')[1].rpartition('.')[0]}.{answer}")
        method = self.channel.unary_stream(
            path, request_serializer=type(request).SerializeToString, response_deserializer=kind.FromString
        )
        return method(request, **options)

    async def all(self, path: str, request: Any, answer: str, **options: Any) -> list[Any]:
        return [each async for each in self.open(path, request, answer, **options)]

    async def one(self, path: str, request: Any, **options: Any) -> Any:
        name = path.split("/")[-1]
        package = path.split("/")[1].rpartition(".")[0]
        kind = message(f"{package}.{name}Response")
        method = self.channel.unary_unary(
            path, request_serializer=type(request).SerializeToString, response_deserializer=kind.FromString
        )
        return await method(request, **options)

    async def generate(self, request: Any, **options: Any) -> list[Any]:
        path = SCHEDULER if type(request).DESCRIPTOR.file.package == SGLANG else ENGINE
        return await self.all(f"{path}/Generate", request, "GenerateResponse", **options)

    async def refusal(self, request: Any, **options: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.generate(request, **options)
        return caught.value


Connect = Callable[..., Awaitable[Calls]]


@pytest.fixture
async def connect(serve: Serve) -> AsyncIterator[Connect]:
    """``await connect(ingress, options of the channel, **config fields)``."""
    closers: list[Callable[[], Awaitable[Any]]] = []

    async def make_calls(
        ingress: FakeIngress | None = None, channel: tuple[tuple[str, int], ...] = (), **settings: Any
    ) -> Calls:
        site = await serve(ingress, grpc_port=0, **settings)
        running = await start(site.app)
        target = f"127.0.0.1:{running.port}"
        client = grpc.aio.insecure_channel(target, options=channel)
        closers.extend((client.close, running.close))
        return Calls(site, client, target)

    yield make_calls
    for close in closers:
        await close()


@pytest.fixture
async def calls(connect: Connect) -> Calls:
    return await connect()


def asks(stream: bool = False, ids: tuple[int, ...] = (97, 98), rid: str = "", **fields: Any) -> Any:
    """SGLang's; fields of the sampling stand in ``params``."""
    params = {"max_new_tokens": 4, "skip_special_tokens": True} | fields.pop("params", {})
    return make(
        SGLANG,
        "GenerateRequest",
        request_id=rid,
        tokenized={"input_ids": ids},
        stream=stream,
        logprob_start_len=fields.pop("logprob_start_len", -1),
        sampling_params=params,
        **fields,
    )


def asks_vllm(stream: bool = False, params: dict[str, Any] | None = None, **fields: Any) -> Any:
    prompt = fields if fields else {"tokenized": {"input_ids": [97, 98]}}
    params = {"max_tokens": 4, "temperature": 0.0, **(params or {})}
    return make(VLLM, "GenerateRequest", stream=stream, sampling_params=params, **prompt)


def about(value: float) -> float:
    return float(np.float32(value))


async def test_answers_are_those_of_http(calls: Calls) -> None:
    params = {"temperature": 0.7, "top_p": 0.9, "n": 2, "max_new_tokens": 5, "stop": ["zz"]}
    native = {**params, "top_k": 0, "min_p": 0.0, "skip_special_tokens": True}
    body = {
        "input_ids": [97, 98],
        "sampling_params": native | {"repetition_penalty": 1.0, "spaces_between_special_tokens": False},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "token_ids_logprob": [65],
    }
    _, results = await calls.site.post("/generate", body)
    logs: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    request = asks(params=params, token_ids_logprob=[65], rid="mine", **logs)
    whole = await calls.generate(request)
    assert calls.ingress.jobs[0].sampling == calls.ingress.jobs[1].sampling
    assert [each.request_id for each in whole] == ["mine", "mine"]
    for answer, result in zip((each.complete for each in whole), results):
        meta = result["meta_info"]
        assert list(answer.output_ids) == result["output_ids"]
        assert (answer.finish_reason, answer.matched_stop_str) == ("stop", "zz")
        counts = answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens
        assert counts == (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"])
        output, prompt = answer.output_logprobs, answer.input_logprobs
        shown = [[value, token, None] for value, token in zip(output.token_logprobs, output.token_ids)]
        assert shown == meta["output_token_logprobs"]
        tops = [[[v, t, None] for v, t in zip(top.values, top.token_ids)] for top in output.top_logprobs]
        assert tops == meta["output_top_logprobs"]
        named = [[[v, t, None] for v, t in zip(r.values, r.token_ids)] for r in output.token_ids_logprobs]
        assert named == meta["output_token_ids_logprobs"]
        assert list(prompt.token_ids) == [97, 98]
        assert [each.HasField("value") for each in prompt.token_logprobs] == [False, True]
        assert about(prompt.token_logprobs[1].value) == meta["input_token_logprobs"][1][0]
    request.stream = True
    pieces = await calls.generate(request)
    for index, each in enumerate(whole):
        chunks = [p.chunk for p in pieces if p.WhichOneof("response") == "chunk" and p.chunk.index == index]
        (last,) = [
            p.complete
            for p in pieces
            if p.HasField("complete")
            and p.complete.index == each.complete.index
            and p.complete.index == index
        ]
        assert last == each.complete
        assert [token for chunk in chunks for token in chunk.token_ids] == list(last.output_ids)
        assert [t for c in chunks for t in c.output_logprobs.token_ids] == list(last.output_ids)
        assert [chunk.HasField("input_logprobs") for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
        assert chunks[-1].completion_tokens == 5


async def test_unset_fields_are_neutral(calls: Calls) -> None:
    request = make(SGLANG, "GenerateRequest", tokenized={"input_ids": [97]})
    await calls.generate(request)
    sampling = calls.ingress.jobs[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 1.0, 0)
    assert (sampling.repetition_penalty, sampling.n, sampling.max_tokens) == (1.0, 1, None)
    assert calls.ingress.jobs[0].clip


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"json_schema": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"ebnf_grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        (
            {"min_new_tokens": 2, "ignore_eos": True, "no_stop_trim": True, "stop_token_ids": [7]},
            {"min_new_tokens": 2, "ignore_eos": True, "no_stop_trim": True, "stop_token_ids": [7]},
        ),
        ({"logit_bias": {"5": 1.5}, "min_p": 0.1}, {"logit_bias": {"5": 1.5}, "min_p": 0.1}),
    ],
    ids=["regex", "schema", "ebnf", "ends", "bias"],
)
async def test_sampling_of_sglang(calls: Calls, there: dict[str, Any], here: dict[str, Any]) -> None:
    await calls.generate(asks(params=there))
    usual = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "max_new_tokens": 4}
    params = {**usual, "spaces_between_special_tokens": False, **here}
    await calls.site.post("/generate", {"input_ids": [97, 98], "sampling_params": params})
    ours, theirs = (job.sampling for job in calls.ingress.jobs)
    assert ours == theirs


async def test_vllm(calls: Calls) -> None:
    body = {"model": "fake", "prompt": [97, 98], "max_tokens": 4, "temperature": 0, "top_k": 0}
    wants = {"seed": 5, "logprobs": 1, "prompt_logprobs": 1, "min_tokens": 1, "guided_choice": ["a", "b"]}
    await calls.site.post("/v1/completions", {**body, **wants, "top_p": 1, "min_p": 0})
    params = {"seed": 5, "logprobs": 1, "prompt_logprobs": 1, "min_tokens": 1}
    params |= {"choice": {"choices": ["a", "b"]}, "skip_special_tokens": True}
    request = asks_vllm(params=params | {"spaces_between_special_tokens": True})
    (whole,) = await calls.generate(request)
    ours, theirs = (job.sampling for job in calls.ingress.jobs)
    assert ours == theirs
    assert whole.complete.finish_reason == "length"
    assert len(whole.complete.output_logprobs.top_logprobs) == 4
    assert len(whole.complete.input_logprobs.token_ids) == 2
    request.stream = True
    *chunks, last = await calls.generate(request)
    assert last.complete == whole.complete
    assert [chunk.chunk.completion_tokens for chunk in chunks] == [len(c.chunk.token_ids) for c in chunks]
    assert [t for chunk in chunks for t in chunk.chunk.token_ids] == list(last.complete.output_ids)
    await calls.generate(asks_vllm(text="ab", params={"json_object": True, "truncate_prompt_tokens": 1}))
    job = calls.ingress.jobs[-1]
    assert (job.text, job.keep_last, job.sampling.grammar.kind) == ("ab", 1, "json_object")


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (asks(mm_inputs={"image_urls": ["u"]}), "mm_inputs"),
        (asks(input_embeds=[1.0]), "input_embeds"),
        (asks(disaggregated_params={"bootstrap_host": "h"}), "disaggregated_params"),
        (asks(custom_logit_processor="x"), "custom_logit_processor"),
        (asks(data_parallel_rank=1), "data_parallel_rank"),
        (asks(params={"custom_params": {"a": 1}}), "custom_params"),
        (asks(params={"temperature": -1}), "temperature"),
        (asks(params={"temperature": float("inf")}), "temperature"),
        (asks(params={"n": 1000}), "n"),
        (asks(params={"stop": ["a"] * 65}), "stop"),
        (asks(top_logprobs_num=21), "top_logprobs_num"),
        (asks(ids=()), "input_ids"),
        (asks(lora_id="none"), "lora_path"),
        (asks_vllm(params={"logprobs": -1}), "top_logprobs"),
        (asks_vllm(kv_transfer_params_json="{}", tokenized={"input_ids": [1]}), "kv_transfer_params_json"),
        (asks_vllm(text=""), "text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_refused_by_name(calls: Calls, request_: Any, param: str) -> None:
    error = await calls.refusal(request_)
    assert error.code() in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
    assert dict(error.trailing_metadata())["sgla-error-param"] == param
    assert not calls.ingress.jobs
    assert calls.site.app[SERVER].memory.used == 0


async def test_embed(connect: Connect) -> None:
    ingress = FakeIngress(manual=True)
    assert ingress.facts is not None
    ingress.facts.pooling = Pooling(task="embed", kind="mean", size=2, normalize=True)
    calls = await connect(ingress)
    for path, package in ((SCHEDULER, SGLANG), (ENGINE, VLLM)):
        request = make(package, "EmbedRequest", request_id="e", tokenized={"input_ids": [1, 2, 3]})
        answer = asyncio.ensure_future(calls.one(f"{path}/Embed", request))
        await until(lambda: ingress.open_jobs)
        (rid,) = ingress.open_jobs
        vector = np.array([3, 4], np.float32).tobytes()
        usage = Usage(prompt_tokens=3)
        ingress.push(rid, Event(rid=rid, index=0, finish="stop", vector=vector, usage=usage))
        told = await answer
        assert [about(value) for value in told.embedding] == [about(0.6), about(0.8)]
        assert (told.embedding_dim, told.prompt_tokens) == (2, 3)
    pair = make(SGLANG, "EmbedRequest", tokenized={"input_ids": [1]}, is_cross_encoder=True)
    with pytest.raises(grpc.aio.AioRpcError, match="is_cross_encoder"):
        await calls.one(f"{SCHEDULER}/Embed", pair)


async def until(state: Callable[[], Any]) -> None:
    """Wait until ``state`` holds; a test that waits for ever is ended by its runner."""
    while not state():
        await asyncio.sleep(0.001)


async def test_facts(calls: Calls) -> None:
    for path, package in ((SCHEDULER, SGLANG), (ENGINE, VLLM)):
        info = await calls.one(f"{path}/GetModelInfo", make(package, "GetModelInfoRequest"))
        assert (info.served_model_name, info.vocab_size, info.max_context_length) == ("fake", 512, 4096)
        assert (info.is_generation, list(info.eos_token_ids)) == (True, [511])
        assert '"temperature": 0.6' in info.default_sampling_params_json
        server = await calls.one(f"{path}/GetServerInfo", make(package, "GetServerInfoRequest"))
        assert server.active_requests == 0
        health = await calls.one(f"{path}/HealthCheck", make(package, "HealthCheckRequest"))
        assert health.healthy
        loads = await calls.one(f"{path}/GetLoads", make(package, "GetLoadsRequest"))
        assert loads.loads[0].max_total_num_tokens == 256 * 16
        flush = make("smg.grpc.common", "FlushCacheRequest")
        method = calls.channel.unary_unary(
            f"{path}/FlushCache",
            request_serializer=type(flush).SerializeToString,
            response_deserializer=message("smg.grpc.common.FlushCacheResponse").FromString,
        )
        assert (await method(flush)).success
        calls.ingress.flushable = False
        with pytest.raises(grpc.aio.AioRpcError) as busy:
            await method(flush)
        assert busy.value.code() == Code.FAILED_PRECONDITION
        calls.ingress.flushable = True


async def test_no_secrets_are_told(connect: Connect) -> None:
    calls = await connect(api_key=["mine"], admin_api_key=["root"])
    key = (("authorization", "Bearer mine"),)
    request = make(SGLANG, "GetServerInfoRequest")
    info = await calls.one(f"{SCHEDULER}/GetServerInfo", request, metadata=key)
    assert "mine" not in str(info)
    assert "root" not in str(info)
    assert "max_queued_requests" in info.server_args


async def test_keys(connect: Connect) -> None:
    calls = await connect(api_key=["mine", "other"], admin_api_key=["root"])
    for metadata in ((), (("authorization", "Bearer wrong"),)):
        error = await calls.refusal(asks(), metadata=metadata)
        assert error.code() == Code.UNAUTHENTICATED
        assert dict(error.trailing_metadata())["sgla-error-code"] == "invalid_api_key"
    assert await calls.generate(asks(), metadata=(("authorization", "Bearer mine"),))
    flush = make("smg.grpc.common", "FlushCacheRequest")
    method = calls.channel.unary_unary(f"{SCHEDULER}/FlushCache", type(flush).SerializeToString)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(flush, metadata=(("authorization", "Bearer mine"),))
    assert caught.value.code() == Code.PERMISSION_DENIED
    await method(flush, metadata=(("authorization", "Bearer root"),))
    health = make("grpc.health.v1", "HealthCheckRequest")
    check = calls.channel.unary_unary("/grpc.health.v1.Health/Check", type(health).SerializeToString)
    assert await check(health)  # is open, as /health is


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")
async def test_tls_and_certificates_of_clients(connect: Connect, tmp_path: Path) -> None:
    """The certificate signs itself, so it is also who may sign those of clients."""
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *more], check=True, capture_output=True)
    pem, secret = certificate.read_bytes(), key.read_bytes()
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    for signers, credentials, answers in (
        ({}, grpc.ssl_channel_credentials(pem), True),
        ({}, None, False),
        ({"ssl_ca_certs": str(certificate)}, grpc.ssl_channel_credentials(pem, secret, pem), True),
        ({"ssl_ca_certs": str(certificate)}, grpc.ssl_channel_credentials(pem), False),
    ):
        calls = await connect(**files, **signers)
        if credentials is not None:
            await calls.channel.close()
            calls.channel = grpc.aio.secure_channel(calls.target, credentials)
        if answers:
            assert len(await calls.generate(asks(), timeout=10)) == 1
        else:
            assert (await calls.refusal(asks(), timeout=10)).code() == Code.UNAVAILABLE
        await calls.channel.close()


async def test_abort_ends_those_of_the_same_key(connect: Connect) -> None:
    ingress = FakeIngress(manual=True)
    calls = await connect(ingress, api_key=["mine", "other"])
    mine, other = ((("authorization", f"Bearer {key}"),) for key in ("mine", "other"))
    running = asyncio.ensure_future(calls.generate(asks(rid="x", stream=True), metadata=mine))
    await until(lambda: ingress.open_jobs)
    abort = make(SGLANG, "AbortRequest", request_id="x")
    assert not (await calls.one(f"{SCHEDULER}/Abort", abort, metadata=other)).success
    assert (await calls.one(f"{SCHEDULER}/Abort", abort, metadata=mine)).success
    (last,) = await running
    assert last.complete.finish_reason == "abort"
    ingress.check()


async def test_who_leaves_ends_the_request(connect: Connect) -> None:
    ingress = FakeIngress(manual=True)
    calls = await connect(ingress)
    call = calls.open(f"{SCHEDULER}/Generate", asks(stream=True), "GenerateResponse")
    await until(lambda: ingress.open_jobs)
    job, _ = next(iter(ingress.open_jobs.values()))
    ingress.push(job.rid, make_event(job, [97, 98], 0, 0, last=False))
    assert (await call.read()).chunk.completion_tokens == 1
    call.cancel()
    await until(lambda: ingress.cancels)
    assert ingress.cancels == [(job.rid, "client")]
    ingress.check()


async def test_deadline(connect: Connect) -> None:
    ingress = FakeIngress(manual=True)
    calls = await connect(ingress)
    for stream in (True, False):
        error = await calls.refusal(asks(stream=stream), timeout=0.2)
        assert error.code() == Code.DEADLINE_EXCEEDED
        await until(lambda: not ingress.open_jobs)
    assert all(job.deadline is not None for job in ingress.jobs)
    running = asyncio.ensure_future(calls.refusal(asks(stream=True, rid="late")))
    await until(lambda: any(rid.startswith("late-") for rid in ingress.open_jobs))
    (rid,) = (rid for rid in ingress.open_jobs if rid.startswith("late-"))
    ingress.push(rid, Rejected(rid=rid, status=408, code="deadline_exceeded", message="late"))
    assert (await running).code() == Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    ("status", "code"), [(429, Code.RESOURCE_EXHAUSTED), (503, Code.UNAVAILABLE), (500, Code.INTERNAL)]
)
async def test_errors_of_the_engine(connect: Connect, status: int, code: grpc.StatusCode) -> None:
    ingress = FakeIngress(manual=True)
    calls = await connect(ingress)
    running = asyncio.ensure_future(calls.refusal(asks(stream=True)))
    await until(lambda: ingress.open_jobs)
    (rid,) = ingress.open_jobs
    ingress.push(rid, Rejected(rid=rid, status=status, code="why", message="because", retry_after=2.0))
    error = await running
    trailing = dict(error.trailing_metadata())
    assert (error.code(), error.details(), trailing["sgla-error-code"]) == (code, "because", "why")
    assert trailing.get("grpc-retry-pushback-ms") == ("2000" if status in (429, 503) else None)


async def test_cut_and_large_messages(connect: Connect) -> None:
    calls = await connect(max_body_bytes=4096)
    raw = calls.channel.unary_stream(f"{SCHEDULER}/Generate")
    whole = asks().SerializeToString()
    for data in (whole[:-1], b"\xff", b"\x0a\xff\xff"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await raw(data).read()
        assert caught.value.code() == Code.INVALID_ARGUMENT
        assert "GenerateRequest" in (caught.value.details() or "")
    error = await calls.refusal(asks(ids=tuple(range(300)) * 16))
    assert error.code() == Code.RESOURCE_EXHAUSTED
    assert not calls.ingress.jobs
    assert await calls.generate(asks())  # the connection goes on
    long = await calls.refusal(asks(ids=(1,) * 4000 + (1,) * 90))
    assert long.code() == Code.RESOURCE_EXHAUSTED or long.code() == Code.INVALID_ARGUMENT


async def test_a_call_without_a_message(calls: Calls) -> None:
    call = calls.channel.stream_stream(f"{SCHEDULER}/Generate")()
    await call.done_writing()
    assert await call.code() == Code.INVALID_ARGUMENT
    assert await call.details() == "the call has no message"


async def test_calls_that_come_at_once_are_answered(connect: Connect) -> None:
    """More than gRPC's own servers keep before they cancel some without a word."""
    calls = await connect()
    channels = [
        grpc.aio.insecure_channel(calls.target, (("grpc.use_local_subchannel_pool", 1),)) for _ in range(3)
    ]
    opened = [
        channel.unary_unary("/grpc.health.v1.Health/Check")(b"") for channel in channels for _ in range(700)
    ]
    codes = await asyncio.gather(*(call.code() for call in opened))
    assert set(codes) == {Code.OK}
    for channel in channels:
        await channel.close()


@pytest.mark.parametrize("kind", ["biases", "numbers that are not packed", "structs", "strings"])
async def test_a_message_of_many_fields_is_not_decoded(connect: Connect, kind: str) -> None:
    """It would take the loop for as long as it has fields, before any of its limits is looked at."""
    calls = await connect()
    request = asks()
    if kind == "biases":
        request.sampling_params.logit_bias.update({str(number): 1.0 for number in range(40_000)})
    elif kind == "structs":
        request.sampling_params.custom_params.update({str(number): {"a": 1} for number in range(30_000)})
    elif kind == "strings":
        request.sampling_params.stop.extend(["a"] * 100_000)
    data = request.SerializeToString()
    if kind == "numbers that are not packed":
        field = type(request).DESCRIPTOR.fields_by_name["token_ids_logprob"].number
        data += bytes([field << 3 & 127 | 128, field >> 4, 1] if field > 15 else [field << 3, 1]) * 200_000
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls.channel.unary_stream(f"{SCHEDULER}/Generate")(data).read()
    assert caught.value.code() == Code.RESOURCE_EXHAUSTED
    assert "8192 fields" in (caught.value.details() or "")
    assert await calls.generate(asks())


async def test_an_id_that_is_too_long_is_refused_and_not_logged(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    calls = await connect()
    error = await calls.refusal(asks(rid="r" * 100_000))
    assert error.code() == Code.INVALID_ARGUMENT
    assert "request_id" in (error.details() or "")
    assert "rrrr" not in caplog.text


async def test_prompt_beyond_the_context(connect: Connect) -> None:
    calls = await connect(FakeIngress(context=64))
    error = await calls.refusal(asks(ids=(1,) * 65))
    assert dict(error.trailing_metadata())["sgla-error-code"] == "context_length_exceeded"


async def test_who_does_not_read_is_bounded(connect: Connect) -> None:
    ingress = FakeIngress(manual=True)
    limit = 64 << 10
    calls = await connect(ingress, sink_limit_bytes=limit)
    call = calls.open(f"{SCHEDULER}/Generate", asks(stream=True), "GenerateResponse")
    await until(lambda: ingress.open_jobs)
    job, _ = next(iter(ingress.open_jobs.values()))
    server, most, made = calls.site.app[SERVER], 0, 0
    while job.rid in ingress.open_jobs:  # as much as the buffers of the way hold, and the limit
        for _ in range(64):
            event = Event(rid=job.rid, index=0, text="", tokens=[1] * 100, usage=Usage(2, made, 0))
            ingress.push(job.rid, event)
            made += 100
        most = max(most, server.unread.total)
        await asyncio.sleep(0)
    assert most <= limit
    assert ingress.cancels == [(job.rid, "slow")]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() == Code.RESOURCE_EXHAUSTED
    assert server.unread.total == 0


async def test_loading(calls: Calls) -> None:
    calls.ingress.phase = "load"
    health = health_pb2.HealthCheckRequest(service=f"{SGLANG}.SglangScheduler")
    kind = health_pb2.HealthCheckResponse
    stub = health_pb2_grpc.HealthStub(calls.channel)
    check, watch = stub.Check, stub.Watch(health)
    assert (await check(health)).status == kind.NOT_SERVING
    assert (await watch.read()).status == kind.NOT_SERVING
    error = await calls.refusal(asks())
    assert error.code() == Code.UNAVAILABLE
    assert dict(error.trailing_metadata())["sgla-error-code"] == "model_loading"
    calls.ingress.phase = "ready"
    assert (await check(health)).status == kind.SERVING
    listed = (await stub.List(health_pb2.HealthListRequest())).statuses
    assert {"", health.service} < set(listed)
    assert {state.status for state in listed.values()} == {kind.SERVING}
    assert (await watch.read()).status == kind.SERVING
    watch.cancel()
    health.service = "nobody"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await check(health)
    assert caught.value.code() == Code.NOT_FOUND
    watch = stub.Watch(health)
    assert (await watch.read()).status == kind.SERVICE_UNKNOWN  # it might come
    watch.cancel()


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection(calls: Calls, version: str) -> None:
    """All services are told of by name, and each is described with all that its file imports."""
    service = f"grpc.reflection.{version}.ServerReflection"
    ask = reflection_pb2.ServerReflectionRequest
    reflect = calls.channel.stream_stream(
        f"/{service}/ServerReflectionInfo",
        ask.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    (listed,) = [each async for each in reflect(iter([ask(list_services="")]))]
    names = [each.name for each in listed.list_services_response.service]
    assert {f"{SGLANG}.SglangScheduler", f"{OWN}.Scheduler", "grpc.health.v1.Health", service} <= set(names)
    assert names == sorted(names)
    answers = reflect(iter([ask(file_containing_symbol=name) for name in (*names, "nobody")]))
    *described, nobody = [each async for each in answers]
    for name, answer in zip(names, described, strict=True):
        files = answer.file_descriptor_response.file_descriptor_proto
        assert pool().FindServiceByName(name).file.serialized_pb in files
        made = DescriptorPool()
        for file in reversed(files):
            made.AddSerializedFile(file)
        assert made.FindServiceByName(name).methods
    assert nobody.error_response.error_code == Code.NOT_FOUND.value[0]
    call = calls.channel.stream_stream(f"/{service}/ServerReflectionInfo")()
    await call.write(b"\xff")
    assert await call.code() == Code.INVALID_ARGUMENT


async def test_metrics_and_unknown_methods(calls: Calls) -> None:
    await calls.generate(asks())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await calls.channel.unary_unary(f"{SCHEDULER}/Nothing")(b"")
    assert caught.value.code() == Code.UNIMPLEMENTED
    await until(lambda: calls.site.metrics.http_responses["gRPC", f"{SCHEDULER}/Generate", 200] == 1)
    assert calls.site.metrics.http_active == 0
    assert calls.ingress.users == 0


async def test_reasoning_tokens(connect: Connect) -> None:
    ingress = FakeIngress(manual=True)
    ingress.template.source = "<think> {{ messages }} </think>"
    calls = await connect(ingress, reasoning_parser="deepseek_r1")
    running = asyncio.ensure_future(calls.generate(asks(stream=True, require_reasoning=True)))
    await until(lambda: ingress.open_jobs)
    job, _ = next(iter(ingress.open_jobs.values()))
    for i, text in enumerate(("<think>", "ab", "</think>", "c")):
        tokens, last = list(text.encode()), text == "c"
        event = Event(
            rid=job.rid, index=0, text=text, tokens=tokens, finish="stop" if last else None, usage=Usage(2, i)
        )
        event.prompt_tokens = [97] if i == 0 else None
        ingress.push(job.rid, event)
    *chunks, last = await running
    assert last.complete.reasoning_tokens == len("<think>ab</think>")
    assert chunks[-1].chunk.reasoning_tokens == len("<think>ab</think>")


class Both:
    """One call of ``Exchange``."""

    def __init__(self, calls: Calls) -> None:
        self.call = calls.channel.stream_stream(
            f"/{OWN}.Scheduler/Exchange",
            request_serializer=message(f"{OWN}.Ask").SerializeToString,
            response_deserializer=message(f"{OWN}.Answer").FromString,
        )()

    async def ask(self, **fields: Any) -> None:
        await self.call.write(make(OWN, "Ask", **fields))

    async def rest(self) -> dict[str, list[Any]]:
        """What comes until the end, by request."""
        await self.call.done_writing()
        found: dict[str, list[Any]] = {}
        while (answer := await self.call.read()) is not grpc.aio.EOF:
            found.setdefault(answer.request_id, []).append(answer)
        return found


async def test_exchange_interleaves(connect: Connect) -> None:
    ingress = FakeIngress(manual=True)
    calls = await connect(ingress)
    both = Both(calls)
    for rid in "ab":
        await both.ask(generate=asks(rid=rid, stream=True))
    await until(lambda: len(ingress.open_jobs) == 2)
    jobs = list(ingress.jobs)
    for step in range(2):
        for job in jobs:
            ingress.push(job.rid, make_event(job, [97, 98], 0, step, last=False))
        seen = [await both.call.read() for _ in jobs]
        assert {answer.request_id for answer in seen} == {"a", "b"}
        assert {answer.generate.chunk.completion_tokens for answer in seen} == {step + 1}
    await both.ask(abort={"request_id": "a"})
    aborted = [await both.call.read(), await both.call.read()]
    assert [answer.abort.success for answer in aborted if answer.HasField("abort")] == [True]
    ends = [answer.generate.complete for answer in aborted if answer.HasField("generate")]
    assert [end.finish_reason for end in ends] == ["abort"]
    for refused in (asks(rid="b"), asks(rid="c", params={"n": 1000})):  # an id that runs; a wrong field
        await both.ask(generate=refused)
        answer = await both.call.read()
        assert (answer.request_id, answer.WhichOneof("answer")) == (refused.request_id, "error")
        assert answer.error.param == ("n" if answer.request_id == "c" else "request_id")
    await both.ask(abort={"request_id": "nobody"})
    ingress.push(jobs[1].rid, make_event(jobs[1], [97, 98], 0, 2, last=True))
    rest = await both.rest()
    assert not rest["nobody"][0].abort.success
    assert [answer.WhichOneof("answer") for answer in rest["b"]] == ["generate", "generate"]
    assert calls.site.app[SERVER].memory.used == 0
    ingress.check()


async def test_exchange_equals_a_call(calls: Calls) -> None:
    both = Both(calls)
    request = asks(rid="same", stream=True, return_logprob=True)
    await both.ask(generate=request)
    answers = (await both.rest())["same"]
    assert [answer.generate for answer in answers] == await calls.generate(request)


async def test_exchange_that_is_left_or_broken(connect: Connect) -> None:
    ingress = FakeIngress(manual=True)
    calls = await connect(ingress)
    both = Both(calls)
    await both.ask(generate=asks(rid="a", stream=True))
    await until(lambda: ingress.open_jobs)
    both.call.cancel()
    await until(lambda: not ingress.open_jobs)
    raw = calls.channel.stream_stream(f"/{OWN}.Scheduler/Exchange")()
    await raw.write(make(OWN, "Ask", generate=asks(rid="a", stream=True)).SerializeToString())
    await until(lambda: ingress.open_jobs)
    await raw.write(b"\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in raw:
            pass
    assert caught.value.code() == Code.INVALID_ARGUMENT
    await until(lambda: not ingress.open_jobs)
    assert calls.site.app[SERVER].memory.used == 0


async def test_an_exchange_that_breaks_before_a_request_begins_holds_nothing(calls: Calls) -> None:
    """Both messages are there at once."""
    server = calls.site.app[SERVER]
    ask = make(OWN, "Ask", generate=asks(rid="a", stream=True)).SerializeToString()
    messages = iter([ask, b"\xff"])

    async def read() -> bytes | None:
        return next(messages, None)

    async def send(message: Any) -> None: ...

    client = Client("somebody")
    with pytest.raises(BadRequest):
        await Exchange(Call(server, client, Share(server.memory, client.name), send), read).run()
    assert server.memory.used == 0


async def test_exchanges_that_wait_keep_nobody_out(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may send nothing for longer than a message may take, and other calls are read meanwhile."""
    monkeypatch.setattr("sgla.grpc.calls.BODY_SECONDS", 0.2)
    ingress = FakeIngress(manual=True)
    calls = await connect(ingress, max_body_bytes=1 << 20, request_memory_bytes=16 << 20)
    opened = [Both(calls) for _ in range(2)]  # as many as this client may have
    for number, both in enumerate(opened):
        await both.ask(generate=asks(rid=str(number), stream=True))
    await until(lambda: len(ingress.open_jobs) == 2)
    beyond = Both(calls)
    assert await beyond.call.code() == Code.RESOURCE_EXHAUSTED
    await asyncio.sleep(0.4)
    one = asyncio.ensure_future(calls.generate(asks(rid="one")))
    await until(lambda: len(ingress.open_jobs) == 3)
    for job in list(ingress.jobs):
        ingress.push(job.rid, make_event(job, [97, 98], 0, 0, last=True))
    assert await one
    for number, both in enumerate(opened):
        assert [answer.WhichOneof("answer") for answer in (await both.rest())[str(number)]] == [
            "generate"
        ] * 2


def test_what_is_published_fits() -> None:
    """Bytes that the published classes write."""
    request = bytes.fromhex(REQUEST)
    read = message(f"{SGLANG}.GenerateRequest").FromString(request)
    assert (read.request_id, list(read.tokenized.input_ids), read.stream) == ("r", [1, 300], True)
    params = read.sampling_params
    assert (about(params.temperature), params.max_new_tokens, params.json_schema) == (about(0.5), 7, "{}")
    assert dict(params.logit_bias) == {"5": 1.5}
    assert read.data_parallel_rank == 0
    assert read.HasField("data_parallel_rank")
    other = message(f"{VLLM}.GenerateRequest").FromString(bytes.fromhex(REQUEST_VLLM))
    assert (other.text, other.sampling_params.seed, list(other.sampling_params.choice.choices)) == (
        "hi",
        3,
        ["a"],
    )
    assert read.SerializeToString(deterministic=True) == request


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert others(Config()) == []
    assert others(Config(grpc_port=0)) == [start]
    require()
    monkeypatch.setattr("sgla.grpc.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'sgla\[grpc\]'"):
        require()

"""What keeps the clients of one server apart: their keys, else their addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from http_fake import FakeIngress
from http_site import Serve, Site

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.http.clients import Proxies, with_key, without_key
from sgla.http.server import SERVER
from sgla.resolve import check

KEYS = ["anna", "ben"]


def by(key: str, **headers: str) -> dict[str, Any]:
    return {"headers": {"Authorization": f"Bearer {key}", **headers}}


def test_clients_are_told_apart_by_digests_or_addresses() -> None:
    salt = b"s" * 16
    anna, ben = (with_key(key.encode(), False, salt) for key in KEYS)
    assert anna.owner != ben.owner
    assert anna == with_key(b"anna", False, salt)
    assert anna.owner != with_key(b"anna", False, b"t" * 16).owner
    assert "anna" not in "".join(map(str, anna))
    for address, same in (
        ("1.2.3.4", "::ffff:1.2.3.4"),
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2"),
    ):
        assert without_key(address) == without_key(same)
    assert (
        len({without_key(address).name for address in ("1.2.3.4", "1.2.3.5", "2001:db8::", "fe80::1")}) == 4
    )
    assert without_key("1.2.3.4").owner == ""


@pytest.mark.parametrize(
    ("trusted", "sent", "client"),
    [
        ([], ["1.1.1.1"], "127.0.0.1"),
        (["127.0.0.2"], ["1.1.1.1"], "127.0.0.1"),
        (["127.0.0.1"], [], "127.0.0.1"),
        (["127.0.0.1"], ["9.9.9.9, 1.1.1.1"], "1.1.1.1"),
        (["127.0.0.1"], ["9.9.9.9", "1.1.1.1:80"], "1.1.1.1"),
        (["10.0.0.0/8,127.0.0.1"], ["9.9.9.9, 1.1.1.1, 10.1.2.3"], "1.1.1.1"),
        (["10.0.0.0/8", "127.0.0.1"], ["unknown, 10.1.2.3"], "10.1.2.3"),
        (["127.0.0.0/8", "::1"], ["2001:db8::1, ::1"], "2001:db8::"),
        (["127.0.0.1"], ["[2001:db8::1]:80"], "2001:db8::"),
        (["*"], ["1.1.1.1, 2.2.2.2, 3.3.3.3"], "1.1.1.1"),
        (["*"], [f"9.9.9.9{', 1.1.1.1' * 100}"], "1.1.1.1"),
    ],
)
async def test_a_trusted_proxy_names_the_client(
    serve: Serve, caplog: pytest.LogCaptureFixture, trusted: list[str], sent: list[str], client: str
) -> None:
    site = await serve(forwarded_allow_ips=trusted, log_requests=True)
    headers = [("X-Forwarded-For", addresses) for addresses in sent]
    with caplog.at_level("INFO"):
        assert (await site.post("/v1/completions", {"prompt": "x"}, headers=headers))[0] == 200
    assert site.ingress.jobs[-1].client == client
    assert client.rstrip(":") in caplog.text


def test_a_proxy_has_an_address() -> None:
    for wrong in ("localhost", "10.0.0.1/8", ""):
        with pytest.raises(ConfigError, match="--forwarded-allow-ips takes"):
            Proxies([wrong])


@pytest.fixture
async def elsewhere() -> AsyncIterator[aiohttp.ClientSession]:
    """A client with another address than the site's own."""
    connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))
    async with aiohttp.ClientSession(connector=connector) as session:
        yield session


async def running(site: Site, key: str, rid: str) -> asyncio.Task[int]:
    async def ask() -> int:
        return (await site.post("/v1/completions", {"prompt": "x"}, **by(key, **{"X-Request-Id": rid})))[0]

    before = len(site.ingress.jobs)
    task = asyncio.ensure_future(ask())
    while len(site.ingress.jobs) == before:
        await asyncio.sleep(0.001)
    return task


async def test_without_an_admin_key_clients_abort_their_own_requests(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True), api_key=KEYS)
    annas, bens = await running(site, "anna", "same"), await running(site, "ben", "same")
    for body in ({"rid": "same"}, {"abort_all": True}):
        status, reply = await site.post("/abort_request", body, **by("ben"))
        assert (status, reply["aborted"]) == (200, 1 if "rid" in body else 0)
    assert await bens == 400
    assert not annas.done()
    assert (await site.post("/abort_request", {"rid": "same"}, **by("anna")))[1]["aborted"] == 1
    assert await annas == 400


async def test_an_admin_aborts_everything(serve: Serve) -> None:
    site = await serve(FakeIngress(manual=True), api_key=KEYS, admin_api_key=["root"])
    tasks = [await running(site, key, "r") for key in KEYS]
    assert (await site.post("/abort_request", {"abort_all": True}, **by("ben")))[1]["aborted"] == 1
    assert (await site.post("/abort_request", {"abort_all": True}, **by("root")))[1]["aborted"] == 1
    assert [await task for task in tasks] == [400, 400]


@pytest.mark.parametrize("isolate", [False, True])
async def test_keys_may_have_prefix_caches_of_their_own(serve: Serve, isolate: bool) -> None:
    site = await serve(api_key=KEYS, isolate_keys=isolate)
    for key in KEYS:
        for salt in ({}, {"cache_salt": "s"}):
            assert (await site.post("/v1/completions", {"prompt": "x", **salt}, **by(key)))[0] == 200
    spaces = [job.namespace for job in site.ingress.jobs]
    assert len(set(spaces)) == (4 if isolate else 2)
    assert (spaces[0] == "") != isolate
    assert len({job.client for job in site.ingress.jobs}) == 2


def test_caches_for_each_key_need_keys() -> None:
    with pytest.raises(ConfigError, match="--isolate-keys needs --api-key"):
        check(Config(isolate_keys=True))


async def test_responses_of_another_key_are_not_there(serve: Serve) -> None:
    site = await serve(api_key=KEYS, admin_api_key=["root"])
    asked = {"model": "fake", "input": [{"role": "user", "content": "secret", "id": "mine"}]}
    status, mine = await site.post("/v1/responses", asked, **by("anna"))
    assert status == 200
    for other in ("ben", "root"):
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            replies = []
            for uid in (mine["id"], "resp_none"):
                async with site.http.request(method, f"/v1/responses/{uid}{tail}", **by(other)) as response:
                    replies.append((response.status, (await response.text()).replace(uid, "UID")))
            assert replies[0] == replies[1]
            assert replies[0][0] == 404
        for wanted in (
            {"input": "x", "previous_response_id": mine["id"]},
            {"input": [{"type": "item_reference", "id": "mine"}]},
            {"input": [{"type": "item_reference", "id": mine["output"][0]["id"]}]},
        ):
            status, _ = await site.post("/v1/responses", wanted, **by(other))
            assert status == (404 if "previous_response_id" in wanted else 400)
    assert (await site.post("/v1/responses", {"input": [{"id": "mine"}]}, **by("anna")))[0] == 200
    assert (await site.get(f"/v1/responses/{mine['id']}", **by("anna")))[1] == mine


async def test_another_key_does_not_push_out_what_is_stored(serve: Serve) -> None:
    site = await serve(api_key=KEYS, response_store=4)
    asked = {"input": "x", "max_output_tokens": 1}
    kept = (await site.post("/v1/responses", asked, **by("anna")))[1]["id"]
    for _ in range(9):
        assert (await site.post("/v1/responses", asked, **by("ben")))[0] == 200
    assert (await site.get(f"/v1/responses/{kept}", **by("anna")))[0] == 200


async def test_without_keys_another_address_does_not_push_out_what_is_stored(
    serve: Serve, elsewhere: aiohttp.ClientSession
) -> None:
    site = await serve(response_store=4)
    asked = {"input": [{"role": "user", "content": "x", "id": "mine"}], "max_output_tokens": 1}
    kept = (await site.post("/v1/responses", asked))[1]["id"]
    assert (await site.post("/open_session", {"capacity_of_str_len": 9, "session_id": "s"}))[0] == 200
    for _ in range(9):
        async with elsewhere.post(f"{site.url}/v1/responses", json=asked) as response:
            assert response.status == 200
        async with elsewhere.post(f"{site.url}/open_session", json={"capacity_of_str_len": 9}) as response:
            assert response.status in (200, 429)
    assert (await site.get(f"/v1/responses/{kept}"))[0] == 200
    assert (await site.post("/close_session", {"session_id": "s"}))[0] == 200


async def test_without_keys_who_knows_an_id_finds_it(serve: Serve, elsewhere: aiohttp.ClientSession) -> None:
    site = await serve()
    asked = {"input": [{"role": "user", "content": "secret", "id": "mine"}], "max_output_tokens": 1}
    mine = (await site.post("/v1/responses", asked))[1]
    session = (await site.post("/open_session", {"capacity_of_str_len": 99}))[1]
    assert min(len(mine["id"].removeprefix("resp_")), len(session)) == 32  # hexadecimal digits: 128 bits
    follow = {"input": "x", "previous_response_id": mine["id"], "max_output_tokens": 1}
    async with elsewhere.post(f"{site.url}/v1/responses", json=follow) as response:
        assert response.status == 200
    turn = {"text": "x", "session_params": {"id": session}}
    async with elsewhere.post(f"{site.url}/generate", json=turn) as response:
        assert response.status == 200
    # The name that a client chose for an item may be another's, too.
    refer = {"input": [{"type": "item_reference", "id": "mine"}]}
    async with elsewhere.post(f"{site.url}/v1/responses", json=refer) as response:
        assert response.status == 400
    assert (await site.post("/v1/responses", refer))[0] == 200


async def test_a_key_is_nowhere_in_what_is_said(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    key = "sk-anna-0123456789"
    site = await serve(api_key=[key], admin_api_key=["root"], log_requests=True)
    said = []
    with caplog.at_level("DEBUG"):
        for path in (
            "/server_info",
            "/get_server_info",
            "/metrics",
            "/load",
            "/v1/responses/none",
            "/none",
            "/openapi.json",
        ):
            for sent in (key, f"{key}x", "root"):
                async with site.http.get(path, **by(sent)) as response:
                    said.append(f"{response.headers} {await response.text()}")
        status, made = await site.post("/v1/responses", {"input": "x"}, **by(key))
        assert status == 200
        said += [str(made), caplog.text]
    assert not [text for text in said if key in text]
    owner = with_key(key.encode(), False, site.app[SERVER].database.salt).owner
    assert not [text for text in said if owner in text]

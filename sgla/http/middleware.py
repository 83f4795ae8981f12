"""Around every handler: request ids, CORS, authorization."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping, Sequence

from aiohttp import HttpVersion11, web

from sgla.errors import BadRequest, Forbidden, Unauthorized
from sgla.http.clients import Client, with_key, without_key
from sgla.http.ids import random_id
from sgla.http.request.schema import header_value
from sgla.http.server import IGNORED_FIELDS, RID, SERVER, TAKEN, UID, unique

PAGES = frozenset({"", "docs", "page"})  # first parts of paths
OPEN = PAGES | {"health", "health_generate", "metrics", "ready", "readyz", "ping"}
# What changes the server for other clients, or shows what they sent, is for an admin key alone; where there
# are no keys at all, everybody is an administrator. What a client may do to its own requests (``OWN``), any
# key may. Where nobody has an admin key, nobody has what is the owner's alone (``SECRET``, with the reason).
SECRET = {
    "step_log": "shows what all clients sent",
    "weights": "gives the model away",
    **dict.fromkeys(
        (
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "collective_rpc",
            "init_weight_transfer_engine",
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
            "init_weights_update_group",
            "update_weights_from_distributed",
            "destroy_weights_update_group",
            "weights_checker",
        ),
        "changes the model",
    ),
}
OWN = frozenset({"abort_request"})
ADMIN = frozenset(
    [
        *SECRET,
        "flush_cache",
        "load_lora_adapter",
        "unload_lora_adapter",
        "reset_prefix_cache",
        "pause_generation",
        "pause",
        "continue_generation",
        "resume",
        "sleep",
        "wake_up",
        "release_memory_occupation",
        "resume_memory_occupation",
        "update_weights_from_disk",
        "update_weight_version",
        "post_process_weights",
        "get_weights_by_name",
        "start_profile",
        "stop_profile",
        "start_expert_distribution_record",
        "stop_expert_distribution_record",
        "dump_expert_distribution_record",
        "rebalance_experts",
    ]
)
# Of administrators, and for a model that is awake: one that sleeps since nobody came wakes for them, too.
WAKING = frozenset(SECRET) - {"step_log"} | {
    "update_weights_from_disk",
    "get_weights_by_name",
    "load_lora_adapter",
    "unload_lora_adapter",
    "rebalance_experts",
}
ADMIN_OF_V1 = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})  # vLLM's paths
CONTINUE = "100-continue"
CLIENT_GONE = 499  # nginx's number, for metrics and logs only
EXPOSED = "x-request-id, request-id, x-model, x-ignored-fields, x-should-retry, Retry-After"
_SAFE_ID = re.compile(r"[\x21-\x7e]{1,200}")
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,1000}")


def identify(request: web.Request) -> None:
    """Take the client's X-Request-Id if it can be echoed, else make an id."""
    asked = request.headers.get("X-Request-Id", "")
    if _SAFE_ID.fullmatch(asked):
        request[RID], request[UID] = asked, unique(asked)
    else:
        request[RID] = request[UID] = random_id()


async def go_ahead(request: web.Request) -> None:
    """Ask for the body of a client that waits with it. What else it may expect is refused later."""
    if CONTINUE in expected(request):
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # of the answer


def check_expected(request: web.Request) -> None:
    """Raises BadRequest."""
    if expected(request) - {CONTINUE}:
        error = BadRequest(f"Expect takes {CONTINUE} alone; leave other expectations out")
        error.status = 417
        raise error


def expected(request: web.Request) -> set[str]:
    """HTTP/1.0 knows of none."""
    if request.version < HttpVersion11:
        return set()
    words = ",".join(request.headers.getall("Expect", ())).split(",")
    return {word.strip().lower() for word in words} - {""}


def part_of(path: str) -> str:
    """That tells who may use it."""
    return path.split("/")[2 if path in ADMIN_OF_V1 else 1]


def is_of_administrators(path: str) -> bool:
    return part_of(path) in ADMIN | OWN


def wakes(path: str) -> bool:
    """Whether the route does something with a model, and not with its rest."""
    return not is_of_administrators(path) or part_of(path) in WAKING


class Gate:
    """Who may use which route. Keys are compared in constant time, each with all of them."""

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str], salt: bytes) -> None:
        users = [(key.encode(), with_key(key.encode(), key in admin_keys, salt)) for key in keys]
        admins = [(key.encode(), with_key(key.encode(), True, salt)) for key in admin_keys]
        self._admins = admins
        self._all = [*users, *admins] if keys else []

    def check(self, headers: Mapping[str, str], address: str, path: str) -> Client:
        """Who asks. Raises Unauthorized unless the path is open or the key is right: a bearer token, or
        Anthropic's x-api-key. Raises Forbidden for a route of administrators, where the key is another."""
        first = part_of(path)
        if first in ADMIN or (first in OWN and not self._all):
            return self._administrator(headers, address, first)
        if not self._all or first in OPEN:
            return without_key(address)
        return self._holder(headers, self._all)

    def _administrator(self, headers: Mapping[str, str], address: str, first: str) -> Client:
        keys = self._all or self._admins
        client = self._holder(headers, keys) if keys else without_key(address)
        if client.admin or not (keys or first in SECRET):
            return client
        why = SECRET.get(first, "changes the server for all clients")
        how = "send an admin key" if self._admins else "start the server with --admin-api-key"
        raise Forbidden(f"/{first} {why}, so it needs an admin key; {how} to use it")

    def _holder(self, headers: Mapping[str, str], keys: Sequence[tuple[bytes, Client]]) -> Client:
        """Whose key was sent."""
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key", "")
            if not given:
                raise Unauthorized("no API key was given; send the header 'Authorization: Bearer KEY'")
        sent = given.strip().encode("utf-8", "surrogateescape")
        matches = [client for key, client in keys if hmac.compare_digest(sent, key)]
        if not matches:
            raise Unauthorized("the API key is wrong")
        return matches[0]


def preflight(request: web.Request) -> web.Response:
    """The answer to OPTIONS. The asked headers are listed by name: ``*`` does not cover Authorization."""
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE, HEAD, OPTIONS",
        "Access-Control-Allow-Headers": asked
        if _PRINTABLE.fullmatch(asked)
        else "Authorization, Content-Type",
        "Access-Control-Max-Age": "86400",
    }
    return web.Response(status=204, headers=headers)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """What every response carries, streams included."""
    headers = response.headers
    headers["x-request-id"] = headers["request-id"] = request.get(RID) or random_id()
    allowed, origin = request.app[SERVER].config.allowed_origins, request.headers.get("Origin", "")
    if not allowed or "*" in allowed:
        headers["Access-Control-Allow-Origin"] = "*"
    else:
        headers["Vary"] = ", ".join(filter(None, (headers.get("Vary"), "Origin")))
        if origin in allowed:
            headers["Access-Control-Allow-Origin"] = origin
    headers["Access-Control-Expose-Headers"] = EXPOSED
    if _PRINTABLE.fullmatch(taken := request.get(TAKEN, "")):
        headers["x-model"] = taken
    if ignored := header_value(request.get(IGNORED_FIELDS, [])):
        headers["x-ignored-fields"] = ignored


GATE = web.AppKey("gate", Gate)

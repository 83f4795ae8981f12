"""What the router answers itself: its health, its metrics, the models of all workers, and who they are."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs, unquote

import msgspec

from sgla import clock
from sgla.errors import BadRequest, ModelNotFound, NotFound, NotReady, SglaError
from sgla.route.balancer import RETRY_AFTER, Balancer
from sgla.route.errors import error_reply
from sgla.route.metrics import METRICS_TYPE, text
from sgla.route.reply import Reply
from sgla.route.wire import plain

HEALTH = frozenset(
    ("/health", "/health/ready", "/ready", "/readyz", "/readiness", "/ping", "/health_generate")
)
LIVE = frozenset(("/health/live", "/liveness"))
OPEN = HEALTH | LIVE | {"/metrics"}  # without a key
ADMIN = frozenset(("/add_worker", "/remove_worker", "/list_workers", "/workers"))
MODELS = "/v1/models"
MOST_FIELDS = 16  # of a query
_encode = msgspec.json.Encoder().encode
_MODEL = re.compile(r"/v1/models/(.+)")
_WORKER = re.compile(r"/+workers/+(.+)")


def own(method: str, path: str) -> bool:
    """Whether the router answers it itself. ``path``: as ``wire.plain`` makes it."""
    if path in ADMIN or _WORKER.fullmatch(path):
        return True
    return method in ("GET", "HEAD") and (path in OPEN or path == MODELS or bool(_MODEL.fullmatch(path)))


def is_open(method: str, path: str) -> bool:
    """Whether it needs no key."""
    return path in OPEN or method == "OPTIONS"


def for_admins(path: str) -> bool:
    return path in ADMIN or bool(_WORKER.fullmatch(path))


def reply(balancer: Balancer, method: str, target: str, body: bytes) -> Reply:
    """The answer to a request that is the router's ``own``."""
    try:
        query = _query(target)
        if found := _WORKER.fullmatch(target.partition("?")[0]):
            return _worker(balancer, method, unquote(found[1]))
        return _reply(balancer, method, plain(target), query, body)
    except SglaError as error:
        return error_reply(error)


def _query(target: str) -> dict[str, str]:
    """Raises BadRequest."""
    try:
        fields = parse_qs(target.partition("?")[2], max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise BadRequest(f"the query has more than {MOST_FIELDS} fields") from error
    return {name: values[0] for name, values in fields.items()}


def _reply(balancer: Balancer, method: str, path: str, query: dict[str, str], body: bytes) -> Reply:
    if path in LIVE:
        return _json({"status": "alive"})
    if path in HEALTH:
        return _health(balancer)
    if path == "/metrics":
        return Reply(200, METRICS_TYPE, text(balancer))
    if path == MODELS:
        return _json({"object": "list", "data": list(_cards(balancer).values())})
    if found := _MODEL.fullmatch(path):
        card = _cards(balancer).get(found[1])
        if card is None:
            raise ModelNotFound(f"model {found[1][:200]!r} does not exist", param="model")
        return _json(card)
    return _workers(balancer, method, path, query, body)


def _health(balancer: Balancer) -> Reply:
    """Ready while some worker is; one that is late takes requests where no other does."""
    now, workers = clock.now(), balancer.workers.values()
    up = sum(worker.usable(now) for worker in workers)
    up = up or sum(worker.late and worker.reachable(now) for worker in workers)
    if balancer.draining or not up:
        why = "no worker is up"
        if balancer.draining:
            why = "the router is shutting down"
        elif rest := sum(worker.reachable(now) for worker in workers):
            why = f"{rest} of {len(balancer.workers)} workers rest (they sleep, or take other weights), and "
            why += "no other is up"
        return error_reply(NotReady(why, retry_after=RETRY_AFTER))
    return _json({"status": "ready", "workers": len(balancer.workers), "up": up})


def _cards(balancer: Balancer) -> dict[str, dict[str, Any]]:
    """By name, of the workers that are up or rest."""
    now = clock.now()
    found: dict[str, dict[str, Any]] = {}
    for worker in balancer.workers.values():
        if worker.reachable(now):
            for card in worker.cards or ():
                found.setdefault(card["id"], card)
    return found


def _workers(balancer: Balancer, method: str, path: str, query: dict[str, str], body: bytes) -> Reply:
    """Both of SGLang's ways: ``/add_worker?url=``, and ``/workers`` with JSON."""
    if path in ("/workers", "/list_workers") and method == "GET":
        now = clock.now()
        workers = [worker.describe(now) for worker in balancer.workers.values()]
        urls = [worker["url"] for worker in workers]
        return _json({"workers": workers, "total": len(workers)} if path == "/workers" else {"urls": urls})
    if path == "/add_worker" and method == "POST":
        return _add(balancer, query.get("url", ""))
    if path == "/workers" and method == "POST":
        try:
            url = msgspec.json.decode(body)["url"]
        except (msgspec.DecodeError, LookupError, TypeError, RecursionError) as error:
            raise BadRequest('send {"url": "http://HOST:PORT"}', param="url") from error
        return _add(balancer, url if isinstance(url, str) else "")
    if path == "/remove_worker" and method == "POST":
        return _remove(balancer, query.get("url", ""))
    raise NotFound(f"there is no {method} {path[:200]}; the documentation of the router lists its routes")


def _worker(balancer: Balancer, method: str, url: str) -> Reply:
    if method == "DELETE":
        return _remove(balancer, url)
    if method != "GET" or url not in balancer.workers:
        raise NotFound(f"there is no {method} of a worker {url[:200]}; /workers lists them")
    return _json(balancer.workers[url].describe(clock.now()))


def _add(balancer: Balancer, url: str) -> Reply:
    try:
        balancer.add(url)
    except SglaError as error:
        raise BadRequest(error.message, param="url") from error
    return _json({"success": True, "message": f"{url} is looked at, and takes requests when it is ready"})


def _remove(balancer: Balancer, url: str) -> Reply:
    balancer.remove(url)
    return _json({"success": True, "message": f"{url} gets no more requests, and ends those that it has"})


def _json(body: Any) -> Reply:
    return Reply(200, "application/json", _encode(body))

"""Settings of ``sgla route``. One field is one flag; names are those of SGLang's router where it has them."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec

from sgla.errors import ConfigError

Doc = msgspec.Meta
DNS = "dns"  # the scheme of a name whose addresses are workers
SECRETS = ("api_key", "admin_api_key", "worker_api_key")


class RouteConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All settings of a router."""

    worker: Annotated[
        list[str],
        Doc(description="servers: http://HOST:PORT, or dns://NAME:PORT for one at each address of a name"),
    ] = []
    policy: Annotated[
        Literal["cache_aware", "power_of_two", "round_robin", "least_load", "session", "consistent_hashing"],
        Doc(description="how a worker is chosen for a request"),
    ] = "cache_aware"
    load_weight: Annotated[
        int,
        Doc(description="cache_aware: bytes of prompt that are as much work as one running request"),
    ] = 1024
    max_tree_size: Annotated[
        int,
        Doc(
            description="cache_aware: bytes of prompts that a worker is taken to keep, where its metrics do "
            "not tell the size of its KV cache"
        ),
    ] = 64 << 20
    session_header: Annotated[
        str, Doc(description="session and consistent_hashing: the header that names a request's session")
    ] = "X-Session-Id"
    host: Annotated[str, Doc(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Doc(description="port to listen on; 0 picks one")] = 30080
    processes: Annotated[
        int | None, Doc(description="processes that pass requests on; default: the cores but one, 8 at most")
    ] = None
    api_key: Annotated[
        list[str], Doc(description="keys that clients need; without it, what they send goes to the workers")
    ] = []
    admin_api_key: Annotated[
        list[str], Doc(description="keys of those who may add and remove workers; without it nobody may")
    ] = []
    worker_api_key: Annotated[
        str | None, Doc(description="key with which the router itself asks workers for models and metrics")
    ] = None
    rpm_limit: Annotated[int | None, Doc(description="requests a minute that a key may send")] = None
    tpm_limit: Annotated[
        int | None, Doc(description="tokens of prompts a minute that a key may send, four bytes each")
    ] = None
    worker_max_requests: Annotated[
        int | None,
        Doc(description="requests that a worker has at a time; others wait, by turns between keys"),
    ] = None
    queue_size: Annotated[int, Doc(description="requests that wait, at most, before new ones get 429")] = 1024
    queue_timeout_secs: Annotated[float, Doc(description="seconds that a request may wait")] = 60.0
    retry_max_retries: Annotated[
        int, Doc(description="other workers that a request is tried on, as long as its client got nothing")
    ] = 5
    cb_failure_threshold: Annotated[
        int, Doc(description="circuit breaker: failures in a row after which a worker gets no requests")
    ] = 3
    cb_timeout_duration_secs: Annotated[
        float, Doc(description="circuit breaker: seconds until one request tries that worker again")
    ] = 10.0
    health_check_interval_secs: Annotated[float, Doc(description="seconds between looks at workers")] = 2.0
    health_check_timeout_secs: Annotated[float, Doc(description="seconds for an answer to a look")] = 5.0
    stuck_secs: Annotated[
        float, Doc(description="seconds without a step after which a worker with requests counts as down")
    ] = 60.0
    request_timeout_secs: Annotated[
        float, Doc(description="seconds that a worker may send nothing of an answer")
    ] = 1800.0
    service_discovery: Annotated[
        bool, Doc(description="find workers by Kubernetes' API: the ready pods that --selector names")
    ] = False
    selector: Annotated[list[str], Doc(description="labels of these pods, as app=sgla")] = []
    service_discovery_port: Annotated[int, Doc(description="port of the servers in these pods")] = 30000
    service_discovery_namespace: Annotated[
        str | None, Doc(description="their namespace; default: the router's own")
    ] = None
    max_body_bytes: Annotated[int, Doc(description="largest request body")] = 16 << 20
    request_memory_bytes: Annotated[
        int, Doc(description="bodies of all requests together; more are refused with 429")
    ] = 512 << 20
    max_connections: Annotated[int, Doc(description="connections of clients, at most")] = 16384
    forwarded_allow_ips: Annotated[
        list[str], Doc(description="proxies whose X-Forwarded-For is believed: addresses, networks, or *")
    ] = []
    ssl_certfile: Annotated[str | None, Doc(description="PEM file with a certificate: serve TLS")] = None
    ssl_keyfile: Annotated[str | None, Doc(description="PEM file with its key, if another one")] = None
    ssl_ca_certs: Annotated[str | None, Doc(description="PEM file of who may sign clients' certificates")] = (
        None
    )
    drain_timeout: Annotated[float, Doc(description="seconds running requests may take after SIGTERM")] = 30.0
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Doc(description="what is logged")] = (
        "info"
    )


HEADER = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
POSITIVE = (
    "load_weight",
    "max_tree_size",
    "rpm_limit",
    "tpm_limit",
    "worker_max_requests",
    "processes",
    "cb_failure_threshold",
    "cb_timeout_duration_secs",
    "health_check_interval_secs",
    "health_check_timeout_secs",
    "stuck_secs",
    "request_timeout_secs",
    "queue_timeout_secs",
    "max_body_bytes",
    "request_memory_bytes",
    "max_connections",
)


def check(config: RouteConfig) -> None:
    """Raise ConfigError for settings that cannot be honoured."""
    for name in POSITIVE:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must be more than 0", param=name)
    for name in ("queue_size", "retry_max_retries", "drain_timeout"):
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} must not be less than 0", param=name)
    for name in ("port", "service_discovery_port"):
        if not 0 <= getattr(config, name) < 1 << 16:
            raise ConfigError(f"--{name.replace('_', '-')} must be from 0 to 65535", param=name)
    for name in SECRETS:
        keys = getattr(config, name)
        if "" in (keys if isinstance(keys, list) else [keys]):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is empty; leave it out to have none", param=name)
    if not HEADER.fullmatch(config.session_header):
        raise ConfigError(
            f"--session-header {config.session_header[:200]!r} is no name of a header", param="session_header"
        )
    for url in config.worker:
        check_url(url)
    if config.selector and not config.service_discovery:
        raise ConfigError("--selector needs --service-discovery", param="selector")
    if config.service_discovery and not config.selector:
        raise ConfigError(
            "--service-discovery needs --selector, such as --selector app=sgla", param="selector"
        )
    if not config.worker and not config.service_discovery and not config.admin_api_key:
        raise ConfigError(
            "no workers: give --worker URL, --service-discovery, or an --admin-api-key to add them with",
            param="worker",
        )


def check_url(url: str, schemes: tuple[str, ...] = ("http", "https", DNS)) -> str:
    """The URL without a slash at its end. Raises ConfigError for one that is no server's address."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in schemes and parts.hostname and (parts.port or parts.scheme != DNS)
        more = parts.path.strip("/") or parts.query or parts.fragment or parts.username
    except ValueError:
        fine, more = False, ""
    if not fine or more or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            f"{url[:200]!r} is no address of a worker; write "
            + " or ".join(f"{scheme}://HOST:PORT" for scheme in schemes),
            param="worker",
        )
    return url.rstrip("/")

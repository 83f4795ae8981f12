"""Where workers come from: the addresses of a DNS name, or the ready pods of Kubernetes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from sgla.errors import ConfigError, SglaError
from sgla.route.balancer import Balancer
from sgla.route.config import DNS, RouteConfig

log = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # of the pod, as Kubernetes mounts it
INTERVAL = 5.0  # seconds between looks


class Cluster:
    """Kubernetes' API, with the pod's service account, which needs the right to list pods."""

    def __init__(
        self, config: RouteConfig, environ: Mapping[str, str] = os.environ, account: Path = ACCOUNT
    ) -> None:
        """Raises ConfigError outside of a cluster."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            self._token = account / "token"
            self._token.read_text()
            namespace = config.service_discovery_namespace or (account / "namespace").read_text().strip()
            tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            host, namespace, tls, why = None, "", None, f" ({error})"
        else:
            why = ""
        if host is None:
            raise ConfigError(
                "--service-discovery works inside a Kubernetes cluster, in a pod with a service "
                f"account{why}; elsewhere give --worker dns://NAME:PORT or --worker URL",
                param="service_discovery",
            )
        name = f"[{host}]" if ":" in host else host
        self._url = f"https://{name}:{port}/api/v1/namespaces/{namespace}/pods"
        self._selector = ",".join(config.selector)
        self._port = config.service_discovery_port
        self._tls = tls

    async def find(self) -> set[str]:
        """URLs of the ready pods. Raises whatever goes wrong."""
        headers = {"Authorization": f"Bearer {self._token.read_text().strip()}"}  # it is renewed
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(
                self._url, params={"labelSelector": self._selector}, ssl=self._tls or True
            ) as response,
        ):
            if response.status != 200:
                raise ValueError(f"Kubernetes answers {response.status}: {(await response.text())[:300]}")
            return set(pods(await response.json(), self._port))


def pods(listed: Any, port: int) -> Iterable[str]:
    """URLs of the pods of a PodList that are ready, and do not end."""
    for pod in listed.get("items", ()):
        status = pod.get("status", {})
        ready = any(
            each.get("type") == "Ready" and each.get("status") == "True"
            for each in status.get("conditions", ())
        )
        if ready and status.get("podIP") and not pod.get("metadata", {}).get("deletionTimestamp"):
            yield address(status["podIP"], port)


def address(ip: str, port: int) -> str:
    return f"http://[{ip}]:{port}" if ":" in ip else f"http://{ip}:{port}"


async def resolve(url: str) -> set[str]:
    """URLs of a ``dns://NAME:PORT``: one for each address, of IPv6 where there is no other, since a server
    with both is one worker. Raises OSError."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    found = await asyncio.get_running_loop().getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    chosen = [info for info in found if info[0] == socket.AF_INET] or found
    return {address(str(info[4][0]), int(info[4][1])) for info in chosen}


class Discovery:
    """Keeps the balancer's workers as ``--worker`` and ``--service-discovery`` say. What cannot be asked
    leaves its workers as they are: they are looked at anyway."""

    def __init__(self, balancer: Balancer, cluster: Cluster | None) -> None:
        self._balancer = balancer
        for url in balancer.config.worker:
            if not url.startswith(f"{DNS}://"):
                balancer.add(url)
        sources: list[Callable[[], Coroutine[Any, Any, set[str]]]] = [
            partial(resolve, url) for url in balancer.config.worker if url.startswith(f"{DNS}://")
        ]
        if cluster is not None:
            sources.append(cluster.find)
        self._tasks = [asyncio.ensure_future(self._follow(find)) for find in sources]

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _follow(self, find: Callable[[], Coroutine[Any, Any, set[str]]]) -> None:
        known: set[str] = set()
        told = ""
        while True:
            trouble = ""
            try:
                found = await find()
            except Exception as error:  # whatever a server may answer with
                trouble = f"{type(error).__name__}: {error}"
                if trouble != told:
                    log.warning("workers cannot be found: %s", trouble)
            else:
                self.apply(known, found)
                known = found
            told = trouble
            await asyncio.sleep(INTERVAL)

    def apply(self, known: set[str], found: set[str]) -> None:
        """Add what is new, drain what is gone."""
        for url in found - known:
            self._balancer.add(url)
        for url in known - found:
            try:
                self._balancer.remove(url)
            except SglaError:  # somebody has removed it
                pass

"""Pictures and sounds from other servers: within limits, and not from where only this server gets."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from sgla.config import MediaSettings
from sgla.errors import InvalidField
from sgla.http.bodies import Share
from sgla.per_client import PerClient
from sgla.version import __version__

AT_ONCE = 8  # fetches of a client
# Names that are looked up at a time, each in a thread that nothing can stop, and those of a client.
RESOLVING, OWN_NAMES = 32, 4
PIECE = 64 << 10  # bytes
MAX_URL = 8192  # characters
REDIRECTS = (301, 302, 303, 307, 308)
UNICAST = ipaddress.ip_network("2000::/3")
CLIENT: ContextVar[str] = ContextVar("client")  # who asks for what is resolved
NAT64 = ipaddress.ip_network("64:ff9b::/96")  # the last 32 bits are an address of IPv4


def is_public(text: str) -> bool:
    """Whether an address is of the internet at large, and so are those that it stands for."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    if address in NAT64:
        return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
    if address.ipv4_mapped is not None:
        return is_public(str(address.ipv4_mapped))
    inner = (address.sixtofour, *(address.teredo or ()))
    return address in UNICAST and address.is_global and all(is_public(str(each)) for each in inner if each)


class Resolver(AbstractResolver):
    """The addresses of names; connections are made to what was looked at here. ``any_address``: private ones,
    too. Raises InvalidField."""

    def __init__(self, any_address: bool) -> None:
        self._any_address = any_address
        self._threads = ThreadPoolExecutor(RESOLVING, thread_name_prefix="resolve")
        self._own = PerClient(OWN_NAMES)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        own = self._own.of(CLIENT.get())
        await own.acquire()
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(own.release)

        work = self._threads.submit(socket.getaddrinfo, host, port, family, socket.SOCK_STREAM)
        work.add_done_callback(ended)  # which may be long after the request has given up
        found = await asyncio.wrap_future(work)
        addresses = [(kind, str(where[0])) for kind, _, _, _, where in found]
        for _, address in addresses:
            self.check(host, address)
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
            )
            for kind, address in addresses
        ]

    def check(self, host: str, address: str) -> None:
        if not self._any_address and not is_public(address):
            raise InvalidField(
                f"{host[:200]} is no public address, from which alone media are fetched "
                "(--allow-private-media)"
            )

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def check_size(size: int, most: int) -> None:
    if size > most:
        raise InvalidField(f"the file has more than {most} bytes (--max-media-bytes)")


class Fetcher:
    def __init__(self, settings: MediaSettings) -> None:
        self._settings = settings
        self._domains = frozenset(domain.lower() for domain in settings.allowed_media_domains)
        self._session: aiohttp.ClientSession | None = None
        self._resolver = Resolver(settings.allow_private_media)
        self._own = PerClient(AT_ONCE)

    async def get(self, url: str, share: Share) -> bytes:
        """The body, which is in ``share``, too. Raises InvalidField, and what ``share`` does."""
        seconds = self._settings.media_timeout
        CLIENT.set(share.client)
        async with self._own.of(share.client):
            try:
                async with asyncio.timeout(seconds):
                    return await self._follow(self._parsed(url), share)
            except TimeoutError:
                problem = f"it could not be fetched within {seconds:g} s (--media-timeout)"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                problem = f"it could not be fetched: {type(error).__name__}"
        raise InvalidField(problem)

    async def _follow(self, url: URL, share: Share) -> bytes:
        for _ in range(self._settings.media_redirects + 1):
            self._check(url)
            async with self._connected().get(url, allow_redirects=False) as response:
                if response.status in REDIRECTS and "Location" in response.headers:
                    url = url.join(self._parsed(response.headers["Location"]))
                    continue
                if response.status != 200:
                    raise InvalidField(f"it could not be fetched: its server answers {response.status}")
                return await self._body(response, share)
        raise InvalidField(
            f"it could not be fetched: more than {self._settings.media_redirects} redirects "
            "(--media-redirects)"
        )

    async def _body(self, response: aiohttp.ClientResponse, share: Share) -> bytes:
        most = self._settings.max_media_bytes
        if response.headers.get("Content-Encoding", "").lower() not in ("", "identity"):
            raise InvalidField("it could not be fetched: its server compresses what was asked for as it is")
        body = bytearray()
        try:
            check_size(response.content_length or 0, most)
            async for piece in response.content.iter_chunked(PIECE):
                check_size(len(body) + len(piece), most)
                share.take(len(piece))
                body += piece
        except BaseException:
            share.give(len(body))
            raise
        return bytes(body)

    def _parsed(self, url: str) -> URL:
        if len(url) > MAX_URL:
            raise InvalidField(f"a URL may have {MAX_URL} characters")
        try:
            return URL(url)
        except ValueError as error:
            raise InvalidField(f"it is no URL: {error}") from error

    def _check(self, url: URL) -> None:
        """Raises InvalidField for a URL that may not be asked for.
        Of a name, it is what it resolves to that is looked at."""
        if url.scheme not in ("http", "https") or not url.host:
            raise InvalidField("only http, https and data URLs are fetched")
        if self._domains and url.host.lower() not in self._domains:
            raise InvalidField(f"{url.host[:200]} is not among the hosts of --allowed-media-domains")
        try:  # as the system reads it, to which 0x7f.1 is 127.0.0.1
            found = socket.getaddrinfo(url.host, None, flags=socket.AI_NUMERICHOST)
        except OSError:
            return
        for *_, where in found:
            self._resolver.check(url.host, str(where[0]))

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=self._resolver, use_dns_cache=False, force_close=True, limit=0
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"User-Agent": f"sgla/{__version__}", "Accept-Encoding": "identity"},
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._resolver.close()

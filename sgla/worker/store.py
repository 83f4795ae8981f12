"""A tier that several servers share: an object for each unit, behind an address that fsspec knows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from sgla.errors import ConfigError
from sgla.messages import Tier
from sgla.worker import nixl
from sgla.worker.disk import places_of
from sgla.worker.lmcache import SCHEMES, open_lmcache
from sgla.worker.mooncake import SCHEME, open_mooncake
from sgla.worker.tiers import SUM, FileTier, UnitMemory, Units, checksum

COPYING, ASKING = 8, 16  # threads
ASKED = 256  # tokens that a prompt must have beyond what is known before it is worth asking for them


class Store(Protocol):
    """What a store has to do, with objects by their names, as fsspec's file systems do it. All raise what
    they like."""

    def cat_file(self, path: str, start: int, end: int) -> bytes: ...

    def pipe_file(self, path: str, data: bytes) -> None:
        """FileNotFoundError: a folder has to be made."""
        ...

    def exists(self, path: str) -> bool: ...

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...


class Objects(Units):
    """Units of one cache group as objects below ``path``, by their keys, which are never deleted. ``whole``:
    of whole histories, of which a text has all up to somewhere. ``nbytes``: of a unit; no more is read of an
    object, whatever others have put there. ``place``: of checksums, so that objects which were moved are
    nothing."""

    def __init__(
        self, fs: Store, path: str, whole: bool, nbytes: int, place: bytes, threads: ThreadPoolExecutor
    ) -> None:
        self._fs, self._path, self._whole, self._threads = fs, path, whole, threads
        self._size, self._place = SUM + nbytes, place

    def read(self, unit: int, key: bytes) -> memoryview:
        found = memoryview(_tried(self._fs.cat_file, self._of(key), 0, self._size + 1))
        if len(found) != self._size or found[:SUM] != checksum(key, found[SUM:], self._place):
            raise OSError("an object is not what was written")
        return found[SUM:]

    def write(self, unit: int, key: bytes, data: bytes | memoryview) -> None:
        """Who reads half of it sees a wrong checksum."""
        path, content = self._of(key), checksum(key, data, self._place) + data
        try:
            _tried(self._fs.pipe_file, path, content)
        except FileNotFoundError:  # folders have to be made, prefixes of object stores not
            _tried(partial(self._fs.makedirs, exist_ok=True), path.rpartition("/")[0])
            _tried(self._fs.pipe_file, path, content)

    def erase(self, unit: int) -> None:
        raise AssertionError("others may want it")

    def find(self, keys: list[bytes]) -> bytes:
        if not self._whole:
            return bytes(self._threads.map(self._has, keys))
        count = bisect_left(range(len(keys)), True, key=lambda i: not self._has(keys[i]))
        return b"\1" * count + bytes(len(keys) - count)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _has(self, key: bytes) -> bool:
        return bool(_tried(self._fs.exists, self._of(key)))

    def _of(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._path}/{name[:2]}/{name}"


def _tried(function: Any, *args: Any) -> Any:
    """Clients of stores raise what they like."""
    try:
        return function(*args)
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _open(url: str, ranks: int) -> tuple[Store, str]:
    """A store, and the folder in it. Raises ConfigError."""
    scheme = url.partition("://")[0]
    if scheme == SCHEME:
        return open_mooncake(url, ranks), SCHEME
    if scheme in SCHEMES:
        return open_lmcache(url), "sgla"
    if scheme == nixl.SCHEME:
        return nixl.open_nixl(url)
    try:
        import fsspec

        fs, root = fsspec.core.url_to_fs(url)
        fs.makedirs(root, exist_ok=True)
        fs.exists(root)
    except ImportError as error:
        raise ConfigError(
            f"--kv-store {url}: {error}; pip install 'sgla[remote]'", param="kv_store"
        ) from error
    except Exception as error:
        raise ConfigError(f"--kv-store {url}: {type(error).__name__}: {error}", param="kv_store") from error
    return fs, root


def open_store(
    url: str,
    identity: str,
    memory: Sequence[UnitMemory],
    page_size: int,
    rank: int,
    size: int,
    abreast: int = 1,
) -> tuple[FileTier, Tier]:
    """The tier of ``--kv-store``. ``abreast``: see ``FileTier``. Raises ConfigError."""
    fs, root = _open(url, size)
    path = f"{root.rstrip('/')}/{identity}/{rank}of{size}"
    threads = ThreadPoolExecutor(ASKING, "kv-ask")
    kept = [
        Objects(fs, f"{path}/{g}", not g, unit.nbytes, place, threads)
        for g, (unit, place) in enumerate(zip(memory, places_of(identity, rank, size, len(memory))))
    ]
    tier = Tier("store", [0] * len(memory), shared=True, least=max(1, ASKED // page_size))
    return FileTier("--kv-store", kept, memory, COPYING, abreast), tier

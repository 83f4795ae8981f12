"""A tier on a disk: copies of what the prefix tree has, in files that outlive the server."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.messages import KEY, CacheGroup, Tier
from sgla.validation import folder_and_size
from sgla.version import __version__
from sgla.worker.memory import tier_units
from sgla.worker.tiers import FULL, SUM, FileTier, Rows, UnitMemory, Units, checksums, runs_of

FORMAT = 5  # of the files
ENTRY = KEY + SUM
BLOCK = 512  # bytes of st_blocks
log = logging.getLogger(__name__)
OWN = re.compile(r"kv-(\d+)of(\d+)")  # a folder for one of so many ranks


class UnitFile(Units):
    """Units of one cache group, whose numbers begin with 1, in two files: an index with the key of each and a
    checksum of both, and what they hold. The index is written last, so half a unit has a wrong checksum, as
    has a file that was put in the place of another: checksums are those of ``place`` alone."""

    def __init__(
        self, folder: Path, group: int, units: int, nbytes: int, place: bytes, lock: int = -1
    ) -> None:
        """``lock``: a file that is closed with it. Raises OSError."""
        self._nbytes, self._units, self._place, self._lock = nbytes, units, place, lock
        self._index = self._open(folder / f"{group}.index", units * ENTRY)
        os.posix_fallocate(
            self._index, 0, units * ENTRY
        )  # what is to be forgotten can be, on a full disk, too
        self._data = self._open(folder / f"{group}.data", units * nbytes)

    def _open(self, path: Path, size: int) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(fd, size)
        return fd

    def keys(self) -> bytes:
        """KEY bytes a unit; zeros for none."""
        index = os.pread(self._index, self._units * ENTRY, 0)
        return np.frombuffer(index, np.uint8).reshape(-1, ENTRY)[:, :KEY].tobytes()

    def write(self, unit: int, key: bytes, data: bytes | memoryview) -> None:
        self.write_all([unit], [key], np.frombuffer(data, np.uint8)[None])

    def write_all(self, units: Sequence[int], keys: Sequence[bytes], rows: Rows) -> None:
        """Raises OSError."""
        entries = self._entries(keys, rows)
        for begun, count, unit in runs_of(units):
            own = slice(begun, begun + count)
            self._write(self._data, rows[own].reshape(-1).data, (unit - 1) * self._nbytes)
            self._write(self._index, b"".join(entries[own]), (unit - 1) * ENTRY)

    def _entries(self, keys: Sequence[bytes], rows: Rows) -> list[bytes]:
        return [key + made for key, made in zip(keys, checksums(keys, rows, self._place))]

    def _write(self, fd: int, data: bytes | memoryview, at: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(fd, data[done:] if done else data, at + done)

    def read(self, unit: int, key: bytes) -> memoryview:
        rows = np.empty((1, self._nbytes), np.uint8)
        self.read_all([unit], [key], rows)
        data: memoryview = rows[0].data
        return data

    def read_all(self, units: Sequence[int], keys: Sequence[bytes], rows: Rows) -> None:
        """Raises OSError if that is not what the units hold."""
        found, entries = 0, b""
        for begun, count, unit in runs_of(units):
            entries += os.pread(self._index, count * ENTRY, (unit - 1) * ENTRY)
            part = rows[begun : begun + count].reshape(-1)
            found += os.preadv(self._data, [part.data], (unit - 1) * self._nbytes)
        if found != rows.nbytes or entries != b"".join(self._entries(keys, rows)):
            raise OSError("a file has been changed, or was cut off")

    def erase(self, unit: int) -> None:
        """Raises OSError."""
        self._write(self._index, bytes(ENTRY), (unit - 1) * ENTRY)

    def find(self, keys: list[bytes]) -> bytes:
        raise AssertionError("the scheduler knows")

    def close(self) -> None:
        for fd in {self._index, self._data, self._lock} - {-1}:
            os.close(fd)


def open_disk(
    setting: str,
    identity: str,
    groups: Sequence[CacheGroup],
    memory: Sequence[UnitMemory],
    rank: int,
    size: int,
    abreast: int = 1,
) -> tuple[FileTier, Tier, list[bytes]]:
    """The tier of ``--kv-disk``, of which each rank has its part, and the keys of what it holds. Files of
    another ``identity`` begin anew. ``abreast``: see ``FileTier``. Raises ConfigError."""
    folder, room = folder_and_size(setting)
    nbytes = [units.nbytes for units in memory]
    pages = [group.pages for group in groups]
    units = tier_units(room / size, pages, [n + ENTRY for n in nbytes])
    if not all(units):
        least = size * sum(count * (n + ENTRY) for count, n in zip(pages, nbytes)) // min(pages)
        raise ConfigError(
            f"--kv-disk {setting}: a page takes more; give {(least >> 10) + 1}K at least", param="kv_disk"
        )
    try:
        lock = _claim(folder, rank, size)
        own = folder / f"kv-{rank}of{size}"
        _begin(own, identity, says=not rank)
        locks, places = [lock] + [-1] * len(units), places_of(identity, rank, size, len(units))
        files = [UnitFile(own, g, *sizes) for g, sizes in enumerate(zip(units, nbytes, places, locks))]
        keys = [file.keys() for file in files]
        if rank == 0:
            _look_at_room(folder, own, size)
    except OSError as error:
        change = "make room there, or name a folder of another disk"
        if error.errno not in FULL:
            change = "name a folder that this user may write to"
        raise ConfigError(
            f"--kv-disk {folder}: {error.strerror or error}; {change}", param="kv_disk"
        ) from error
    return FileTier("--kv-disk", files, memory, abreast=abreast), Tier("disk", units, lasting=True), keys


def _claim(folder: Path, rank: int, size: int) -> int:
    """A lock for this rank alone; files for another number of ranks go. Raises OSError, ConfigError."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / f"lock-{rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"--kv-disk {folder}: another server has it; name a folder of its own", param="kv_disk"
        ) from None
    for path in folder.iterdir() if rank == 0 else ():
        if (found := OWN.fullmatch(path.name)) and int(found[2]) != size:
            shutil.rmtree(path)
    return lock


def _look_at_room(folder: Path, own: Path, size: int) -> None:
    """Say so if the disk has less room than the files of all ranks may take. Raises OSError."""
    stats = [path.stat() for path in own.iterdir()]
    lacking = size * sum(max(0, stat.st_size - stat.st_blocks * BLOCK) for stat in stats)
    if lacking > (free := shutil.disk_usage(folder).free):
        log.warning(
            "--kv-disk %s: %d MiB are free there, and the files may grow by %d MiB: what finds no room is "
            "not kept",
            folder,
            free >> 20,
            lacking >> 20,
        )


def _begin(folder: Path, identity: str, says: bool) -> None:
    """Make a folder for files of this identity, if it is not one; ``says``, if files of another go. Raises
    OSError."""
    told = folder / "identity"
    if not (told.is_file() and told.read_bytes() == identity.encode()):
        if says and folder.exists():
            log.warning(
                "--kv-disk %s: its files are of another model, version or settings of KV, and are removed; "
                "name a folder for each",
                folder.parent,
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(0o700)
        told.write_text(identity)


def places_of(identity: str, rank: int, size: int, groups: int) -> list[bytes]:
    """Of each cache group, where alone its units may be found: see ``tiers.checksum``."""
    return [
        blake2b(f"{identity} {rank} of {size} {g}".encode(), digest_size=32).digest() for g in range(groups)
    ]


def identity_of(config: Config, source: ModelSource, layout: object, long: Sequence[bool] = ()) -> str:
    """What KV depends on beside the text: weights, settings, and how units lie in memory, which ``layout``
    tells. ``long``: of each layer, whether its positions are rotated as the context's length has it. Files of
    weights are known by size and time, those of a hub's cache by their content."""
    described = [
        FORMAT,
        __version__,
        source.kind,
        source.config,
        source.layout and source.layout.name,
        layout,
        long,
    ]
    settings = ["dtype", "kv_cache_dtype", "quantization", "load_format", "model_impl", "page_size"]
    settings.append("deterministic")  # which the bits of another server need not be
    if source.kind == "dummy":
        settings.append("random_seed")
    settings += ["speculative_algorithm", "speculative_model", "speculative_quantization"]
    described += [getattr(config, name) for name in settings]
    beside = sorted([*source.folder.glob("*.json"), *source.folder.glob("*.py")])
    drafts = source.draft.files if source.draft is not None else ()
    described += [_version(path) for path in (*source.files, *drafts, *beside)]
    return blake2b(
        json.dumps(described, sort_keys=True, default=msgspec.to_builtins).encode(), digest_size=16
    ).hexdigest()


def _version(path: Path) -> list[object]:
    real = path.resolve()
    if real.parent.name == "blobs":
        return [path.name, real.name]
    stat = real.stat()
    return [path.name, stat.st_size, stat.st_mtime_ns]

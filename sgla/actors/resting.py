"""What the ingress does while no request is open: memory goes and comes back, weights become others."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any

from sgla import clock
from sgla.actors.adapters import inside
from sgla.actors.works import Done, Works
from sgla.config import Config
from sgla.errors import InvalidField, SglaError, UnsupportedField
from sgla.hub.remote import files_of
from sgla.loading.source import configured_source
from sgla.messages import Control, Facts

Room = Callable[[], AbstractAsyncContextManager[Any]]
Clear = Callable[[], Awaitable[Any]]  # ends the requests that run

RESTS = {"updating": "weights are being updated", "sleeping": "the server sleeps; POST /wake_up wakes it"}
PARTS = "weights", "kv_cache"  # as SGLang and vLLM call them
GRAPHS = "cuda_graph"  # SGLang's; they stay, as the addresses do
GROUP = "weight_update_group"  # of a trainer, where it has no name; SGLang's
# Types of tensors that a trainer may send: the latter are of layers that are stored quantized.
FLOATS, PACKED = ("bfloat16", "float16", "float32"), ("float8_e4m3fn", "int8", "uint8", "int32", "int64")
NAME = 8  # random bytes of a name of weights, which tiers keep
TRY = 0.02  # seconds between two looks at a cache that is to be empty
TRIES = 1500  # looks, since a disk may still write what requests have left
FEW = 50  # by a server that goes to sleep by itself, whose next requests wait


class Resting(ABC):
    """A part of the ingress. ``weight_version``: whose weights the answers are of; ``asleep``: what a server
    that sleeps has given back, of ``PARTS``; ``dozing``: it does so because nobody came, and wakes for
    whoever does."""

    config: Config
    phase: str
    facts: Facts | None
    files: Mapping[str, Path]
    weight_version = "default"
    _open: Mapping[str, Any]
    _control: Callable[[Control], Awaitable[Any]] | None
    _flush: Callable[[bool], bool] | None
    _renew: Callable[[str], bool]
    _weights = ""  # a name of those that have come since the start
    _pause: Callable[[bool], None] | None
    paused: bool

    def __init__(self) -> None:
        self.asleep: set[str] = set()
        self.dozing = False
        self.used = clock.now()  # when somebody last came or left
        self._users = 0  # who wants something of the model now, and may not have opened a request yet
        self._door: asyncio.Event | None = None  # behind which those wait who come now
        # Of a model that is not loaded before somebody comes; and what makes room for what wakes.
        self.load: Callable[[], Awaitable[None]] | None = None
        self.make_room: Room = nullcontext
        self._one = asyncio.Lock()  # of works, one after the other
        self._works = Works()

    @abstractmethod
    def require_ready(self, resting: bool = False) -> None: ...

    def enter(self) -> None:
        """Somebody comes, and leaves by ``leave``; meanwhile the model does not doze."""
        self._users += 1
        self.used = clock.now()

    def leave(self) -> None:
        self._users -= 1
        self.used = clock.now()

    @property
    def idle(self) -> bool:
        """Loaded, and nobody wants anything of it."""
        return self.phase == "ready" and not (self._users or self._open or self.paused)

    async def awake(self) -> None:
        """Return when the model can do something, if it waits for somebody to come, or another has its turn.
        Raises what loading does, and Overloaded where there is no room."""
        while self._door is not None:
            self._users -= 1
            try:
                await self._door.wait()
            finally:
                self._users += 1
        if self.phase == "unloaded" and self.load is not None:
            await self.load()
        elif self.dozing:
            await self.wake()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Whoever comes meanwhile waits, and is not there."""
        door = self._door = asyncio.Event()
        try:
            yield
        finally:
            self._door = None
            door.set()

    async def doze(self) -> bool:
        """``sleep`` until somebody comes. False if somebody is there."""
        return await self._whole(self._doze())

    async def sleep(self, kv: bool, weights: str, clear: Clear | None = None) -> bool:
        """Give back the memory of the KV cache, and of the weights; until all of it is there again no request
        is accepted. ``weights``: "" if they stay; else where they come from later, see ``ChangingRunner``.
        ``clear``: called once the workers say that it can be done. False if requests are open (nothing is
        given back then). Raises UnsupportedField and OutOfMemory."""
        if not (kv or weights):
            return True
        self.dozing = False
        return await self._whole(self._sleep(kv, weights, clear))

    async def wake(self, parts: Collection[str] = PARTS) -> None:
        """Have these again. Raises what loading does: then it still sleeps."""
        await self._whole(self._wake(parts))

    async def update_weights(
        self, folder: str, version: str | None, trusted: bool = False, clear: Clear | None = None
    ) -> bool:
        """Take other weights of the same model; meanwhile no request is accepted. False if requests are open
        that are not paused (then nothing has changed); those that are go on with the KV that they have.
        ``trusted``: the folder may be any. ``clear``: called once the workers say that it can be done, before
        they read it. Raises InvalidField and UnsupportedField; the old weights stay."""
        path = Path(folder)
        if not trusted:
            path = inside(folder, self.config.weight_folders, "model_path", "--weight-folders")
        change = partial(self._take_folder, path, version)
        return await self._whole(self._changed(change, clear, str(path)))

    async def take_tensors(
        self,
        payloads: Sequence[bytes],
        version: str | None,
        names: Sequence[str] = (),
        clear: Clear | None = None,
    ) -> bool:
        """As ``update_weights``, of some tensors (``loading/tensors.py``): one payload, or one a rank.
        ``names``: of tensors whose handles a payload has."""
        if len(payloads) not in (1, self.config.tp):
            raise InvalidField(
                f"there are {self.config.tp} ranks, and tensors for {len(payloads)}; give one item, or one "
                "for each",
                param="serialized_named_tensors",
            )
        change = partial(self._take_payloads, payloads, version, names)
        return await self._whole(self._changed(change, clear))

    async def take_from_servers(
        self, servers: Mapping[str, str], version: str | None, clear: Clear | None = None
    ) -> bool:
        """As ``take_tensors``, of what parameter servers bring: the ZMQ address of each rank's, by the name
        of its device."""
        if wrong := [address for address in servers.values() if not address.startswith("ipc://")]:
            raise InvalidField(
                f"a parameter server is on this host, at ipc://..., not at {wrong[0][:99]!r}",
                param="zmq_handles",
            )
        what = {"servers": dict(servers)}
        return await self._whole(self._changed(partial(self._take, what, version), clear))

    async def check_weights(self, action: str) -> list[dict[str, Any]]:
        """What each rank tells of its weights: see ``ChangingRunner``. Raises InvalidField where they are not
        what they were, and UnsupportedField."""
        self.require_ready()
        return await self._check(action)

    async def _check(self, action: str) -> list[dict[str, Any]]:
        assert self._control is not None
        told = await self._control(Control(verb="weights_check", args={"action": action}))
        ranks: list[dict[str, Any]] = told["ranks"]
        return ranks

    async def show_weights(self, name: str, rows: int) -> list[Any]:
        """The first ``rows`` of a tensor by its name in files. Raises InvalidField and UnsupportedField."""
        self.require_ready()
        assert self._control is not None
        told = await self._control(Control(verb="weights_show", args={"name": name, "rows": rows}))
        return _values(told["ranks"], name)

    async def scramble_weights(self) -> bool:
        """As ``update_weights``, to random ones."""
        return await self._whole(self._changed(self._scramble))

    async def _scramble(self) -> None:
        await self._check("reset_tensors")
        self._brought(None)

    def name_weights(self, version: str) -> None:
        """Answers that begin from now on are of this ``weight_version``."""
        self.require_ready(resting=True)
        self.weight_version = version

    async def join_trainer(self, group: str, **where: Any) -> None:
        """A group of a trainer, ``where`` it meets (``dist/trainer.py``). Raises InvalidField."""
        await self._works.whole(self._join_trainer(group, where))

    async def _join_trainer(self, group: str, where: dict[str, Any]) -> None:
        self.require_ready(resting=True)
        assert self._control is not None
        try:
            await self._control(Control(verb="trainer_join", args={"group": group, **where}))
        except InvalidField as error:
            if error.param == "master_address":  # ranks that have met others leave them
                with suppress(InvalidField):
                    await self.leave_trainer(group)
            raise

    async def leave_trainer(self, group: str) -> None:
        self.require_ready(resting=True)
        assert self._control is not None
        await self._control(Control(verb="trainer_leave", args={"group": group}))

    async def take_from_trainer(
        self,
        group: str,
        tensors: Sequence[tuple[str, Sequence[int], str]],
        version: str | None,
        clear: Clear | None = None,
    ) -> bool:
        """As ``take_tensors``, of what the trainer of a group broadcasts: names, shapes and types."""
        what = {"group": group, "tensors": list(tensors)}
        return await self._whole(self._changed(partial(self._take, what, version), clear))

    async def _whole(self, work: Coroutine[Any, Any, Done]) -> Done:
        """What ``work`` gives, which comes behind the works before it, and to its end although who waits for
        it may go: the workers do what they have been told."""

        async def alone() -> Done:
            async with self._one:
                return await work

        return await self._works.whole(alone())

    async def _doze(self) -> bool:
        if not self.idle:
            return False
        self.dozing = True  # who comes from now on waits behind this
        try:
            self.dozing = await self._sleep(True, "either", tries=FEW) and self.dozing
        except UnsupportedField:  # weights that cannot be read again
            self.dozing = await self._sleep(True, "", tries=FEW) and self.dozing
        except BaseException:
            self.dozing = False
            raise
        return self.phase == "sleeping"

    async def _sleep(
        self, kv: bool, weights: str, clear: Clear | None = None, tries: int | None = None
    ) -> bool:
        sleeps = self.phase == "sleeping"
        if not sleeps:
            self.require_ready()
        self.phase = "sleeping"  # from now on nobody comes
        parts = {part for part, goes in zip(PARTS, (weights, kv)) if goes} - self.asleep
        done = False
        try:
            await self._cleared(clear, weights=weights)
            if sleeps or (not self._open and await self._emptied(tries or TRIES)):
                await self._part_with(parts, {"kv": kv, "weights": weights})
                done = True
        finally:
            if not (done or sleeps):
                self._leave_phase("sleeping")
        return done

    async def _cleared(self, clear: Clear | None, **what: str) -> None:
        """No request ends for what cannot be done. ``what``: see ``ChangingRunner``."""
        if clear is not None:
            assert self._control is not None
            await self._control(Control(verb="may_change", args=what))
            await clear()

    async def _part_with(self, parts: set[str], args: dict[str, Any]) -> None:
        assert self._control is not None
        try:
            await self._control(Control(verb="sleep", args=args))
        except SglaError:  # of one rank
            await self._control(_waking(parts))
            raise
        self.asleep |= parts

    async def _wake(self, parts: Collection[str]) -> None:
        if self.phase == "sleeping":
            assert self._control is not None
            async with self.make_room():
                await self._control(_waking(self.asleep.intersection(parts)))
            self.asleep.difference_update(parts)
            if not self.asleep:
                self.dozing = False
                self._leave_phase("sleeping")

    async def _changed(
        self, change: Callable[[], Awaitable[None]], clear: Clear | None = None, path: str = ""
    ) -> bool:
        before = self.phase
        if before != "sleeping" or "weights" in self.asleep:
            self.require_ready()
        self.phase = "updating"
        name = os.urandom(NAME).hex()
        try:
            await self._cleared(clear, path=path)
            if not await self._still(name):
                return False
            try:
                await change()
            except BaseException:
                self._renew(self._weights)
                raise
            self._weights = name
            return True
        finally:
            self._leave_phase("updating", before)

    async def _still(self, weights: str) -> bool:
        """Whether no step runs, and nobody who comes finds a prefix of others than these ``weights``."""
        if self._open and not self.paused:
            return False
        for _ in range(TRIES):
            if self._renew(weights):
                return True
            await asyncio.sleep(TRY)
        return False

    async def _take_folder(self, path: Path, version: str | None) -> None:
        assert self._control is not None
        try:
            await self._control(Control(verb="weights_update", args={"path": str(path)}))
            source = await asyncio.to_thread(configured_source, path, self.config)
        except SglaError:  # other ranks may have them
            await self._control(Control(verb="weights_update", args={"path": ""}))
            raise
        self.files = files_of(source)
        self.weight_version = version or str(path)

    async def _take_payloads(
        self, payloads: Sequence[bytes], version: str | None, names: Sequence[str]
    ) -> None:
        with ExitStack() as files:
            paths = [files.enter_context(in_memory(payload)) for payload in payloads]
            what = {"paths": paths, "names": list(names)} if names else {"paths": paths}
            await self._take(what, version)

    async def _take(self, what: dict[str, Any], version: str | None) -> None:
        """All ranks take them, or none."""
        assert self._control is not None
        try:
            await self._control(Control(verb="weights_receive", args=what))
        except SglaError:
            await self._control(Control(verb="weights_take", args={"keep": False}))
            raise
        await self._control(Control(verb="weights_take", args={"keep": True}))
        self._brought(version)

    def _brought(self, version: str | None) -> None:
        """Weights have come that are in no file."""
        self.files = {}
        self.weight_version = version or self.weight_version

    def _leave_phase(self, phase: str, to: str = "ready") -> None:
        """A server that drains or is dead meanwhile stays so."""
        if self.phase == phase:
            self.phase = to
            if to == "ready" and self._pause is not None:
                self._pause(self.paused)

    async def _emptied(self, tries: int) -> bool:
        """Whether the prefix cache is empty on the device and workers have nothing to do, which steps and
        copies under way hold up."""
        assert self._flush is not None
        for _ in range(tries):
            if self._flush(False):
                return True
            await asyncio.sleep(TRY)
        return False


def named_parts(tags: Collection[str] | None) -> Collection[str]:
    """``PARTS`` that clients name; no tag means all. Raises InvalidField."""
    if unknown := set(tags or ()) - {*PARTS, GRAPHS}:
        raise InvalidField(f"tags are weights and kv_cache, not {min(unknown)[:40]!r}", param="tags")
    return [part for part in PARTS if part in tags] if tags else PARTS


def _values(ranks: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """Of the tensor of that name, out of what each rank has of it."""
    found = [part["values"] for part in ranks if part["values"] is not None]
    if not found:
        raise InvalidField(f"no rank can tell the tensor {name[:200]!r}", param="name")
    values: list[Any] = reduce(_both, found)
    return values


def _both(one: Any, other: Any) -> Any:
    """Numbers of two ranks, each of which has NaN where the other may know better."""
    if not isinstance(one, list):
        return _both([one], [other])[0]
    if one and isinstance(one[0], list):
        return [_both(*pair) for pair in zip(one, other, strict=True)]
    return [theirs if own != own else own for own, theirs in zip(one, other, strict=True)]


def _waking(parts: Collection[str]) -> Control:
    weights, kv = (part in parts for part in PARTS)
    return Control(verb="wake", args={"kv": kv, "weights": weights})


@contextmanager
def in_memory(data: bytes) -> Iterator[str]:
    """A file of no folder, which workers open by this path."""
    fd = os.memfd_create("weights", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(data)
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def announced(
    names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]
) -> list[tuple[str, Sequence[int], str]]:
    """What a trainer is going to send. Raises InvalidField."""
    kinds = [kind.removeprefix("torch.") for kind in dtypes]
    if not len(names) == len(kinds) == len(shapes):
        raise InvalidField("names, dtypes and shapes must be as many", param="names")
    if len(set(names)) < len(names):
        raise InvalidField("a name is there twice", param="names")
    if unknown := set(kinds) - {*FLOATS, *PACKED}:
        known = ", ".join(FLOATS + PACKED)
        raise InvalidField(f"dtypes are {known}, not {min(unknown)[:40]!r}", param="dtypes")
    return list(zip(names, shapes, kinds))

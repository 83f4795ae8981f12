"""The models of one server: a System for each, on the same loop, and a ledger of their memory.

Each system is what it is alone. What they share is memory: whoever is loaded, or wakes, has its bytes in the
ledger first, and if need be others that nobody uses sleep for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from sgla import clock
from sgla.actors.base import in_thread
from sgla.actors.resting import PARTS
from sgla.actors.setup import look_up
from sgla.actors.system import System
from sgla.config import Config
from sgla.errors import ConfigError, NotReady, Overloaded, SglaError, UnsupportedField
from sgla.ledger import Need, check_fits, lacking, need_of, room_of, size_text
from sgla.messages import Facts, Progress
from sgla.observe.machine import detect

log = logging.getLogger(__name__)

LOOKS = 4  # at idle models, in the seconds after which they sleep
LOOK = 0.1  # seconds between two looks at models that may make room soon
STAY, LONGEST_STAY = 1.0, 30.0  # times the seconds that a model took to come, and the most of it in seconds
LAST = 30.0  # seconds in which the requests of a model that is to make room have to end

Report = Callable[[Progress], None]


class Systems:
    """``died`` resolves to the last error when no model is left. ``all``: in the order in which they were
    given; the first one is for requests that name none."""

    def __init__(
        self,
        configs: Sequence[Config],
        on_progress: Report | None = None,
        on_demand: bool = False,
        sleep_idle: float = 0.0,
    ) -> None:
        """``on_demand``: a model is loaded when somebody asks for it. ``sleep_idle``: seconds after which an
        unused one sleeps; 0: never."""
        self._report = on_progress or (lambda progress: None)
        self.all = [System(config, self._report) for config in configs]
        self.died: asyncio.Future[SglaError] = asyncio.get_running_loop().create_future()
        self._on_demand = on_demand
        self._sleep_idle = sleep_idle
        self._memory = ModelMemory(self.all) if self.several else None
        self._loads: dict[System, asyncio.Task[None]] = {}
        self._watching: asyncio.Task[None] | None = None
        for system in self.all:
            system.died.add_done_callback(partial(self._one_died, system))
            if on_demand:
                system.ingress.phase = "unloaded"
                system.ingress.load = partial(self._loaded, system)
            if self._memory is not None:
                system.ingress.make_room = partial(self._memory.room, system)

    @property
    def several(self) -> bool:
        return len(self.all) > 1

    @property
    def first(self) -> System:
        return self.all[0]

    @property
    def running(self) -> bool:
        """Whether a model may have requests that are to be finished."""
        return any(system.ingress.phase == "ready" for system in self.all)

    async def start(self, ready: Callable[[System, Facts], object]) -> None:
        """Load the models one after the other, those that wait for somebody aside. Raises ConfigError, also
        where they do not fit together, or WorkerDied; ``close`` is still due."""
        if self._memory is not None and not self._on_demand:
            await self._memory.check_all(self._report)
        for system in () if self._on_demand else self.all:
            ready(system, await self._started(system))
        if self._sleep_idle:
            self._watching = asyncio.ensure_future(self._watch())

    async def _started(self, system: System) -> Facts:
        """Raises what starting does; of several models it names the one."""
        try:
            return await system.start()
        except ConfigError as error:
            if len(self.all) > 1:
                error.message = f"{system.ingress.model_names[0]}: {error.message}"
            raise

    async def _loaded(self, system: System) -> None:
        """Load a model that waited for somebody, once for all who come meanwhile; it goes on if they go."""
        if system not in self._loads:
            task = self._loads[system] = asyncio.ensure_future(self._load(system))
            task.add_done_callback(lambda _: self._loads.pop(system))
        await asyncio.shield(self._loads[system])

    async def _load(self, system: System) -> None:
        ingress = system.ingress
        try:
            async with ingress.make_room():
                await system.start()
        except Overloaded:
            raise
        except SglaError as error:
            why = f"model {ingress.model_names[0]} cannot be loaded: {error.message}"
            log.error("%s", why)
            ingress.fail(NotReady(why))
            await system.close()
            raise NotReady(why) from error

    async def _watch(self) -> None:
        """Have models sleep that nobody has used for long enough."""
        while True:
            await asyncio.sleep(self._sleep_idle / LOOKS)
            for system in self.all:
                ingress = system.ingress
                if ingress.idle and clock.now() - ingress.used >= self._sleep_idle:
                    await put_to_sleep(system)

    def _one_died(self, system: System, died: asyncio.Future[SglaError]) -> None:
        if died.cancelled():
            return
        if self.several:
            log.error("model %s is gone: %s", system.ingress.model_names[0], died.result().message)
        if all(each.died.done() for each in self.all) and not self.died.done():
            self.died.set_result(died.result())

    def fail(self, error: SglaError) -> None:
        for system in self.all:
            system.ingress.fail(error)

    async def drain(self, timeout: float) -> None:
        """See ``System.drain``."""
        await asyncio.gather(*(system.drain(timeout) for system in self.all if not system.died.done()))

    def end_requests(self) -> None:
        for system in self.all:
            system.end_requests()

    async def close(self) -> None:
        for task in (self._watching, *self._loads.values()):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(system.close() for system in self.all))

    def abandon(self) -> None:
        """See ``System.abandon``."""
        for system in self.all:
            system.abandon()


class ModelMemory:
    """Who of several models may have its bytes. What one holds follows from its state: nothing while it is
    not loaded, or for what it has given back while it sleeps. Those that are on their way hold all."""

    def __init__(self, systems: Sequence[System]) -> None:
        self._systems = systems
        self._needs: dict[System, Need] = {}
        self._room = room_of(detect())
        self._rising: set[System] = set()
        self._stays: dict[System, float] = {}  # until when it makes no room for others
        self._one = asyncio.Lock()

    async def check_all(self, report: Report) -> None:
        """Raises OutOfMemory for models that cannot all be loaded at once."""
        for system in self._systems:
            await self._look_up(system, report)
        check_fits({name_of(system): need for system, need in self._needs.items()}, self._room)

    @asynccontextmanager
    async def room(self, system: System) -> AsyncIterator[None]:
        """Room for a model while it is loaded or wakes; from then on it holds what it has. Others sleep for
        it: of those that nobody uses the one that was used longest ago, else one whose requests end while
        whoever comes to it waits. None does before it has been there for as long as it took to come: else
        whoever asks for two models in turns would leave no time for anything but loading.
        Raises OutOfMemory if it never fits, and Overloaded while the others cannot go."""
        async with self._one:
            need = await self._look_up(system, lambda progress: None)
            check_fits({name_of(system): need}, self._room)
            tried = {system}
            while missing := lacking([need, *self._held(but=system)], self._room):
                other = self._next_to_sleep(missing, tried)
                rest = LOOK if other is None else self._rest(other)
                if rest > 0 and (other is not None or self._rising):
                    await asyncio.sleep(min(rest, LOOK))  # meanwhile another one may be idle
                    continue
                if other is None or not await self._give_way(other):
                    raise Overloaded(
                        f"there is no room for model {name_of(system)} while the other models are in use: "
                        f"{size_text(max(missing.values()))} are missing; retry later",
                        retry_after=5.0,
                    )
                tried.add(other)
            self._rising.add(system)
        began = clock.now()
        try:
            yield
        finally:
            self._rising.discard(system)
            now = clock.now()
            self._stays[system] = now + min(STAY * (now - began), LONGEST_STAY)

    async def _look_up(self, system: System, report: Report) -> Need:
        """What the model takes; its settings then say so."""
        if system not in self._needs:
            self._needs[system], system.config = await in_thread(settle_size, system.config, report)
        return self._needs[system]

    def _held(self, but: System) -> Iterable[Need]:
        for system, need in self._needs.items():
            ingress = system.ingress
            loaded = ingress.phase not in ("unloaded", "dead")
            if system is not but and (loaded or system in self._rising):
                gone = set() if system in self._rising else ingress.asleep
                weights, cache = (0 if part in gone else size for part, size in zip(PARTS, need[1:]))
                yield Need(need.place, weights, cache)

    def _next_to_sleep(self, places: Iterable[str], but: set[System]) -> System | None:
        """Of the models in these places the idle one whose stay ends first, else of the others; then that
        which was used longest ago."""
        others = [
            system
            for system, need in self._needs.items()
            if need.place in places
            and system not in but
            and system.ingress.phase == "ready"
            and not system.ingress.paused
        ]
        return min(
            others,
            key=lambda other: (not other.ingress.idle, self._rest(other), other.ingress.used),
            default=None,
        )

    async def _give_way(self, system: System) -> bool:
        """Have a model sleep as soon as nobody uses it. Whoever comes waits, and has it back in turn. False:
        its requests do not end; it stays for as long again."""
        ingress, due = system.ingress, clock.now() + LAST
        with ingress.closed():
            while not ingress.idle:
                if clock.now() > due:
                    self._stays[system] = due + LAST
                    return False
                await asyncio.sleep(LOOK / 10)
            await put_to_sleep(system)
        return True

    def _rest(self, system: System) -> float:
        """Seconds that it still stays in any case."""
        return max(0.0, self._stays.get(system, 0.0) - clock.now())


def settle_size(config: Config, report: Report) -> tuple[Need, Config]:
    """What one of several models takes, and its settings with the size of its KV cache, which does not follow
    then from what the others have left. Blocks. Raises ConfigError."""
    found, source = look_up(config, report)
    draft = None if source.draft is None else source.draft.config
    name = (config.served_model_name or [config.model])[0]
    need = need_of(name, found.config, source.config, draft)
    return need, msgspec.structs.replace(config, kv_cache_bytes=found.config.kv_cache_bytes)


async def put_to_sleep(system: System) -> None:
    """Where that fails the model goes on as it was."""
    try:
        if await system.ingress.doze():
            log.info("model %s sleeps until somebody asks for it", name_of(system))
    except UnsupportedField:  # it cannot, so what it has stays
        system.ingress.used = math.inf
    except SglaError as error:
        log.warning("model %s does not sleep: %s", name_of(system), error.message)


def name_of(system: System) -> str:
    return system.ingress.model_names[0]

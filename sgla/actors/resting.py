"""What the ingress does while no request is open: memory goes and comes back, weights become others."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from sgla.actors.adapters import inside
from sgla.actors.works import Done, Works
from sgla.config import Config
from sgla.errors import SglaError
from sgla.hub.remote import files_of
from sgla.loading.source import configured_source
from sgla.messages import Control

RESTS = {"updating": "weights are being updated", "sleeping": "the server sleeps; POST /wake_up wakes it"}
TRIES, TRY = 50, 0.02  # looks at a cache that is to be empty, and seconds between two


class Resting(ABC):
    """A part of the ingress. ``weight_version``: whose weights the answers are of."""

    config: Config
    phase: str
    files: Mapping[str, Path]
    weight_version = "default"
    _open: Mapping[str, Any]
    _control: Callable[[Control], Awaitable[Any]] | None
    _flush: Callable[[bool], bool] | None

    def __init__(self) -> None:
        self._one = asyncio.Lock()  # of works, one after the other
        self._works = Works()

    @abstractmethod
    def require_ready(self) -> None: ...

    async def sleep(self, weights: bool) -> bool:
        """Give back the memory of the KV cache, and of the ``weights``; until ``wake`` no request is
        accepted. False if requests are open (nothing is given back then). Raises UnsupportedField."""
        return await self._whole(self._sleep(weights))

    async def wake(self) -> None:
        """Have everything again. Raises what loading does: then it still sleeps."""
        await self._whole(self._wake())

    async def update_weights(self, folder: str, version: str | None) -> bool:
        """Take other weights of the same model; meanwhile no request is accepted. False if requests are open
        (then nothing has changed). Raises InvalidField and UnsupportedField; the old weights stay."""
        return await self._whole(self._update_weights(folder, version))

    async def _whole(self, work: Coroutine[Any, Any, Done]) -> Done:
        """What ``work`` gives, which comes behind the works before it, and to its end although who waits for
        it may go: the workers do what they have been told."""

        async def alone() -> Done:
            async with self._one:
                return await work

        return await self._works.whole(alone())

    async def _sleep(self, weights: bool) -> bool:
        self.require_ready()
        assert self._control is not None
        done, self.phase = False, "sleeping"  # from now on nobody comes
        try:
            if not self._open and await self._emptied():
                await self._control(Control(verb="sleep", args={"weights": weights}))
                done = True
        finally:
            if not done:
                self._leave_phase("sleeping")
        return done

    async def _wake(self) -> None:
        if self.phase == "sleeping":
            assert self._control is not None
            await self._control(Control(verb="wake"))
            self._leave_phase("sleeping")

    async def _update_weights(self, folder: str, version: str | None) -> bool:
        self.require_ready()
        assert self._control is not None
        path = inside(folder, self.config.weight_folders, "model_path", "--weight-folders")
        self.phase = "updating"
        try:
            if self._open or not await self._emptied():
                return False
            try:
                await self._control(Control(verb="weights_update", args={"path": str(path)}))
                source = await asyncio.to_thread(configured_source, path, self.config)
            except SglaError:  # other ranks may have them
                await self._control(Control(verb="weights_update", args={"path": ""}))
                raise
            self.files = files_of(source)
            self.weight_version = version or str(path)
            return True
        finally:
            self._leave_phase("updating")

    def _leave_phase(self, phase: str) -> None:
        """A server that drains or is dead meanwhile stays so."""
        if self.phase == phase:
            self.phase = "ready"

    async def _emptied(self) -> bool:
        """Whether the prefix cache is empty on the device and workers have nothing to do, which steps and
        copies under way hold up."""
        assert self._flush is not None
        for _ in range(TRIES):
            if self._flush(False):
                return True
            await asyncio.sleep(TRY)
        return False

"""What the ingress does while no request is open: memory goes and comes back, weights become others."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from sgla.actors.adapters import inside
from sgla.config import Config
from sgla.errors import SglaError
from sgla.hub.remote import files_of
from sgla.loading.source import configured_source
from sgla.messages import Control

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

    @abstractmethod
    def require_ready(self) -> None: ...

    async def sleep(self, weights: bool) -> bool:
        """Give back the memory of the KV cache, and of the ``weights``; until ``wake`` no request is
        accepted. False if requests are open (nothing is given back then). Raises UnsupportedField."""
        self.require_ready()
        assert self._control is not None
        done, self.phase = False, "sleeping"  # from now on nobody comes
        try:
            if not self._open and await self._emptied():
                await self._control(Control(verb="sleep", args={"weights": weights}))
                done = True
        finally:
            if not done:
                self.phase = "ready"
        return done

    async def wake(self) -> None:
        """Have everything again. Raises what loading does: then it still sleeps."""
        if self.phase == "sleeping":
            assert self._control is not None
            await self._control(Control(verb="wake"))
            self.phase = "ready"

    async def update_weights(self, folder: str, version: str | None) -> bool:
        """Take other weights of the same model; meanwhile no request is accepted. False if requests are open
        (then nothing has changed). Raises InvalidField and UnsupportedField; the old weights stay."""
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
            self.phase = "ready"

    async def _emptied(self) -> bool:
        """Whether the prefix cache is empty on the device, which copies under way hold up."""
        assert self._flush is not None
        for _ in range(TRIES):
            if self._flush(False):
                return True
            await asyncio.sleep(TRY)
        return False

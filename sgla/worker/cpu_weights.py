"""What becomes of a CPU runner's memory and weights after its start: they go, come back, or become others."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from dataclasses import replace
from math import prod
from typing import Any

from sgla.errors import ConfigError, InvalidField, SglaError, UnsupportedField
from sgla.hub.source import ModelSource
from sgla.loading.checkpoint import stored_tensors
from sgla.loading.source import configured_source
from sgla.memory import give_back
from sgla.messages import Control
from sgla.model.read import read_decoder
from sgla.worker.cpu_setup import CpuSetup
from sgla.worker.kv import forget

MOST_VALUES = 1 << 20  # of a tensor that is shown


class CpuWeights(CpuSetup):
    """No step runs while it does what a command says, and no request has anything."""

    _awake = True  # the weights are there
    _before: ModelSource | None = None  # those that the latest ones came in place of

    def control(self, command: Control) -> dict[str, Any] | Future[dict[str, Any]]:
        """Beside those of all runners: ``sleep`` gives the memory of the KV cache back, which is empty, and
        with ``weights`` theirs; ``wake`` reads them again. ``weights_update`` takes those of the folder
        ``path``, or the ones before. ``weights_show`` has the first ``rows`` of the tensor ``name``."""
        args = command.args
        match command.verb:
            case "sleep":
                return self._sleep(args["weights"])
            case "wake":
                return self._wake()
            case "weights_update":
                return self._update(args["path"])
            case "weights_show":
                return self._show(args["name"], args["rows"])
        return super().control(command)

    def _sleep(self, weights: bool) -> dict[str, Any]:
        if weights and self.fixed:
            raise UnsupportedField(
                f"weights cannot be given back beside {self.fixed}; give back the KV cache alone",
                param="tags",
            )
        forget(self.kv, len(self.facts.groups))
        if weights and self._awake:
            self._drop()
        return {}

    def _wake(self) -> dict[str, Any]:
        if not self._awake:
            self.load_again()
            self._awake = True
            if self._tiers and self.identity() != self.begun_as:
                self._drop()
                raise ConfigError(
                    "the model's files have changed, and --kv-disk and --kv-store have prefixes of the old "
                    "ones; put these back, or start a server anew",
                    param="model",
                )
        return {}

    def _drop(self) -> None:
        self._awake = False
        del self.model, self._forward
        gc.unfreeze()
        gc.collect()
        give_back()
        gc.freeze()

    def _update(self, path: str) -> dict[str, Any]:
        """Raises InvalidField: then the weights are those that there were."""
        if self.fixed or self._tiers:
            what = self.fixed or "--kv-disk and --kv-store, whose prefixes are of the old ones"
            raise UnsupportedField(f"weights cannot be updated beside {what}", param="model_path")
        old = self.source
        if path:
            self._before, new = old, self._other(path)
        elif self._before is None or self._before is old:
            return {}
        else:
            new = self._before
        self._drop()
        try:
            self.source = new
            self._wake()
        except SglaError as error:
            self.source = old
            self._wake()
            raise InvalidField(f"{error.message}; the old weights stay", param="model_path") from error
        return {}

    def _other(self, path: str) -> ModelSource:
        try:
            found = configured_source(path, self.config)
            same = read_decoder(found.config) == read_decoder(self.source.config)
        except SglaError as error:
            raise InvalidField(error.message, param="model_path") from error
        if not same or found.kind != self.source.kind:
            raise InvalidField(
                f"{path} is another model than the one that is served: its config.json or the format of its "
                "files differs; start a server with it",
                param="model_path",
            )
        return replace(found, draft=self.source.draft)

    def _show(self, name: str, rows: int) -> dict[str, Any]:
        if self.source.kind not in ("safetensors", "pt"):
            raise UnsupportedField("tensors of GGUF files and of random weights have no names", param="name")
        for found, tensor in stored_tensors(self.source):
            if found == name:
                count = min(rows, tensor.shape[0] if tensor.shape else 1)
                if (size := count * prod(tensor.shape[1:])) > MOST_VALUES:
                    raise InvalidField(
                        f"{count} rows have {size} values, more than {MOST_VALUES}; lower truncate_size",
                        param="truncate_size",
                    )
                return {"values": tensor.values(range(count)).float().tolist()}
        raise InvalidField(f"the model's files have no tensor {name[:200]!r}", param="name")

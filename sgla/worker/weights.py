"""What becomes of a runner's memory and weights after its start: they go, come back, or become others."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sgla.config import Config
from sgla.dist.trainer import Rendezvous
from sgla.errors import ConfigError, InvalidField, SglaError, UnsupportedField, WeightError
from sgla.hub.source import ModelSource
from sgla.loading.checkpoint import stored_tensors
from sgla.loading.source import configured_source
from sgla.loading.tensors import own, received
from sgla.model.base import CausalLM
from sgla.model.read import read_decoder
from sgla.worker.runner import CHANGES, Command, Runner
from sgla.worker.tier_setup import Identity
from sgla.worker.trainers import Trainers
from sgla.worker.weight_sums import weight_sums

MOST_VALUES = 1 << 20  # of a tensor that is shown


class ChangingRunner(Runner):
    """No step runs while it does what a command says, and no request has anything. ``source``: where its
    weights are from. ``identity``: of the KV in tiers, if there are any."""

    config: Config
    source: ModelSource
    identity: Identity | None = None
    brought = False  # some weights have come as tensors, and are in no file
    _received: Mapping[str, Tensor] = MappingProxyType({})  # and is not taken yet
    _sums: dict[str, int] | None = None  # of a snapshot of the weights
    _before: ModelSource | None = None  # that of the weights which the latest ones came in place of

    def _commands(self) -> dict[str, Command]:
        """Beside those of all runners ``may_change``, which raises what ``sleep`` with ``weights`` would, or
        an update from the folder ``path`` (of tensors: ""), as far as it is known before anything is read
        or given back. ``sleep`` gives memory back, with ``kv`` that of the KV cache, which is empty, and with
        ``weights`` theirs: they go to the ``host``'s memory, if that is another one; are read again from the
        ``files``; or ``either``, whichever there is. ``wake`` has ``kv`` and ``weights`` again.
        ``weights_update`` takes those of the folder ``path``, or the ones before. ``weights_receive`` reads
        tensors from the files ``paths``, of which each rank may have its own (``names``: if they have handles
        alone), from a trainer's ``group``, or from parameter ``servers``, and looks whether they fit; then
        ``weights_take`` takes them, or drops them. ``weights_show`` has the first ``rows`` of the tensor
        ``name``; ``weights_check`` does what ``action`` says (``_check_weights``). ``trainer_join`` and
        ``trainer_leave`` a group."""
        changes: dict[str, Command] = {
            "may_change": self._may_change,
            "sleep": lambda args: self._sleep(args["kv"], args["weights"]),
            "wake": lambda args: self._wake(args["kv"], args["weights"]),
            "weights_update": lambda args: self._update(args["path"]),
            "weights_receive": self._receive,
            "weights_take": lambda args: self._bring(args["keep"]),
            "weights_show": lambda args: {"values": self._show(args["name"], args["rows"])},
            "weights_check": lambda args: self._check_weights(args["action"]),
            "trainer_join": self._join,
            "trainer_leave": lambda args: self.trainers.leave(args["group"]),
        }
        assert changes.keys() == set(CHANGES)
        return super()._commands() | changes

    def _may_change(self, args: dict[str, Any]) -> None:
        if "weights" in args:
            self._check_sleep(args["weights"])
            return
        self._check_changes()
        if args["path"]:
            self._other(args["path"])
        else:
            self._check_tensors()

    @abstractmethod
    def _check_sleep(self, weights: str) -> None:
        """Raises UnsupportedField and OutOfMemory, where ``_sleep`` cannot be."""

    @abstractmethod
    def _sleep(self, kv: bool, weights: str) -> None:
        """Raises what ``_check_sleep`` does: then nothing has changed."""

    @abstractmethod
    def _wake(self, kv: bool, weights: bool) -> None:
        """Raises what loading does, and OutOfMemory: then what has not come back is still away."""

    @abstractmethod
    def _take(self, source: ModelSource, sound: bool = True) -> None:
        """These weights in place of the others. ``sound``: they must be finite. Where it raises
        there are none that are of use."""

    @abstractmethod
    def _look(self, source: ModelSource) -> None:
        """Whether these weights fit, and are finite. Raises WeightError."""

    @abstractmethod
    def _take_tensors(self, tensors: Mapping[str, Tensor], look: bool) -> None:
        """These in place of the others of the same names, or only ``look`` whether they fit. Raises
        WeightError: then nothing has changed."""

    @abstractmethod
    def _scramble(self) -> None:
        """Random weights in place of those that there are."""

    @property
    @abstractmethod
    def _model(self) -> CausalLM:
        """What has the weights."""

    @property
    @abstractmethod
    def refilled(self) -> bool:
        """Other weights can come where those are that there are."""

    @property
    def fixed(self) -> str:
        """What the weights cannot be changed beside, or ""."""
        config = self.config
        beside = (
            ("adapters", self.adapters is not None),
            ("an 8-bit KV cache, whose scales are those of the old ones", config.kv_cache_dtype == "fp8"),
            ("a head for vectors", self.pooling is not None),
            ("what guesses", config.speculative_algorithm is not None),
            ("modules of transformers", not self.refilled),
        )
        return next((what for what, there in beside if there), "")

    def _check_files(self) -> None:
        """Raises ConfigError where weights that are to be read again are not those of the tiers' KV."""
        if self.identity is not None and self.identity.changed:
            raise ConfigError(
                "the model's files have changed, and tiers have prefixes of the old ones; put these back, or "
                "start a server anew",
                param="model",
            )

    def _check_moves(self, here: bool) -> None:
        """Raises UnsupportedField where experts cannot move, whose weights are read again. ``here``: the
        weights are."""
        if self.fixed:
            raise UnsupportedField(f"experts cannot move beside {self.fixed}: their weights are read again")
        if self.brought or not here:
            raise UnsupportedField("experts cannot move: their weights are in no file, or are not here")

    def _check_changes(self) -> None:
        """Raises UnsupportedField where weights cannot become others."""
        if self.fixed or self.config.role != "both":
            what = self.fixed or f"--role {self.config.role}, whose servers have the same weights"
            raise UnsupportedField(f"weights cannot be updated beside {what}", param="model_path")

    def _check_tensors(self) -> None:
        """Raises UnsupportedField where tensors cannot come in place of weights."""
        if self.source.kind == "gguf":
            raise UnsupportedField(
                "weights of GGUF files cannot be updated", param="serialized_named_tensors"
            )

    @cached_property
    def trainers(self) -> Trainers:
        return Trainers(self.place.begin_thread)

    def _join(self, args: dict[str, Any]) -> Future[dict[str, Any]]:
        """Raises InvalidField."""
        self._check_changes()
        if args["backend"] == "nccl" and self.place.torch.type != "cuda":
            raise InvalidField("nccl is for GPUs; use gloo", param="backend")
        rank = args["rank_offset"] + self.shard.of_mlps.number
        where = args["master_address"], args["master_port"], rank, args["world_size"]
        return self.trainers.join(Rendezvous(*where, args["group"], args["backend"]))

    def _receive(self, args: dict[str, Any]) -> Future[dict[str, Any]] | None:
        """Raises InvalidField, at once or later."""
        self._check_changes()
        self._check_tensors()
        if "group" in args:
            wanted = {name: (shape, getattr(torch, kind)) for name, shape, kind in args["tensors"]}
            return self.trainers.receive(args["group"], wanted, partial(self._look_at, "names"))
        try:
            if "servers" in args:
                address = own(args["servers"], self._places)
                return self.trainers.fetch(address, partial(self._check, "zmq_handles"), self._hold)
            rank, paths, names = self.shard.of_mlps.rank, args["paths"], args.get("names", ())
            found = received(paths[rank if len(paths) > 1 else 0], rank, names, self._places)
        except WeightError as error:
            raise InvalidField(error.message, param=_named(args)) from error
        self._look_at(_named(args), found)
        return None

    @cached_property
    def _places(self) -> list[str]:
        """Names of this rank's device."""
        if self.place.torch.type != "cuda":
            return [f"CPU-{self.shard.of_mlps.number}"]
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return [f"GPU-{uuid}", uuid]

    def _look_at(self, param: str, tensors: dict[str, Tensor]) -> None:
        """Raises InvalidField."""
        self._check(param, tensors)
        self._hold(tensors)

    def _check(self, param: str, tensors: dict[str, Tensor]) -> None:
        """Raises InvalidField."""
        try:
            self._take_tensors(tensors, look=True)
        except WeightError as error:
            raise InvalidField(f"{error.message}; the old weights stay", param=param) from error

    def _hold(self, tensors: dict[str, Tensor]) -> None:
        self._received = tensors

    def _bring(self, keep: bool) -> None:
        found, self._received = self._received, {}
        if keep:
            self._take_tensors(found, look=False)
            self.brought = True

    def _update(self, path: str) -> None:
        """Raises InvalidField: then the weights are those that there were."""
        self._check_changes()
        old = self.source
        if path:
            self._before, new = old, self._other(path)
        elif self._before is None or self._before is old:
            return
        else:
            new = self._before
        try:
            self._look(new)  # the files of the old ones may be others by now, so there may be no way back
        except SglaError as error:
            raise InvalidField(f"{error.message}; the old weights stay", param="model_path") from error
        try:
            self._take(new)
            self.source, self.brought = new, False
            if self.identity is not None:
                self.identity.follow(new)
        except Exception as error:  # whatever a file can bring about
            self._take(old, sound=False)
            why = error.message if isinstance(error, SglaError) else f"{type(error).__name__}: {error}"
            raise InvalidField(f"{why}; the old weights stay", param="model_path") from error

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

    def _check_weights(self, action: str) -> dict[str, Any]:
        """Take a ``snapshot``, have random weights (``reset_tensors``), ``compare`` with the snapshot, or
        tell the ``checksum`` of all. Raises InvalidField where some differ, UnsupportedField."""
        if action == "reset_tensors":
            self._check_changes()
            if self.source.kind == "gguf":
                raise UnsupportedField("weights of GGUF files cannot be updated", param="action")
            self._scramble()
            self.brought = True
            return {}
        sums = weight_sums(self._model)
        if action == "snapshot":
            self._sums = sums
        if action == "compare":
            if self._sums is None:
                raise InvalidField("there is no snapshot to compare with; take one first", param="action")
            names = [name for name in sums | self._sums if sums.get(name) != self._sums.get(name)]
            if names:
                raise InvalidField(
                    f"{len(names)} of {len(sums)} tensors are not those of the snapshot: "
                    + ", ".join(names[:8]),
                    param="action",
                )
        whole = sum(sums.values()) % (1 << 64)
        return {"tensors": len(sums), "checksum": f"{whole:016x}"}

    def _show(self, name: str, rows: int) -> list[Any] | None:
        """As files have them, or what the model computes with, once tensors have come, or where files have
        other names. None where other ranks have the tensor, NaN where they have a part of it."""
        stored = self.source.kind in ("safetensors", "pt")
        declared = self._model.declared if self.brought or not stored else None
        if declared is not None and (shape := declared.shape(name)) is not None:
            told: list[Any] = declared.show(name, shown_rows(shape, rows)).tolist()
            return told
        tensors = stored_tensors(self.source) if stored else ()
        tensor = next((tensor for found, tensor in tensors if found == name), None)
        if declared is None and tensor is not None:
            values: list[Any] = tensor.values(shown_rows(tensor.shape, rows)).float().tolist()
            return values
        if self.shard.pipe is not None:
            return None
        if tensor is None:
            raise InvalidField(f"the model has no tensor {name[:200]!r} that can be told", param="name")
        raise UnsupportedField(
            "tensors have come, and this one cannot be told out of what is computed with; /weights_checker "
            "tells whether weights are those of a snapshot",
            param="name",
        )


def shown_rows(shape: tuple[int, ...], rows: int) -> range:
    """The first ``rows`` of a tensor. Raises InvalidField where they are too much to show."""
    count = min(rows, shape[0] if shape else 1)
    if (size := count * prod(shape[1:])) > MOST_VALUES:
        raise InvalidField(
            f"{count} rows have {size} values, more than {MOST_VALUES}; lower truncate_size",
            param="truncate_size",
        )
    return range(count)


def _named(args: Mapping[str, Any]) -> str:
    """The field of a request that tensors came by."""
    if "servers" in args:
        return "zmq_handles"
    return "update_info" if "names" in args else "serialized_named_tensors"

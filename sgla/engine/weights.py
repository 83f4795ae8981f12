"""The calls of ``Engine`` that give memory back, and bring other weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sgla.actors.resting import GROUP, announced, named_parts
from sgla.engine.loop import EngineLoop
from sgla.errors import InvalidField


class WeightCalls(EngineLoop):
    """What ``Engine`` inherits. Names and arguments are those of SGLang's ``Engine`` and vLLM's ``LLM``."""

    def sleep(self, level: int = 1) -> bool:
        """Give memory back: 1: the KV cache, and what weights take of a GPU; 2: the weights are dropped, and
        read again. False while requests are running."""
        if level not in (1, 2):
            raise InvalidField("level is 1 or 2", param="level")
        return self._call(self._ready().ingress.sleep(True, "files" if level == 2 else "host"))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Have what ``tags`` say again (``weights``, ``kv_cache``; None: both)."""
        self._call(self._ready().ingress.wake(named_parts(tags)))

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> bool:
        """False while requests are running."""
        parts = named_parts(tags)
        return self._call(
            self._ready().ingress.sleep("kv_cache" in parts, "either" if "weights" in parts else "")
        )

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """As ``wake_up``."""
        self.wake_up(tags)

    def pause_generation(self) -> None:
        """Requests that run wait, and keep what they have; SGLang's mode ``in_place``."""
        self._call(self._pause(True))

    def continue_generation(self) -> None:
        self._call(self._pause(False))

    async def _pause(self, paused: bool) -> None:
        self._ready().ingress.pause(paused)

    def update_weights_from_disk(self, model_path: str, weight_version: str | None = None) -> bool:
        """Take other weights of the same model. False while requests are running that are not paused. Raises
        InvalidField; then the old weights stay."""
        change = self._ready().ingress.update_weights(model_path, weight_version, trusted=True)
        return self._call(change)

    def update_weights_from_tensor(
        self, named_tensors: Iterable[tuple[str, Any]], weight_version: str | None = None
    ) -> bool:
        """As ``update_weights_from_disk``, of some tensors by their names in the model's files. Those of a
        GPU are read where they are."""
        from sgla.loading.tensors import packed  # which has torch

        named = list(named_tensors)
        return self._call(self._ready().ingress.take_tensors([packed(named)], weight_version))

    def update_weights_from_ipc(
        self, zmq_handles: Mapping[str, str], weight_version: str | None = None
    ) -> bool:
        """As ``update_weights_from_tensor``, of what checkpoint-engine broadcasts: the address of each rank's
        parameter server, by the name of its device (``GPU-<uuid>``, ``CPU-<rank>``)."""
        return self._call(self._ready().ingress.take_from_servers(zmq_handles, weight_version))

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP,
        backend: str = "nccl",
    ) -> None:
        """Join a trainer, which is rank 0 of ``world_size``; ``rank_offset``: of our first rank."""
        where = {"master_address": master_address, "master_port": master_port, "rank_offset": rank_offset}
        where |= {"world_size": world_size, "backend": backend}
        self._call(self._ready().ingress.join_trainer(group_name, **where))

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = GROUP,
        weight_version: str | None = None,
    ) -> bool:
        """As ``update_weights_from_tensor``, of what the trainer broadcasts in this order."""
        tensors = announced(names, dtypes, shapes)
        return self._call(self._ready().ingress.take_from_trainer(group_name, tensors, weight_version))

    def destroy_weights_update_group(self, group_name: str = GROUP) -> None:
        self._call(self._ready().ingress.leave_trainer(group_name))

    def check_weights(self, action: str) -> list[dict[str, Any]]:
        """SGLang's: keep a ``snapshot`` of what each rank computes with, have random weights
        (``reset_tensors``), ``compare`` with the snapshot, or tell a ``checksum``. Raises InvalidField where
        weights are not those of the snapshot."""
        ingress = self._ready().ingress
        if action != "reset_tensors":
            return self._call(ingress.check_weights(action))
        if not self._call(ingress.scramble_weights()):
            raise InvalidField("requests are running that are not paused", param="action")
        return []

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """The first rows of a tensor, by its name in the model's files."""
        return self._call(self._ready().ingress.show_weights(name, truncate_size))

    @property
    def is_sleeping(self) -> bool:
        return self._ready().ingress.phase == "sleeping"

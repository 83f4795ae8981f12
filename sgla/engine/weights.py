"""The calls of ``Engine`` that give memory back, and bring other weights."""

from __future__ import annotations

from collections.abc import Sequence

from sgla.actors.resting import PARTS
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
        self._call(self._ready().ingress.wake(_parts(tags)))

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> bool:
        """False while requests are running."""
        parts = _parts(tags)
        return self._call(
            self._ready().ingress.sleep("kv_cache" in parts, "either" if "weights" in parts else "")
        )

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> None:
        """As ``wake_up``."""
        self.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        return self._ready().ingress.phase == "sleeping"


def _parts(tags: Sequence[str] | None) -> Sequence[str]:
    if unknown := set(tags or ()) - set(PARTS):
        raise InvalidField(f"tags are weights and kv_cache, not {min(unknown)[:40]!r}", param="tags")
    return tags or PARTS

"""The runner of a pair of encoders, for texts and for pictures, on CPUs and GPUs."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.loading.dual import DualEncoder, load_dual
from sgla.messages import NewRow, Placed, StepPlan, StepResult
from sgla.model.vision.served import untaken, vision_of
from sgla.worker.encoder import EncoderRunner
from sgla.worker.features import FeatureCache
from sgla.worker.pictures import groups_of
from sgla.worker.place import Cpu
from sgla.worker.pooler import add_vectors
from sgla.worker.seeing import plain_of
from sgla.worker.state import column

ABREAST = 64 << 20  # bytes of pictures that are looked at together
KEPT = 16 << 20  # bytes of vectors of pictures


class DualRunner(EncoderRunner):
    """Every row is a text or a picture."""

    model: DualEncoder  # type: ignore[assignment]

    def _load(self, config: Config, source: ModelSource) -> None:
        if config.quantization:
            raise ConfigError(
                f"--quantization {config.quantization} is not for models that are pairs of encoders; leave "
                "it out",
                param="quantization",
            )
        super()._load(config, source)
        vision, note = vision_of(config, source)
        if vision is not None:
            self.facts.media = {vision.kind: vision.media}
            self.facts.ledger["pictures"] = KEPT
        self.facts.untaken = untaken(source, note)
        self.facts.notes += [note] if note else []

    def _make(self) -> str:
        where = self.place.torch
        plain = plain_of(self.facts.dtype)
        length = self.facts.context_len
        self.model = load_dual(self.source, plain, where, length, self.config.random_seed or 0)
        assert self.pooling is not None
        self._seen = FeatureCache(self.model, self.pooling.size, KEPT)
        if isinstance(self.place, Cpu):
            torch.set_num_threads(self.place.threads)
        return ""

    def _forget(self) -> None:
        del self.model, self._seen

    def _warm_up(self) -> None:
        self._texts([np.zeros(1, np.int32)])

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        assert len(plan.new) * 4 == len(plan.slots), "a row that is not a whole new prompt"
        found: list[Any] = [None] * len(plan.new)
        texts = [i for i, new in enumerate(plan.new) if not new.pictures]
        for i, row in zip(texts, self._texts([column(plan.new[i].tokens) for i in texts])):
            found[i] = row
        for i, row in self._pictures(plan.new):
            found[i] = row
        self.profiler.step()
        result = StepResult(step=plan.step, tokens=b"")
        add_vectors(result, enumerate(found))
        return result

    def _texts(self, prompts: list[Any]) -> list[Any]:
        """float32[size] each, on the host. Those of one length are computed together."""
        found: list[Any] = [None] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        for _, group in groupby(order, key=lambda row: len(prompts[row])):
            rows = list(group)
            ids = torch.from_numpy(np.stack([prompts[row] for row in rows]).astype(np.int64))
            for row, values in zip(rows, host(self.model.texts(ids))):
                found[row] = values
        return found

    def _pictures(self, new: list[NewRow]) -> list[tuple[int, Any]]:
        """By number of a row. The encoder looks at those together that it has not seen lately; what cannot be
        had is no number."""
        shown: list[tuple[int, Placed]] = [(i, row.pictures[0]) for i, row in enumerate(new) if row.pictures]
        missing = {
            one.picture.digest: (one.picture, 1) for _, one in shown if one.picture.digest not in self._seen
        }
        for group in groups_of(list(missing.values()), ABREAST):
            pictures = [picture for picture, _ in group]
            try:
                made = self.model.several([self._seen.read(each) for each in pictures], [1] * len(pictures))
            except (OSError, ValueError, RuntimeError):
                continue  # alone each tells what it lacks
            for picture, features in zip(pictures, made):
                self._seen.keep(picture, features)
            self._seen.computed += len(pictures)
        rows = [self._seen.of(one.picture, 1).values for _, one in shown]
        return list(zip([i for i, _ in shown], host(torch.cat(rows)))) if rows else []


def host(values: Tensor) -> Any:
    return values.float().cpu().numpy()

"""The calls of ``Engine`` for models that answer with vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sgla.engine.inputs import is_one, kind, prompt_fields
from sgla.engine.loop import EngineLoop
from sgla.engine.pictures import NOTHING, Shown, prompt_given
from sgla.engine.progress import Bar
from sgla.errors import InvalidField, UnsupportedTask
from sgla.messages import Pooling
from sgla.text import reranking
from sgla.text.vectors import check_dimensions, cosine, embedding, scores

T = TypeVar("T")
Floats = NDArray[np.float32]
Inputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
WINDOW = 256  # inputs of one call that are open at a time


class VectorCalls(EngineLoop):
    """What ``Engine`` inherits. ``Inputs``: a text or token ids, or a list of either."""

    def embed(
        self,
        inputs: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        progress: bool | None = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
    ) -> Floats:
        """Embeddings: float32 ``[size]`` of one input, ``[n, size]`` of a list. The options are those of
        /v1/embeddings; ``progress`` and media are as in ``Engine.generate``. For a model that makes a vector
        of a text or of a picture, the text of a picture is empty."""
        shown = Shown(image_data, video_data, audio_data)
        return self._call(self._embed(inputs, dimensions, normalize, progress, shown))

    def classify(self, inputs: Inputs, *, activate: bool = True, progress: bool | None = None) -> Any:
        """Label -> probability (logit if not ``activate``: the reward of a reward model);
        a list of that for a list."""
        return self._call(self._classify(inputs, activate, progress))

    def score(self, query: str, documents: str | Sequence[str], *, progress: bool | None = None) -> Any:
        """How well each document fits the query: a cross-encoder's score, or the cosine of two embeddings."""
        return self._call(self._score(query, documents, progress))

    async def aembed(
        self,
        inputs: Inputs,
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
    ) -> Floats:
        """``embed`` for asyncio code."""
        shown = Shown(image_data, video_data, audio_data)
        return await self._acall(self._embed(inputs, dimensions, normalize, shown=shown))

    async def aclassify(self, inputs: Inputs, *, activate: bool = True) -> Any:
        """``classify`` for asyncio code."""
        return await self._acall(self._classify(inputs, activate))

    async def ascore(self, query: str, documents: str | Sequence[str]) -> Any:
        """``score`` for asyncio code."""
        return await self._acall(self._score(query, documents))

    # inside

    async def _embed(
        self,
        inputs: Inputs,
        dimensions: int | None,
        normalize: bool | None,
        progress: bool | None = None,
        shown: Shown = NOTHING,
    ) -> Floats:
        pooling = self._pools("embed")
        check_dimensions(pooling, dimensions)
        batch, single = as_batch(inputs)
        if shown != NOTHING:
            media = [shown] if single else shown.each(len(batch))
            given = [prompt_given(prompt, own) for prompt, own in zip([inputs] if single else inputs, media)]
            batch = await self._inputs(given)
        vectors = await self._vectors(batch, progress=progress)
        rows = np.stack([embedding(vector, pooling, dimensions, normalize) for vector in vectors])
        return rows[0] if single else rows

    async def _classify(self, inputs: Inputs, activate: bool, progress: bool | None = None) -> Any:
        pooling = self._pools("classify")
        batch, single = as_batch(inputs)
        vectors = await self._vectors(batch, progress=progress)
        results = [dict(zip(pooling.labels, scores(v, pooling, activate).tolist())) for v in vectors]
        return results[0] if single else results

    async def _score(self, query: str, documents: str | Sequence[str], progress: bool | None = None) -> Any:
        batch = texts_of(documents)
        if not isinstance(query, str):
            raise InvalidField(f"query must be a text, got {kind(query)}", param="query")
        ways = self._rerank if self.config.task == "rerank" else self._fit
        values = await ways(query, batch, progress)
        return values[0] if isinstance(documents, str) else values

    async def _rerank(self, query: str, batch: list[str], progress: bool | None) -> list[float]:
        labels = reranking.answer_ids(self.tokenizer)
        prompts = [{"text": reranking.prompt(query, text)} for text in batch]
        return [reranking.relevance(vector) for vector in await self._vectors(prompts, labels, progress)]

    async def _fit(self, query: str, batch: list[str], progress: bool | None) -> list[float]:
        pooling = self._pools("classify", "embed")
        if pooling.task == "embed":
            vectors = await self._vectors([{"text": text} for text in (query, *batch)], progress=progress)
            return [cosine(vectors[0], vector) for vector in vectors[1:]]
        if pooling.size > 1:
            raise UnsupportedTask(f"scores need a model with one label, this one has {pooling.size}")
        vectors = await self._vectors([{"text": query, "pair": text} for text in batch], progress=progress)
        return [float(scores(vector, pooling)[0]) for vector in vectors]

    async def _vectors(
        self, prompts: list[dict[str, Any]], labels: Sequence[int] = (), progress: bool | None = None
    ) -> list[bytes]:
        found: list[bytes] = []
        bar = Bar(len(prompts), "input", progress)
        try:
            for start in range(0, len(prompts), WINDOW):
                jobs = [
                    self._job(None, **prompt, pool=list(labels)) for prompt in prompts[start : start + WINDOW]
                ]
                for output in await self._collect(jobs, bar):
                    assert output[0].vector is not None
                    found.append(output[0].vector)
        finally:
            bar.close()
        return found

    def _pools(self, *tasks: str) -> Pooling:
        pooling = self._pooling()
        if pooling is None or pooling.task not in tasks:
            needed = " or ".join(tasks)
            hint = ", for example 'minilm'" if "embed" in tasks else ""
            raise UnsupportedTask(f"this call needs a model for the task {needed}{hint}")
        return pooling


def texts_of(given: Any) -> list[str]:
    """The documents of a score. Raises InvalidField for others than texts."""
    if isinstance(given, (bytes, Mapping)) or not isinstance(given, Iterable):
        text = f"documents must be a text or a list of texts, got {kind(given)}"
        raise InvalidField(text, param="documents")
    found = [given] if isinstance(given, str) else list(given)
    for one in found:
        if not isinstance(one, str):
            raise InvalidField(f"documents must have texts alone, got {kind(one)}", param="documents")
    return found


def as_batch(inputs: Inputs) -> tuple[list[dict[str, Any]], bool]:
    """Job fields of each input, and whether it was one alone."""
    single = is_one(inputs)
    batch: Any = [inputs] if single else list(inputs)
    if not batch:
        raise ValueError("there are no inputs")
    return [prompt_fields(item) for item in batch], single

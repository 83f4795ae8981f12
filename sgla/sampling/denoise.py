"""Blocks of tokens out of noise, as DiffusionGemma's sampler of transformers makes them
(``EntropyBoundSampler``, ``StableAndConfidentStoppingCriteria``)."""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.model.diffusion_gemma_spec import Denoising
from sgla.sampling.draw import Distribution, Draw, uniform
from sgla.sampling.draw_rows import draw_rows

Int32s = NDArray[np.int32]
ATTEMPT = 32  # the bits of a position from which on the number of an attempt stands (``draw.bits_of``)


class Block:
    """One of ``size`` tokens, those at the places from ``start`` on. ``tokens`` int32[size]: as the model is
    to see them in the next step; ``predicted`` float32[size, d]: the embeddings that were predicted, on the
    ``device``."""

    def __init__(
        self,
        start: int,
        size: int,
        width: int,
        vocab: int,
        seed: int,
        how: Denoising,
        device: torch.device | None = None,
    ) -> None:
        self.start, self._seed, self._vocab, self._how = start, seed, vocab, how
        self._left = how.steps
        self._latest = deque[Int32s](maxlen=max(how.stability, 1))
        self.predicted = torch.zeros(size, width, device=device)
        self.tokens = self._noise(size)

    @property
    def temperature(self) -> float:
        return self._how.temperature(self._left)

    @property
    def attempt(self) -> int:
        """Of the step that comes; the first is 1."""
        return self._how.steps - self._left + 1

    def drawn(self, logits: NDArray[np.float32], places: range, sampling: Distribution, draw: Draw) -> Int32s:
        """Tokens out of float32[n, V], of so many ``places`` in the block; a ``temperature`` of 0 is greedy,
        any other multiplies that of the step."""
        if sampling.temperature == 0:
            return logits.argmax(-1).astype(np.int32)
        hot = sampling._replace(temperature=sampling.temperature * self.temperature)
        turn = self.attempt << ATTEMPT
        pairs = zip(logits, places, strict=True)
        return np.array([draw(x, hot, self._seed, turn | (self.start + i)) for x, i in pairs], np.int32)

    def drawn_on(self, logits: Tensor, places: range, sampling: Distribution) -> Tensor:
        """As ``drawn``, where the logits are."""
        if sampling.temperature == 0:
            return logits.argmax(-1)
        hot = sampling._replace(temperature=sampling.temperature * self.temperature)
        turn = self.attempt << ATTEMPT
        return draw_rows(logits, hot, self._seed, [turn | (self.start + i) for i in places])

    def take(self, likely: Int32s, drawn: Int32s, entropy: Tensor) -> bool:
        """A step has predicted these: the most probable tokens, drawn ones, and entropies float32[size].
        Whether the block is done: it is ``likely`` then."""
        how = self._how
        stable = not how.stability or (
            len(self._latest) == how.stability and all((old == likely).all() for old in self._latest)
        )
        self._latest.append(likely)
        sure, order = entropy.sort()
        kept = order[sure.cumsum(0) - sure <= how.entropy_bound].numpy()
        self._left -= 1
        self.tokens = self._noise(len(likely))
        self.tokens[kept] = drawn[kept]
        return self._left == 0 or (stable and float(entropy.mean()) < how.confidence)

    def _noise(self, size: int) -> Int32s:
        """What the model is to see in the step that comes, where it has nothing better."""
        turn = (self._how.steps - self._left) << ATTEMPT
        places = (turn | (self.start + i) for i in range(size))
        return np.array([uniform(self._seed, place, self._vocab) for place in places], np.int32)

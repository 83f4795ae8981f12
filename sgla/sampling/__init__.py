"""From logits to token ids and logprobs,
per request and on the host (numpy: a row of logits stays in the L2 cache)."""

from __future__ import annotations

from sgla.sampling.sampler import Sampler, Samples

__all__ = ["Sampler", "Samples"]

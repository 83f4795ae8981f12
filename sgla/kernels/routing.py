"""How tokens find their experts, and what an expert does, as values: what ``ops.moe`` takes, and what kernels
look at before they take a mixture. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Routing:
    """Each token goes to the ``top_k`` experts with the highest scores: the ``softmax`` of the router's
    logits over all experts, or the ``sigmoid`` of each. Its weights are these scores.

    ``groups``: the experts lie in so many groups of equal size, of which ``kept`` stay: those whose best
    expert has the highest score, or (``two``) whose best two have the highest sum. ``normalize``: the weights
    are divided by their sum, which counts as ``least`` if it is smaller. ``scale``: by which they are
    multiplied then. ``zeros``: experts of groups that do not stay count as 0 instead of not at all.

    ``shared``: one more expert, the last, is every token's (arXiv 2401.06066), with the weight 1, or
    (``gated``) with the sigmoid of a logit that stands behind those of the others. One that is ``parts``
    times as wide as the others is as many experts.

    ``sqrtsoftplus`` (DeepSeek V4): the score of a logit is ``sqrt(log(1 + exp(logit)))``.

    ``sparsemixer`` (arXiv 2409.12136): the two experts with the highest logits; the weight of each is its
    share of a softmax over the experts that are not left out: those chosen before it, and those whose logit
    is below its own by more than ``2 * jitter`` of the larger of its own and their magnitude.

    ``held``: the experts that a rank has, whole; None: it has a part of each. ``copies``: of each of these
    how many there are on all ranks and which this one is, if there may be several, which take turns.

    The softmax over the chosen logits alone, as Mixtral and gpt-oss have it, is the softmax over all,
    normalized.
    """

    top_k: int
    score: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = "softmax"
    normalize: bool = False
    groups: int = 1
    kept: int = 1
    two: bool = False
    zeros: bool = False
    least: float = 0.0
    scale: float = 1.0
    shared: Literal["", "always", "gated"] = ""
    parts: int = 1
    jitter: float = 0.0
    held: range | tuple[int, ...] | None = None
    copies: tuple[tuple[int, int], ...] = ()

    def experts(self, logits: int) -> int:
        """How many there are, of so many logits."""
        return logits - (self.shared == "gated") + self.common

    def here(self, logits: int) -> Sequence[int]:
        """Those that a rank has, or a part of."""
        return range(self.experts(logits)) if self.held is None else self.held

    @property
    def common(self) -> int:
        """How many of them every token has."""
        return self.parts if self.shared else 0

    @cached_property
    def plain(self) -> bool:
        """Softmax over all experts, and nothing else but ``normalize``."""
        return self == Routing(self.top_k, normalize=self.normalize)


@dataclass(frozen=True)
class Clamped:
    """The gated activation of gpt-oss: ``(up + more) * gate * sigmoid(alpha * gate)``, where the gate is at
    most ``limit`` and up is between ``-limit`` and ``limit``."""

    alpha: float
    limit: float
    more: float = 1.0


Gating = Activation | Clamped | Literal["relu2"]  # the last without a gate (arXiv 2109.08668)

"""What a request makes of the raw vector of the model: an embedding, scores, a similarity. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sgla.errors import InvalidField, UnsupportedField
from sgla.messages import Pooling

Floats = NDArray[np.float32]


def raw(vector: bytes) -> Floats:
    return np.frombuffer(vector, np.float32)


def check_dimensions(pooling: Pooling, dimensions: int | None) -> None:
    """Raise UnsupportedField or InvalidField for a length that embeddings cannot be cut to."""
    if dimensions is None or dimensions == pooling.size:
        return
    if pooling.dimensions is None:
        raise UnsupportedField(
            f"dimensions is not supported by this model: its embeddings have {pooling.size} values and were "
            "not trained to be cut; leave it out",
            param="dimensions",
        )
    allowed = pooling.dimensions or range(1, pooling.size + 1)
    if dimensions not in allowed:
        text = ", ".join(map(str, pooling.dimensions)) if pooling.dimensions else f"1 to {pooling.size}"
        raise InvalidField(f"dimensions must be one of {text}, got {dimensions}", param="dimensions")


def embedding(
    vector: bytes, pooling: Pooling, dimensions: int | None = None, normalize: bool | None = None
) -> Floats:
    """The first ``dimensions`` values, of length 1 if ``normalize`` (None: as the model's files say)."""
    values = raw(vector)[:dimensions]
    return unit(values) if (pooling.normalize if normalize is None else normalize) else values


def unit(values: Floats) -> Floats:
    """Scaled to length 1, as torch.nn.functional.normalize does it."""
    return values / max(float(np.linalg.norm(values)), 1e-12)


def scores(vector: bytes, pooling: Pooling, activate: bool = True) -> Floats:
    """Probabilities, or what else the model's activation makes of the logits;
    the logits themselves if not ``activate``."""
    logits = raw(vector)
    if not activate or pooling.activation == "identity":
        return logits
    if pooling.activation == "sigmoid":
        return (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    return softmax(logits)


def softmax(logits: Floats) -> Floats:
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


def cosine(a: bytes, b: bytes) -> float:
    return float(unit(raw(a)) @ unit(raw(b)))

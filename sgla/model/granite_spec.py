"""What Granite's layers with windows have each of their own. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from sgla.hub.reader import Reader
from sgla.model.spec import ModelSpec

BASES = "layer_rope_theta"


def with_bases(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``. Each layer has the base of its rotation; one with 0 does not rotate."""
    if not c.given(BASES):
        return spec
    bases = c.values[BASES]
    if not isinstance(bases, list) or len(bases) != spec.layers:
        raise c.error(BASES, f"a list of {spec.layers} numbers, one for each layer")
    layers = []
    for layer, base in zip(spec.attention, bases):
        if base == 0 and not isinstance(base, bool):
            layers.append(replace(layer, rope=None))
            continue
        theta = Reader(c.architecture, {BASES: base}).number(BASES)
        if theta <= 1 or layer.rope is None:
            raise c.error(BASES, "numbers above 1, or 0")
        layers.append(replace(layer, rope=replace(layer.rope, theta=theta)))
    return replace(spec, attention=tuple(layers))

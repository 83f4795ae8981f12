"""What a key of HyperCLOVA X says otherwise than Granite's of the same name. Loads no torch."""

from __future__ import annotations

from dataclasses import replace

from sgla.hub.reader import Reader
from sgla.model.spec import ModelSpec


def with_logit_scale(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``. Logits are multiplied; Granite's are divided."""
    return replace(spec, logit_scale=c.number("logits_scaling"))

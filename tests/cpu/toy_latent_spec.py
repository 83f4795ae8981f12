"""What a package outside registers for the family of ``toy_latent.py``, and the shapes of its layers. Loads
no torch."""

from __future__ import annotations

from dataclasses import dataclass

from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec, StateTensor
from sgla.model.families import FAMILIES
from sgla.model.family import Family
from sgla.model.limits import HEAD_DIM, HEADS


@dataclass(frozen=True)
class ToyLatentSpec(AttentionSpec):
    """Of a token one latent of ``head_dim`` values is kept, which is key and value of all heads."""

    @property
    def latent(self) -> bool:
        return True

    def kept(self, kv_heads: int) -> tuple[StateTensor, ...]:
        return (StateTensor("k", (1, self.head_dim)),)

    def weights(self, hidden: int) -> int:
        return hidden * self.head_dim * (2 * self.heads + 1)


def read(c: Reader, layers: int, positions: int) -> tuple[ToyLatentSpec, ...]:
    dim = c.integer("head_dim", HEAD_DIM)
    return (ToyLatentSpec(c.integer("num_attention_heads", HEADS), 1, dim, dim**-0.5, None),) * layers


_LIKE = FAMILIES["SmolLM3ForCausalLM"]
FAMILY = Family(
    ("toy_latent",),
    _LIKE.defaults | {"head_dim": 8},
    _LIKE.fixed,
    model="toy_latent:ToyLatent",
    attention="toy_latent_spec:read",
)

"""Command R (HF ``CohereForCausalLM``), Command A (arXiv 2504.00698), GPT-J, Phi-2 and StableLM 2 12B:
attention and MLP read the same norm, side by side."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.layers.linear import side_by_side
from sgla.model import base, llama
from sgla.model.base import Decoder


class Block:
    def __init__(self, model: Decoder, build: Build, name: str, index: int) -> None:
        self.norm = model.norm_of(build, f"{name}.input_layernorm")
        self.attention = model.attention(build, f"{name}.self_attn", index)
        self.mlp = model.mlp(build, f"{name}.mlp", index)

    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.norm.add(x, h)
        attended = self.attention(x, batch, kv)
        if rows is not None:
            attended, x, h = (ops.gather(y, rows) for y in (attended, x, h))
        return side_by_side(self.attention.out, attended, self.mlp, x), h


class Cohere(Decoder):
    def block(self, build: Build, name: str, index: int) -> Block:
        return Block(self, build, name, index)


class GptJ(Cohere):
    """GPT-J, too."""

    plain_names = ("fc_in", "fc_out")


class Phi(Cohere):
    """Phi-1, 1.5 (arXiv 2309.05463) and 2: MLPs without a gate, with other names."""

    plain_names = ("fc1", "fc2")


class StableLm(llama.Llama):
    """StableLM: so, or one behind the other."""

    def block(self, build: Build, name: str, index: int) -> base.Block:  # type: ignore[override]
        return (Block if self.spec.parallel else llama.Block)(self, build, name, index)

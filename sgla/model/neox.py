"""GPT-NeoX (arXiv 2204.06745) and Pythia: attention and MLP have norms of their own and stand side by side,
or one behind the other."""

from __future__ import annotations

from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.ops import KVLayer
from sgla.layers.build import Build
from sgla.layers.linear import side_by_side
from sgla.model import llama


class Parallel(llama.Block):
    def __call__(
        self, x: Tensor, h: Tensor | None, batch: ForwardBatch, kv: KVLayer, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x, h = self.input_norm.add(x, h)
        attended = self.attention(x, batch, kv)
        if rows is not None:
            attended, h = ops.gather(attended, rows), ops.gather(h, rows)
        return side_by_side(self.attention.out, attended, self.mlp, self.mlp_norm(h)), h


class Neox(llama.Llama):
    plain_names = ("dense_h_to_4h", "dense_4h_to_h")

    def block(self, build: Build, name: str, index: int) -> llama.Block:
        return (Parallel if self.spec.parallel else llama.Block)(self, build, name, index)

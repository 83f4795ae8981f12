"""Apertus (arXiv 2509.14233): Llama with norms of q and k, and MLPs without a gate whose activation is
learned."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.kernels.dispatch import op
from sgla.layers.build import Build
from sgla.layers.mlp import PlainMLP
from sgla.model.llama import Llama
from sgla.quant.weight import SourceTensor


@op
def xielu(x: Tensor, shape: Tensor) -> Tensor:
    """xIELU (arXiv 2411.13010): a parabola above 0, an exponential below. ``shape`` float32[4]: the
    coefficient of the one, that of the other less the slope at 0, this slope, and where the exponential
    ends."""
    above, below, slope, end = shape
    f = x.float()
    rising, bent = f * f * above, torch.expm1(torch.minimum(f, end)) - f
    return (torch.where(f > 0, rising, bent * below + bent * slope) + slope * f).to(x.dtype)


class ApertusMLP(PlainMLP):
    """``name.act_fn`` has a layer's shape of the activation."""

    def __init__(self, build: Build, name: str, hidden: int, intermediate: int) -> None:
        super().__init__(build, name, hidden, intermediate, "xielu", False, ("up_proj", "down_proj"))
        self.shape = torch.zeros(4)
        for i, (part, size) in enumerate((("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))):
            build.declare(f"{name}.act_fn.{part}", size, partial(self._take, i))

    def _take(self, at: int, source: SourceTensor) -> None:
        value = source.dense().float().flatten()[0]
        self.shape[at] = F.softplus(value) if at < 2 else value

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(xielu(self.up(x), self.shape))


class Apertus(Llama):
    def mlp(self, build: Build, name: str, index: int) -> PlainMLP:
        return ApertusMLP(build, name, self.spec.hidden, self.spec.intermediate)

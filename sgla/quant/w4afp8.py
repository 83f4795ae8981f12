"""Checkpoints of mixtures in W4AFP8: experts in 4 bits, all other linear layers in fp8 with blocks. Loads no
torch.

``X.weight`` of an expert has two numbers from -8 to 7 in each byte, the first in the lower bits;
``X.weight_scale_inv`` is what they are multiplied by, one for every 128 channels of a row. What is said of
activations, also ``X.input_scale``, is for kernels that multiply in 8 bits; here the experts' are not
rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgla.hub.reader import Reader
from sgla.quant.compressed import LINEAR, Mixed
from sgla.quant.fp8 import Fp8
from sgla.quant.gptq import SCALES, Grouped, Scheme
from sgla.quant.method import Held, Method

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor

NOTE = "the activations of experts are not rounded to fp8, as the checkpoint's method does"


def w4afp8(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError for what is not supported."""
    blocks = config.get("weight_block_size") or [128, 128]
    others = Fp8({**config, "quant_method": "fp8", "weight_block_size": blocks})
    return Mixed(config, [([r"re:.*\.experts\.\d+\."], Experts(config)), ([LINEAR], others)])


class Experts(Grouped):
    name = "w4afp8"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        c = Reader("w4afp8", config)
        size = c.integer("group_size", 1 << 17) if c.given("group_size") else 128
        if c.values.get("moe_weight_format", "int4") != "int4":
            raise c.error("moe_weight_format", "int4")
        self.scheme = Scheme(4, size, symmetric=True)
        self.keep()
        self.notes += (NOTE,)

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        return {
            f"{module}.weight": Held((n, k // 2), ("I8", "U8")),
            f"{module}.weight_scale_inv": Held((n, -(-k // self.scheme.group)), SCALES),
            f"{module}.input_scale": Held(optional=True),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant import quants

        weight, scale = stored[f"{module}.weight"], stored[f"{module}.weight_scale_inv"]
        return quants.Int4Rows(weight, None, scale, (n, k), 4, self.scheme.group)

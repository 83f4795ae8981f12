"""Checkpoints of mixtures in fp8 whose experts are in MXFP4, as DeepSeek V4 is published. Loads no torch.

``X.weight`` of an expert has two e2m1 numbers in each byte, the first in the lower bits;
``X.weight_scale_inv`` has a power of two for every 32 channels of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgla.hub.reader import Reader
from sgla.quant.compressed import LINEAR, Mixed
from sgla.quant.e2m1_files import Mx4
from sgla.quant.fp8 import Fp8
from sgla.quant.method import Held, Method

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor


def fp8(config: Mapping[str, Any]) -> Method:
    """Raises ConfigError for what is not supported."""
    kind = config.get("expert_dtype")
    if kind in (None, "fp8"):
        return Fp8(config)
    if kind != "fp4":
        raise Reader("fp8", config).error("expert_dtype", "fp8 or fp4")
    return Mixed(config, [([r"re:.*\.experts\.\d+\."], Experts(config)), ([LINEAR], Fp8(config))])


class Experts(Mx4):
    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        return {
            f"{module}.weight": Held((n, k // 2), ("I8", "U8")),
            f"{module}.weight_scale_inv": Held((n, -(-k // 32)), ("U8", "F8_E8M0")),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant.nibbles import Nibbles

        return Nibbles(stored[f"{module}.weight"], stored[f"{module}.weight_scale_inv"], (n, k), 32)

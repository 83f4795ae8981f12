"""Linear layers in the formats of compressed-tensors that ``sgla quantize`` writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
TOP = {"w4a16": 7.5, "int8": 127.5, "fp8": 448.0}  # what the largest number of a group becomes
LEAST, MOST = {"w4a16": -8, "int8": -128}, {"w4a16": 7, "int8": 127}
SHRUNK = [1 - 0.04 * i for i in range(11)]  # of the span of a group of 4-bit numbers, what may be kept


@dataclass(frozen=True)
class Recipe:
    """``format``: w4a16, int8 or fp8. ``group``: channels of k with one scale, 0: all. ``scale``: the type of
    scales, which numbers are rounded with."""

    format: str
    group: int
    scale: torch.dtype

    def scales(self, w: Tensor) -> Tensor:
        """Of round-to-nearest, ``[n, groups]``; those of 4 bits have the smallest squared error."""
        tiles = w.float().unflatten(1, (-1, self.group or w.shape[1]))
        whole = (tiles.abs().amax(-1) / TOP[self.format]).clamp_min(1e-8)
        best, error = whole.to(self.scale), torch.full_like(whole, torch.inf)
        for part in SHRUNK if self.format == "w4a16" else SHRUNK[:1]:
            scale = (whole * part).to(self.scale)
            wide = scale.float()[..., None]
            found = ((tiles / wide).round_().clamp_(*self._range).mul_(wide) - tiles).square_().sum(-1)
            best, error = torch.where(found < error, scale, best), torch.minimum(found, error)
        return best

    def round(self, w: Tensor, scales: Tensor) -> Tensor:
        """``w`` ``[n, some channels]`` as it is stored, int8 or e4m3; ``scales`` of the same shape."""
        q = w.float() / scales.float()
        if self.format == "fp8":
            return q.clamp(-TOP["fp8"], TOP["fp8"]).to(E4M3)
        return q.round().clamp(*self._range).to(torch.int8)

    def wide(self, scales: Tensor, k: int) -> Tensor:
        """Those of each channel, float32 ``[n, k]``."""
        return scales.float().repeat_interleave(self.group or k, 1)

    def stored(self, module: str, q: Tensor, scales: Tensor) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        if self.format != "w4a16":
            return {f"{module}.weight": q, f"{module}.weight_scale": scales}
        padded = F.pad(q.int() + 8, (0, -q.shape[1] % 8)).unflatten(1, (-1, 8))
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        return {
            f"{module}.weight_packed": (padded << shifts).sum(-1, dtype=torch.int32),
            f"{module}.weight_scale": scales,
            f"{module}.weight_shape": torch.tensor(q.shape),
        }

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """The checkpoint's ``quantization_config``."""
        number = {"type": "float" if self.format == "fp8" else "int", "symmetric": True, "dynamic": False}
        grouped = {"strategy": "group", "group_size": self.group} if self.group else {"strategy": "channel"}
        weights = {"num_bits": 4 if self.format == "w4a16" else 8, **number, **grouped}
        inputs = {"num_bits": 8, **number, "dynamic": True, "strategy": "token"}
        group = {
            "targets": ["Linear"],
            "weights": weights,
            "input_activations": None if self.format == "w4a16" else inputs,
            "output_activations": None,
        }
        names = {"w4a16": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}
        return {
            "quant_method": "compressed-tensors",
            "format": names[self.format],
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ignored,
        }

    @property
    def _range(self) -> tuple[float, float]:
        if self.format == "fp8":
            return -TOP["fp8"], TOP["fp8"]
        return LEAST[self.format], MOST[self.format]

"""What towers derive from the shapes of pictures: places, windows and lengths. transformers computes it on
the GPU and waits for it; here the host computes it, once for pictures of the same shapes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

KEPT = 32  # shapes


class Grids:
    """``module``: a model of transformers whose ``visual`` takes what ``vision_utils`` computes."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._known: OrderedDict[bytes, dict[str, Any]] = OrderedDict()

    @staticmethod
    def fit(module: Any) -> bool:
        visual = getattr(module, "visual", None)
        try:
            import transformers.vision_utils  # noqa: F401
        except ImportError:
            return False
        return all(hasattr(visual, name) for name in ("spatial_merge_size", "blocks", "rotary_pos_emb"))

    def of(self, grid: Tensor) -> dict[str, Any]:
        """Further arguments of ``get_image_features``. ``grid`` int64[N, 3], on the host."""
        key = grid.numpy().tobytes()
        known = self._known.pop(key, None)
        if known is None:
            known = {f"image_{name}": self._put(value) for name, value in derived(self._module, grid).items()}
        self._known[key] = known
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
        return known

    def _put(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or self._device.type == "cpu":
            return value
        return value.pin_memory().to(self._device, non_blocking=True)


def derived(module: Any, grid: Tensor) -> dict[str, Any]:
    """By the names that transformers has for it, on the host."""
    from transformers import vision_utils

    visual = module.visual
    merged = visual.spatial_merge_size
    found: dict[str, Any] = {"position_ids": vision_utils.get_vision_position_ids(grid, merged)}
    ends, longest = vision_utils.get_vision_attention_seqlens(grid, visual.config)
    found |= {"cu_seqlens": ends, "max_seqlen": longest}
    if hasattr(visual, "window_size"):
        index, ends = vision_utils.get_vision_window_index(
            grid, spatial_merge_size=merged, window_size=visual.window_size, patch_size=visual.patch_size
        )
        longest = vision_utils.get_max_seqlen(ends, visual.config)
        found |= {"window_index": index, "cu_window_seqlens": ends, "max_window_seqlen": longest}
    if hasattr(visual, "num_grid_per_side"):
        found["interp_indices"], found["interp_weights"] = (
            vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=merged,
            )
        )
    return found

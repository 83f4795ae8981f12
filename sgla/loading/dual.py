"""Pairs of encoders for texts and pictures: transformers' module with the checkpoint's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource
from sgla.loading.tower import Features
from sgla.model.dual import filler_of
from sgla.model.families.dual import DUALS
from sgla.model.registry import architecture_of


class DualEncoder:
    """``filler``: the token behind a text, up to ``length`` tokens; None: texts have none."""

    def __init__(self, module: Any, device: torch.device, filler: int | None, length: int) -> None:
        self.module, self.device = module, device
        self.dtype: torch.dtype = module.dtype
        self._filler, self._length = filler, length

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.module.parameters())

    def texts(self, ids: Tensor) -> Tensor:
        """int64 ``[n, length]``, of texts of one length -> ``[n, size]``."""
        ids = ids.to(self.device)
        if self._filler is not None:
            room = self._length - ids.shape[1]
            ids = torch.nn.functional.pad(ids, (0, room), value=self._filler)
        found: Tensor = self.module.get_text_features(input_ids=ids).pooler_output
        return found

    def __call__(self, arrays: Mapping[str, Tensor]) -> Features:
        """Of one picture."""
        return self.several([arrays], [1])[0]

    def several(self, pictures: Sequence[Mapping[str, Tensor]], counts: list[int]) -> list[Features]:
        """Of several, which have one size; a picture is one vector."""
        pixels = torch.cat([arrays["pixel_values"] for arrays in pictures])
        given = pixels.to(self.device, self.dtype)
        found = self.module.get_image_features(pixel_values=given).pooler_output
        return [Features(row.clone(), []) for row in found.split(counts)]


def load_dual(
    source: ModelSource, dtype: torch.dtype, device: torch.device, length: int, seed: int = 0
) -> DualEncoder:
    """``length``: of the longest text. Raises ConfigError, and WeightError for files that lack some."""
    from transformers import CONFIG_MAPPING, AutoModel

    name = architecture_of(source.config)
    try:
        config = CONFIG_MAPPING[source.config.get("model_type")].from_dict(dict(source.config))
    except Exception as error:
        raise ConfigError(
            f"config.json cannot be read by transformers: {error}"[:500], param="model"
        ) from error
    if source.kind == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = AutoModel.from_config(config, dtype=dtype)
    elif source.kind == "safetensors":
        module, told = AutoModel.from_pretrained(
            source.folder, config=config, dtype=dtype, output_loading_info=True, local_files_only=True
        )
        if lacking := told["missing_keys"]:
            raise WeightError(f"the weights lack {len(lacking)}: {', '.join(sorted(lacking)[:8])}")
    else:
        raise ConfigError(f"{name} is read from safetensors files, not from {source.kind}", param="model")
    filler = filler_of(source.folder, source.config) if DUALS[name].filled else None
    return DualEncoder(module.eval().requires_grad_(False).to(device), device, filler, length)

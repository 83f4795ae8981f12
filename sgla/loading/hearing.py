"""Features of sounds, by transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def heard(module: Any, log_mel: Tensor) -> Tensor:
    """``[n, d]`` of a window of sound, as ``WhisperModel.encoder`` makes them. ``log_mel``: [frames, mels];
    those that the last window of a sound lacks are zeros, as in transformers."""
    lacking = 2 * module.config.max_source_positions - len(log_mel)
    made: Tensor = module.encoder(F.pad(log_mel.T, (0, lacking))[None]).last_hidden_state[0]
    return made


def features_of(module: Any, given: Mapping[str, Tensor]) -> Tensor:
    """``[n, d]`` of one sound, as ``Qwen2AudioModel.forward`` makes them. ``given``: ``input_features``
    ``[1, mels, frames]``, and ``attention_mask`` int ``[1, frames]``, 1 where there is sound; or what the
    module's own ``get_audio_features`` takes."""
    if "attention_mask" not in given:
        told = module.get_audio_features(**given, return_dict=True)
        whole: Tensor = told.pooler_output.reshape(-1, told.pooler_output.shape[-1])
        seen = getattr(told, "attention_mask", None)
        return whole if seen is None else whole[seen.flatten()]
    mask = given["attention_mask"]
    heard, count = (int(n) for n in module.audio_tower._get_feat_extract_output_lengths(mask.sum()))
    room = (mask.shape[1] - 2) // 2 + 1
    seen = (torch.arange(room, device=mask.device) < heard).expand(1, 1, room, room)
    found = module.audio_tower(given["input_features"], attention_mask=None if heard >= room else seen)
    made: Tensor = module.multi_modal_projector(found.last_hidden_state)[0, :count]
    return made

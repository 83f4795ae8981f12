"""The part of a model that makes features of pictures or sounds: transformers' module with the checkpoint's
weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from sgla.errors import ConfigError, WeightError
from sgla.hub.source import SAID, ModelSource
from sgla.loading.hearing import features_of, heard
from sgla.loading.patches import patches_of
from sgla.loading.tower_grid import Grids
from sgla.media.arrays import BLOCK, FEATURES, LEVELS, PIXELS
from sgla.model.vision.spec import Vision

# A language model that takes next to nothing stands where transformers' class wants one.
SMALL: dict[str, Any] = {"num_hidden_layers": 0, "vocab_size": 8, "pad_token_id": None, "layer_types": []}
GRID = "image_grid_thw"
SEEN = "tower"  # in a profile
READ = (
    *("pixel_values", "pixel_attention_mask", GRID, "image_sizes", "batch_num_images"),
    *("image_position_ids", "target_sizes", "pixel_values_videos"),
)
HEARD = ("input_features", "attention_mask", "input_features_mask", "feature_attention_mask", "log_mel")
TEXTS = ("language_model", "text_model", "decoder")


class Features(NamedTuple):
    """Of one picture or sound: what stands in place of its tokens' embeddings ``[n, d]``, and what is added
    to the outputs of the first layers."""

    values: Tensor
    deep: list[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.values, *self.deep))

    def layer(self, i: int) -> Tensor:
        """What is added to the output of layer ``i``; what is no number, if nothing of the picture is."""
        return self.deep[i] if i < len(self.deep) else self.values


class Copies:
    """Arrays to a GPU on a stream of its own: those of pictures beside what is computed of the last ones.
    The host goes on when what is computed of all but ``AHEAD`` is done, or their memory would pile up."""

    AHEAD = 2

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._computed: deque[torch.cuda.Event] = deque()

    def put(self, values: Tensor) -> Tensor:
        """``values``: in pinned memory."""
        now = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            there = values.to(self._device, non_blocking=True)
        now.wait_stream(self._stream)
        there.record_stream(now)
        return there

    def computed(self) -> None:
        """What was put is in use no more, once the device comes here."""
        self._computed.append(torch.cuda.current_stream(self._device).record_event())
        if len(self._computed) > self.AHEAD:
            self._computed.popleft().synchronize()


class Tower:
    """``module``: a model of transformers without its language model. ``apart``: it takes the steps of a
    video as pictures."""

    def __init__(self, module: Any, device: torch.device, apart: bool = False) -> None:
        self.module, self.device, self._apart = module, device, apart
        self.dtype: torch.dtype = module.dtype
        self.grids: Grids | None = None  # where the host computes what follows from shapes of pictures
        self._copies = Copies(device) if device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.module.parameters(), *self.module.buffers()))

    def __call__(self, arrays: Mapping[str, Tensor]) -> Features:
        """Of one picture or sound. ``arrays``: what the processor made of it."""
        with record_function(SEEN):
            made = self._seen(arrays)
        if self._copies is not None:
            self._copies.computed()
        return made

    def several(self, pictures: Sequence[Mapping[str, Tensor]], counts: list[int]) -> list[Features]:
        """Of several, and of videos, whose patches lie behind each other, with so many tokens each. Raises
        RuntimeError if they have not."""
        with record_function(SEEN):
            read = [self._read(one) for one in pictures]
            joined = {name: torch.cat([one[name] for one in read]) for name in read[0]}
        whole = self(joined)
        values, *deep = (x.split(counts) for x in (whole.values, *whole.deep))
        return [
            Features(own.clone(), [of[i].clone() for of in deep]) for i, own in enumerate(values)
        ]  # memory of their own, or one would keep that of all

    def _put(self, name: str, values: Tensor) -> Tensor:
        """On the device, without waiting for pinned ones, in the type of the weights; shapes stay where they
        are looked at."""
        if self.grids is not None and name == GRID:
            return values
        if self._copies is not None and values.is_pinned():
            values = self._copies.put(values)
        there = values.to(self.device)
        return there.to(self.dtype) if values.is_floating_point() else there

    def _read(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the module takes, on the device."""
        given = {name: self._put(name, values) for name, values in arrays.items() if name in READ + HEARD}
        if PIXELS in arrays:
            pixels, levels = (self._put(name, arrays[name]) for name in (PIXELS, LEVELS))
            grid, block = arrays[GRID][0].tolist(), arrays[BLOCK].tolist()
            given["pixel_values"] = patches_of(pixels, levels, grid, block)
        return given

    def _seen(self, arrays: Mapping[str, Tensor]) -> Features:
        given: dict[str, Any] = self._read(arrays)
        if "log_mel" in given:
            return Features(heard(self.module, given["log_mel"]), [])
        if "input_features" in given:
            return Features(features_of(self.module, given), [])
        if self._apart:
            given[GRID] = steps_of(given[GRID])
        if self.grids is not None:
            given |= self.grids.of(given[GRID])
        films = "pixel_values_videos" in given
        see = self.module.get_video_features if films else self.module.get_image_features
        made = see(**given, return_dict=True)
        found = made.pooler_output
        if found is None:  # Llama 4 leaves that to its language model
            found = self.module.multi_modal_projector(joined(made.last_hidden_state))
        deep = getattr(made, "deepstack_features", None) or []
        return Features(joined(found), [joined(of) for of in deep])


class Elsewhere:
    """In place of a ``Tower``: another server has made the features, which lie beside what its processor made
    of a picture."""

    nbytes = 0

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, arrays: Mapping[str, Tensor]) -> Features:
        found = [arrays[name].to(self.device, self.dtype) for name in arrays if name.startswith(FEATURES)]
        if not found:
            raise RuntimeError("no server has made them")
        return Features(found[0], found[1:])

    def several(self, pictures: Sequence[Mapping[str, Tensor]], counts: list[int]) -> list[Features]:
        return [self(arrays) for arrays in pictures]


def steps_of(grid: Tensor) -> Tensor:
    """int64[N, 3], of steps in time, rows and columns -> the same, each of one step."""
    once = grid.repeat_interleave(grid[:, 0], 0)
    once[:, 0] = 1
    return once


def joined(found: Tensor | Sequence[Tensor]) -> Tensor:
    """``[n, d]``, which versions of transformers have whole or in parts."""
    values = found if isinstance(found, Tensor) else torch.cat(list(found))
    return values.reshape(-1, values.shape[-1])


def small_config(config: dict[str, Any]) -> Any:
    """transformers' configuration of the model, with a language model of no layers, whose quantization is not
    its affair. Raises ConfigError."""
    from transformers import CONFIG_MAPPING

    config = {key: value for key, value in deepcopy(config).items() if key not in SAID}
    if isinstance(inner := config.get("text_config"), dict):
        config["text_config"] = {key: value for key, value in inner.items() if key not in SAID}
    kind = config.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"transformers knows no model_type {str(kind)[:60]!r}", param="model")
    try:
        found = CONFIG_MAPPING[kind].from_dict(config)
    except Exception as error:
        raise ConfigError(
            f"config.json cannot be read by transformers: {error}"[:500], param="model"
        ) from error
    if found.is_encoder_decoder:
        found.decoder_layers, found.vocab_size, found.pad_token_id = 0, SMALL["vocab_size"], None
        return found
    text = found.get_text_config()
    for key, value in SMALL.items():
        if hasattr(text, key):
            setattr(text, key, value)
    return found


def load_tower(
    source: ModelSource, vision: Vision, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Tower:
    """Raises ConfigError, and WeightError for files that lack some of its weights."""
    from transformers import AutoModel
    from transformers.utils import logging

    config = small_config(source.config)
    if vision.hearing is None and getattr(config, "audio_config", None) is not None:
        config.audio_config = None  # another tower, which nothing is shown to
    settings: dict[str, Any] = {"config": config, "dtype": dtype}
    if source.kind == "dummy":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            del settings["config"]
            module = AutoModel.from_config(config, **settings)
    else:
        level = logging.get_verbosity()
        logging.set_verbosity(logging.CRITICAL)  # it would tell of weights that are left out
        try:
            module, told = AutoModel.from_pretrained(
                source.folder,
                **settings,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                local_files_only=True,
            )
        finally:
            logging.set_verbosity(level)
        if lacking := [name for name in told["missing_keys"] if not _of_text(name)]:
            raise WeightError(
                f"the weights lack {len(lacking)} of the tower: {', '.join(sorted(lacking)[:8])}"
            )
    for name in TEXTS:
        if hasattr(module, name):
            setattr(module, name, nn.Identity())
    apart = vision.film is not None and vision.film.apart
    return Tower(module.eval().requires_grad_(False).to(device), device, apart)


def _of_text(name: str) -> bool:
    return any(part in TEXTS for part in name.split("."))

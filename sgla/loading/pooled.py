"""Models that answer with vectors: the body and the layers behind the pooling, with weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from sgla.dist import Shard
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.layers.build import Build
from sgla.loading.load import Declared, OnProgress, decoder_build, load_weights, model_of, towers_of
from sgla.messages import Pooling
from sgla.model.base import CausalLM
from sgla.model.bert import Encoder
from sgla.model.encoder import IGNORED, EncoderSpec
from sgla.model.families import FAMILIES
from sgla.model.grouped_encoder import GroupedEncoder
from sgla.model.heads import Layer, make_head
from sgla.model.read import read_decoder
from sgla.model.registry import body_of
from sgla.model.rotary_encoder import RotaryEncoder
from sgla.model.sizes import as_stored, kinds_of
from sgla.quant.weight import Make, anywhere


class PooledEncoder(NamedTuple):
    body: Encoder | RotaryEncoder | GroupedEncoder
    head: list[Layer]


class PooledDecoder(NamedTuple):
    body: CausalLM
    head: list[Layer]


def load_encoder(
    source: ModelSource,
    pooling: Pooling,
    dtype: str,
    quantization: str | None = None,
    on_progress: OnProgress | None = None,
    seed: int = 0,
) -> PooledEncoder:
    """Raises ConfigError and WeightError as ``load_model`` does."""
    spec = EncoderSpec.from_config(source.config)
    build = Build(Shard(), *kinds_of(dtype, quantization, spec.method))
    if as_stored(spec.method, quantization) is not None:
        build.kinds = {tensor.name: tensor.kept or build.plain for tensor in source.gguf().tensors()}
    body, made = _body(spec, build), FAMILIES[spec.family].classifier
    bias, norm = True, None
    if isinstance(body, RotaryEncoder) and body.rotary.before:  # ModernBERT
        bias, norm = "head" in body.rotary.biases, partial(body.norm_of, build, "head.norm")
    model = PooledEncoder(body, make_head(pooling, build, made, spec.hidden, bias, norm))
    unused = [f"{name}." for name in ("pooler", "head") if f"{name}.dense.weight" not in build.table]
    load_weights(
        source,
        build,
        spec.architecture,
        ignored=(*IGNORED, *unused),
        rename=spec.rename,
        on_progress=on_progress,
        seed=seed,
    )
    return model


def _body(spec: EncoderSpec, build: Build) -> Encoder | RotaryEncoder | GroupedEncoder:
    if spec.grouped is not None:
        return GroupedEncoder(spec, build)
    return Encoder(spec, build) if spec.rotary is None else RotaryEncoder(spec, build)


def load_decoder(
    source: ModelSource,
    pooling: Pooling,
    dtype: str,
    quantization: str | None,
    shard: Shard,
    context_len: int,
    on_progress: OnProgress | None = None,
    seed: int = 0,
    on_model: Callable[[CausalLM], None] | None = None,
    make: Make = anywhere,
) -> PooledDecoder:
    """Without its output layer. ``on_model`` is told of the body; ``make``: as in ``load_model``. Raises
    ConfigError and WeightError as ``load_model`` does."""
    spec = read_decoder(source.config)
    body = body_of(spec.architecture)
    if body is None:
        raise ConfigError(f"{spec.architecture} cannot be pooled", param="task")
    build = decoder_build(source, spec, dtype, quantization, shard, _decoder_name)
    build.make = make
    # The output layer of a tied model is no tensor of its own.
    model = PooledDecoder(
        model_of(replace(spec, architecture=body, tied=True), build, context_len),
        make_head(pooling, build, None, spec.hidden),
    )
    if on_model is not None:
        on_model(model.body)
    ignored = (*towers_of(spec.architecture), *model.body.ignored)
    model.body.declared = Declared(build, spec.architecture, True, ignored, _decoder_name, seed=seed)
    model.body.declared.load(source, on_progress)
    return model


def _decoder_name(name: str) -> str:
    """Checkpoints of a model without a head leave out the prefix of its body."""
    return name if name.startswith(("model.", "language_model.", "lm_head.", "score.")) else f"model.{name}"

"""The weights of heads that guess tokens behind the next one."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import replace

import torch

from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource
from sgla.layers.build import Values
from sgla.layers.vocab import LMHead
from sgla.loading.checkpoint import FileTensor
from sgla.loading.load import OnProgress, decoder_build, load_weights, mending, renaming
from sgla.model.base import Decoder
from sgla.model.dflash import DFlash
from sgla.model.drafting import BlockSpec, EagleSpec, MedusaSpec, predictor_layer, predictor_names
from sgla.model.eagle import Eagle, Eagle3
from sgla.model.medusa import Medusa
from sgla.model.predictor import Head, Predictor
from sgla.quant.weight import SourceTensor

EVERYTHING = ("",)  # a prefix of all names


def narrow(head: Predictor | Eagle, tokens: list[int] | None) -> None:
    """Have it guess none but ``tokens``, if they are given."""
    if tokens is not None:
        own, ids = head.out.own, torch.tensor(tokens)
        head.ids, head.out = ids[(ids >= own.start) & (ids < own.stop)], head.out.only(ids)


def repack(head: Head | DFlash, kind: str | None) -> LMHead | None:
    """Have it guess with an output layer in another storage, if one is given; the layer that this was made
    of, if there is one and its products are the logits."""
    if kind is None:
        return None
    exact, head.out = head.out, head.out.stored_as(kind)
    return exact if exact.plain and exact.weight.kind in ("bf16", "f32") else None


def with_embedding(
    source: ModelSource,
    target: Decoder,
    dtype: str,
    quantization: str | None,
    report: OnProgress,
    seed: int = 0,
) -> Decoder:
    """``target``, whose embedding heads read; the last stage of a pipeline has none, so it gets one."""
    if target.spec.first:
        return target
    rename, made = renaming(target.spec.architecture), copy(target)
    if target.tied is not None:
        made.embed = target.tied
        return made
    build = decoder_build(source, target.spec, dtype, quantization, target.shard.of_guesses, rename)
    made.embed = target.embedding(build)
    load_weights(
        source,
        build,
        f"{target.spec.architecture}'s embedding",
        ignored=EVERYTHING,
        rename=rename,
        mend=mending(target.spec),
        on_progress=report,
        seed=seed,
    )
    return made


def load_predictor(
    source: ModelSource,
    target: Decoder,
    dtype: str,
    quantization: str | None,
    report: OnProgress,
    seed: int = 0,
) -> Predictor:
    """The layer of the target's own checkpoint that guesses further tokens. Raises ConfigError for a GGUF
    file, and WeightError if there is none."""
    spec = target.spec
    if source.kind == "gguf":
        raise ConfigError(
            "--speculative-algorithm mtp cannot be honoured for GGUF files, whose layers that guess further "
            "tokens are left out; take safetensors",
            param="speculative_algorithm",
        )
    rename = renaming(spec.architecture)
    build = decoder_build(source, spec, dtype, quantization, target.shard.of_guesses, rename)
    head = Predictor(target, build, predictor_names(spec), predictor_layer(spec))
    load_weights(
        source,
        build,
        f"{spec.architecture}'s layer that guesses further tokens",
        ignored=EVERYTHING,
        rename=rename,
        mend=mending(spec),
        on_progress=report,
        seed=seed,
    )
    return head


def load_medusa(
    source: ModelSource,
    target: Decoder,
    medusa: MedusaSpec,
    dtype: str,
    quantization: str | None,
    report: OnProgress,
    seed: int = 0,
) -> Medusa:
    """Raises WeightError for heads whose files are neither as the authors' nor as vLLM's."""

    def rename(name: str) -> str:
        """vLLM's names as the authors'."""
        name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        return re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{medusa.layers}.", name)

    own = replace(target.spec, method=None)  # whatever their target's files are
    build = decoder_build(source, own, dtype, quantization, target.shard.of_guesses, rename)
    heads = Medusa(target, build, medusa.heads, medusa.layers, medusa.bias)
    load_weights(source, build, "Medusa", rename=rename, on_progress=report, seed=seed)
    return heads


def load_block(
    source: ModelSource,
    target: Decoder,
    block: BlockSpec,
    dtype: str,
    quantization: str | None,
    positions: int,
    report: OnProgress,
    seed: int = 0,
) -> DFlash:
    """Raises WeightError for a head whose files are not as DFlash's."""
    build = decoder_build(source, block.spec, dtype, quantization, target.shard.of_guesses)
    head = DFlash(target, block.spec, build, positions, len(block.layers), block.mask)
    ignored = ("embed_tokens.", "lm_head.")
    load_weights(source, build, "DFlash", ignored=ignored, on_progress=report, seed=seed)
    return head


def _as_authors(name: str) -> str:
    """Of a tensor of EAGLE, which others put into a model."""
    return name.removeprefix("model.")


def _as_third(name: str) -> str:
    """The same of EAGLE-3, whose layer others call by its number."""
    return re.sub(r"^layers\.0\.", "midlayer.", _as_authors(name))


def load_eagle(
    source: ModelSource,
    target: Decoder,
    eagle: EagleSpec,
    dtype: str,
    quantization: str | None,
    positions: int,
    report: OnProgress,
    seed: int = 0,
) -> Eagle | Eagle3:
    """Raises WeightError for a head whose files are not as EAGLE's."""
    rename = _as_third if eagle.layers else _as_authors
    build = decoder_build(source, eagle.spec, dtype, quantization, target.shard.of_guesses, rename)
    ignored = ("embed_tokens.", "model.embed_tokens.", "lm_head.")
    if not eagle.layers:
        first = Eagle(target, eagle.spec, build, positions, eagle.bias)
        load_weights(source, build, "EAGLE", ignored=ignored, on_progress=report, seed=seed)
        return first
    places, normed = len(eagle.layers), (eagle.normed, eagle.read_normed)
    head = Eagle3(target, eagle.spec, build, positions, places, eagle.vocab, *normed)

    def mend(name: str, tensor: SourceTensor) -> SourceTensor:
        return Values(tensor.values()) if name == "d2t" and isinstance(tensor, FileTensor) else tensor

    unread = ("t2d", "d2t", *ignored)
    load_weights(
        source, build, "EAGLE-3", ignored=unread, rename=rename, mend=mend, on_progress=report, seed=seed
    )
    if head.ids is not None and not 0 <= int(head.ids.min()) <= int(head.ids.max()) < head.vocab:
        raise WeightError("d2t of the EAGLE-3 head names tokens that its model has not")
    return head

"""``sgla quantize``: a checkpoint whose linear layers have few bits, as compressed-tensors has them.

A decoder layer at a time is read, rounded and written to a file of its own, so memory holds one layer, and
with calibration what its inputs are. Round-to-nearest needs no text; GPTQ and AWQ do (``calibrate.py``).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.layers.build import Build
from sgla.loading.checkpoint import FileTensor, Numbers, canonical, renamed, stored_tensors
from sgla.loading.gguf_tensors import weights_of_file
from sgla.loading.load import model_of
from sgla.loading.stacks import lie_turned, matrices, of_experts
from sgla.messages import Progress
from sgla.model.encoder import EncoderSpec
from sgla.model.family import Family
from sgla.model.generic_spec import GenericSpec
from sgla.model.read import read_spec
from sgla.model.registry import family_of
from sgla.quant.encode import Recipe
from sgla.quant.weight import SourceTensor, Weight

OnProgress = Callable[[Progress], None]
GROUPS = (128, 64, 32)  # channels with one scale, the first that divides all layers
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass
class Linears(Build):
    """Notes which modules are linear layers."""

    modules_of: set[str] = field(default_factory=set)
    widths: set[int] = field(default_factory=set)

    def empty(self, n: int, k: int, *modules: str, gathers: bool = False) -> Weight:
        self.modules_of.update(modules)
        self.widths.add(k)
        return super().empty(n, k, *modules, gathers=gathers)


@dataclass(frozen=True)
class Job:
    """``tensors``: of the source by name, those of each decoder layer by its index, all others under -1;
    ``linears``: the modules that are rounded; ``numbers``: see ``Family``."""

    source: ModelSource
    recipe: Recipe
    tensors: dict[int, dict[str, SourceTensor]]
    linears: frozenset[str]
    dtype: torch.dtype
    numbers: tuple[str, ...] = ()

    def read(self, index: int) -> dict[str, Tensor]:
        """The tensors of a layer, as the source's type of floats; whole numbers as they are."""
        return {
            name: Numbers(tensor).dense()
            if isinstance(tensor, FileTensor) and name.endswith(self.numbers)
            else tensor.dense().to(self.dtype)
            for name, tensor in self.tensors[index].items()
        }

    def module(self, name: str) -> str | None:
        """The linear layer whose matrix a tensor is."""
        module = canonical(name).removesuffix(".weight")
        return name.removesuffix(".weight") if module in self.linears and name.endswith(".weight") else None


Rounded = dict[str, tuple[Tensor, Tensor]]  # by the name of a matrix: numbers and scales
Solve = Callable[[Job, OnProgress], Iterator[tuple[int, dict[str, Tensor], Rounded]]]


def plan(source: ModelSource, format: str) -> Job:
    """What is to be done. Raises ConfigError for a model that cannot be quantized."""
    spec = read_spec(source.config)
    if isinstance(spec, EncoderSpec):
        raise ConfigError("only decoders are quantized, and this is an encoder", param="model")
    if isinstance(spec, GenericSpec):
        raise ConfigError(
            f"{spec.architecture} runs by transformers' module, whose layers are not known here"
        )
    if spec.method is not None and source.kind != "gguf":
        raise ConfigError("the checkpoint is quantized already; take the one that is not", param="model")
    if spec.moe is not None and spec.moe.halves:  # whose experts are rounded one by one
        spec = replace(spec, moe=replace(spec.moe, crossed=False))
    with torch.device("meta"):
        build = Linears()
        model_of(spec, build, 32)
    family, tensors = family_of(spec.architecture), dict[int, dict[str, SourceTensor]]()
    linears, gguf = set(build.modules_of), source.kind == "gguf"
    for name, tensor in weights_of_file(source) if gguf else _unstacked(source, build, family):
        at = _LAYER.search(name)
        tensors.setdefault(int(at[1]) if at else -1, {})[name] = tensor
        ours = renamed(canonical(name), family.renamed)
        if ours.removesuffix(".weight") in build.modules_of:
            linears.add(canonical(name).removesuffix(".weight"))
    group = next((size for size in GROUPS if all(k % size == 0 for k in build.widths)), 0)
    dtype = _DTYPES.get(spec.dtype, torch.bfloat16)
    recipe = Recipe(format, group if format == "w4a16" else 0, dtype)
    return Job(source, recipe, tensors, frozenset(linears), dtype, family.numbers)


def _unstacked(source: ModelSource, build: Build, family: Family) -> Iterator[tuple[str, FileTensor]]:
    """Experts one by one."""
    stored = dict(stored_tensors(source))
    names = {raw: renamed(canonical(raw), family.renamed) for raw in stored}
    ours = of_experts(build)
    stacks = {names[raw]: tensor for raw, tensor in stored.items() if names[raw] in ours}
    turned = lie_turned(stacks, build)
    for raw, tensor in stored.items():
        if (name := names[raw]) not in stacks:
            yield raw, tensor
            continue
        theirs, known = raw.rpartition(".")[0], name.rpartition(".")[0]
        for part, matrix in matrices(name, tensor, build, turned):
            yield theirs + part.name.removeprefix(known), matrix


def nearest(job: Job, on_progress: OnProgress) -> Iterator[tuple[int, dict[str, Tensor], Rounded]]:
    """Round each matrix by itself."""
    for index in sorted(job.tensors):
        tensors, rounded = job.read(index), Rounded()
        for name, w in tensors.items():
            if job.module(name) is not None and w.dim() == 2:
                scales = job.recipe.scales(w)
                rounded[name] = job.recipe.round(w, job.recipe.wide(scales, w.shape[1])), scales
        yield index, tensors, rounded


def write(job: Job, out: Path, solve: Solve, on_progress: OnProgress) -> None:
    """The checkpoint into the folder ``out``, which must be empty, and is again if this fails. Raises
    ConfigError and WeightError."""
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; name a folder that is, or none yet")
    try:
        _write(job, out, solve, on_progress)
    except BaseException:
        for path in out.iterdir():
            path.unlink()
        raise


def _write(job: Job, out: Path, solve: Solve, on_progress: OnProgress) -> None:
    places: dict[str, str] = {}
    ignored, total, size = set[str](), 0, len(job.tensors)
    for done, (index, tensors, rounded) in enumerate(solve(job, on_progress)):
        made: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            module = job.module(name)
            if name in rounded and module is not None:
                made |= job.recipe.stored(module, *rounded[name])
                continue
            made[name] = tensor.contiguous()
            if tensor.dim() == 2 and name.endswith(".weight") and "embed" not in name:
                ignored.add(name.removesuffix(".weight"))
        file = f"model-{index + 2:05d}-of-{max(job.tensors) + 2:05d}.safetensors"
        save_file(made, out / file, {"format": "pt"})
        places |= dict.fromkeys(made, file)
        total += sum(tensor.nbytes for tensor in made.values())
        on_progress(Progress(phase="quantize", message="layers", done=done + 1, total=size))
    index_file = {"metadata": {"total_size": total}, "weight_map": places}
    listed = out / "model.safetensors.index.json"
    listed.write_text(json.dumps(index_file, indent=2))
    for file in {*places.values()}:  # which the library makes for their owner alone
        (out / file).chmod(listed.stat().st_mode)
    _copy_others(job.source, out)
    said = job.recipe.config(sorted({*ignored, "lm_head"}))
    dtype = str(job.dtype).removeprefix("torch.")
    config = _without_quantization(job.source.config) | {"dtype": dtype, "quantization_config": said}
    (out / "config.json").write_text(json.dumps(config, indent=2))


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}


def _copy_others(source: ModelSource, out: Path) -> None:
    """What is no weights: the tokenizer and settings."""
    if source.kind == "gguf":
        (out / "generation_config.json").write_text(json.dumps(source.generation_config))
        return
    for path in sorted(source.folder.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.name != "config.json":
            shutil.copyfile(path, out / path.name)

"""Rounding by what the inputs of layers are: GPTQ (arXiv 2210.17323).

transformers' module runs over the text once. Its layers are on the meta device: a layer's weights come when
it is reached, its linear layers' inputs are gathered while it runs, its matrices are rounded, and it runs
again with them, so that the next layer sees what it will see. Then its weights go.
"""

from __future__ import annotations

from collections.abc import Iterator
from queue import Queue
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from sgla.errors import ConfigError
from sgla.loading.checkpoint import canonical
from sgla.loading.quantize import Job, OnProgress, Rounded
from sgla.quant.encode import Recipe

BLOCK = 128  # channels whose errors are spread at once
DAMP = 0.01  # of the mean of the Hessian's diagonal, what is added to it


def gptq(w: Tensor, hessian: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Numbers and scales of ``w`` ``[n, k]``; ``hessian``: sum of its inputs' outer products, ``[k, k]``."""
    w, k, size = w.float().clone(), w.shape[1], recipe.group or w.shape[1]
    dead = hessian.diagonal() == 0
    w[:, dead] = 0
    damped = hessian + torch.diag(DAMP * hessian.diagonal().mean() + dead.float())
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    numbers = torch.empty(w.shape, dtype=torch.float8_e4m3fn if recipe.format == "fp8" else torch.int8)
    scales = []
    for first in range(0, k, BLOCK):
        last = min(first + BLOCK, k)
        errors = torch.zeros(len(w), last - first)
        for at in range(first, last):
            if at % size == 0:
                scales.append(recipe.scales(w[:, at : at + size])[:, :1])
            scale = scales[-1]
            q = recipe.round(w[:, at : at + 1], scale)
            numbers[:, at : at + 1] = q
            error = (w[:, at] - (q.float() * scale.float())[:, 0]) / upper[at, at]
            w[:, at:last] -= error[:, None] * upper[at, at:last]
            errors[:, at - first] = error
        w[:, last:] -= errors @ upper[first:last, last:]
    return numbers, torch.cat(scales, 1)


class Calibration:
    """Solves a ``Job`` by ``tokens`` int64 ``[texts, length]``."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __call__(self, job: Job, on_progress: OnProgress) -> Iterator[tuple[int, dict[str, Tensor], Rounded]]:
        others = job.read(-1)
        yield -1, others, {}
        done: Queue[Any] = Queue(1)  # so that no more than one layer waits to be written
        thread = Thread(target=self._run, args=(job, others, done), daemon=True)
        thread.start()
        while (found := done.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found

    @torch.no_grad()
    def _run(self, job: Job, others: dict[str, Tensor], done: Queue[Any]) -> None:
        try:
            base = _module(job, others)
            for index, layer in enumerate(base.layers):
                _watch(job, index, layer, done)
            base(input_ids=self.tokens, use_cache=False)
            done.put(None)
        except BaseException as error:
            done.put(error)


def _module(job: Job, others: dict[str, Tensor]) -> Any:
    """transformers' module without weights in its layers. Raises ConfigError for one of another form."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**job.source.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    base = model.model
    if not isinstance(getattr(base, "layers", None), nn.ModuleList):
        raise ConfigError(f"calibration needs a model with layers, which {type(base).__name__} has not")
    weights = {canonical(name): tensor.float() for name, tensor in others.items()}
    for name, child in base.named_children():
        if name == "norm":
            base.norm = nn.Identity()
        elif "rotary" in name:
            setattr(base, name, type(child)(config))
        elif name != "layers":
            child.to_empty(device="cpu")
            _fill(child, f"model.{name}.", weights)
    return base


def _fill(module: nn.Module, prefix: str, weights: dict[str, Tensor]) -> None:
    for name, parameter in module.named_parameters():
        if (found := weights.get(prefix + name)) is None or found.shape != parameter.shape:
            raise ConfigError(
                f"calibration: the checkpoint has no {prefix}{name} as transformers has it; "
                "leave --calibrate out"
            )
        parameter.copy_(found)


def _watch(job: Job, index: int, layer: nn.Module, done: Queue[Any]) -> None:
    """Let a layer bring, round and give up its weights when it runs."""
    held: dict[str, Tensor] = {}
    state = {"again": False}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not state["again"]:
            held.update(job.read(index))
            module.to_empty(device="cpu")
            named = {canonical(name): tensor.float() for name, tensor in held.items()}
            _fill(module, f"model.layers.{index}.", named)
            for linear in linears.values():
                linear.hessian = torch.zeros(linear.in_features, linear.in_features)

    def gather(linear: Any, args: Any) -> None:
        if not state["again"]:
            for text in args[0].flatten(0, -2).float().split(8192):
                linear.hessian += text.T @ text

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if state["again"]:
            return None
        rounded: Rounded = {}
        for name, tensor in held.items():
            linear = linears.get(canonical(name).removesuffix(".weight"))
            if linear is not None and job.module(name) is not None:
                numbers, scales = gptq(tensor, linear.hessian, job.recipe)
                linear.weight.copy_(numbers.float() * job.recipe.wide(scales, tensor.shape[1]))
                rounded[name] = numbers, scales
                linear.hessian = None
        state["again"] = True
        again = module(*args, **kwargs)
        done.put((index, dict(held), rounded))
        held.clear()
        module.to_empty(device="meta")
        return again

    prefix = f"model.layers.{index}."
    linears: dict[str, Any] = {
        prefix + name: child for name, child in layer.named_modules() if isinstance(child, nn.Linear)
    }
    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, with_kwargs=True)
    for linear in linears.values():
        linear.register_forward_pre_hook(gather)


def calibration(rows: list[list[int]]) -> Calibration:
    """By texts of one length."""
    return Calibration(torch.tensor(rows))

"""Rounding by what the inputs of layers are: GPTQ (arXiv 2210.17323) and AWQ (arXiv 2306.00978).

transformers' module runs over the text once. Its layers are on the meta device: a layer's weights come when
it is reached, its linear layers' inputs are gathered while it runs, its matrices are rounded, and it runs
again with them, so that the next layer sees what it will see. Then its weights go. Experts, which see few of
the texts, are rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
POWERS = [i / 20 for i in range(20)]  # of the sizes of channels, which AWQ tries
# What makes the input of linear layers, and these: there AWQ's factors cancel.
FOLDED = (
    (("input_layernorm",), ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    (("pre_feedforward_layernorm", "post_attention_layernorm"), ("mlp.gate_proj", "mlp.up_proj")),
    (("mlp.up_proj",), ("mlp.down_proj",)),
)
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


@dataclass
class Layer:
    """One that has run: ``held``, its tensors by their names in the file; ``linears`` and ``moments``, the
    sums of their inputs' outer products and of their inputs' sizes, by module; ``run``: what it makes of its
    inputs."""

    module: nn.Module
    prefix: str
    held: dict[str, Tensor]
    linears: dict[str, nn.Linear]
    moments: dict[str, tuple[Tensor, Tensor]]
    run: Callable[[], Any]

    def matrices(self, job: Job) -> Iterator[tuple[str, str]]:
        """The names of those that are rounded, and their modules."""
        for name in self.held:
            module = canonical(name).removesuffix(".weight")
            if module in self.linears and job.module(name) is not None:
                yield name, module


def by_gptq(layer: Layer, job: Job) -> Rounded:
    """Errors of a channel are made up for by those that come later."""
    found: Rounded = {}
    for name, module in layer.matrices(job):
        numbers, scales = gptq(layer.linears[module].weight, layer.moments[module][0], job.recipe)
        found[name] = numbers, scales
    return found


def by_awq(layer: Layer, job: Job) -> Rounded:
    """Channels whose inputs are large become larger before they are rounded, and what makes these inputs
    makes them smaller. Raises ConfigError where the layer is then another one."""
    before = _first(layer.run())
    named = {module: name for name, module in layer.matrices(job)}
    inside = dict(layer.module.named_modules())
    for makers, parts in FOLDED:
        modules = [f"{layer.prefix}{part}" for part in parts]
        maker: Any = next((inside[name] for name in makers if name in inside), None)
        if maker is None or not all(module in named for module in modules):
            continue
        factors = _factors([layer.linears[m].weight for m in modules], *layer.moments[modules[0]], job.recipe)
        for module in modules:
            layer.linears[module].weight.mul_(factors)
        if isinstance(maker, nn.Linear):
            maker.weight.div_(factors[:, None])
        else:
            shift = 1.0 if "Gemma" in type(maker).__name__ else 0.0
            maker.weight.copy_((maker.weight + shift) / factors - shift)
    after = _first(layer.run())
    if not torch.allclose(before, after, rtol=1e-2, atol=1e-3 * float(before.abs().max())):
        raise ConfigError("the scales of AWQ do not fit this model's layers; use --method gptq")
    parameters = dict(layer.module.named_parameters())
    for name in layer.held:
        if (own := canonical(name).removeprefix(layer.prefix)) in parameters:
            layer.held[name] = parameters[own].to(job.dtype)
    found: Rounded = {}
    for name, module in layer.matrices(job):
        w = layer.linears[module].weight
        scales = job.recipe.scales(w)
        found[name] = job.recipe.round(w, job.recipe.wide(scales, w.shape[1])), scales
    return found


def _experts(layer: Layer, job: Job) -> Rounded:
    """Those whose matrices are no linear layers of the module, to nearest."""
    found: Rounded = {}
    for name, w in layer.held.items():
        if job.module(name) is not None and canonical(name).removesuffix(".weight") not in layer.linears:
            scales = job.recipe.scales(w)
            found[name] = job.recipe.round(w, job.recipe.wide(scales, w.shape[1])), scales
    return found


def _factors(weights: list[Tensor], hessian: Tensor, sizes: Tensor, recipe: Recipe) -> Tensor:
    """What the input channels of layers with one input are multiplied by, float32 ``[k]``: the powers of
    their mean size with the smallest error of the layers' results."""
    best, error = torch.ones_like(sizes), float("inf")
    mean = (sizes / sizes.mean()).clamp_min(1e-4)
    for power in POWERS:
        factors = mean**power
        factors = factors / (factors.max() * factors.min()).sqrt()
        lost = 0.0
        for w in weights:
            wide = w * factors
            scales = recipe.wide(recipe.scales(wide), w.shape[1])
            off = recipe.round(wide, scales).float() * scales / factors - w
            lost += float(((off @ hessian) * off).sum())
        if lost < error:
            best, error = factors, lost
    return best


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


SOLVERS = {"gptq": by_gptq, "awq": by_awq}


class Calibration:
    """Solves a ``Job`` by ``tokens`` int64 ``[texts, length]`` and a ``method`` of ``SOLVERS``."""

    def __init__(self, tokens: Tensor, method: str) -> None:
        self.tokens, self.solve = tokens, SOLVERS[method]

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
                _watch(job, index, layer, self.solve, done)
            base(input_ids=self.tokens, use_cache=False)
            done.put(None)
        except BaseException as error:
            done.put(error)


def _module(job: Job, others: dict[str, Tensor]) -> Any:
    """transformers' module without weights in its layers. Raises ConfigError for one of another form."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**job.source.config)
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    base = model.model
    if not isinstance(getattr(base, "layers", None), nn.ModuleList):
        raise ConfigError(f"calibration needs a model with layers, which {type(base).__name__} has not")
    weights = {canonical(name): tensor.float() for name, tensor in others.items()}
    for name, child in base.named_children():
        if name == "norm":
            base.norm = nn.Identity()
        elif name != "layers":
            _fill(child, f"model.{name}.", weights)
    return base


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made have their buffers, and parameters without memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.to("meta"), False))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _fill(module: nn.Module, prefix: str, weights: dict[str, Tensor]) -> None:
    """Give a module its parameters. Raises ConfigError for those that the checkpoint has not."""
    for name, parameter in list(module.named_parameters()):
        found = weights.get(prefix + name)
        if found is None and name.endswith(".experts.gate_up_proj"):
            found = _stacked(prefix + name, ("gate_proj", "up_proj"), parameter.shape, weights)
        elif found is None and name.endswith(".experts.down_proj"):
            found = _stacked(prefix + name, ("down_proj",), parameter.shape, weights)
        if found is None or found.shape != parameter.shape:
            raise ConfigError(
                f"calibration: the checkpoint has no {prefix}{name} as transformers has it; "
                "leave --calibrate out"
            )
        _assign(module, name, found)


def _stacked(
    name: str, parts: tuple[str, ...], shape: torch.Size, weights: dict[str, Tensor]
) -> Tensor | None:
    """The matrices of all experts in one tensor, as the module has them; None: some are not there."""
    base = name.rpartition(".")[0]
    each = [[weights.get(f"{base}.{e}.{part}.weight") for part in parts] for e in range(shape[0])]
    whole = [[w for w in expert if w is not None] for expert in each]
    if any(len(expert) < len(parts) for expert in whole):
        return None
    made = torch.stack([torch.cat(expert) for expert in whole])
    return made if made.shape == shape else made.mT.contiguous()


def _assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=False))


def _watch(
    job: Job, index: int, layer: nn.Module, solve: Callable[[Layer, Job], Rounded], done: Queue[Any]
) -> None:
    """Let a layer bring, round and give up its weights when it runs."""
    prefix, quiet = f"model.layers.{index}.", [False]
    linears = {prefix + name: child for name, child in layer.named_modules() if isinstance(child, nn.Linear)}
    held: dict[str, Tensor] = {}
    moments: dict[str, tuple[Tensor, Tensor]] = {}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not quiet[0]:
            held.update(job.read(index))
            _fill(module, prefix, {canonical(name): tensor.float() for name, tensor in held.items()})
            for name, linear in linears.items():
                k = linear.in_features
                moments[name] = torch.zeros(k, k), torch.zeros(k)

    def gather(name: str, linear: nn.Module, args: Any) -> None:
        if not quiet[0]:
            for x in args[0].flatten(0, -2).float().split(8192):
                moments[name][0].add_(x.T @ x)
                moments[name][1].add_(x.abs().sum(0))

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if quiet[0]:
            return None
        quiet[0] = True
        run = partial(module, *args, **kwargs)
        known = Layer(module, prefix, held, linears, moments, run)
        rounded = solve(known, job)
        experts = _experts(known, job)
        rounded |= experts
        weights: dict[str, Tensor] = {
            prefix + name: parameter
            for name, parameter in module.named_parameters()
            if not experts or ".experts." not in name
        }
        for name, (numbers, scales) in rounded.items():
            wide = job.recipe.wide(scales, numbers.shape[1])
            weights[canonical(name)] = numbers.float() * wide
        _fill(module, prefix, weights)
        again = run()
        done.put((index, dict(held), rounded))
        held.clear()
        moments.clear()
        for name, parameter in list(module.named_parameters()):
            _assign(module, name, parameter.to("meta"))
        return again

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, with_kwargs=True)
    for name, linear in linears.items():
        linear.register_forward_pre_hook(partial(gather, name))


def calibration(rows: list[list[int]], method: str) -> Calibration:
    """By texts of one length."""
    return Calibration(torch.tensor(rows), method)

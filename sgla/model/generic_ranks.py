"""A module of transformers over several ranks, by the plan that its class gives (``base_model_tp_plan``).

A rank keeps its part of the matrices that the plan splits, in place; what the plan gathers or replicates, and
the output layer, every rank computes whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sgla.dist import Shard
from sgla.errors import ConfigError

Sum = Callable[[Tensor], None]  # over the ranks, in place
# Kinds of a plan that need nothing of a rank that computes the layer whole.
WHOLE = {
    "colwise_gather_output",
    "embedding_colwise",
    "embedding_rowwise",
    "replicate",
    "replicated_with_grad_allreduce",
    "rowwise_split_input",
}
PARTS = {"colwise", "packed_colwise", "rowwise"}
OF_PARTS = {"local_params", "moe_tp_experts"}  # of modules whose parameters are split by lines of their own


def refusal(reason: str) -> ConfigError:
    return ConfigError(f"transformers' module cannot be split over ranks: {reason}; use --tp 1", param="tp")


def body_of(model: PreTrainedModel) -> Any:
    """What makes the hidden states of texts: the base of the model, or the part of it that is no tower."""
    base, text = model.base_model, model.config.get_text_config()
    if text is model.config:
        return base
    return next((part for part in base.children() if getattr(part, "config", None) is text), None)


def split(model: PreTrainedModel, shard: Shard, add: Sum) -> None:
    """Leave ``shard``'s part. ``add``: what sums what the ranks have. Raises ConfigError for a class without
    a plan, and for one whose plan cannot be followed."""
    base = body_of(model)
    plan = getattr(base.config, "base_model_tp_plan", None)
    if not isinstance(plan, dict) or not plan:
        raise refusal(f"{type(model).__name__} gives no plan for that (base_model_tp_plan)")
    if unknown := sorted(set(map(str, plan.values())) - WHOLE - PARTS - OF_PARTS):
        raise refusal(f"the plan of {type(model).__name__} has {', '.join(unknown)[:200]}")
    for name, kind in plan.items():
        for module, parameter in _found(base, name):
            _take(module, parameter, kind, shard, add)


def _found(base: nn.Module, pattern: str) -> Iterator[tuple[nn.Module, str]]:
    """Modules that a line of a plan names, and which of their parameters, or ""."""
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    for name, module in base.named_modules():
        if wanted.fullmatch(name):
            yield module, ""
        for parameter, _ in module.named_parameters(recurse=False):
            if wanted.fullmatch(f"{name}.{parameter}"):
                yield module, parameter


def _take(module: nn.Module, parameter: str, kind: str, shard: Shard, add: Sum) -> None:
    if kind == "moe_tp_experts":
        module.register_forward_hook(lambda module, given, out: _summed(out, add))
    if kind not in PARTS:
        return
    if parameter:
        _take_parameter(module, parameter, kind, shard)
        return
    if not isinstance(module, nn.Linear):
        raise refusal(f"its plan splits a {type(module).__name__}")
    _cut(module, "weight", 1 if kind == "rowwise" else 0, shard, kind == "packed_colwise")
    if kind == "rowwise":
        if module.bias is not None and shard.rank > 0:  # it must enter the sum once
            module.bias = nn.Parameter(torch.zeros_like(module.bias), requires_grad=False)
        module.register_forward_hook(lambda module, given, out: _summed(out, add))
    elif module.bias is not None:
        _cut(module, "bias", 0, shard, kind == "packed_colwise")


def _take_parameter(module: nn.Module, name: str, kind: str, shard: Shard) -> None:
    """Of experts ``[E, n, k]``, or a vector."""
    dims = module.get_parameter(name).dim()
    if dims == 3 and not getattr(module, "is_transposed", False):
        _cut(module, name, 2 if kind == "rowwise" else 1, shard, kind == "packed_colwise")
    elif dims == 1 and kind == "colwise":
        _cut(module, name, 0, shard)
    else:
        raise refusal(f"its plan splits {name} of a {type(module).__name__}")


def _cut(module: nn.Module, name: str, dim: int, shard: Shard, packed: bool = False) -> None:
    """``packed``: two matrices, one behind the other."""
    whole = module.get_parameter(name)
    size, rest = divmod(whole.shape[dim], shard.size * (2 if packed else 1))
    if rest:
        raise refusal(f"{whole.shape[dim]} rows or columns of {name} do not divide among {shard.size}")
    halves = whole.detach().chunk(2, dim) if packed else (whole.detach(),)
    part = torch.cat([half.narrow(dim, shard.rank * size, size) for half in halves], dim)
    setattr(module, name, nn.Parameter(part.clone(), requires_grad=False))


def _summed(out: Any, add: Sum) -> Tensor:
    if not isinstance(out, Tensor):
        raise refusal("a layer that its plan splits gives more than one tensor")
    out = out.contiguous()
    add(out.view(-1, out.shape[-1]))
    return out

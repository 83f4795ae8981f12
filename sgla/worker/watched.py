"""Runners that keep the hidden states of each layer, and what transformers' own module has in their place:
for ``sgla debug``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.source import ModelSource
from sgla.kernels import ops
from sgla.kernels.rehearsal import under_way
from sgla.messages import Progress
from sgla.model.base import CausalLM
from sgla.model.generic import Generic
from sgla.model.generic_ranks import body_of
from sgla.model.registry import architecture_of
from sgla.worker.cpu import CpuRunner
from sgla.worker.cuda import CudaRunner
from sgla.worker.runner import Runner

States = dict[str, NDArray[np.float32]]


class Watch:
    """Keeps what goes into the first block of a model and the sum of the residual stream and the update
    behind each, or all streams ``[T, n * d]`` or ``[n, T, d]``, of the latest step. The last layer may have
    some of the rows alone. Of transformers' own module: what its layers are given and make."""

    def __init__(self, model: CausalLM) -> None:
        self.states: dict[str, Tensor] = {}
        if isinstance(model, Generic):
            listen(model.module, self.keep)
            return
        blocks: list[Any] = [_Block(self, block, index) for index, block in enumerate(model.blocks)]
        model.blocks = blocks

    def keep(self, name: str, x: Tensor) -> None:
        if not under_way():
            tokens = x if x.dim() == 2 else x.transpose(0, 1).flatten(1)
            self.states[name] = tokens.detach().float().cpu().clone()

    def add(self, name: str, h: Tensor) -> None:
        if not under_way():
            self.states[name] += h.detach().float().cpu()

    def taken(self) -> States:
        return {name: state.numpy() for name, state in self.states.items()}


class _Block:
    def __init__(self, watch: Watch, block: Any, index: int) -> None:
        self._watch, self._block, self._index = watch, block, index

    def __call__(self, x: Tensor, *others: Any) -> Tensor | tuple[Tensor, Tensor | None]:
        keep, name = self._watch.keep, f"layer {self._index}"
        if self._index == 0:
            x = ops.inplace(partial(keep, "embedding"), x)
        made = self._block(x, *others)
        if isinstance(made, Tensor):
            return ops.inplace(partial(keep, name), made)
        x, h = made
        x = ops.inplace(partial(keep, name), x)
        return x, None if h is None else ops.inplace(partial(self._watch.add, name), h)


class WatchedCpu(CpuRunner):
    watch: Watch

    def _load_model(self, *given: Any) -> CausalLM:
        model = super()._load_model(*given)
        self.watch = Watch(model)
        return model


class WatchedCuda(CudaRunner):
    """Without graphs, which would not tell."""

    watch: Watch

    def _begin(self, *given: Any) -> None:
        self.watch = Watch(given[-1])
        super()._begin(*given)
        self._captures = False


def watched(config: Config, source: ModelSource, report: Callable[[Progress], None]) -> Runner:
    """Raises ConfigError."""
    if config.device not in ("cpu", "cuda"):
        raise ConfigError(f"sgla debug runs on cpu and cuda, not --device {config.device}", param="device")
    kind = WatchedCuda if config.device == "cuda" else WatchedCpu
    return kind(config, source, 0, 1, "", report)


@torch.no_grad()
def reference(source: ModelSource, tokens: list[int]) -> tuple[States, int, float]:
    """What transformers' module computes in float32 on the CPU: the same states, the most probable next
    token, and its logprob. Raises ConfigError."""
    name = architecture_of(source.config)
    kind = getattr(transformers, name, None)
    if kind is None or source.kind not in ("safetensors", "pt"):
        raise ConfigError(
            f"transformers cannot run {name} from {source.kind} files, so there is nothing to compare with: "
            "dump another run, and give it by --with",
            param="model",
        )
    found: dict[str, Tensor] = {}

    def keep(name: str, state: Tensor) -> None:
        found[name] = state.float()

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        hf = kind.config_class.from_dict(with_infinities(source.config))
        model = kind.from_pretrained(source.folder, config=hf, dtype=torch.float32, local_files_only=True)
        listen(model.eval(), keep)
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
    except Exception as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ConfigError(f"transformers fails with this model: {said}", param="model") from error
    best = int(logits.argmax())
    return {n: state.numpy() for n, state in found.items()}, best, float(logits.log_softmax(-1)[best])


def with_infinities(value: Any) -> Any:
    """What transformers writes as ``{"__float__": "Infinity"}``, as a float."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: with_infinities(part) for key, part in value.items()}
    return [with_infinities(part) for part in value] if isinstance(value, list) else value


def listen(model: transformers.PreTrainedModel, keep: Callable[[str, Tensor], None]) -> None:
    """Have a module of transformers' tell by name what goes into its first layer and what each makes,
    ``[T, d]``. Raises ValueError."""

    def tell(name: str, value: Any) -> None:
        made = value[0] if isinstance(value, tuple) else value
        streams_first = made.dim() == 4 and made.shape[0] > 1  # else the batch, of one
        keep(name, (made[:, 0].transpose(0, 1) if streams_first else made[0]).flatten(1))

    def before(name: str, module: nn.Module) -> None:
        module.register_forward_pre_hook(
            lambda _, args, given: tell(name, args[0] if args else given["hidden_states"]), with_kwargs=True
        )

    layers, parts = layers_of(model, body_of(model) or model)
    before("embedding", layers[0])
    for index, layer in enumerate(layers):
        for part in range(1, parts):
            before(f"layer {index * parts + part - 1}", layer.input_layernorm[part])
        name = f"layer {index * parts + parts - 1}"
        layer.register_forward_hook(lambda _, given, made, name=name: tell(name, made))


def layers_of(model: Any, body: nn.Module) -> tuple[Any, int]:
    """Of the ``body`` of a module of transformers', and how many of ours each is: LongCat's have two, and a
    norm before each. Raises ValueError."""
    count = model.config.get_text_config().num_hidden_layers
    for parts in (1, 2):
        for part in body.modules():
            if isinstance(part, nn.ModuleList) and len(part) * parts == count:
                return part, parts
    raise ValueError(f"it has no list of {count} layers")

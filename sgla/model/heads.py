"""From hidden states to the vector of a prompt:
pooling, the dense layers of sentence-transformers, classification heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from sgla.errors import WeightError
from sgla.layers.build import Build
from sgla.messages import Dense, Pooling
from sgla.quant.weight import SourceTensor

Layer = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def matrix(build: Build, name: str, rows: int, columns: int) -> Tensor:
    """A float32 matrix holding the checkpoint's ``name``."""
    values = torch.zeros(rows, columns)

    def take(source: SourceTensor) -> None:
        values.copy_(source.dense())

    build.declare(name, (rows, columns), take)
    return values


class Linear:
    """``activation(x @ w.T + b)`` in float32: small layers that are never quantized."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "identity") -> None:
        self.weight, self.bias, self.activation = weight, bias, activation

    @classmethod
    def declared(
        cls,
        build: Build,
        name: str,
        inputs: int,
        outputs: int,
        bias: bool = True,
        activation: str = "identity",
    ) -> Linear:
        """With the weights of the model's checkpoint."""
        weight = matrix(build, f"{name}.weight", outputs, inputs)
        return cls(weight, build.vector(f"{name}.bias", outputs) if bias else None, activation)

    @classmethod
    def stored(cls, dense: Dense) -> Linear:
        """With the weights in a folder of its own. Raises WeightError."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = Path(dense.folder) / "model.safetensors"
        try:
            stored = load_file(path, str(torch.get_default_device()))
        except (SafetensorError, OSError) as error:
            raise WeightError(f"{path} cannot be read: {error}") from error
        tensors = {name.removeprefix("linear."): value.float() for name, value in stored.items()}
        bias = tensors.get("bias") if dense.bias else None
        shape = (dense.outputs, dense.inputs)
        if "weight" not in tensors or tensors["weight"].shape != shape or (dense.bias and bias is None):
            raise WeightError(f"{path} does not hold linear.weight of shape {list(shape)}")
        return cls(tensors["weight"], bias, dense.activation)

    def __call__(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.activation](F.linear(x, self.weight, self.bias))


def make_head(
    pooling: Pooling,
    build: Build,
    classifier: tuple[str, str, str] | None,
    hidden: int,
    bias: bool = True,
    norm: Callable[[], Layer] | None = None,
) -> list[Layer]:
    """The layers behind the pooling. ``classifier``: that of an encoder's ``Family``; None: a decoder's.
    ``bias``: of its first layer, ``norm``: makes what follows that.

    Sources: HF's ``BertForSequenceClassification``, ``DistilBertForSequenceClassification``,
    ``RobertaClassificationHead``, ``ModernBertPredictionHead`` and ``GenericForSequenceClassification``.
    """
    if pooling.task == "embed":
        return [
            Linear.stored(dense)
            if dense.folder
            else Linear.declared(build, f"dense.{i}", dense.inputs, dense.outputs, dense.bias)
            for i, dense in enumerate(pooling.dense)
        ]
    if classifier is None:
        return [Linear.declared(build, "score", hidden, pooling.size, bias=False)]
    first, activation, last = classifier
    return [
        Linear.declared(build, first, hidden, hidden, bias, activation),
        *(() if norm is None else (norm(),)),
        Linear.declared(build, last, hidden, pooling.size),
    ]


def apply(head: list[Layer], x: Tensor) -> Tensor:
    """``[n, d] -> [n, size]``, float32."""
    x = x.float()
    for layer in head:
        x = layer(x)
    return x


def pool(hidden: Tensor, kind: str) -> Tensor:
    """Whole prompts of one length: ``[n, L, d] -> [n, d]``."""
    if kind == "cls":
        return hidden[:, 0]
    if kind == "last":
        return hidden[:, -1]
    if kind == "max":
        return hidden.amax(1)
    total = hidden.sum(1)
    return total / (hidden.shape[1] if kind == "mean" else hidden.shape[1] ** 0.5)


class Accumulator:
    """Pooling of prompts that come in chunks: the state of each slot is ``[d]``."""

    def __init__(self, kind: str, slots: int, size: int) -> None:
        self.kind = kind
        self.state = torch.zeros(slots, size)

    def add(self, slot: int, start: int, hidden: Tensor) -> None:
        """Tokens from position ``start`` on: ``[L, d]``."""
        state = self.state[slot]
        if self.kind == "cls":
            if start == 0:
                state.copy_(hidden[0])
        elif self.kind == "max":
            most = hidden.amax(0)
            state.copy_(most if start == 0 else torch.maximum(state, most))
        else:
            state.copy_(hidden.sum(0) if start == 0 else state + hidden.sum(0))

    def take(self, slot: int, length: int) -> Tensor:
        """The pooled vector ``[d]`` of a prompt of ``length`` tokens."""
        state = self.state[slot]
        if self.kind in ("cls", "max"):
            return state
        return state / (length if self.kind == "mean" else length**0.5)

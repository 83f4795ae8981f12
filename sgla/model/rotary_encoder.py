"""Encoders whose positions rotate: ModernBERT (arXiv 2412.13663), with norms before attention and MLPs and
windows in most layers; NomicBERT (2402.01613) and GTE (2407.19669), with norms behind them. MLPs are
gated."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.layers.build import Build, StackPart
from sgla.layers.linear import GateUpLinear, QKVLinear, RowLinear
from sgla.layers.norm import LayerNorm
from sgla.layers.rope import rope_table
from sgla.layers.spec import RopeSpec
from sgla.layers.vocab import VocabEmbedding
from sgla.model.encoder import EncoderSpec
from sgla.model.heads import matrix


class Layer:
    def __init__(self, model: RotaryEncoder, build: Build, name: str, index: int) -> None:
        spec, rotary = model.spec, model.rotary
        d, f, heads, biases = spec.hidden, spec.intermediate, spec.heads, rotary.biases
        self.qkv = QKVLinear(build, f"{name}.self_attn", d, heads, heads, d // heads, "qkv" in biases)
        self.out = RowLinear(build, f"{name}.self_attn.o_proj", d, d, range(d), "out" in biases)
        self.gate_up = GateUpLinear(build, f"{name}.mlp", d, f, "gate_up" in biases)
        self.down = RowLinear(build, f"{name}.mlp.down_proj", d, f, range(f), "down" in biases)
        parts = [StackPart(f"{name}.mlp.{part}_proj.weight", None, range(f)) for part in ("up", "gate")]
        parts[1] = parts[1]._replace(rows=range(f, 2 * f))
        build.stacks[f"{name}.mlp.up_gate_proj.weight"] = (2 * f, d), parts  # as GTE has them
        self.before = rotary.before
        begins = rotary.before and index == 0  # with what the embedding's norm gives
        self.attention_norm = None if begins else model.norm_of(build, f"{name}.post_attention_layernorm")
        self.mlp_norm = model.norm_of(build, f"{name}.post_mlp_layernorm")
        self.heads, self.scale, self.activation = heads, (d // heads) ** -0.5, spec.activation
        self.rotate, self.window = partial(model.rotate, rotary.ropes[index]), rotary.windows[index]

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        norm, mlp_norm = self.attention_norm, self.mlp_norm
        if self.before:
            y, x = mlp_norm.add(self.attend(x if norm is None else norm(x), batch), x)
            return ops.add(x, self.mlp(y))
        assert norm is not None
        x, _ = norm.add(self.attend(x, batch), x)
        return mlp_norm.add(self.mlp(x), x)[0]

    def attend(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        qkv = ops.inplace(self.rotate, self.qkv(x))
        return self.out(ops.self_attention(qkv, batch, self.heads, self.scale, self.window))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=1)
        return self.down(ops.activate(gate.contiguous(), self.activation) * up)


class Turning:
    """What turns the queries and keys of a step."""

    def __init__(self, spec: EncoderSpec) -> None:
        assert spec.rotary is not None
        self.spec, self.rotary = spec, spec.rotary
        self.tables = {rope: self._table(rope) for rope in dict.fromkeys(self.rotary.ropes)}
        self._angles: dict[RopeSpec, Tensor] = {}

    def _table(self, rope: RopeSpec) -> Tensor:
        return rope_table(rope.theta, rope.dim, rope.kind, rope.scaling, self.spec.positions)

    def place(self, positions: Tensor, types: Tensor) -> None:
        """Tell the next step where its tokens stand and of which type (0 or 1) they are; int64 ``[T]``."""
        self._angles = {rope: table[positions] for rope, table in self.tables.items()}

    def rotate(self, rope: RopeSpec, qkv: Tensor) -> None:
        """Turn q and k of ``qkv [T, 3 * heads * hd]`` in place."""
        cos, sin = self._angles[rope][:, None].chunk(2, dim=2)
        heads = qkv.view(len(qkv), 3 * self.spec.heads, -1)[:, : 2 * self.spec.heads]
        a, b = heads.float().chunk(2, dim=2)
        heads.copy_(torch.cat([a * cos - b * sin, b * cos + a * sin], 2))


class RotaryEncoder(Turning):
    """As ``bert.py: Encoder``."""

    def __init__(self, spec: EncoderSpec, build: Build) -> None:
        super().__init__(spec)
        self.words = VocabEmbedding(build, "embeddings.word_embeddings", spec.vocab, spec.hidden)
        self.types: Tensor | None = None
        if spec.types:
            self.types = matrix(build, "embeddings.token_type_embeddings.weight", spec.types, spec.hidden)
        self.norm = self.norm_of(build, "embeddings.LayerNorm")
        self.layers = [Layer(self, build, f"layers.{i}", i) for i in range(spec.layers)]
        self.last_norm = self.norm_of(build, "final_norm") if self.rotary.before else None
        self._types: Tensor | None = None

    def norm_of(self, build: Build, name: str) -> LayerNorm:
        return LayerNorm(build, name, self.spec.hidden, self.spec.eps, bias="norm" in self.rotary.biases)

    def place(self, positions: Tensor, types: Tensor) -> None:
        super().place(positions, types)
        if self.types is not None:
            self._types = self.types[types.clamp_max(len(self.types) - 1)]

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Final hidden states ``[T, d]``."""
        x: Tensor = self.words(batch.ids)
        x = self.norm(x if self.types is None else ops.inplace(self._add_types, x))
        for layer in self.layers:
            x = layer(x, batch)
        return x if self.last_norm is None else self.last_norm(x)

    def _add_types(self, x: Tensor) -> None:
        assert self._types is not None
        x += self._types

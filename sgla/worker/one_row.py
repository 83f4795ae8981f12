"""A whole decode step of one row as one kernel: for which models there is one."""

from __future__ import annotations

import torch

from sgla.kernels.cuda.decode_step import HEAD_DIM, DecodeStep, LayerWeights, Shape
from sgla.kernels.cuda.mixture_step import MixtureShape, MixtureWeights
from sgla.kernels.ops import KVLayer
from sgla.layers.attention import SelfAttention
from sgla.layers.mlp import PlainMLP
from sgla.layers.moe import MoE
from sgla.model.base import CausalLM
from sgla.model.llama import Block, Llama


def match(model: CausalLM, kv: list[KVLayer]) -> DecodeStep | None:
    """The kernel for this model on this GPU, if there is one and it pays."""
    if type(model) is not Llama or kv[0].k.dtype != torch.bfloat16:
        return None
    spec = model.spec
    blocks = (block for block in model.blocks if isinstance(block, Block))
    layers = [weights for block in blocks if (weights := _weights(block)) is not None]
    alike = len(layers) == spec.layers and len({type(weights) for weights in layers}) == 1
    plain = model.embed.weight.kind == model.lm_head.weight.kind == "bf16" and model.embed.scale == 1.0
    usual = spec.norm == "rms" and spec.residual_scale == 1.0 and spec.qk_norm != "width"
    attention = spec.attention[0]
    rotated = attention.rope is not None and attention.rope.dim == HEAD_DIM
    whole_heads = len(set(spec.attention)) == 1 and rotated and attention.head_dim == HEAD_DIM
    if model.shard.size > 1 or not (alike and plain and usual and whole_heads) or not model.lm_head.plain:
        return None
    page_size = kv[0].k.shape[1]
    shape: Shape | MixtureShape
    if isinstance(layers[0], MixtureWeights):
        assert spec.moe is not None
        shape = MixtureShape(
            spec.hidden, attention.heads, attention.kv_heads, spec.moe.intermediate, spec.moe.experts,
            spec.moe.top_k, spec.moe.normalize, bool(spec.qk_norm), page_size,
        )  # fmt: skip
    else:
        shape = Shape(
            spec.hidden, attention.heads, attention.kv_heads, spec.intermediate, bool(spec.qk_norm), page_size
        )
    if not shape.pays(spec.layers, spec.vocab):
        return None
    embedding, head = model.embed.weight.data, model.lm_head.weight.data
    cos_sin = model.angles(attention.rope, HEAD_DIM)
    return DecodeStep(
        shape, layers, kv, embedding, head, model.norm.weight, cos_sin, spec.eps, attention.scale
    )


def _weights(block: Block) -> LayerWeights | MixtureWeights | None:
    """A layer's tensors, if it has nothing but plain bfloat16 weights, full attention and SiLU-gated MLPs."""
    attention, mlp = block.attention, block.mlp
    if not isinstance(attention, SelfAttention):
        return None
    qkv, out = attention.qkv, attention.out
    norms = block.input_norm.weight, block.mlp_norm.weight
    heads = attention.q_norm, attention.k_norm
    if mlp.activation != "silu" or attention.window or attention.softcap or attention.sinks is not None:
        return None
    if any(x.bias is not None or x.weight.kind != "bf16" for x in (qkv, out)):
        return None
    if isinstance(mlp, PlainMLP):
        return None
    if isinstance(mlp, MoE):
        if any(weight.kind != "bf16" for weight in (mlp.router, mlp.gate_up, mlp.down)):
            return None
        experts = mlp.router.data, mlp.gate_up.data, mlp.down.data
        return MixtureWeights(qkv.weight.data, out.weight.data, *experts, *norms, *heads)
    if any(x.bias is not None or x.weight.kind != "bf16" for x in (mlp.gate_up, mlp.down)):
        return None
    return LayerWeights(
        qkv.weight.data, out.weight.data, mlp.gate_up.weight.data, mlp.down.weight.data, *norms, *heads
    )

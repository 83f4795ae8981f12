"""The recorder: the ops of ``kernels/ops.py`` as instructions on symbolic tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sgla.kernels import ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.fuse import ACTIVATIONS, Body, Buffer, Node
from sgla.kernels.native import Op
from sgla.kernels.panels import FORMATS, Kind, Panels

if TYPE_CHECKING:
    from sgla.kernels.ops import Activation, KVLayer, Ranks
    from sgla.quant import Weight

INPUTS = ("ids", "positions", "slots", "q_start", "kv_len", "out_loc", "page_table", "sample_rows")
MAX_HEAD_DIM = 512  # the kernels' scratch is made for this
_STAND_IN = {False: 3, True: 2}  # row counts of symbolic tensors


class Recorder:
    """Collects nodes. Symbolic tensors are on the meta device and known by identity. ``isa``: level of the kernels."""

    def __init__(self, isa: str = "") -> None:
        self._isa = isa
        self.nodes: list[Node] = []
        self._known: dict[int, tuple[Tensor, Buffer]] = {}
        self._batch: ForwardBatch | None = None

    def batch(self) -> ForwardBatch:
        """The symbolic batch to record with."""
        tokens, rows = _STAND_IN[False], _STAND_IN[True]
        shapes: dict[str, tuple[int, ...]] = {
            "ids": (tokens,),
            "positions": (tokens,),
            "slots": (rows,),
            "q_start": (rows + 1,),
            "kv_len": (rows,),
            "out_loc": (tokens,),
            "page_table": (rows, 1),
            "sample_rows": (rows,),
        }
        tensors = {
            name: torch.empty(shape, dtype=torch.int32, device="meta") for name, shape in shapes.items()
        }
        self._batch = ForwardBatch(rows=rows, tokens=tokens, page_size=1, draws=None, **tensors)
        return self._batch

    def buffer(self, x: Tensor) -> Buffer:
        """The buffer a symbolic tensor stands for."""
        known = self._known.get(id(x))
        if known is None:
            raise TypeError(
                f"a recorded op got a tensor of shape {tuple(x.shape)} that no op made: a recorded forward may touch "
                "activations only with the functions of kernels/ops.py"
            )
        return known[1]

    def _new(self, width: int, sampled: bool) -> tuple[Tensor, Buffer]:
        tensor = torch.empty(_STAND_IN[sampled], width, device="meta")
        buffer = Buffer(width, sampled)
        self._known[id(tensor)] = (tensor, buffer)
        return tensor, buffer

    def _expect(self, tensor: Tensor, name: str) -> None:
        if tensor is not getattr(self._batch, name):
            raise TypeError(f"a recorded op takes {name} from the batch itself")

    def embedding(self, ids: Tensor, weight: Tensor | Weight, scale: float) -> Tensor:
        self._expect(ids, "ids")
        if isinstance(weight, Tensor):
            kind: Kind = "bf16" if weight.dtype == torch.bfloat16 else "f32"
            panels = Panels.of(kind, weight.shape[1], weight, None, None, self._isa)
        else:
            panels = weight.to_panels(self._isa)
        out, y = self._new(panels.k, False)
        self.nodes.append(
            Node(
                Op.EMBEDDING, False, [None, None], [y], [panels.data], panels.n, panels.k,
                a=[FORMATS.index(panels.kind)], f=[scale],
            )
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        source = self.buffer(x)
        out, y = self._new(source.width, source.sampled)
        node = Node(
            Op.RMS_NORM,
            source.sampled,
            [source, None],
            [y],
            [_floats(weight)],
            k=source.width,
            a=[0],
            f=[eps],
        )
        self.nodes.append(node)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        a, b = self.buffer(x), self.buffer(residual)
        assert a.sampled == b.sampled
        out, y = self._new(a.width, a.sampled)
        total, h = self._new(a.width, a.sampled)
        node = Node(Op.ADD_RMS_NORM, a.sampled, [a, b], [y, h], [_floats(weight)], k=a.width, a=[0], f=[eps])
        self.nodes.append(node)
        return out, total

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.buffer(x), self.buffer(y)
        assert a.sampled == b.sampled
        out, total = self._new(a.width, a.sampled)
        self.nodes.append(Node(Op.ADD, a.sampled, [a, b], [total], k=a.width))
        return out

    def linear(self, x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
        source, panels = self.buffer(x), w.to_panels(self._isa)
        assert source.width == w.k
        out, y = self._new(w.n, source.sampled)
        tensors = [panels.data, None if bias is None else _floats(bias)]
        a = [FORMATS.index(panels.kind), ACTIVATIONS["none"], 0, 0]
        self.nodes.append(Node(Op.LINEAR, source.sampled, [source, None], [y], tensors, w.n, w.k, a))
        return out

    def qk_norm_rope_store(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        kv: KVLayer,
        out_loc: Tensor,
    ) -> Tensor:
        self._expect(positions, "positions")
        self._expect(out_loc, "out_loc")
        source, dim, kv_heads = self.buffer(qkv), kv.k.shape[3], kv.k.shape[2]
        heads = source.width // dim - 2 * kv_heads
        out, q = self._new(heads * dim, source.sampled)
        norms = [None if w is None else _floats(w) for w in (q_norm, k_norm)]
        a = [kv_heads, cos_sin.shape[1], *_layout(kv), 0, kv.group]
        tensors = [_floats(cos_sin), *norms]
        self.nodes.append(
            Node(Op.ROPE_STORE, source.sampled, [source, None], [q], tensors, heads, dim, a, [eps], keep=kv)
        )
        return out

    def attention(
        self, q: Tensor, kv: KVLayer, batch: ForwardBatch, scale: float, window: int, softcap: float
    ) -> Tensor:
        assert batch is self._batch
        source, dim, kv_heads = self.buffer(q), kv.k.shape[3], kv.k.shape[2]
        out, y = self._new(source.width, source.sampled)
        a = [kv_heads, window, *_layout(kv), 0, kv.group]
        heads = source.width // dim
        self.nodes.append(
            Node(
                Op.ATTENTION,
                source.sampled,
                [source, None],
                [y],
                [],
                heads,
                dim,
                a,
                [scale, softcap],
                keep=kv,
            )
        )
        return out

    def act_mul(self, x: Tensor, kind: Activation) -> Tensor:
        source = self.buffer(x)
        out, y = self._new(source.width // 2, source.sampled)
        self.nodes.append(
            Node(Op.ACT_MUL, source.sampled, [source, None], [y], n=y.width, a=[0, ACTIVATIONS[kind]])
        )
        return out

    def moe(
        self,
        x: Tensor,
        router: Weight,
        gate_up: Weight,
        down: Weight,
        top_k: int,
        normalize: bool,
        activation: Activation,
    ) -> Tensor:
        """Routing with torch, between native segments; each expert is a body."""

        def mlp(a: Weight, b: Weight) -> Body:
            return self._body(x.shape[1], lambda x: ops.linear(ops.act_mul(ops.linear(x, a), activation), b))

        def run(views: list[Tensor], experts: list[Callable[[Tensor], Tensor]]) -> None:
            views[1].copy_(ops.mix(views[0], router, lambda e, rows: experts[e](rows), top_k, normalize))

        source = self.buffer(x)
        out, y = self._new(source.width, source.sampled)
        bodies = [mlp(*pair) for pair in zip(gate_up.split(router.n), down.split(router.n))]
        self.nodes.append(Node(Op.PYTHON, source.sampled, [source, None], [y], fn=run, bodies=bodies))
        return out

    def _body(self, width: int, fn: Callable[[Tensor], Tensor]) -> Body:
        inner = Recorder(self._isa)
        x, given = inner._new(width, False)
        outer, ops.recorder = ops.recorder, inner
        try:
            made = inner.buffer(fn(x))
        finally:
            ops.recorder = outer
        return Body(inner.nodes, given, made)

    def self_attention(self, qkv: Tensor, batch: ForwardBatch, heads: int, scale: float) -> Tensor:
        assert batch is self._batch
        source = self.buffer(qkv)
        dim = source.width // (3 * heads)
        assert dim <= MAX_HEAD_DIM
        out, y = self._new(heads * dim, source.sampled)
        self.nodes.append(
            Node(Op.SELF_ATTENTION, source.sampled, [source, None], [y], n=heads, k=dim, f=[scale])
        )
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        source = self.buffer(x)
        out, y = self._new(source.width, source.sampled)
        tensors: list[Tensor | None] = [_floats(weight), _floats(bias)]
        self.nodes.append(
            Node(Op.LAYER_NORM, source.sampled, [source, None], [y], tensors, k=source.width, f=[eps])
        )
        return out

    def activate(self, x: Tensor, kind: str) -> Tensor:
        source = self.buffer(x)
        out, y = self._new(source.width, source.sampled)
        self.nodes.append(
            Node(Op.ACTIVATE, source.sampled, [source, None], [y], k=source.width, a=[ACTIVATIONS[kind]])
        )
        return out

    def gather(self, x: Tensor, rows: Tensor) -> Tensor:
        self._expect(rows, "sample_rows")
        source = self.buffer(x)
        out, y = self._new(source.width, True)
        self.nodes.append(Node(Op.GATHER, True, [source, None], [y], k=source.width))
        return out

    def all_reduce(self, x: Tensor, ranks: Ranks) -> Tensor:
        return self.inplace(ranks.all_reduce, x)

    def inplace(self, fn: Callable[[Tensor], None], x: Tensor) -> Tensor:
        buffer = self.buffer(x)
        self.nodes.append(
            Node(Op.PYTHON, buffer.sampled, [buffer, None], [buffer], fn=lambda views: fn(views[0]))
        )
        return x

    def call(self, fn: Callable[[Tensor, Tensor], None], x: Tensor, width: int) -> Tensor:
        source = self.buffer(x)
        out, y = self._new(width, source.sampled)
        self.nodes.append(Node(Op.PYTHON, source.sampled, [source, None], [y], fn=lambda views: fn(*views)))
        return out

    def argmax(self, logits: Tensor) -> Tensor:
        source = self.buffer(logits)
        out, y = self._new(1, source.sampled)
        y.dtype, y.scalar = torch.int32, True
        self.nodes.append(Node(Op.ARGMAX, source.sampled, [source, None], [y], k=source.width))
        return out


def _floats(weight: Tensor) -> Tensor:
    return weight.to(torch.float32).contiguous()


def _layout(kv: KVLayer) -> list[int]:
    """Places 2 to 7 of ``a`` in rope_store and attention: type, strides in elements, addresses."""
    assert kv.k.dtype == kv.v.dtype
    assert kv.k.dtype in (torch.float32, torch.bfloat16)
    assert kv.k.stride() == kv.v.stride()
    assert kv.k.stride(3) == 1
    assert kv.k.shape[3] <= MAX_HEAD_DIM
    page, token, head, _ = kv.k.stride()
    return [int(kv.k.dtype == torch.bfloat16), page, token, head, kv.k.data_ptr(), kv.v.data_ptr()]

"""``sgla explain --kernels``: which rules give which layers of a model their kernels on a GPU, and why faster
ones do not. Nothing is loaded, and no GPU is needed.

    python -m sgla.worker.report PATH < CONFIG
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from sgla import attention
from sgla.attention.base import DecodeByLayer
from sgla.config import Config
from sgla.device import H200
from sgla.dist import Shard
from sgla.errors import SglaError
from sgla.hub.source import ModelSource
from sgla.kernels import gpu, ops
from sgla.kernels.device import describe, this_device, use
from sgla.kernels.gpu import tuning
from sgla.kernels.gpu.record import Node
from sgla.kernels.gpu.rewrite import Asked, Work
from sgla.kernels.gpu.tiles import GATES
from sgla.loading.load import decoder_build, model_of
from sgla.loading.source import configured_source
from sgla.model.generic_spec import GenericSpec
from sgla.model.pooling import read_pooling
from sgla.model.read import read_decoder
from sgla.model.state import kv_groups
from sgla.model.vision.served import vision_of
from sgla.quant.weight import Weight
from sgla.worker.gpu_load import choose_sizes, dtype_of, shapes_of
from sgla.worker.kv import allocate_kv

CONTEXT = 256  # positions of the tables that are built
DECODES, PROMPTS = (1, 8, 64, 256), (512, 2048, 8192)  # rows, tokens
SHOWN = 6  # reasons


def report(config: Config, source: ModelSource) -> Iterator[str]:
    """Lines of text. Raises ConfigError for a model that cannot be built."""
    device = describe()
    if device.kind != "cuda":
        device = H200
    use(device)
    pooling = read_pooling(source, config.task)
    if pooling is not None and pooling.encoder:
        yield f"kernels on {device.name}: an encoder runs op by op, and no rule takes its layers"
        return
    yield f"kernels on {device.name}: how many layers each rule takes, and why others are not taken"
    spec = read_decoder(source.config)
    if isinstance(spec, GenericSpec):
        yield "  none: transformers' module computes it, and our kernels are attention and sampling alone"
        return
    sizes = choose_sizes(config, spec, pooling)
    vision, _ = vision_of(config, source)
    backend, notes = attention.choose_backend(
        config.attention_backend,
        shapes_of(config, spec, Shard(0, config.tp), sizes, vision is not None and vision.ahead),
        device,
        decode=config.decode_attention_backend,
        prefill=config.prefill_attention_backend,
        make=attention.unmade,
    )
    yield from (f"  {note}" for note in notes)
    if vision is not None:
        yield "  no rule takes layers in steps that read pictures, which go op by op; all others:"
    forward = forward_of(config, source)
    if pooling is None:
        yield from _decode_steps(forward, backend, config.deterministic)
    for tokens in PROMPTS:
        asked = Asked({"tokens": tokens, "sampled": 1, "rows": 1}, deterministic=config.deterministic)
        yield from _lines(f"{tokens} tokens of prompts", forward.rewritten("hidden", True, asked))


def _decode_steps(
    forward: gpu.RecordedForward, backend: attention.Attention, deterministic: bool
) -> Iterator[str]:
    fused = backend.decode.fused is not None
    if not fused:
        yield f"  no kernel takes q, k and v from the projection: decode attention is {backend.decode.name}"
    for rows in DECODES:
        sizes = {"tokens": rows, "sampled": 0, "rows": rows}
        decode = _Attention(backend.decode) if fused else None
        asked = Asked(sizes, decode, forward.draws, deterministic)
        yield from _lines(f"{rows} rows", forward.rewritten("step", False, asked))


class _Attention:
    """In the place of a backend, and of the kernels ``decode`` that take q, k and v from the projection."""

    in_place = False

    def __init__(self, decode: Any = None) -> None:
        self._decode = decode

    def fuses(self, kv: Any) -> bool:
        return not isinstance(self._decode, DecodeByLayer) or self._decode.fuses(kv)

    def __call__(self, q: torch.Tensor, *given: Any, **more: Any) -> torch.Tensor:
        return q

    def forward(self, **given: Any) -> None: ...


def forward_of(config: Config, source: ModelSource) -> gpu.RecordedForward:
    """The forward pass of a model without weights, which can be recorded and rewritten."""
    spec, dtype = read_decoder(source.config), dtype_of(config)
    quantization = spec.quantized(config.quantization, "cuda")
    with torch.device("meta"):
        build = decoder_build(source, spec, dtype, quantization, Shard(0, config.tp))
        model = model_of(spec, build, CONTEXT)
        kv_dtype = config.kv_dtype(dtype)
        groups = kv_groups(model.state(), 0, kv_dtype)
        kv = allocate_kv(model.state(), groups, [1] * len(groups), config.page_size, kv_dtype, _empty)
    return gpu.RecordedForward(model, kv, gpu.GpuOps(_Attention(), config.deterministic))


def _empty(pages: int, page_size: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    heads, *width = shape
    return torch.empty(pages, heads, page_size, *width, dtype=dtype, device="meta").transpose(1, 2)


def _lines(what: str, work: Work | None) -> Iterator[str]:
    if work is None:
        yield f"  {what}: op by op, because this model cannot be recorded"
        return
    others = Counter(
        getattr(node.op, "name", None) or getattr(node.op, "__name__", str(node.op))
        for node in work.nodes.values()
        if not node.rule
    )
    taken = ", ".join(f"{count} {name}" for name, count in work.taken.most_common())
    yield f"  {what}: {taken or 'no rule takes a layer'}"
    alone = ", ".join(f"{count} {name}" for name, count in others.most_common())
    yield f"    by themselves: {alone or 'none'}"
    sources = Counter(_source(work.rows(node), node) for node in work.nodes.values() if _is_product(node))
    yield "    products: " + (", ".join(f"{count} {source}" for source, count in sources.items()) or "none")
    reasons = Counter(work.refused).most_common(SHOWN)
    for (name, why), count in reasons:
        yield f"    not '{name}' ({count}): {why}"


def _is_product(node: Node) -> bool:
    """Whether its kernel was chosen by the number of rows."""
    weight = node.given.get("weight")
    if isinstance(weight, Weight):
        return True
    return isinstance(weight, torch.Tensor) and weight.dim() == 2 and node.op is not ops.embedding


def _source(rows: int, node: Node) -> str:
    if isinstance(node.given["weight"], Weight):
        return "as estimated"
    n, k = node.given["weight"].shape
    storage = "bf16" if node.given.get("scale") is None else "fp8"
    gated = node.given.get("epilogue") in GATES.values()
    found = tuning.measured(rows, tuning.Product(n, k, gated, storage))
    table = tuning.file_of(this_device().name)
    return "as estimated" if found is None else f"as measured ({table.parent.name}/{table.name})"


def main() -> None:
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=Config)
    try:
        for line in report(config, configured_source(Path(sys.argv[1]), config)):
            print(line)
    except (SglaError, NotImplementedError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

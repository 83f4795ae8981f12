"""Layers that read a part of the tokens before, those that an indexer picks or of a chunk, and layers with
several kinds of heads, and a mixture beside the MLP: in graphs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from test_gpu_runner import make
from test_gpu_windows import run

from sgla.kernels.compressed import compress, compressed_attention, pick_entries
from sgla.kernels.gpu.ops import LOWERINGS
from sgla.kernels.hyper import stream_weights
from sgla.kernels.picking import pick, picked_attention

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from tiny import ENTRIES, make_core, submit

MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "mlp_layer_types": ["dense"] * 3,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_topk": 64,
    "index_n_heads": 16,
    "index_head_dim": 128,
}
SINKS = MODEL | {
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "indexer_types": ["full", "shared", "shared"],
}
CHUNKED: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size_mlp": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "moe_layers": [],
    "attention_chunk_size": 100,
}


OPS = pick, picked_attention, compress, pick_entries, compressed_attention, stream_weights
TWO_HEADS: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 5000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "global_head_dim": 128,
    "max_position_embeddings": 2048,
    "sliding_window": 100,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 5000,
    "num_kv_shared_layers": 0,
}
BESIDE = TWO_HEADS | {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 192,
}


@pytest.mark.parametrize("config", [MODEL, CHUNKED, TWO_HEADS, BESIDE, SINKS, ENTRIES | {"vocab_size": 5000}])
def test_kernels_read_what_torch_does(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; steps of decode rows alone are graphs with kernels, and none with torch."""
    texts = [[(7 * i + n) % 5000 for i in range(length)] for n, length in enumerate((3, 90, 500))]
    requests = [submit(str(n), text, 24) for n, text in enumerate(texts)]
    found = []
    for backend in ("auto", "torch"):
        runner = make(config, dtype="float32", attention_backend=backend)
        found.append(run(runner, requests, make_core(runner.facts, step_tokens=256)))
        for op in OPS if backend == "auto" else ():
            monkeypatch.delitem(LOWERINGS, op)
    assert found[0] == found[1]

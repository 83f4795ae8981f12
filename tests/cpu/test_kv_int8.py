"""KV pages of integers: of 8 bits with a scale of each token and head, and values of 4. The kernels:
test_kernels.py, test_triton.py."""

from __future__ import annotations

import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from checkpoints import SMALL, Eager, random_prompts
from config_cases import gemma3
from test_mixtures import INDEXED
from tiny import make_core, run, submit, tiny_config, tiny_source
from transformers import AutoConfig

from sgla.hub import packaged
from sgla.hub.source import ModelSource
from sgla.layers.spec import StateTensor
from sgla.loading.load import load_model
from sgla.loading.source import open_source
from sgla.messages import Submit
from sgla.model.state import LayerState, kv_groups
from sgla.text.tokenizer import load_path
from sgla.worker.cpu import CpuRunner
from sgla.worker.kv import allocate_kv, memory_of, paged, zero_pages

KV = StateTensor("k", (2, 8)), StateTensor("v", (2, 6))
WINDOWS = gemma3(
    vocab_size=331, num_hidden_layers=3, sliding_window=40, max_position_embeddings=1024, layer_types=...
)


def source_of(config: dict[str, Any]) -> ModelSource:
    return ModelSource("dummy", Path("tiny"), (), config, {})


def test_a_page_has_a_scale_for_each_head_of_a_token() -> None:
    """It goes wherever the page goes."""
    state = [
        LayerState(0, KV),
        LayerState(0, (StateTensor("k", (1, 40)), StateTensor("v", (2, 6), "float32"))),
    ]
    [group] = kv_groups(state, 64, "int8")
    assert group.token_bytes == 2 * (8 + 4) + 2 * (6 + 4) + (40 + 4) + 2 * 6 * 4
    both, latent = allocate_kv(state, [group], [3], 4, "int8")
    assert [tuple(x.shape) for x in both.tensors] == [(3, 4, 2, 8), (3, 4, 2, 6), (3, 2, 4), (3, 2, 4)]
    assert [x.dtype for x in both.tensors] == [torch.int8] * 2 + [torch.float32] * 2
    assert latent.v_scales is None
    key = torch.randn(1, 1, 40)
    latent.put_keys(key, (torch.tensor([2]), torch.tensor([3])))
    read = latent.latent(30).values(torch.tensor([2]))[0, 3]
    torch.testing.assert_close(read, key[0, :, :30], rtol=0, atol=0.03)
    for x in both.tensors:
        x.fill_(3)
    both.k_scales[1] = torch.nan
    [memory] = memory_of([both, latent], 1)
    assert sum(x.shape[1] for x in memory) == 4 * group.token_bytes
    zero_pages([both, latent], [torch.tensor([1, 2])])
    assert [[bool(page.any()) for page in x] for x in both.tensors] == [[True, False, False]] * 4


def test_values_of_4_bits_have_constants_of_their_own() -> None:
    """Keys are as beside int8. A value is off by half a step at most, and one that is none spoils its group
    alone."""
    state = [LayerState(0, (StateTensor("k", (2, 96)), StateTensor("v", (2, 96))))]
    [group] = kv_groups(state, 64, "int4")
    assert group.token_bytes == 2 * (96 + 4) + 2 * (48 + 3 * 4)
    [kv] = paged(allocate_kv(state, [group], [3], 4, "int4"))
    assert [x.dtype for x in kv.tensors] == [torch.int8, torch.uint8, torch.float32, torch.bfloat16]
    assert kv.v_dim == 96
    [memory] = memory_of([kv], 1)
    assert sum(x.shape[1] for x in memory) == 4 * group.token_bytes
    value, where = torch.randn(3, 2, 96) * 5 + 3, (torch.tensor([2, 2, 1]), torch.tensor([3, 0, 1]))
    value[1, 1, 40], value[2, 0, :32] = torch.inf, 7.0
    kv.put_values(value, where)
    kv.put_keys(value.nan_to_num(), where)
    found = kv.values(torch.tensor([1, 2]))
    found = torch.stack([found[1, 3], found[1, 0], found[0, 1]])
    groups, read = value.unflatten(-1, (3, 32)), found.unflatten(-1, (3, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    fine = torch.ones(3, 2, 3, dtype=torch.bool)
    fine[1, 1, 1] = False
    assert ((read - groups).abs().amax(-1) <= 0.6 * step)[fine].all()
    assert read[1, 1, 1].isnan().all()
    zero_pages([kv], [torch.tensor([1, 2])])
    assert not any(x.any() for x in kv.tensors)


@pytest.mark.real
def test_logprobs_of_the_demo_model_are_off_by_so_much() -> None:
    """Of a text in English, beside a cache in float32."""
    path = packaged.cached()
    if path is None:
        pytest.skip("the demo model is not in the cache")
    model = load_model(open_source(path), context_len=512)
    tokens = load_path(path).encode("\n".join(topics[name] for name in sorted(topics))[:2000])[:300]
    whole, int8, int4 = (
        Eager(model, page_size=16, dtype=kind).prompt_logprobs([tokens])[range(len(tokens) - 1), tokens[1:]]
        for kind in ("float32", "int8", "int4")
    )
    off = [float((each - whole).abs().mean()) for each in (int8, int4)]
    print(f"off by {off[0]:.4f} in int8, {off[1]:.4f} in int4")
    assert 0 < off[0] < 0.02
    assert off[0] < off[1] < 0.1


def requests() -> list[Submit]:
    rng = random.Random(3)
    prompt = lambda n: [rng.randrange(331) for _ in range(n)]  # noqa: E731
    shared = prompt(70)
    return [
        submit("long", prompt(150), 12),
        submit("one", prompt(1), 30, temperature=0.8, seed=3),
        submit("shared-a", shared + prompt(3), 15, temperature=1.0, seed=4),
        submit("shared-b", shared + prompt(4), 15),
        submit("short", prompt(16), 17),
    ]


@pytest.mark.native
@pytest.mark.parametrize("config", [None, WINDOWS], ids=["llama", "windows"])
def test_alone_batch_chunked_whole_warm_and_cold_are_one(config: dict[str, Any] | None) -> None:
    source = tiny_source() if config is None else source_of(config)
    runner = CpuRunner(
        tiny_config(native_kernels=True, kv_cache_dtype="int8"), source, 0, 1, "", lambda progress: None
    )
    assert "torch" not in runner.facts.notes[0]
    alone: dict[str, list[int]] = {}
    for request in requests():
        alone |= run(runner, [request], depth=1, prefix_cache=False).tokens()
    assert run(runner, requests(), depth=2, step_tokens=9).tokens() == alone
    core = make_core(runner.facts)
    assert run(runner, requests(), core).tokens() == alone
    warm = run(runner, requests(), core)
    assert warm.tokens() == alone
    assert max(d.cached_tokens for deltas in warm.values() for d in deltas) >= 64


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    config = AutoConfig.for_model(model_type, **SMALL | changes).to_dict()
    return config | {"architectures": ["GlmMoeDsaForCausalLM"]}


@pytest.mark.parametrize(
    "config",
    [WINDOWS, config_of("glm_moe_dsa", **INDEXED | {"num_hidden_layers": 2})],
    ids=["windows", "picked latents"],
)
def test_answers_are_near_those_of_a_float_cache(config: dict[str, Any]) -> None:
    """By torch and by native kernels, which agree with each other."""
    model, prompts = load_model(source_of(config)), random_prompts([1, 60, 90])
    types = torch.float32, torch.bfloat16, torch.int8
    whole, half, narrow = (Eager(model, dtype=each).prompt_logprobs(prompts) for each in types)
    assert 0 < (narrow - whole).abs().mean() < 5 * (half - whole).abs().mean()
    rows, native = (Eager(model, 20, dtype=torch.int8, native=n).generate(prompts, 4) for n in (False, True))
    assert [row.tokens for row in native] == [row.tokens for row in rows]

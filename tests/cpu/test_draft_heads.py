"""Rows for which a layer guesses that reads the model's hidden states: its own (multi-token prediction) or an
EAGLE-3 head. The text is that without, and the guesses are those of the whole text at once."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from config_cases import MIMO, RUN, deepseek, gemma3, qwen3_next
from safetensors.torch import save_file
from test_draft_models import requests
from tiny import LLAMA, VOCAB, check_draws, make_core, run, submit, tiny_config, tiny_source
from torch import Tensor

from sgla.config import Config
from sgla.device import H200
from sgla.errors import ConfigError, WeightError
from sgla.hub.source import ModelSource
from sgla.loading.drafter import load_predictor, repack
from sgla.loading.load import _Dummy
from sgla.loading.source import configured_source, drafting
from sgla.messages import StepPlan
from sgla.model.base import Decoder
from sgla.model.drafting import check_leaves, read_block, read_eagle
from sgla.model.read import read_decoder
from sgla.model.registry import EAGLE as EAGLES
from sgla.model.registry import EAGLE3, HEADS, check_architecture
from sgla.model.stages import stages_of
from sgla.observe.machine import Machine
from sgla.resolve import resolve
from sgla.worker import draft_setup
from sgla.worker.cpu import CpuRunner
from sgla.worker.draft_head import of_target
from sgla.worker.ngrams import Both, NGrams
from sgla.worker.pace import Best, Pace
from sgla.worker.state import column

SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 256}
LATENT = deepseek(3, num_hidden_layers=2, first_k_dense_replace=1, num_nextn_predict_layers=1, **SIZES)
WINDOWS = gemma3(num_hidden_layers=3, sliding_window=20, **SIZES)
EAGLE = LLAMA | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 200,
    "max_position_embeddings": 24,  # of texts of its training
}
SPECULATORS = {  # a head of EAGLE-3 as the library of this name writes it
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 200,
    "norm_before_residual": True,
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformer_layer_config": LLAMA | {"num_hidden_layers": 1},
}
READ_NORMED = {"architectures": ["Eagle3DraftModel"], "norm_before_fc": True}
DEEP = LLAMA | {"num_hidden_layers": 4}
DFLASH = LLAMA | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "num_target_layers": 4,
    "head_dim": 16,
    "block_size": 4,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 7},
}
MIMO_7B = LLAMA | {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
MIMO_7B |= {"num_nextn_predict_layers": 1, "num_hidden_layers": 3}
NORMS = "input_layernorm", "hidden_norm", "post_attention_layernorm"
HYBRID = qwen3_next(num_hidden_layers=3, full_attention_interval=2, **SIZES)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "latent": ("mtp", LATENT, None),
    "eagle": ("eagle", DEEP, LLAMA | {"num_hidden_layers": 1}),
    "eagle3": ("eagle3", DEEP, EAGLE),
    "speculators": ("eagle3", DEEP, SPECULATORS),
    "read_normed": ("eagle3", DEEP, SPECULATORS | READ_NORMED),
    "medusa": ("medusa", DEEP, {"medusa_num_heads": 3, "medusa_num_layers": 1}),
    "dflash": ("dflash", DEEP, DFLASH),
    "hybrid": ("mtp", HYBRID, None),
    "a window of its own": ("mtp", MIMO | SIZES, None),
    "mimo": ("mtp", MIMO_7B, None),
    "windows": (
        "eagle3",
        WINDOWS,
        EAGLE | {"hidden_size": WINDOWS["hidden_size"], "draft_vocab_size": VOCAB},
    ),
}


def source_of(config: dict[str, Any], draft: dict[str, Any] | None) -> ModelSource:
    source = replace(tiny_source(), config=config)
    return replace(source, draft=None if draft is None else replace(source, config=draft))


def runner_of(case: str, guesses: bool = True, adaptive: bool = False, **changes: Any) -> CpuRunner:
    algorithm, config, draft = CASES[case]
    settings = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": 3} if guesses else {}
    asked = tiny_config(**settings, speculative_adaptive=adaptive, **changes)
    return CpuRunner(asked, source_of(config, draft if guesses else None), 0, 1, "", lambda progress: None)


class Guesses(dict[tuple[int, ...], list[int]]):
    """What a drafter has guessed behind each text."""

    def __init__(self, runner: CpuRunner) -> None:
        tables, guess = runner.tables, runner._drafter.guess

        def spy(plan: StepPlan) -> Any:
            found = guess(plan)
            if found is not None:
                for slot, most, start, count in zip(column(plan.slots), column(plan.drafts), *found):
                    tokens = tables.tokens[slot].tolist()
                    if most >= 0 and count > 1:
                        self[tuple(tokens[: start + 1])] = tokens[start + 1 : start + count]
            return found

        runner._drafter.guess = spy  # type: ignore[method-assign]


@pytest.mark.parametrize("case", CASES)
def test_text_is_the_same(case: str) -> None:
    native = CASES[case][0] != "mtp"  # those have layers that torch computes anyway
    plain = runner_of(case, guesses=False, native_kernels=native)
    check_draws(plain)
    expected = run(plain, requests()[:2], depth=1, prefix_cache=False)
    runner = runner_of(case, native_kernels=native)
    found: list[Guesses] = []
    for limits in ({"depth": 1}, {"depth": 3, "step_tokens": 17, "pages": 5, "reserve": 0.0}):
        core = make_core(runner.facts, drafts=3, **limits)
        found.append(Guesses(runner))
        for _ in range(1 + (limits["depth"] == 3)):  # the second time behind cached prefixes
            got = run(runner, requests()[:2], core)
            assert got.tokens() == expected.tokens()
            assert got.finish() == expected.finish()
        assert core.stats().draft_tokens > 20
        few = "pages" in limits and case != "a window of its own"  # two windows give back enough
        assert (core.stats().preemptions > 0) == few
    whole, *others = found
    for other in others:  # in parts, after retraction, behind cached prefixes
        common = [text for text in whole if text in other]
        assert len(common) > 10
        same = sum(whole[text] == other[text][: len(whole[text])] for text in common)
        assert same >= 0.9 * len(common)  # beside prefixes whose last token was followed by another one


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case in ("eagle3", "dflash", "hybrid") else pytest.mark.slow)
        for case in CASES
    ],
)
def test_what_a_head_keeps_comes_back_from_a_disk(case: str, tmp_path: Path) -> None:
    """Behind a restart its guesses are those of a server that has read the prompts itself, as is the text."""
    asked = [submit(f"{i}", [*range(40 + i, 120 + i)], 9) for i in range(3)]
    expected = run(runner_of(case, guesses=False), asked, depth=1, prefix_cache=False).tokens()
    told: list[Guesses] = []
    for start in range(2):
        runner = runner_of(case, kv_disk=f"{tmp_path}:16M")
        core = make_core(runner.facts, drafts=3)
        told.append(Guesses(runner))
        assert run(runner, asked, core).tokens() == expected
        stats = core.stats()
        assert (stats.hits.get("disk", 0) > 100, stats.tiers[0].failed) == (start == 1, 0)
        runner.close()
    assert len(told[0]) > 15
    assert told[0] == told[1]


@pytest.mark.parametrize("case", ["latent", "eagle"])
def test_a_head_that_guesses_some_tokens_alone(case: str, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(json.dumps([*range(0, VOCAB, 2)]))
    expected = run(runner_of(case, guesses=False), requests()[:2], depth=1)
    runner = runner_of(case, speculative_token_map=str(tmp_path / "map.json"))
    guesses = Guesses(runner)
    got = run(runner, requests()[:2], depth=2, drafts=3)
    assert got.tokens() == expected.tokens()
    assert {token % 2 for found in guesses.values() for token in found} == {0}
    for text, said in (("[]", "a list of ids"), ("[999]", "a list of ids"), ("{", "give a JSON file")):
        (tmp_path / "map.json").write_text(text)
        with pytest.raises(ConfigError, match=said) as caught:
            runner_of(case, speculative_token_map=str(tmp_path / "map.json"))
        assert caught.value.param == "speculative_token_map"


@pytest.mark.parametrize("case", ["latent", "eagle", "eagle3", "dflash"])
def test_a_head_guesses_with_an_output_layer_of_its_own(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of the model's layer, the guesses are those of the rounded numbers."""

    def guessed(native: bool = False, **changes: Any) -> Guesses:
        runner = runner_of(case, native_kernels=native, **changes)
        found = Guesses(runner)
        assert run(runner, requests()[:2], depth=2, drafts=3).tokens() == expected
        return found

    def spread(head: Any, kind: str | None) -> None:
        repack(head, kind)
        head.out.weight = head.out.weight.stored_as("f32")

    expected = run(runner_of(case, guesses=False), requests()[:2], depth=1).tokens()
    plain, rounded = guessed(), guessed(speculative_head_quantization="int4")
    assert rounded != plain
    monkeypatch.setattr(draft_setup, "repack", spread)
    assert guessed(speculative_head_quantization="int4") == rounded
    monkeypatch.undo()
    assert guessed(native=case != "latent", speculative_head_quantization="int8")


@pytest.mark.parametrize("case", ["eagle3", "dflash", "medusa", "latent", "hybrid"])
def test_n_grams_and_a_head_by_chance(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says: how many guesses pay for each row, and whose."""
    native = CASES[case][0] != "mtp"
    asked = [*requests(), submit("loop", [5, 6, 7] * 6, 40, allowed=[6, 7, 9])]
    plain = runner_of(case, guesses=False, native_kernels=native)
    expected = run(plain, asked, depth=1, prefix_cache=False)
    runner, chance = runner_of(case, adaptive=True, native_kernels=native), random.Random(3)
    assert isinstance(runner._drafter, Both)
    looked, put = [], NGrams.put

    def best(pace: Pace, slot: int, most: int) -> Best:
        return Best(chance.randrange(most + 1), chance.random())

    def each(pace: Pace, slots: Any, most: int, tokens: int) -> Any:
        return np.array([chance.randrange(most + 1) for _ in slots], np.int32)

    monkeypatch.setattr(NGrams, "put", lambda *args: looked.append(put(*args)) or looked[-1])
    monkeypatch.setattr(Pace, "best", best)
    monkeypatch.setattr(Pace, "each", each)
    for limits in ({"depth": 1}, {"depth": 3, "step_tokens": 17}):
        core = make_core(runner.facts, drafts=3, **limits)
        for _ in range(2):
            got = run(runner, asked, core)
            assert got.tokens() == expected.tokens()
            assert got.finish() == expected.finish()
        assert core.stats().draft_tokens > 20
    assert sum(looked) > 10


def weights(name: str, *shape: int) -> Tensor:
    """As a head without files has them."""
    return _Dummy(name, shape, 1, torch.device("cpu")).dense()


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


def layer(name: str, x: Tensor, residual: Tensor) -> Tensor:
    """A Llama's layer behind its first norm."""
    d, heads, kv_heads, dim = 64, 4, 2, 16
    q, k, v = (
        (x @ weights(f"{name}.self_attn.{part}_proj.weight", n * dim, x.shape[1]).T).view(-1, n, dim)
        for part, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    angles = torch.arange(len(x))[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]

    def turned(y: Tensor) -> Tensor:
        return y * cos + torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1) * sin

    q, k, v = (y.transpose(0, 1)[None] for y in (turned(q), turned(k), v))
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = seen[0].transpose(0, 1).flatten(1) @ weights(f"{name}.self_attn.o_proj.weight", d, heads * dim).T
    h = residual + x
    gate, up = (norm(h) @ weights(f"{name}.mlp.{part}_proj.weight", 96, d).T for part in ("gate", "up"))
    return h + (F.silu(gate) * up) @ weights(f"{name}.mlp.down_proj.weight", d, 96).T


def eagle(told: Tensor, embedded: Tensor) -> Tensor:
    """The best token of each position. ``told`` [T, d]; ``embedded`` [T, d]: the tokens behind."""
    x = torch.cat([embedded, told], 1) @ weights("fc.weight", 64, 128).T
    return (layer("layers.0", x, x) @ weights("lm_head.weight", VOCAB, 64).T).argmax(1)


def eagle3(told: Tensor, embedded: Tensor) -> Tensor:
    """The same of ``told`` [T, 3 d]."""
    return behind_layer(told @ weights("fc.weight", 64, 192).T, embedded)


def speculators(told: Tensor, embedded: Tensor) -> Tensor:
    return behind_layer(norm(told @ weights("fc.weight", 64, 192).T), embedded)


def mimo(told: Tensor, embedded: Tensor) -> Tensor:
    name = "model.mtp_layers.0"
    x = torch.cat([norm(told), norm(embedded)], 1) @ weights(f"{name}.input_proj.weight", 64, 128).T
    return (norm(layer(name, norm(x), x)) @ weights("lm_head.weight", VOCAB, 64).T).argmax(1)


def read_normed(told: Tensor, embedded: Tensor) -> Tensor:
    return speculators(norm(told), embedded)


def behind_layer(hidden: Tensor, embedded: Tensor) -> Tensor:
    h = layer("midlayer", torch.cat([norm(embedded), norm(hidden)], 1), hidden)
    return (norm(h) @ weights("lm_head.weight", 200, 64).T).argmax(1) + 1  # d2t of random weights is 1


@pytest.mark.parametrize("says", [eagle, eagle3, speculators, read_normed, mimo])
def test_a_head_guesses_what_its_paper_says(says: Callable[[Tensor, Tensor], Tensor]) -> None:
    """The first guess behind each text of a greedy request, from all hidden states at once."""
    runner, request = runner_of(says.__name__), requests()[0]
    if says is mimo:
        runner._drafter._forward.head.block.attention.qkv.bias.zero_()  # type: ignore[attr-defined]
    guesses = Guesses(runner)
    text = request.tokens + run(runner, [request], drafts=3).tokens()["greedy"]
    first = {len(known): made[0] for known, made in guesses.items()}
    told: list[Tensor] = []
    for one in runner._drafter._target:  # type: ignore[attr-defined]
        one.take = lambda take=one.take: told.append(take()) or told[-1]
    run(runner, [submit("whole", text, 1)], prefix_cache=False)
    whole = torch.cat([one for one in told if len(one) == len(text)], 1)
    best = says(whole[:-1], runner.model.embed(torch.tensor(text[1:], dtype=torch.int32)))
    assert len(first) > 5
    for known, token in first.items():
        assert best[known - 2] == token


def block_of(told: Tensor, embedded: Tensor, window: int) -> Tensor:
    """What the best tokens behind the first of a block ``embedded`` [B, d] are made of, all of which see each
    other and what is ``told`` [T, 2 d] of the text before; in the first layer ``window`` places in all, if it
    has a window."""
    d, heads, kv_heads, dim, count = 64, 4, 2, 16, len(told)
    text, x = norm(told @ weights("fc.weight", d, 2 * d).T), embedded
    angles = torch.arange(count + len(x))[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def heads_of(y: Tensor, name: str, part: str, n: int) -> Tensor:
        return (y @ weights(f"{name}.self_attn.{part}_proj.weight", n * dim, d).T).view(-1, n, dim)

    def turned(y: Tensor, places: slice) -> Tensor:
        y = norm(y)
        back = torch.cat([-y[..., dim // 2 :], y[..., : dim // 2]], -1)
        return (y * cos[places, None] + back * sin[places, None]).transpose(0, 1)[None]

    for name in ("layers.0", "layers.1"):
        seen, own = torch.cat([text, norm(x)]), slice(count, None)
        q = turned(heads_of(norm(x), name, "q", heads), own)
        k = turned(heads_of(seen, name, "k", kv_heads), slice(None))
        v = heads_of(seen, name, "v", kv_heads).transpose(0, 1)[None]
        if window and name == "layers.0":
            k, v = k[:, :, -window:], v[:, :, -window:]
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)[0].transpose(0, 1).flatten(1)
        x = x + y @ weights(f"{name}.self_attn.o_proj.weight", d, heads * dim).T
        gate, up = (norm(x) @ weights(f"{name}.mlp.{p}_proj.weight", 96, d).T for p in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ weights(f"{name}.mlp.down_proj.weight", d, 96).T
    return norm(x)[1:]


@pytest.mark.parametrize("window", [0, 10])
def test_a_block_is_what_its_paper_says(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each behind a text, from all hidden states at once; beside a prompt that is read in parts."""
    windows = {"use_sliding_window": True, "sliding_window": window} if window else {}
    kinds = {"layer_types": ["sliding_attention", "full_attention"]} if window else {}
    monkeypatch.setitem(CASES, "dflash", ("dflash", DEEP, DFLASH | windows | kinds))
    runner, request = runner_of("dflash"), requests()[0]
    guesses = Guesses(runner)
    text = request.tokens + run(runner, [request], drafts=3, step_tokens=16).tokens()["greedy"]
    told: list[Tensor] = []
    for one in runner._drafter._target:  # type: ignore[attr-defined]
        one.take = lambda take=one.take: told.append(take()) or told[-1]
    run(runner, [submit("whole", text, 1)], prefix_cache=False)
    whole = torch.cat([one for one in told if len(one) == len(text)], 1)
    assert len(guesses) > 5
    for known, made in guesses.items():
        ids = torch.tensor([known[-1], *[7] * len(made)], dtype=torch.int32)
        states = block_of(whole[: len(known) - 1], runner.model.embed(ids), window)
        assert runner.model.lm_head(states).argmax(1).tolist() == made


def test_a_block_head_is_read_from_its_files(tmp_path: Path) -> None:
    d, shapes = 64, {"fc.weight": (64, 128), "hidden_norm.weight": (64,), "norm.weight": (64,)}
    for i in range(2):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        shapes |= {f"{attention}.{part}_proj.weight": (n, d) for part, n in (("q", 64), ("k", 32), ("v", 32))}
        shapes |= {f"{attention}.o_proj.weight": (d, 64), f"{mlp}.down_proj.weight": (d, 96)}
        shapes |= {f"{mlp}.{part}_proj.weight": (96, d) for part in ("gate", "up")}
        shapes |= {f"{attention}.{part}_norm.weight": (16,) for part in "qk"}
        shapes |= {f"layers.{i}.{name}_layernorm.weight": (d,) for name in ("input", "post_attention")}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    (tmp_path / "config.json").write_text(json.dumps(DFLASH))
    for missing in ("", "hidden_norm.weight"):
        tensors.pop(missing, None)
        save_file(tensors, tmp_path / "model.safetensors")
        settings = {"speculative_algorithm": "dflash", "speculative_num_draft_tokens": 3}
        asked = tiny_config(**settings, speculative_model=str(tmp_path), speculative_adaptive=False)
        source = replace(source_of(DEEP, None), draft=configured_source(tmp_path, drafting(asked)))
        if missing:
            with pytest.raises(WeightError, match=r"hidden_norm\.weight"):
                CpuRunner(asked, source, 0, 1, "", lambda progress: None)
            continue
        runner = CpuRunner(asked, source, 0, 1, "", lambda progress: None)
        head = runner._drafter._forward.head  # type: ignore[attr-defined]
        x = torch.randn(3, 128)
        torch.testing.assert_close(head.join(x), x @ tensors["fc.weight"].T, atol=1e-4, rtol=1e-4)
        assert torch.equal(head.blocks[1].attention.k_norm, tensors["layers.1.self_attn.k_norm.weight"])


def test_a_block_of_another_model_is_refused() -> None:
    table = DFLASH["dflash_config"]
    for changes, said in (
        ({"num_target_layers": 3}, "num_target_layers is 3, and the model's 4"),
        ({"dflash_config": {"target_layer_ids": [0, 3], "mask_token_id": 7}}, r"\[0, 3\], of 4 layers"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "no mask_token_id"),
        ({"dflash_config": table | {"mask_token_id": VOCAB}}, f"token {VOCAB} of {VOCAB}"),
        ({"vocab_size": 99}, "vocab_size is 99"),
        ({"architectures": EAGLE["architectures"]}, "no head of DFlash"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_block(DFLASH | changes, read_decoder(DEEP))
    shares = read_block(DFLASH | {"dflash_config": {"mask_token_id": 7}}, read_decoder(DEEP)).layers
    assert shares == (2, 2)
    asked = {"speculative_algorithm": "dflash", "speculative_model": "a/b"}
    with pytest.raises(ConfigError, match="give --speculative-num-draft-tokens 3 or less"):
        resolve(tiny_config(**asked, speculative_num_draft_tokens=4), model=DEEP, draft=DFLASH)
    found = resolve(tiny_config(**asked), model=DEEP, draft=DFLASH)
    assert found.config.speculative_num_draft_tokens == 3


def test_a_head_is_read_from_its_files(tmp_path: Path) -> None:
    """As its authors store it, with tables between the vocabularies, the model's embedding and a mask."""
    d, dims = 64, {"q": 64, "k": 32, "v": 32}
    shapes = {f"midlayer.self_attn.{part}_proj.weight": (n, 2 * d) for part, n in dims.items()} | {
        "midlayer.self_attn.o_proj.weight": (d, 64),
        "midlayer.mlp.gate_proj.weight": (96, d),
        "midlayer.mlp.up_proj.weight": (96, d),
        "midlayer.mlp.down_proj.weight": (d, 96),
        "fc.weight": (d, 3 * d),
        "lm_head.weight": (200, d),
        "embed_tokens.weight": (VOCAB, d),
        **dict.fromkeys(("norm.weight", *(f"midlayer.{one}.weight" for one in NORMS)), (d,)),
    }
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    tensors |= {"d2t": torch.arange(200) // 2, "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    (tmp_path / "config.json").write_text(json.dumps(EAGLE))
    others = {name.replace("midlayer.", "model.layers.0."): tensor for name, tensor in tensors.items()}
    for last, said in ((torch.zeros(1), ""), (torch.full((1,), 999), "d2t of the EAGLE-3 head names tokens")):
        tensors["d2t"][-1:] += last.long()
        save_file(tensors, tmp_path / "model.safetensors")
        settings = {"speculative_algorithm": "eagle3", "speculative_model": str(tmp_path)}
        config = tiny_config(**settings, speculative_adaptive=False)
        source = replace(source_of(DEEP, None), draft=configured_source(tmp_path, drafting(config)))
        if said:
            with pytest.raises(WeightError, match=said):
                CpuRunner(config, source, 0, 1, "", lambda progress: None)
            continue
        runner = CpuRunner(config, source, 0, 1, "", lambda progress: None)
        head = runner._drafter._forward.head  # type: ignore[attr-defined]
        assert head.ids.tolist() == [i + i // 2 for i in range(200)]
        logits = torch.arange(200.0)[None]
        assert of_target(head, logits)[0, [3, 299 - 1]].tolist() == [2.0, 199.0]
        as_vllm = tmp_path / "vllm"  # and speculators
        as_vllm.mkdir()
        save_file(others, as_vllm / "model.safetensors")
        (as_vllm / "config.json").write_text(json.dumps(SPECULATORS))
        named = replace(source, draft=configured_source(as_vllm, drafting(config)))
        again = CpuRunner(config, named, 0, 1, "", lambda progress: None)
        same = again._drafter._forward.head  # type: ignore[attr-defined]
        assert torch.equal(same.attention.out.weight.dequant(), head.attention.out.weight.dequant())
        assert (same.normed, head.normed) == (True, False)


def test_a_head_of_eagle_has_biases_as_its_file_says() -> None:
    """Those beside Qwen2 have them, and are called so."""
    head = DEEP | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 1}
    spec = read_eagle(head | {"qkv_bias": True}, read_decoder(DEEP), third=False).spec
    assert spec.qkv_bias
    assert not read_eagle(DEEP | {"num_hidden_layers": 1}, read_decoder(DEEP), third=False).spec.qkv_bias


def test_a_layer_with_a_window_is_read_from_its_files(tmp_path: Path) -> None:
    """As MiMo-V2-Flash has it: it has no experts, and norms have other names."""
    runner = runner_of("a window of its own", guesses=False)
    c, d = MIMO, MIMO["hidden_size"]
    heads, kv_heads, inner = c["num_attention_heads"], 2 * c["num_key_value_heads"], c["intermediate_size"]
    k, v = c["head_dim"], c["v_head_dim"]
    attention = {"q": (heads * k, d), "k": (kv_heads * k, d), "v": (kv_heads * v, d), "o": (d, heads * v)}
    mlp = {"gate": (inner, d), "up": (inner, d), "down": (d, inner)}
    norms = "enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm"
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys((f"{norm}.weight" for norm in norms), (d,))
    shapes |= {f"self_attn.{part}_proj.weight": shape for part, shape in attention.items()}
    shapes |= {f"mlp.{part}_proj.weight": shape for part, shape in mlp.items()}
    shapes |= {"eh_proj.weight": (d, 2 * d), "self_attn.attention_sink_bias": (heads,)}
    tensors = {f"model.mtp.layers.0.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MIMO | SIZES))
    source = configured_source(tmp_path, Config())
    assert isinstance(runner.model, Decoder)
    head = load_predictor(source, runner.model, "float32", None, lambda progress: None)
    torch.testing.assert_close(head.join.weight.dequant(), tensors["model.mtp.layers.0.eh_proj.weight"])
    torch.testing.assert_close(head.norm.weight, tensors["model.mtp.layers.0.final_layernorm.weight"])
    assert head.block.attention.layer.window == 9


@pytest.mark.parametrize("name", HEADS)
def test_heads_are_found_by_the_names_of_their_files(name: str, tmp_path: Path) -> None:
    third = name in EAGLE3
    config = EAGLE | {"architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"fc.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    asked = Config(speculative_algorithm="eagle3" if third else "eagle", speculative_model=str(tmp_path))
    found = configured_source(tmp_path, drafting(asked))
    assert read_eagle(found.config, read_decoder(DEEP), third).spec.hidden == 64
    with pytest.raises(ConfigError, match="is a head .*; give it as --speculative-model"):
        check_architecture(name)
    with pytest.raises(ConfigError, match="it is "):
        read_eagle(found.config, read_decoder(DEEP), not third)


@pytest.mark.parametrize("name", ["DeepSeek-V4", "Hy4-preview", "LongCat-Flash", "gemma-3n-E2B"])
def test_layers_that_no_head_can_be_told_of_are_refused(name: str) -> None:
    """Whose inputs are several streams, or that are not counted as in the file."""
    target = read_decoder(RUN[name].config)
    words = "counts as two" if name == "LongCat-Flash" else "residual stream is several wide"
    with pytest.raises(ConfigError, match=words):
        read_eagle(EAGLE, target, third=True)
    with pytest.raises(ConfigError, match=words):
        read_block(DFLASH, target)


def test_layers_count_as_two_whatever_their_experts_do() -> None:
    target = read_decoder(RUN["LongCat-Flash"].config | {"zero_expert_num": 0})
    with pytest.raises(ConfigError, match="counts as two"):
        read_block(DFLASH, target)
    with pytest.raises(ConfigError, match="--pp 2 cannot be honoured .*share a mixture"):
        stages_of(Config(pp=2), target)


def test_heads_that_do_not_fit_are_refused() -> None:
    target = read_decoder(DEEP)
    assert read_eagle(EAGLE, target, third=True).layers == (1, 2, 2)
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    for named, layers in ((ids, (0, 1, 2)), ({"eagle_config": ids}, (1, 2, 3))):
        assert read_eagle(EAGLE | named, target, third=True).layers == layers
    for change, said in (
        ({"hidden_size": 32}, "its width is 32, and the model's 64"),
        ({"vocab_size": 300}, "another vocabulary"),
        ({"num_hidden_layers": 2}, "it has 2 layers, and a head of EAGLE one"),
        ({"architectures": ["LlamaForCausalLM"]}, "it is no head of EAGLE-3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"is \[1, 2, 9\], and the model has 4 layers"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            r"is \[0, 1, 3\], and the model has 4 layers",
        ),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "reads the last hidden state alone"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            read_eagle(EAGLE | change, target, third=True)
        assert caught.value.param == "speculative_model"
    for change, said in ((EAGLE, "it is a head of EAGLE-3"), (LLAMA, "2 layers, and a head of EAGLE one")):
        with pytest.raises(ConfigError, match=said):
            read_eagle(change, target, third=False)
    for settings, said in (
        ({"speculative_algorithm": "mtp"}, "LlamaForCausalLM has no layer here that guesses"),
        ({"speculative_algorithm": "eagle3"}, "eagle3 needs --speculative-model"),
        ({"speculative_algorithm": "ngram", "speculative_model": "a/b"}, "leave one of them out"),
        (
            {"speculative_model": "a/b", "speculative_algorithm": "draft_model"},
            "it is a head of EAGLE-3; give --speculative-algorithm eagle3",
        ),
        ({"speculative_adaptive": False}, "for models that guess"),
        ({"speculative_quantization": "int8"}, "needs --speculative-algorithm"),
        ({"speculative_token_map": "x", "speculative_algorithm": "ngram"}, "is for --speculative-algorithm"),
        ({"speculative_head_quantization": "int4"}, "needs --speculative-algorithm"),
        (
            {"speculative_head_quantization": "int4", "speculative_algorithm": "ngram"},
            "--speculative-head-quantization is for --speculative-algorithm mtp, eagle, dflash, eagle3",
        ),
    ):
        draft = EAGLE if "speculative_model" in settings else None
        with pytest.raises(ConfigError, match=said):
            resolve(tiny_config(**settings), model=DEEP, draft=draft)
    gpu = Machine(gpus=(H200,) * 2, torch_cuda="13.0")
    two = {"speculative_algorithm": "draft_model", "speculative_model": "a/b", "speculative_eagle_topk": 2}
    window = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8}
    for settings, model, said in (
        ({"device": "cpu"}, DEEP, "2 cannot be honoured on CPUs"),
        ({"speculative_algorithm": "ngram", "speculative_model": None}, DEEP, "2 is for"),
        ({"speculative_algorithm": None, "speculative_model": None}, DEEP, "needs --speculative-algorithm"),
        ({"speculative_eagle_topk": 3}, DEEP, "from 1 to 2"),
        ({"pp": 2}, DEEP, "2 cannot be honoured with --pp"),
        ({"deterministic": True}, DEEP, "2 cannot be honoured with --deterministic"),
        ({"kv_cache_dtype": "int8"}, DEEP, "2 cannot be honoured with --kv-cache-dtype"),
        ({}, LATENT, "attend to all tokens before"),
        ({}, DEEP | window, "attend to all tokens"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            resolve(Config(**two | {"device": "cuda"} | settings), gpu, model, draft=DEEP)
        assert caught.value.param == "speculative_eagle_topk"
    assert resolve(Config(**two, device="cuda"), gpu, DEEP, draft=DEEP).config.speculative_eagle_topk == 2
    target = read_decoder(DEEP)
    first = replace(target.attention[0], kv_heads=1)
    with pytest.raises(ConfigError, match="as many heads"):
        check_leaves(Config(**two), replace(target, attention=(first, *target.attention[1:])))
    for name in ("mtp", "NEXTN", "EAGLE"):
        with pytest.raises(ConfigError, match="mtp cannot be honoured with --kv-cache-dtype fp8 on GPUs yet"):
            resolve(Config(speculative_algorithm=name, kv_cache_dtype="fp8"), gpu, LATENT)
    with pytest.raises(ConfigError, match="eagle needs --speculative-model, .*own layer guesses by mtp"):
        resolve(tiny_config(speculative_algorithm="EAGLE"), model=DEEP)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_head_that_its_authors_call_a_llama_is_known_by_its_file(tmp_path: Path, kind: str) -> None:
    d, name = 64, "layers.0"
    shapes = {"fc.weight": (d, 2 * d), "fc.bias": (d,), f"{name}.post_attention_layernorm.weight": (d,)}
    parts = (("q", d, d), ("k", 32, d), ("v", 32, d), ("o", d, d))
    shapes |= {f"{name}.self_attn.{part}_proj.weight": (n, k) for part, n, k in parts}
    parts = (("gate", 96, d), ("up", 96, d), ("down", d, 96))
    shapes |= {f"{name}.mlp.{part}_proj.weight": (n, k) for part, n, k in parts}
    head = {key: torch.randn(shape) for key, shape in shapes.items()}
    tables = {"embed_tokens.weight": torch.zeros(VOCAB, d)}
    asked = tiny_config(speculative_model=str(tmp_path), speculative_adaptive=False)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    for tensors, algorithm in ((tables, "draft_model"), (tables | head, "eagle")):
        if kind == "bin":
            torch.save(tensors, tmp_path / "pytorch_model.bin")
        else:
            save_file(tensors, tmp_path / "model.safetensors")
        draft = configured_source(tmp_path, drafting(asked))
        config = resolve(asked, model=DEEP, draft=draft.config).config
        assert config.speculative_algorithm == algorithm
    runner = CpuRunner(config, replace(source_of(DEEP, None), draft=draft), 0, 1, "", lambda progress: None)
    x = torch.randn(3, 2 * d)
    expected = F.linear(x, head["fc.weight"], head["fc.bias"])
    torch.testing.assert_close(runner._drafter._forward.head.join(x), expected)  # type: ignore[attr-defined]


def test_what_guesses_if_nobody_says_what() -> None:
    def chosen(model: dict[str, Any] | None, draft: dict[str, Any] | None = None, **settings: Any) -> Any:
        given = {"speculative_model": "a/b"} if draft else {}
        asked = Config(device="cpu", speculative_algorithm="auto", **given, **settings)
        return resolve(asked, model=model, draft=draft)

    assert chosen(DEEP).config.speculative_algorithm == "ngram"
    assert chosen(None).config.speculative_num_draft_tokens == 8
    assert chosen(DEEP, EAGLE).config.speculative_algorithm == "eagle3"
    assert chosen(DEEP, EAGLE | {"draft_vocab_size": None}).config.context_length == 256
    assert chosen(DEEP, DFLASH).config.speculative_algorithm == "dflash"
    assert chosen(DEEP, LLAMA).config.speculative_algorithm == "draft_model"
    for medusa in ({"medusa_num_heads": 3}, {"model_type": "medusa", "num_heads": 3}):
        assert chosen(DEEP, medusa).config.speculative_algorithm == "medusa"
    for name in EAGLES:
        first = DEEP | {"architectures": [name], "num_hidden_layers": 1}
        assert chosen(DEEP, first).config.speculative_algorithm == "eagle"
        silent = resolve(Config(device="cpu", speculative_model="a/b"), model=DEEP, draft=first)
        assert silent.config.speculative_algorithm == "eagle"
    assert chosen(DEEP, tp=2).config.speculative_algorithm == "ngram"
    assert chosen(DEEP, pp=2).config.speculative_algorithm == "ngram"
    gpus = Machine(gpus=(H200,) * 2, torch_cuda="13.0")
    for ways in ({"pp": 2}, {"cp": 2}):
        asked = Config(speculative_algorithm="auto", speculative_num_draft_tokens=3, **ways)
        assert resolve(asked, gpus, DEEP).config.speculative_algorithm == "ngram"
    staged = Config(speculative_algorithm="auto", speculative_num_draft_tokens=3, pp=2)
    assert resolve(staged, gpus, HYBRID).config.speculative_algorithm == "ngram"
    asked = Config(device="cpu", speculative_algorithm="auto", speculative_num_draft_tokens=3)
    vectors = resolve(asked, model=DEEP, pooled=True)
    assert vectors.config.speculative_algorithm is None
    assert vectors.config.speculative_num_draft_tokens is None
    assert "auto, but" in vectors.reasons["speculative_algorithm"]
    assert chosen(DEEP, EAGLE, pp=2).config.speculative_algorithm == "eagle3"
    with pytest.raises(ConfigError, match="page-size"):  # what has nothing to do with guesses
        chosen(DEEP, page_size=-1)
    off = resolve(
        Config(device="cpu", speculative_algorithm="off", speculative_num_draft_tokens=3), model=DEEP
    )
    assert off.config.speculative_algorithm is None
    with pytest.raises(ConfigError, match="off does not"):
        resolve(Config(speculative_algorithm="off", speculative_model="a/b"))

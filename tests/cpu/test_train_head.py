"""``bench/train_head.py``: the head that it trains and saves is the one that a server guesses with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_draft_heads import DEEP, Guesses, source_of, weights
from test_draft_models import requests
from tiny import VOCAB, run, tiny_config

from sgla.loading.source import configured_source, drafting
from sgla.worker.cpu import CpuRunner

BENCH = Path(__file__).parents[2] / "bench"
SIZES = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    import train_head

    return train_head


def target(trainer: Any) -> Any:
    """The model that a server makes of ``DEEP`` without files."""
    names = {"model.embed_tokens": (VOCAB, 64), "lm_head": (VOCAB, 64), "model.norm": (64,)}
    for i in range(DEEP["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        names |= {f"{layer}.self_attn.{part}_proj": size for part, size in SIZES.items()}
        names |= {f"{layer}.mlp.{part}_proj": (96, 64) for part in ("gate", "up")}
        names |= {f"{layer}.mlp.down_proj": (64, 96)}
        names |= {f"{layer}.{norm}": (64,) for norm in ("input_layernorm", "post_attention_layernorm")}
    shape = trainer.Shape.of(DEEP)
    tensors = {f"{name}.weight": weights(f"{name}.weight", *size) for name, size in names.items()}
    return trainer.Llama(shape, tensors, trainer.Rope(shape, 256, "cpu"))


def test_a_saved_head_guesses_as_it_was_trained(trainer: Any, tmp_path: Path) -> None:
    llama = target(trainer)
    head = trainer.Head(llama, torch.arange(0, VOCAB, 2))
    with torch.no_grad():
        for value in head.values.values():
            value.add_(0.05 * torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    trainer.save(head, DEEP, tmp_path)
    for name, value in head.named().items():  # as it was saved
        if value.dim() > 1:
            numbers, scales = trainer.rounded(name, value).values()
            value.copy_((numbers.unflatten(1, (-1, trainer.GROUP)) * scales.float()[..., None]).flatten(1))
    settings = {"speculative_algorithm": "eagle3", "speculative_model": str(tmp_path)}
    config = tiny_config(**settings, speculative_num_draft_tokens=3, speculative_adaptive=False)
    source = replace(source_of(DEEP, None), draft=configured_source(tmp_path, drafting(config)))
    runner = CpuRunner(config, source, 0, 1, "", lambda progress: None)
    guesses = Guesses(runner)
    run(runner, requests()[:1], drafts=3)
    long = {known: made for known, made in guesses.items() if len(made) == 3}
    assert len(long) > 5
    for known, made in list(long.items())[:6]:
        ids = torch.tensor([[*known, *made]])
        heard = llama.forward(ids, torch.arange(ids.shape[1])[None], told=head.told)[1]
        for place, shown in enumerate(list(head(ids.roll(-1, 1), heard))[:3]):
            best = head.kept[head.guess(shown).argmax(-1)]
            assert best[0, len(known) - 2 + place] == made[place]


def test_a_head_learns_what_its_target_writes(trainer: Any) -> None:
    llama = target(trainer)
    order = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 40, (16, 12), generator=order)
    with torch.no_grad():
        for _ in range(20):
            hidden = llama.forward(ids, torch.arange(ids.shape[1])[None])[0][:, -1]
            ids = torch.cat([ids, (hidden @ llama.out.T).argmax(1, keepdim=True)], 1)
    ends = torch.full((16,), 32)
    texts = trainer.Texts(ids.int(), torch.full((16,), 12), ends, torch.ones(16, dtype=torch.bool))
    head = trainer.Head(llama, torch.arange(VOCAB))
    lesson = trainer.Lesson(llama, head, texts, 8, "cpu")
    before = trainer.check(head, lesson)
    trainer.train(head, lesson, lesson, 40, trainer.Clock(1e9), 1e-2)
    after = trainer.check(head, lesson)
    assert after["loss"] < 0.9 * before["loss"]
    assert after["tokens_a_step"][1] > before["tokens_a_step"][1] + 0.5

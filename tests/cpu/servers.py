"""Servers with tiny models of each kind of KV cache, alone and in pairs, and what they say of prompts."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_cases import FALCON_H1, MAMBA_1, MAMBA_2, RUN, deepseek, gemma3, qwen3_next
from tiny import LLAMA, VOCAB
from tokenizers import Tokenizer, models

from sgla.engine import Engine
from sgla.engine.params import SamplingParams

SECRET = {"kv_transfer_secret": "between us"}
TEXTS = [[(a * i + a) % 300 for i in range(150)] for a in (7, 11, 13)]
ASKED = [TEXTS[0], [*TEXTS[0][:100], *TEXTS[1][:40]], TEXTS[0], TEXTS[2][:9], TEXTS[2]]
MODELS: dict[str, dict[str, Any]] = {
    "pages": LLAMA,
    "windows": gemma3(sliding_window=32, vocab_size=VOCAB),
    "latent": deepseek(3, vocab_size=VOCAB),
    "states": qwen3_next(vocab_size=VOCAB),
}
# Others that keep states, each of which splits over ranks in its own way.
RECURRENT: dict[str, dict[str, Any]] = {
    "both": FALCON_H1 | {"vocab_size": VOCAB},
    "two groups": FALCON_H1 | {"vocab_size": VOCAB, "mamba_n_groups": 2},
    "mamba": MAMBA_2 | {"vocab_size": VOCAB},
    "first mamba": MAMBA_1 | {"vocab_size": VOCAB},
    "kimi": RUN["Kimi-Linear-48B-A3B"].config | {"vocab_size": VOCAB},
    "convolutions": RUN["LFM2-1.2B"].config | {"vocab_size": VOCAB},
}


def write(folder: Path, model: dict[str, Any], length: int = 256) -> Path:
    """A folder of the model, without weights. ``length``: of its context."""
    lengths = [key for key in ("max_position_embeddings", "model_max_length") if key in model]
    (folder / "config.json").write_text(json.dumps(model | dict.fromkeys(lengths, length)))
    words = {f"<{i}>": i for i in range(VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="<0>")).save(str(folder / "tokenizer.json"))
    return folder


def begin(folder: Path, **changes: Any) -> Engine:
    config = {"device": "cpu", "dtype": "float32", "threads": 1, "executor": "inline", "random_seed": 1}
    config |= {"load_format": "dummy", "native_kernels": False, "kv_cache_bytes": 2 << 20}
    return Engine(str(folder), **config | {"step_tokens": 64, "max_running_requests": 4} | changes)


def prefilling(folder: Path, **changes: Any) -> Engine:
    return begin(folder, **{"role": "prefill", "kv_transfer_port": 0} | SECRET | changes)


def port_of(engine: Engine) -> int:
    assert engine._system is not None
    assert engine._system.prefilling is not None
    return engine._system.prefilling.port


def decoding(folder: Path, port: int, **changes: Any) -> Engine:
    role = {"role": "decode", "prefill_url": f"tcp://127.0.0.1:{port}"} | SECRET
    return begin(folder, **role | changes)


def tell(engine: Engine, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    """Tokens, usage, finish and logprobs of each prompt, one after the other. Sums depend on how a text is
    cut, in their last bits."""
    wanted = SamplingParams(**{"temperature": 0.7, "seed": 5, "max_tokens": 4, "logprobs": 2} | sampling)
    told = []
    for prompt in prompts:
        out = engine.generate(prompt, wanted)
        entries = [entry for entry in [*(out.prompt_logprobs or ()), *out.logprobs] if entry is not None]
        values = [x for entry in entries for x in (entry.logprob, *(value for _, value in entry.top))]
        told.append((out.tokens, out.usage, out.finish, pytest.approx(values, abs=1e-4)))
    return told


def same(told: list[Any], others: list[Any]) -> bool:
    for (*first, values), (*second, wanted) in zip(told, others, strict=True):
        assert first == second
        assert list(values.expected) == wanted
    return True


def stats(engine: Engine) -> Any:
    assert engine._system is not None
    found = engine._system.ingress.stats()
    assert found is not None
    return found


def check_idle(engine: Engine) -> None:
    """Nothing is held, nor on its way once all has been saved; no page is lost."""
    assert engine._system is not None
    core = engine._system._core
    assert core is not None
    wait_until(lambda: core.idle)
    core.check()
    assert not core._memory.transfers.under_way


def same_text(told: list[Any], others: list[Any]) -> bool:
    """But for what was cached: what a peer has lost is computed again."""
    return same([(t, f, v) for t, _, f, v in told], [(t, f, v) for t, _, f, v in others])


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    wait, waited = threading.Event(), 0.0
    while not true():
        assert waited < seconds
        wait.wait(0.01)
        waited += 0.01

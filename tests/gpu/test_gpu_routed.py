"""What an engine on a GPU tells of a mixture of Qwen3-30B-A3B's layers: which experts each token went to, and
whether its weights are what they were."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_gpu_moe import TINY

sys.path.append(str(Path(__file__).parents[1] / "cpu"))
from servers import write
from tiny import VOCAB

from sgla.engine import Engine
from sgla.engine.params import SamplingParams
from sgla.errors import InvalidField

LAYERS, CHOSEN = 4, 8
MODEL = TINY | {"num_hidden_layers": LAYERS, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
PROMPT = [(7 * i * i + i) % 300 for i in range(700)]


def ask(engine: Engine, prompt: list[int], count: int) -> tuple[list[int], NDArray[np.int32]]:
    """Tokens, and int32[all but the last, layers, experts of a token]."""
    wanted = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, routed_experts=True)
    told: Any = engine.generate(prompt, wanted)
    found = np.frombuffer(b"".join(told.hidden_states), np.int32)
    return told.tokens, found.reshape(len(prompt) + count - 1, LAYERS, CHOSEN)


def test_experts_of_steps_are_those_of_the_whole_text(tmp_path: Path) -> None:
    """Bits differ from step to step, so experts that are about as good may change places."""
    settings: dict[str, Any] = {"enable_return_routed_experts": True, "kv_cache_bytes": 1 << 28}
    settings |= {"executor": "inline", "max_running_requests": 8}
    with Engine(str(write(tmp_path, MODEL, 2048)), device="cuda", load_format="dummy", **settings) as engine:
        tokens, steps = ask(engine, PROMPT, 24)
        _, whole = ask(engine, [*PROMPT, *tokens[:-1]], 1)
        assert all(len(set(chosen)) == CHOSEN for chosen in steps.reshape(-1, CHOSEN).tolist())
        equal = (np.sort(steps) == np.sort(whole)).all(-1).mean()
        assert equal > 0.9
        assert len({tuple(sorted(chosen)) for chosen in whole[:, 0].tolist()}) > 20


def test_weights_that_are_others_are_named(tmp_path: Path) -> None:
    with Engine(
        str(write(tmp_path, MODEL, 2048)),
        device="cuda",
        load_format="dummy",
        kv_cache_bytes=1 << 28,
        executor="inline",
    ) as engine:
        (told,) = engine.check_weights("snapshot")
        assert engine.check_weights("compare") == [told]
        engine.check_weights("reset_tensors")
        with pytest.raises(InvalidField, match="mlp.router"):
            engine.check_weights("compare")

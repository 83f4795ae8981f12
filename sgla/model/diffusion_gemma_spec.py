"""The shapes of DiffusionGemma's layers: those of a Gemma 4 with experts. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.hub.reader import Reader
from sgla.layers.spec import AttentionSpec
from sgla.model import gemma4_spec
from sgla.model.limits import POSITIONS
from sgla.model.spec import ModelSpec

# What Gemma 4 reads from keys and this class has built in.
BUILT_IN = {
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
}

MOST = 1 << 16


class Denoising(NamedTuple):
    """How a block comes out of noise (``DiffusionGemmaGenerationConfig`` in transformers): in at most
    ``steps`` steps, whose temperature falls from ``t_max`` to ``t_min``. Each keeps those of its tokens whose
    entropies together are at most ``entropy_bound`` (arXiv 2505.24857). A block is done when the mean entropy
    is below ``confidence``, and the most probable tokens were the same in the ``stability`` steps before."""

    steps: int = 48
    t_min: float = 0.4
    t_max: float = 0.8
    entropy_bound: float = 0.1
    stability: int = 1
    confidence: float = 0.005

    def temperature(self, left: int) -> float:
        """With so many steps left, this one included."""
        return self.t_min + (self.t_max - self.t_min) * (left / self.steps)


# By field: the key of generation_config.json.
KEYS = {
    "steps": "max_denoising_steps",
    "t_min": "t_min",
    "t_max": "t_max",
    "entropy_bound": "entropy_bound",
    "stability": "stability_threshold",
    "confidence": "confidence_threshold",
}


# Settings that ask for what is not known to be right with blocks.
LACKS = (
    "enable_lora",
    "speculative_algorithm",
    "enable_return_hidden_states",
    "enable_return_routed_experts",
    "logits_processors",
    "enable_return_routed_experts",
    "tp",
    "ep",
    "cp",
    "dp_attention",
    "pp",
    "nnodes",
    "role",
    "encode_url",
)


def check_canvas(config: Config, device: str, spec: ModelSpec) -> None:
    """Raise ConfigError for what a model that writes blocks cannot honour, or what only such a one can."""
    if not spec.canvas:
        if config.diffusion_config:
            raise ConfigError(
                "--diffusion-config is for models that write blocks out of noise; leave it out",
                param="diffusion_config",
            )
        return
    if device not in ("cpu", "cuda"):
        raise ConfigError(
            f"{spec.architecture} has no kernels for --device {device}; give --device cpu or cuda",
            param="device",
        )
    chosen = {config.attention_backend, config.decode_attention_backend, config.prefill_attention_backend}
    if device == "cuda" and (others := chosen - {None, "auto", "torch", "triton"}):
        raise ConfigError(
            f"--attention-backend {min(map(str, others))} does not let the tokens of a block see each other; "
            "leave it out",
            param="attention_backend",
        )
    plain = Config()
    for name in (name for name in LACKS if getattr(config, name) != getattr(plain, name)):
        raise ConfigError(
            f"--{name.replace('_', '-')} cannot be honoured by a model that writes blocks out of noise; "
            "leave it out",
            param=name,
        )
    if config.step_tokens is not None and config.step_tokens < 2 * spec.canvas:
        raise ConfigError(
            f"--step-tokens {config.step_tokens} leaves no room beside a block of {spec.canvas} tokens; give "
            f"{2 * spec.canvas} or more",
            param="step_tokens",
        )
    denoising_of({}, config.diffusion_config)


WHOLE = ("steps", "stability")  # numbers
MAY_BE_ZERO = ("stability", "t_min")


def denoising_of(generation: Mapping[str, Any], asked: Mapping[str, Any]) -> Denoising:
    """By ``generation_config.json``, and what ``--diffusion-config`` has in its place. Raises ConfigError."""
    if unknown := asked.keys() - set(KEYS.values()):
        raise ConfigError(
            f"--diffusion-config has {sorted(unknown)[0][:40]!r}; it may have {', '.join(KEYS.values())}",
            param="diffusion_config",
        )
    sampler = generation.get("sampler_config") or {}
    if not isinstance(sampler, dict):
        raise ConfigError("generation_config.json: sampler_config must be an object", param="model")
    file = {**generation, "entropy_bound": sampler.get("entropy_bound")}
    found = {
        name: _checked(name, key, asked[key], "--diffusion-config")
        if key in asked
        else _checked(name, key, file[key], "generation_config.json")
        for name, key in KEYS.items()
        if key in asked or file.get(key) is not None
    }
    made = Denoising(**found)
    if made.t_max <= made.t_min:
        raise ConfigError(
            f"t_max ({made.t_max}) must be above t_min ({made.t_min}): a block begins with the former",
            param="diffusion_config",
        )
    return made


def _checked(name: str, key: str, value: Any, where: str) -> Any:
    whole, least = name in WHOLE, 0 if name in MAY_BE_ZERO else 1 if name in WHOLE else 1e-9
    number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not number or not least <= value <= MOST:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(
            f"{where}: {key} must be {kind} from {least} to {MOST}",
            param="diffusion_config" if where.startswith("--") else "model",
        )
    return value


def read(c: Reader, layers: int, positions: int) -> tuple[AttentionSpec, ...]:
    """See ``Family.attention``."""
    return gemma4_spec.read(_whole(c), layers, positions)


def complete(c: Reader, spec: ModelSpec) -> ModelSpec:
    """See ``Family.completed``."""
    canvas = c.integer("canvas_length", POSITIONS)
    return replace(gemma4_spec.complete(_whole(c), spec), canvas=canvas)


def _whole(c: Reader) -> Reader:
    return Reader(c.architecture, {**c.values, **BUILT_IN})

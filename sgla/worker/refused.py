"""What a GPU, or the kernels for it, cannot do: refused by name before anything is loaded."""

from __future__ import annotations

import torch

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.model.spec import ModelSpec

E4M3 = (8, 9)  # compute capability of the first GPUs with 8-bit floating point


def check(config: Config, spec: ModelSpec, dtype: torch.dtype) -> None:
    """Raise ConfigError. ``dtype``: in which the model computes."""
    if config.deterministic and (spec.moe is not None or spec.quantization is not None):
        raise ConfigError(
            "--deterministic cannot be honoured for mixtures of experts or fp8 checkpoints yet; leave it out",
            param="deterministic",
        )
    check_weights(config.quantization or spec.quantization, dtype, spec.moe is not None)
    if config.kv_cache_dtype == "fp8":
        check_kv_cache(dtype)


def has_e4m3() -> bool:
    """Whether the GPU has 8-bit floating point."""
    return torch.cuda.get_device_capability() >= E4M3


def check_weights(quantization: str | None, dtype: torch.dtype, mixture: bool) -> None:
    if mixture and quantization in ("int8", "int4"):
        raise ConfigError(
            f"--quantization {quantization} cannot be honoured for a mixture of experts on a GPU; use fp8 or none",
            param="quantization",
        )
    if quantization == "fp8" and dtype == torch.float32:
        raise ConfigError("fp8 weights compute in bfloat16; leave --dtype float32 out", param="dtype")
    if quantization == "fp8" and not has_e4m3():
        raise ConfigError(
            f"{torch.cuda.get_device_name()} has no 8-bit floating point (Ada and Hopper have): fp8 weights need a newer "
            "GPU; use bfloat16 weights, without --quantization fp8",
            param="quantization",
        )


def check_kv_cache(dtype: torch.dtype) -> None:
    if not has_e4m3() or dtype != torch.bfloat16:
        raise ConfigError(
            "--kv-cache-dtype fp8 needs a GPU with 8-bit floating point (Ada, Hopper or newer) and --dtype bfloat16; "
            "leave it out",
            param="kv_cache_dtype",
        )

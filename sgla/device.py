"""What a GPU is to those who choose by it, and which models it cannot run: asked before anything is loaded, by ``explain`` as by
the workers. Loads no torch."""

from __future__ import annotations

from typing import NamedTuple

from sgla.config import Config
from sgla.errors import ConfigError

# KiB of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
LEAST_SHARED = 99  # of the others: 8.6, 8.9, 12.0, 12.1
LEAST = (8, 0)  # capability with bfloat16 products
HEAD_DIM = 256  # the largest of the attention kernels
CPU = "give --device cpu"


class Device(NamedTuple):
    """A GPU. ``capability`` is NVIDIA's, and (0, 0) of other makers, whose numbers mean something else."""

    name: str
    capability: tuple[int, int]

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a block may have."""
        return SHARED.get(self.capability, LEAST_SHARED) << 10

    @property
    def e4m3(self) -> bool:
        """It has 8-bit floating point."""
        return self.capability >= (8, 9)


def check(
    device: Device, config: Config, head_dim: int, dtype: str, mixture: bool, stored: str | None
) -> None:
    """Raise ConfigError for a generating model that ``device`` cannot run. ``dtype``: in which it computes; ``stored``: the
    quantization of the checkpoint."""
    quantization = config.quantization or stored
    if device.capability == (0, 0):
        raise ConfigError(
            f"{device.name} is no NVIDIA GPU, and others are not supported yet; {CPU}", param="device"
        )
    if device.capability < LEAST:
        raise ConfigError(
            f"{device.name} has compute capability {device.capability[0]}.{device.capability[1]}, and the kernels need "
            f"{LEAST[0]}.{LEAST[1]} (Ampere) or more; {CPU}",
            param="device",
        )
    if head_dim > HEAD_DIM:
        raise ConfigError(
            f"the model's head dimension is {head_dim}, and the GPU's attention kernels end at {HEAD_DIM}; {CPU}",
            param="device",
        )
    if config.deterministic and (mixture or stored is not None):
        raise ConfigError(
            "--deterministic cannot be honoured for mixtures of experts or fp8 checkpoints yet; leave it out",
            param="deterministic",
        )
    if quantization in ("int8", "int4"):
        raise ConfigError(
            f"--quantization {quantization} has no GPU kernels yet: every step would make bfloat16 weights of all of them; use "
            f"--quantization fp8 (Ada, Hopper or newer) or none, or {CPU}",
            param="quantization",
        )
    if quantization == "fp8" and dtype == "float32":
        raise ConfigError("fp8 weights compute in bfloat16; leave --dtype float32 out", param="dtype")
    if quantization == "fp8" and not device.e4m3:
        raise ConfigError(
            f"{device.name} has no 8-bit floating point (Ada and Hopper have): fp8 weights need a newer GPU; use weights in "
            "bfloat16: another checkpoint if these are fp8, or no --quantization fp8",
            param="quantization",
        )
    if config.kv_cache_dtype == "fp8" and (not device.e4m3 or dtype != "bfloat16"):
        raise ConfigError(
            "--kv-cache-dtype fp8 needs a GPU with 8-bit floating point (Ada, Hopper or newer) and --dtype bfloat16; "
            "leave it out",
            param="kv_cache_dtype",
        )

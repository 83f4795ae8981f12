"""What a device is to all who choose by it, the kinds there are, and which models a GPU cannot run: asked
before anything is loaded, by ``explain`` as by the workers. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sgla.config import Config
from sgla.errors import ConfigError
from sgla.packages import brought

# KiB of shared memory that a block may have,
# by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227}
LEAST_SHARED = 99  # of the others: 8.6, 8.9, 12.0, 12.1
LEAST = (8, 0)  # capability with bfloat16 products
CPU = "give --device cpu"
# Methods whose layers, on GPUs, are integers in groups.
OF_INTEGERS = "gptq", "awq", "compressed-tensors", "gguf", "bitsandbytes", "hqq", "torchao", "mxfp4", "nvfp4"
OF_EXPERTS = (
    "f32",
    "bf16",
    "fp8",
    "fp8g128",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "nf4",
    "fp4",
    *(f"int{bits}{of}{group}" for bits in (4, 8) for of in "gm" for group in (32, 64, 128)),
)  # storages of experts that GPUs have kernels for
# Settings for what models that make text do with logits, and for pages of KV.
OF_TEXT = (
    "deterministic",
    "enable_lora",
    "enable_return_hidden_states",
    "enable_return_routed_experts",
    "kv_disk",
    "kv_host_bytes",
    "kv_host_ratio",
    "kv_store",
    "logits_processors",
    "speculative_algorithm",
)
OF_PAGES = (
    "attention_backend",
    "decode_attention_backend",
    "prefill_attention_backend",
    "kv_cache_dtype",
)
TIERS = "use --kv-disk or --kv-store, which keep prefixes there, too"
INSTEAD = {"kv_host_bytes": TIERS, "kv_host_ratio": TIERS}  # of settings that a device lacks
OTHERS = {  # kinds that people may ask for
    "rocm": "AMD GPUs", "hip": "AMD GPUs", "xpu": "Intel GPUs", "hpu": "Gaudi", "npu": "Ascend NPUs",
    "tpu": "TPUs", "mps": "Apple GPUs", "vulkan": "GPUs by way of Vulkan", "musa": "Moore Threads GPUs",
    "neuron": "Trainium and Inferentia",
}  # fmt: skip


class Device(NamedTuple):
    """A device. ``kind``: see ``platform``; ``arch``: the compute capability of an NVIDIA GPU, (0, 0) of
    everything else, whose numbers mean something else. Sizes in bytes: ``shared`` is the shared memory that a
    block may have."""

    kind: str
    name: str
    arch: tuple[int, int] = (0, 0)
    multiprocessors: int = 1
    shared: int = 0
    memory: int = 0

    @property
    def bf16(self) -> bool:
        """It multiplies bfloat16."""
        return self.kind == "cpu" or self.arch >= LEAST

    @property
    def fp8(self) -> bool:
        """It has 8-bit floating point (e4m3)."""
        return self.arch >= (8, 9)

    @property
    def tma(self) -> bool:
        """It copies tiles by itself (tensor memory accelerator)."""
        return self.arch >= (9, 0)

    @property
    def pdl(self) -> bool:
        """A kernel may start before the one before it has ended (programmatic dependent launch)."""
        return self.arch >= (9, 0)

    @property
    def wgmma(self) -> bool:
        """It has Hopper's products of warp groups, which no other generation has."""
        return self.arch == (9, 0)


def nvidia(name: str, arch: tuple[int, int], multiprocessors: int = 1, memory: int = 0) -> Device:
    return Device("cuda", name, arch, multiprocessors, SHARED.get(arch, LEAST_SHARED) << 10, memory)


H200 = nvidia("H200", (9, 0), 132)  # on which kernels were measured: what is explained without a GPU


class Platform(NamedTuple):
    """A kind of device that models run on. ``runner``: import path (``module:name``) of what runs steps in a
    worker, called as ``worker.runner.Runner`` is; ``find``: the devices of the kind that this machine has,
    found without torch; ``lacks``: settings that ask of a step what it cannot give there; ``place``: import
    path of a ``worker.place.Place``, called as ``take_place`` is, where not the CPU and its memory serve."""

    runner: str
    find: Callable[[], tuple[Device, ...]] = tuple
    lacks: tuple[str, ...] = ()
    place: str = "sgla.worker.place:Cpu"


PLATFORMS = {
    "cpu": Platform("sgla.worker.start_cpu:cpu_runner", lacks=("kv_host_bytes", "kv_host_ratio")),
    "cuda": Platform(
        "sgla.worker.start_gpu:cuda_runner",
        lacks=("logits_processors",),
        place="sgla.worker.place:Gpu",
    ),
}


def platform(kind: str) -> Platform:
    """That of ``--device kind``: ours, or one that a package registers as an entry point of the group
    ``sgla.devices``, whose name is the kind and whose object is a Platform. Raises ConfigError if there is
    none, or a broken one."""
    if kind not in PLATFORMS:
        asked = f"--device {kind[:99]}"
        found = brought("sgla.devices", kind, Platform, asked, f"mend or remove it, or {CPU}", "device")
        if found is None:
            what = f"{OTHERS[kind]} are not supported yet" if kind in OTHERS else "no package registers it"
            raise ConfigError(f"{asked}: {what}; {CPU}, cuda or auto", param="device")
        PLATFORMS[kind] = found
    return PLATFORMS[kind]


def check_answers(config: Config, kind: str, vectors: bool, encoder: bool) -> None:
    """Raise ConfigError for settings that ask for what no step gives: on devices of this ``kind``, or of a
    model that answers with ``vectors``, such as an ``encoder``."""
    refused = dict.fromkeys(platform(kind).lacks, f"by --device {kind}")
    if vectors:
        refused |= dict.fromkeys(OF_TEXT, "by a model that answers with vectors")
    if encoder:
        refused |= dict.fromkeys(OF_PAGES, "by an encoder, which keeps no KV cache")
        if config.tp > 1:
            raise ConfigError("an encoder is not split over ranks; use --tp 1", param="tp")
    plain = Config()
    for name, where in refused.items():
        value = getattr(config, name)
        if value != getattr(plain, name):
            shown = f" {value}" if isinstance(value, str) else ""
            flag = "--" + name.replace("_", "-") + shown
            other = INSTEAD.get(name, "leave it out") if name in platform(kind).lacks else "leave it out"
            raise ConfigError(f"{flag} cannot be honoured {where}; {other}", param=name)


def devices(kind: str) -> tuple[Device, ...]:
    """Those of the kind that this machine has. Raises ConfigError."""
    find = platform(kind).find
    try:
        return find()
    except Exception as error:
        raise ConfigError(
            f"--device {kind}: its package failed to look for them: {type(error).__name__}: {error}; {CPU}",
            param="device",
        ) from error


def check(device: Device, config: Config, dtype: str, experts: str | None, stored: str | None) -> None:
    """Raise ConfigError for a decoder that ``device`` cannot run. ``dtype``: in which it computes;
    ``experts``: the storage of a mixture's; ``stored``: the quantization of the checkpoint."""
    quantization = config.quantization or stored
    if device.kind != "cuda":
        raise ConfigError(
            f"{device.name} is no NVIDIA GPU, and others are not supported yet; {CPU}", param="device"
        )
    if not device.bf16:
        raise ConfigError(
            f"{device.name} has compute capability {device.arch[0]}.{device.arch[1]}, and the kernels need "
            f"{LEAST[0]}.{LEAST[1]} (Ampere) or more; {CPU}",
            param="device",
        )
    if config.deterministic and (experts is not None or stored not in (None, *OF_INTEGERS)):
        raise ConfigError(
            "--deterministic cannot be honoured for mixtures of experts or fp8 checkpoints yet; leave it out",
            param="deterministic",
        )
    if experts is not None and experts not in OF_EXPERTS:
        raise ConfigError(
            f"experts in {experts} have no GPU kernels; take another checkpoint, or {CPU}", param="model"
        )
    if quantization == "fp8" and dtype == "float32":
        raise ConfigError("fp8 weights compute in bfloat16; leave --dtype float32 out", param="dtype")
    if quantization == "fp8" and not device.fp8:
        raise ConfigError(
            f"{device.name} has no 8-bit floating point (Ada and Hopper have): fp8 weights need a newer "
            "GPU; use weights in bfloat16: another checkpoint if these are fp8, or no --quantization fp8",
            param="quantization",
        )
    if config.kv_cache_dtype == "fp8" and (not device.fp8 or dtype != "bfloat16"):
        raise ConfigError(
            "--kv-cache-dtype fp8 needs a GPU with 8-bit floating point (Ada, Hopper or newer) and --dtype "
            "bfloat16; leave it out",
            param="kv_cache_dtype",
        )


def check_encoder(device: Device, config: Config, dtype: str) -> None:
    """``check`` for an encoder."""
    check(device, config, dtype, None, None)
    if config.quantization:
        raise ConfigError(
            f"--quantization {config.quantization} cannot be honoured for encoders on a GPU; leave it out",
            param="quantization",
        )

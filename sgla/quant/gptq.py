"""GPTQ and AWQ checkpoints (arXiv 2210.17323, 2306.00978). Loads no torch.

Beside ``X.scales`` there are ``X.qweight`` and ``X.qzeros``, with several numbers in each int32, and with
GPTQ ``X.g_idx``, the group of each input channel. A CPU keeps them in groups of 32: GPTQ's symmetric ones as
they are, others with the minimum of a group rounded to float16. Where the channels of a group do not lie
together (``desc_act``), and on GPUs, the weights become floating-point numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sgla.errors import ConfigError, WeightError
from sgla.hub.reader import Reader, shown
from sgla.quant.method import Held, Method

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor

SCATTERED = (
    "the channels of a group do not lie together in this checkpoint (act-order), so its weights become "
    "floating-point numbers",
)
SCALES = ("F16", "BF16", "F32")
GROUP = 32  # channels of k that have constants of their own in our storages


class Grouped(Method):
    """Integers of ``bits`` bits, of which ``group`` channels have constants in common (0: all)."""

    bits: int
    group: int

    def keep(self, symmetric: bool, reordered: bool = False) -> None:
        """Say what CPUs keep such layers in. ``reordered``: the channels of a group do not lie together."""
        fits = not (reordered or self.group % GROUP)
        self.storage = (f"q{self.bits}_0" if symmetric else f"int{self.bits}") if fits else ""
        self.devices = ("cpu",) if fits else ()
        self.notes = SCATTERED if reordered else ()


class Gptq(Grouped):
    name = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        c = Reader("gptq", config)
        super().__init__(config, _left_out(c))
        self.bits = _bits(c, (4, 8))
        self.group = _group(c, "group_size")
        self.symmetric, self.reordered = c.flag("sym") or not c.given("sym"), c.flag("desc_act")
        self.plus = 1 if _format(c, ("gptq", "gptq_v2"), "checkpoint_format", "format") == "gptq" else 0
        self.keep(self.symmetric, self.reordered)

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        each, groups = 32 // self.bits, -(-k // (self.group or k))
        return {
            f"{module}.qweight": Held((k // each, n), ("I32",)),
            f"{module}.qzeros": Held((groups, n // each), ("I32",)),
            f"{module}.scales": Held((groups, n), SCALES),
            f"{module}.g_idx": Held((k,), ("I32",), optional=not self.reordered),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant import quants

        group = self.group or k
        qweight, qzeros, scales = (stored[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        g_idx = stored.get(f"{module}.g_idx")
        order = None if g_idx is None else quants.group_order(f"{module}.g_idx", g_idx, k, group)
        if order is not None and not self.reordered:
            raise WeightError(f"{module}.g_idx is not in order, though desc_act is false")
        zeros = quants.numbers(qzeros.values(), self.bits, 1).int() + self.plus
        if self.symmetric and bool((zeros != 1 << self.bits - 1).any()):
            raise WeightError(f"{module}.qzeros is not half of the range, though sym is true")
        made = quants.Gptq if self.plus else quants.Gptq2
        return made(qweight, qzeros, scales, (n, k), self.bits, group, order)

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        """AutoGPTQ writes a bias of zeros for every layer."""
        return name.endswith(".bias") and not tensor.dense().any()


class Awq(Grouped):
    name = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        c = Reader("awq", config)
        self.bits = _bits(c, (4,), "bits" if c.given("bits") else "w_bit")
        self.group = _group(c, "group_size" if c.given("group_size") else "q_group_size")
        _format(c, ("gemm",), "checkpoint_format", "version", "format")
        if config.get("backend") == "llm-awq":
            raise c.error("backend", "another: only numbers in the order of gemm are supported")
        if config.get("zero_point", True) is not True:
            raise c.error("zero_point", "true")
        self.keep(symmetric=False)

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        groups = -(-k // (self.group or k))
        return {
            f"{module}.qweight": Held((k, n // 8), ("I32",)),
            f"{module}.qzeros": Held((groups, n // 8), ("I32",)),
            f"{module}.scales": Held((groups, n), SCALES),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant import quants

        qweight, qzeros, scales = (stored[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        return quants.Awq(qweight, qzeros, scales, (n, k), self.bits, self.group or k)


def _left_out(c: Reader) -> list[str]:
    """What GPTQModel's settings for some layers say, as entries of an ignore list."""
    rules = c.table("dynamic")
    if not all(rule.startswith("-:") for rule in rules):
        raise c.error("dynamic", "rules that leave layers out (-:...)")
    return [f"re:{rule[2:]}" for rule in rules]


def _format(c: Reader, known: tuple[str, ...], *keys: str) -> str:
    """How the numbers lie; a file says it by any of ``keys``. Raises ConfigError where they differ, too."""
    found = {}
    for key in keys:
        if c.given(key):
            found[key] = str(c.values[key]).lower()
            if found[key] not in known:
                raise c.error(key, " or ".join(known))
    if len(set(found.values())) > 1:
        raise c.error(min(found), f"that of {max(found)}")
    return next(iter(found.values()), known[0])


def _bits(c: Reader, known: tuple[int, ...], key: str = "bits") -> int:
    found = c.values.get(key)
    if type(found) is int and found in known:
        return found
    raise c.error(key, " or ".join(map(str, known)))


def _group(c: Reader, key: str) -> int:
    """Channels with one scale; 0: all."""
    found = c.values.get(key)
    if type(found) is not int or not (found == -1 or 0 < found <= 1 << 17):
        raise ConfigError(
            f"config.json: quantization_config: {key} is {shown(found)}; "
            "it must be -1 or a number of channels",
            param="model",
        )
    return max(found, 0)

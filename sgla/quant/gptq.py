"""GPTQ and AWQ checkpoints (arXiv 2210.17323, 2306.00978). Loads no torch.

Beside ``X.scales`` there are ``X.qweight`` and ``X.qzeros``, with several numbers in each int32, and with
GPTQ ``X.g_idx``, the group of each input channel. ``checkpoint_format`` says how the numbers lie: GPTQ's own
order with zero points one less than they mean, or as they are (version 2); AWQ's ``gemm``, ``gemv`` and
``gemv_fast``; or Marlin's (arXiv 2408.11743). A GPU keeps them as they are (``quant/integers.py``), a CPU in
groups of 32: symmetric ones as they are, others with the minimum of a group rounded to float16. Where the
channels of a group do not lie together (``desc_act``) they are sorted, and layers gather their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sgla.errors import ConfigError, WeightError
from sgla.hub.reader import Reader, shown
from sgla.quant.formats import FORMATS, devices, of_groups
from sgla.quant.method import Expressions, Held, Method

if TYPE_CHECKING:
    from sgla.quant.weight import SourceTensor, StoredTensor

SCATTERED = (
    "the channels of a group do not lie together in this checkpoint (act-order): layers gather their inputs; "
    "experts, and with --tp what is behind attention and MLPs, become floating-point numbers",
)
SCALES = ("F16", "BF16", "F32")
_HALVES = 0x88888888 - (1 << 32)  # int32 of eight zeros in the middle of four bits
GROUP = 32  # channels of k that have constants of their own in our storages
# What may stand in GPTQModel's settings for some layers and says how the numbers were found.
_FOUND = {"mse", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "gptaq", "v2"}
_FOUND |= {"act_group_aware", "hyb_act", "failsafe", "fallback"}


class Scheme(NamedTuple):
    """How the numbers of a layer are stored: integers of ``bits`` bits, of which ``group`` channels have
    constants in common (0: all). ``reordered``: these do not lie together."""

    bits: int
    group: int
    symmetric: bool
    reordered: bool = False

    def stored(self, device: str) -> str:
        return self.storage if device == "cpu" else self.of_gpus

    @property
    def of_gpus(self) -> str:
        """The storage of GPUs; empty: floating-point numbers."""
        return of_groups(self.bits, self.group)

    @property
    def storage(self) -> str:
        """That of CPUs; empty: floating-point numbers."""
        if self.group % GROUP:
            return ""
        wide = 4 if self.bits <= 4 else 8
        return f"q{wide}_0" if self.symmetric else f"int{wide}"


class Grouped(Method):
    """Integers in groups. ``scheme``: of all layers but those that ``of`` has others for."""

    scheme: Scheme

    def keep(self, others: Iterable[Scheme] = ()) -> None:
        """Say in what devices keep such layers."""
        self._all = schemes = [self.scheme, *others]
        self.storage = self.stored("cpu")
        self.devices = devices(each.stored(device) for each in schemes for device in ("cpu", "cuda"))
        self.scatters = any(each.reordered and each.group for each in schemes)
        self.notes = SCATTERED if self.scatters else ()

    def of(self, module: str) -> Scheme:
        return self.scheme

    def stored(self, device: str = "cpu") -> str:
        kinds = {scheme.stored(device) for scheme in self._all}
        return "" if "" in kinds else max(kinds, key=lambda kind: (FORMATS[kind].bytes, kind))

    def kept(self, module: str, device: str = "cpu") -> str:
        return self.of(module).stored(device)

    def scattered(self, module: str) -> bool:
        scheme = self.of(module)
        return scheme.reordered and scheme.group > 0


class Gptq(Grouped):
    name = "gptq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        c = Reader("gptq", config)
        self.scheme = _scheme(c)
        rules = c.table("dynamic")
        self._rules = Expressions([rule.removeprefix("+:").removeprefix("-:") for rule in rules])
        self._schemes = [None if rule[:2] == "-:" else self._other(c, rules, rule) for rule in rules]
        self.format = _format(c, ("gptq", "gptq_v2", "marlin"), "checkpoint_format", "format")
        if c.flag("is_marlin_format"):
            self.format = "marlin"
        if self.format == "marlin":
            _check_marlin(c, [self.scheme, *(s for s in self._schemes if s)])
        self.keep(scheme for scheme in self._schemes if scheme is not None)

    def _other(self, c: Reader, rules: dict[str, Any], rule: str) -> Scheme:
        """That of the layers which a rule of ``dynamic`` names."""
        given = Reader("gptq", rules).table(rule)
        for key in given:
            if key not in {"bits", "group_size", "sym", "desc_act"} | _FOUND:
                raise c.error("dynamic", f"rules without {key[:40]!r}, which sgla does not know")
        return _scheme(Reader("gptq: dynamic", {**c.values, **given}))

    def covers(self, module: str) -> bool:
        rule = self._rules.first(module)
        return super().covers(module) and (rule is None or self._schemes[rule] is not None)

    def of(self, module: str) -> Scheme:
        rule = self._rules.first(module)
        return (None if rule is None else self._schemes[rule]) or self.scheme

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        bits, group, _, reordered = self.of(module)
        groups = -(-k // (group or k))
        if self.format == "marlin":
            return _of_marlin(module, "B", "s", n, k, groups)
        return {
            f"{module}.qweight": Held((k * bits // 32, n), ("I32",)),
            f"{module}.qzeros": Held((groups, -(-n * bits // 32)), ("I32",)),
            f"{module}.scales": Held((groups, n), SCALES),
            f"{module}.g_idx": Held((k,), ("I32",), optional=not reordered),
        }

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant import quants

        bits, group, symmetric, reordered = self.of(module)
        group = group or k
        _check_tiles(module, self.format, n, k)
        if self.format == "marlin":
            return quants.Marlin(stored[f"{module}.B"], None, stored[f"{module}.s"], (n, k), bits, group)
        qweight, qzeros, scales = (stored[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales"))
        g_idx = stored.get(f"{module}.g_idx")
        order = None if g_idx is None else quants.group_order(f"{module}.g_idx", g_idx, k, group)
        if order is not None and not reordered:
            raise WeightError(f"{module}.g_idx is not in order, though desc_act is false")
        plus = 1 if self.format == "gptq" else 0
        zeros = quants.numbers(qzeros.values(), bits, 1)[:, :n].int() + plus
        if symmetric and bool((zeros != 1 << bits - 1).any()):
            raise WeightError(f"{module}.qzeros is not half of the range, though sym is true")
        made = quants.Gptq if plus else quants.Gptq2
        return made(qweight, qzeros, scales, (n, k), bits, group, order)

    def unused(self, name: str, tensor: StoredTensor) -> bool:
        """AutoGPTQ writes a bias of zeros for every layer."""
        return name.endswith(".bias") and not tensor.dense().any()


class Awq(Grouped):
    name = "awq"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        c = Reader("awq", config)
        bits = _bits(c, (4,), "bits" if c.given("bits") else "w_bit")
        group = _group(c, "group_size" if c.given("group_size") else "q_group_size")
        keys = "checkpoint_format", "version", "format"
        self.format = _format(c, ("gemm", "gemv", "gemv_fast", "llm-awq", "marlin"), *keys)
        if config.get("backend") == "llm-awq":
            self.format = "llm-awq"
        marlin, symmetric = self.format == "marlin", config.get("zero_point", True) is False
        if symmetric is not marlin and self.format != "gemm":
            raise c.error("zero_point", "false in Marlin's format" if marlin else "true")
        self.scheme = Scheme(bits, group, symmetric)
        if marlin:
            _check_marlin(c, [self.scheme])
        self.keep()

    def tensors(self, module: str, n: int, k: int) -> dict[str, Held]:
        groups = -(-k // (self.scheme.group or k))
        padded = 8 * _padded_words(groups, self.scheme.group or k)
        parts: dict[str, Held]
        if self.format == "marlin":
            return _of_marlin(module, "qweight", "scales", n, k, groups)
        if self.format == "gemm":
            parts = {
                "qweight": Held((k, n // 8), ("I32",)),
                "qzeros": Held((groups, n // 8), ("I32",)),
                "scales": Held((groups, n), SCALES),
            }
        elif self.format == "gemv":
            parts = {
                "qweight": Held((n, k // 8), ("I32",)),
                "qzeros": Held((n, padded // 8), ("I32",)),
                "scales": Held((n, padded), SCALES),
            }
        else:
            minimum = "qzeros" if self.format == "gemv_fast" else "scaled_zeros"
            parts = {
                "qweight": Held((n // 4, k), ("I16",)),
                minimum: Held((padded, n), SCALES),
                "scales": Held((padded, n), SCALES),
            }
        return {f"{module}.{part}": held for part, held in parts.items()}

    def take(self, module: str, stored: Mapping[str, StoredTensor], n: int, k: int) -> SourceTensor:
        from sgla.quant import quants

        _check_tiles(module, self.format, n, k)
        zeros = stored.get(f"{module}.{'scaled_zeros' if self.format == 'llm-awq' else 'qzeros'}")
        parts = stored[f"{module}.qweight"], zeros, stored[f"{module}.scales"]
        settings = (n, k), self.scheme.bits, self.scheme.group or k
        if self.format == "marlin":
            return quants.Marlin(*parts, *settings)
        if self.format == "gemm":
            if self.scheme.symmetric and zeros is not None and bool((zeros.values() != _HALVES).any()):
                raise WeightError(f"{module}.qzeros is not half of the range, though zero_point is false")
            return quants.Awq(*parts, *settings)
        return (quants.AwqRows if self.format == "gemv" else quants.AwqFast)(*parts, *settings)


def _of_marlin(module: str, weight: str, scales: str, n: int, k: int, groups: int) -> dict[str, Held]:
    return {
        f"{module}.{weight}": Held((k // 16, n * 2), ("I32",)),
        f"{module}.{scales}": Held((groups, n), SCALES),
    }


def _check_tiles(module: str, format: str, n: int, k: int) -> None:
    """Raises WeightError where a matrix cannot lie so."""
    rows, channels = {"marlin": (64, 16), "gemv_fast": (4, 64), "llm-awq": (4, 64)}.get(format, (1, 1))
    if n % rows or k % channels:
        raise WeightError(f"{module} is {n} x {k}; the format {format} has multiples of {rows} x {channels}")


def _padded_words(groups: int, group: int) -> int:
    """int32 that AWQ's kernels for vectors want for the zeros of a row."""
    multiple = {64: 2, 32: 4}.get(group, 1)
    return -(-groups // (8 * multiple)) * multiple


def _check_marlin(c: Reader, schemes: list[Scheme]) -> None:
    for bits, _, symmetric, reordered in schemes:
        if bits != 4:
            raise c.error("bits", "4 in Marlin's format")
        if not symmetric or reordered:
            raise ConfigError(
                "config.json: quantization_config: Marlin's format is symmetric and without act-order; sym "
                "and desc_act say something else",
                param="model",
            )


def _scheme(c: Reader) -> Scheme:
    group, symmetric = _group(c, "group_size"), c.flag("sym") or not c.given("sym")
    return Scheme(_bits(c, (2, 3, 4, 8)), group, symmetric, c.flag("desc_act"))


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

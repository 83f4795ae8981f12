"""Adapters in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors`` of a folder.

Everything is checked before anything is taken: what the configuration asks for, then names, ranks, shapes and
types of all tensors, then that all values are numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from sgla.errors import InvalidAdapter
from sgla.hub.adapter import CONFIG, FUSED, LoraConfig, read_config
from sgla.layers.adapters import EXPERTS, Adapters, Mixture, Target

WEIGHTS = "adapter_model.safetensors"
SPARE = 1 << 20  # bytes of a file beside its values
STAGED = 256 << 20  # the same, where other stages may have larger layers, as that of the vocabulary
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_COPY = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
OF_BASE = "no modules_to_save, no weights of the base: save_embedding_layers=False"
LIKE = 0.1  # the part by which rows of a copy of the base's may differ
TABLES = ("embed_tokens", "lm_head")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Piece(NamedTuple):
    """What an adapter has for one target, the part of this rank: a [r, k] and b [n, r] with the scale."""

    target: Target
    a: Tensor
    b: Tensor


def read_adapter(folder: Path, adapters: Adapters) -> tuple[list[Piece], str]:
    """All pieces of an adapter, in the type of the places, and a hash of what they come from, which is the
    same on all ranks. Blocks. Raises InvalidAdapter."""
    config = read_config(folder, adapters.rank)
    dtype, data = adapters.dtype, _read(folder, adapters)
    tensors, content = _tensors(folder, data), blake2b(data, digest_size=16)
    content.update(repr((config, dtype)).encode())
    pairs, copies = _told(folder, tensors)
    pairs, said = _apart(folder, config, adapters, pairs)
    checked = [_checked(folder, config, said.get(m, m), adapters, m, pair) for m, pair in pairs.items()]
    for module, tensor in copies.items():
        _check_copy(folder, adapters, module, tensor)
    taken: dict[tuple[int, int], str] = {}
    pieces = []
    for module, a, b, targets in sorted(checked, key=itemgetter(0)):
        scaled = b.float() * config.scale_of(said.get(module, module))
        if not targets:
            continue
        whole = scaled if targets[0][1] is None else adapters.mend(module, scaled)
        for target, rows in targets:
            place = id(target.stack), target.part
            if place in taken:
                raise InvalidAdapter(f"{folder.name}: {module[:200]} and {taken[place][:200]} are one layer")
            taken[place] = module
            part = whole if rows is None else whole[rows.start : rows.stop]
            own_a, own_b = target.own(a, part)
            piece = Piece(target, own_a.to(dtype), own_b.to(dtype))
            if not (_finite(piece.a) and _finite(piece.b)):
                _check_finite(folder, module, a, b)
                raise InvalidAdapter(f"{folder.name}: values are beyond what {dtype} can hold")
            pieces.append(piece)
    return pieces, content.hexdigest()


def _told(folder: Path, tensors: dict[str, Tensor]) -> tuple[Pairs, dict[str, Tensor]]:
    """What is added to each module, and copies of the base's weights. Raises InvalidAdapter."""
    pairs: Pairs = {}
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "lora_magnitude_vector" in name:
            raise InvalidAdapter(f"{folder.name}: DoRA is not supported ({name[:200]})")
        if copy := _COPY.fullmatch(name):
            copies[copy[1]] = tensor
            continue
        if (found := _NAME.fullmatch(name)) is None:
            raise InvalidAdapter(
                f"{folder.name}: {name[:200]!r} is no layer's lora_A or lora_B, which alone are supported "
                f"({OF_BASE})"
            )
        module = f"{found[1]} (embedding)" if found[2] else found[1]
        if found[3] in (pair := pairs.setdefault(module, {})):
            raise InvalidAdapter(f"{folder.name}: lora_{found[3]} of {module[:200]} is there twice")
        pair[found[3]] = tensor
    if not pairs:
        raise InvalidAdapter(f"{folder.name}: {WEIGHTS} has no tensors")
    return pairs, copies


def _check_copy(folder: Path, adapters: Adapters, module: str, copy: Tensor) -> None:
    """PEFT writes the base's embedding and output layer beside what it adds to these. Raises InvalidAdapter
    for a ``copy`` that is not as the base's, whose numbers may be rounded here, or one of another layer."""
    name = adapters.rename(module)
    if name not in adapters.samples:
        if adapters.leaves(module):
            return
        raise InvalidAdapter(f"{folder.name}: {module[:200]}: {OF_BASE}")
    (rows, known), (target,) = adapters.samples[name], adapters.table[name]
    wanted = target.k if target.embedding else target.n, known.shape[1]
    what = f"{folder.name}: base_layer.weight of {module[:200]}"
    if tuple(copy.shape) != wanted or copy.dtype not in FLOATS:
        raise InvalidAdapter(
            f"{what} has shape {list(copy.shape)}, and the base's {list(wanted)} (another base?)"
        )
    if not (copy[rows].float() - known).norm() <= LIKE * known.norm():
        raise InvalidAdapter(f"{what} is another one than the base's (another base?)")


def _read(folder: Path, adapters: Adapters) -> bytes:
    """Read whole, not mapped: a file that is cut while it is read must not end the process."""
    path = folder / WEIGHTS
    targets = [target for (target, *_) in adapters.table.values()]
    most = sum(t.n + t.k for t in targets) + sum(adapters.absent.values())
    most = int(4 * adapters.rank * most * adapters.sets) + (STAGED if adapters.beyond else SPARE)
    most += sum(4 * target.n * target.k for name in adapters.samples for target in adapters.table[name])
    try:
        if not path.is_file():
            raise FileNotFoundError
        if (size := path.stat().st_size) > most:
            raise InvalidAdapter(
                f"{folder.name}: {WEIGHTS} has {size} bytes, more than an adapter of rank "
                f"{adapters.rank} can have for this model ({most})"
            )
        return path.read_bytes()
    except FileNotFoundError:
        other = " (adapter_model.bin is not read: save it with safe_serialization=True)"
        there = other if (folder / "adapter_model.bin").is_file() else ""
        raise InvalidAdapter(f"{folder.name} has no {WEIGHTS}{there}") from None
    except OSError as error:
        raise InvalidAdapter(f"{folder.name}: {WEIGHTS} cannot be read: {error}") from None


def _tensors(folder: Path, data: bytes) -> dict[str, Tensor]:
    try:
        return load(data)
    except (SafetensorError, ValueError) as error:
        raise InvalidAdapter(f"{folder.name}: {WEIGHTS} cannot be read: {error}") from None


Checked = tuple[str, Tensor, Tensor, list[tuple[Target, range | None]]]


Pairs = dict[str, dict[str, Tensor]]  # A and B of each module


def _apart(
    folder: Path, config: LoraConfig, adapters: Adapters, pairs: Pairs
) -> tuple[Pairs, dict[str, str]]:
    """``pairs`` with one for each expert's matrix in the place of those of tensors that hold all experts; and
    the tensor that each of these comes from. Of such a tensor PEFT has A [rank * experts, k], expert by
    expert, and B [n, rank * experts], rank by rank; older versions have k and n in each other's place where
    experts are stored [n, k]. The first tensor of a module is found one ``base_layer`` deeper for each that
    follows. Raises InvalidAdapter."""
    found: Pairs = {}
    said: dict[str, str] = {}
    for module, pair in sorted(pairs.items()):
        experts = module
        while experts.endswith(".base_layer"):
            experts = experts.removesuffix(".base_layer")
        mixture = adapters.mixtures.get(adapters.rename(experts))
        if mixture is None:
            found[module] = pair
            continue
        tensors = [f"{experts}.{name}" for name in FUSED]
        tensors = [t for t in tensors if any(f".{t}".endswith(f".{end}") for end in config.parameters)]
        depth = (len(module) - len(experts)) // len(".base_layer")
        if depth >= len(tensors):
            raise InvalidAdapter(
                f"{folder.name}: {module[:200]}: target_parameters in {CONFIG} does not say which tensor of "
                "the experts this changes"
            )
        tensor = tensors[len(tensors) - 1 - depth]
        for name, own in _of_experts(folder, config.rank_of(tensor), tensor, mixture, pair):
            full = f"{experts}.{name}"
            if full in found or full in pairs:
                raise InvalidAdapter(f"{folder.name}: {full[:200]} and {tensor[:200]} are one layer")
            found[full], said[full] = own, tensor
    return found, said


def _of_experts(
    folder: Path, rank: int, tensor: str, mixture: Mixture, pair: dict[str, Tensor]
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The matrices of each expert, by their names behind that of the experts."""
    count, outputs = mixture.experts, tensor.endswith(".down_proj")
    parts = ("down",) if outputs else mixture.parts
    sizes = (mixture.width, mixture.hidden) if outputs else (mixture.hidden, len(parts) * mixture.width)
    if len(pair) < 2:
        raise InvalidAdapter(f"{folder.name}: {tensor[:200]}: lora_{'B' if 'A' in pair else 'A'} is missing")
    a, b, many = pair["A"], pair["B"], rank * count
    k, n = sizes
    if (*a.shape, *b.shape) == (many, k, n, many):
        a, b = a.view(count, rank, k), b.view(n, rank, count).permute(2, 0, 1)
    elif (*a.shape, *b.shape) == (many, n, k, many):
        a, b = b.view(k, rank, count).permute(2, 1, 0), a.view(count, rank, n).transpose(1, 2)
    else:
        raise InvalidAdapter(
            f"{folder.name}: {tensor[:200]}: lora_A and lora_B have shapes {list(a.shape)} and "
            f"{list(b.shape)}, expected {[many, k]} and {[n, many]} (another base?)"
        )
    for expert in range(count):
        for i, part in enumerate(parts):
            rows = slice(i, None, len(parts)) if mixture.in_turn and not outputs else _run(n, i, len(parts))
            yield f"{expert}.{part}_proj", {"A": a[expert], "B": b[expert, rows]}


def _run(n: int, part: int, parts: int) -> slice:
    return slice(part * n // parts, (part + 1) * n // parts)


def _checked(
    folder: Path, config: LoraConfig, said: str, adapters: Adapters, module: str, pair: dict[str, Tensor]
) -> Checked:
    """A module with its two matrices and where they go. ``said``: its name in the configuration, which is
    compared with patterns once it is known to be one of the model's. Raises InvalidAdapter."""

    def bad(why: str) -> InvalidAdapter:
        return InvalidAdapter(f"{folder.name}: {module[:200]}: {why}")

    module, _, embedding = module.partition(" ")
    found = [entry for entry in adapters.find(module) if entry[0].embedding == bool(embedding)]
    if not found and len(pair) == 2 and adapters.leaves(module):
        return module, pair["A"], pair["B"], []
    if not found:
        changed = sorted({name.rpartition(".")[2] for name in adapters.table})
        if ".experts." in module and EXPERTS not in adapters.modules:
            raise bad("for adapters of experts start the server with experts in --lora-target-modules")
        if (last := module.rpartition(".")[2]) in TABLES and last not in adapters.modules:
            raise bad(f"for adapters of this layer start the server with {last} in --lora-target-modules")
        raise bad(
            "this model has no such layer that adapters can change (another base?); there are "
            f"{', '.join(changed)}"
        )
    if len(pair) < 2:
        raise bad(f"lora_{'B' if 'A' in pair else 'A'} is missing")
    a, b = pair["A"], pair["B"]
    rank = config.rank_of(said)
    n = found[0][0].n if found[0][1] is None else sum(target.n for target, _ in found)
    k = found[0][0].k
    for name, tensor, shape in (("lora_A", a, (rank, k)), ("lora_B", b, (n, rank))):
        if tuple(tensor.shape) != shape:
            raise bad(f"{name} has shape {list(tensor.shape)}, expected {list(shape)} (another base?)")
        if tensor.dtype not in FLOATS:
            raise bad(f"{name} has type {tensor.dtype}, expected float32, bfloat16 or float16")
    return module, a, b, found


def _finite(x: Tensor) -> bool:
    """In one pass over x, which keeps what is no number."""
    return not x.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())


def _check_finite(folder: Path, module: str, a: Tensor, b: Tensor) -> None:
    for name, tensor in (("lora_A", a), ("lora_B", b)):
        if not _finite(tensor):
            raise InvalidAdapter(
                f"{folder.name}: {module[:200]}: {name} has values that are no numbers (NaN or infinity)"
            )

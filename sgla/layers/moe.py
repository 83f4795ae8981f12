"""The mixture of experts: a router picks a few of many gated MLPs for each token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sgla.errors import ConfigError
from sgla.kernels import ops
from sgla.kernels.expert_counts import ExpertCounts
from sgla.kernels.lora import Rows
from sgla.kernels.lora_moe import ExpertStacks, lora_moe
from sgla.kernels.ops import Biases
from sgla.kernels.placement import Homes, Part, Placement
from sgla.kernels.routing import Gating, Routing
from sgla.kernels.sent_moe import Slots, sent_moe
from sgla.layers.adapters import Mixture
from sgla.layers.build import Build, Share, StackPart, Values, drawn, fill, given
from sgla.layers.mlp import GatedMLP, PlainMLP
from sgla.quant.weight import SourceTensor, Weight

ONCE = ((1, 0),)  # there is one copy of an expert


class MoE:
    """``sum of p_e * down_e(act(gate_e(x)) * up_e(x))`` over each token's experts e, and what ``shared``
    makes: ``[T, d] -> [T, d]``.

    The experts lie behind each other: ``gate_up [E * 2 f, d]`` (each expert's gate rows, then its up rows)
    and ``down [E * d, f]``. Ranks split every expert's f, or have each some experts whole
    (``Shard.whole_experts``). ``bias``: of the router and both products;
    ``correction``: of the scores (``ops.Biases``). A file has the tensors of each expert, or all stacked as
    transformers 5 keeps them in memory, or (``crossed``) stacked as gpt-oss has them, ``[input, output]``
    with gate and up in turn, or (``halves``) one behind the other. A shared expert may be the last one, or
    as many as it is wider (``Routing.shared``). With the activation relu2 there is no gate. ``routed``: width
    of what the router sees, if that is not x. ``idle``: so many further experts can be chosen, of which
    nothing comes here.
    """

    def __init__(
        self,
        build: Build,
        name: str,
        *,
        hidden: int,
        intermediate: int,
        experts: int,
        routing: Routing,
        activation: Gating,
        bias: bool = False,
        correction: bool = False,
        crossed: bool = False,
        halves: bool = False,
        shared: SharedExpert | None = None,
        routed: int = 0,
        idle: int = 0,
    ) -> None:
        self.shard, self.activation, self.shared = build.shard.of_mlps, activation, shared
        self.crossed = crossed
        self.lockstep = build.shard.lockstep
        self.held: Sequence[int] = range(experts)
        self.homes: Homes = []
        if self.shard.whole_experts:
            assert not routing.shared
            self.held = self.shard.range(experts)
            routing = replace(routing, held=self.held)
            self.layer = int(name.partition(".layers.")[2].partition(".")[0])
            if self.shard.placement is not None:
                part = self.shard.placement.part(self.layer, experts, self.shard.rank)
                self.held, routing = part.held, replace(routing, held=part.held, copies=part.copies)
            self.homes = self.shard.homes(self.layer, experts)
            self.slots = Slots(self.homes, max(map(len, self.homes)))
        if idle and routing.held is None:
            routing = replace(routing, held=self.held)
        self.name, self.routing, self.experts, self.choices = name, routing, experts, experts + idle
        self.hidden, self.intermediate = hidden, intermediate
        modules = [f"{name}.experts.{e}" for e in self.held]
        self.parts = ("up",) if activation == "relu2" else ("gate", "up")
        inputs = [f"{module}.{which}_proj" for module in modules for which in self.parts]
        outputs = [f"{module}.down_proj" for module in modules]
        common = f"{name}.shared_experts"
        also = [f"{common}.{which}_proj" for which in self.parts] * routing.common
        seen = routed or hidden
        self.router = build.empty_plain(self.choices + (routing.shared == "gated"), seen)
        stacks = [f"{name}.experts.{which}_proj" for which in ("gate_up", "down")] if crossed else []
        rows, count = len(inputs) + len(also), len(self.held) + routing.common
        down = stacks[1:] or [*outputs, *[f"{common}.down_proj"] * routing.common]
        self.own = range(intermediate) if self.shard.whole_experts else build.inside(intermediate, *down)
        self.gate_up = build.empty(rows * len(self.own), hidden, *(stacks[:1] or inputs + also))
        self.down = build.empty_part(count * hidden, intermediate, self.own, *down)
        self.stacks, self.rows = self._stacks(build, f"{name}.experts", common, crossed and not halves)
        _whole(build, f"{name}.gate.weight", (self.choices, seen), self.router, 0)
        if crossed:
            self._declare_crossed(build, f"{name}.experts", halves)
        else:
            self._declare_each(build, f"{name}.experts")
        if routing.shared:
            self._declare_shared(build, common)
        if routing.shared == "gated":
            _whole(build, f"{name}.shared_expert_gate.weight", (1, hidden), self.router, experts)
        row = [StackPart(f"{name}.gate.e_score_correction_bias", 0, range(experts))]  # as ERNIE has it
        build.stacks[f"{name}.gate.moe_statics.e_score_correction_bias"] = (1, experts), row
        self.biases = Biases(
            build.vector(f"{name}.gate.bias", experts) if bias else None,
            build.vector(f"{name}.gate.e_score_correction_bias", self.choices) if correction else None,
            *(self._declare_biases(build, f"{name}.experts", crossed) if bias else ()),
        )
        self.counts = build.counts[name] = ExpertCounts(self.choices)
        if self.shard.whole_experts and build.device == "cuda":
            self._move_in_place(build)
        elif idle and build.device == "cuda":
            self.biases = self.biases._replace(places=self._places(Part(tuple(self.held), ONCE * experts)))

    def _move_in_place(self, build: Build) -> None:
        """Have graphs read where experts are, so that these may move."""
        copies = self.routing.copies or ONCE * len(self.held)
        self.biases = self.biases._replace(places=self._places(Part(tuple(self.held), copies)))
        if self.lockstep is None or self.lockstep.traffic is None:  # which counts by the experts' numbers
            self.counts.held = self.held
        build.mixtures[self.layer] = self

    def _places(self, part: Part) -> Tensor:
        return torch.tensor(part.table(self.choices), dtype=torch.int32)

    def move(self, placement: Placement) -> list[str]:
        """Take the experts that this rank has there, as many: beginnings of the names of tensors that have to
        be read again. Those that stay are where they were."""
        assert self.biases.places is not None
        parts = [
            placement.part(self.layer, self.experts, rank).keeping(held)
            for rank, held in enumerate(self.homes)
        ]
        part = parts[self.shard.rank]
        self.homes = [each.held for each in parts]
        self.slots.move(self.homes)
        fresh = [new for old, new in zip(self.held, part.held) if new != old]
        self.held = part.held
        if self.counts.held is not None:
            self.counts.held = part.held
        words = torch.tensor(part.table(self.experts), dtype=torch.int32, device="cpu")
        self.biases.places.copy_(words)
        if self.crossed or self.biases.gate_up is not None:
            return [f"{self.name}.experts."] if fresh else []
        return [f"{self.name}.experts.{expert}." for expert in fresh]

    def _stacks(
        self, build: Build, name: str, common: str, in_turn: bool
    ) -> tuple[ExpertStacks | None, Rows | None]:
        """What adapters add to the experts; ``common``: name of those that every token goes through, of which
        more than one are not changed."""
        d, f, own, adapters = self.hidden, self.intermediate, self.own, build.adapters
        if adapters is None:
            return None, None
        adapters.mixtures[name] = Mixture(self.experts, d, f, self.parts, in_turn)
        modules = [f"{name}.{e}" for e in self.held]
        modules += [common if self.routing.common == 1 else ""] * self.routing.common
        inputs = [(f"{m}.{p}_proj" if m else "", f, own, None) for m in modules for p in self.parts]
        outputs = [(f"{m}.down_proj" if m else "", d, range(d), None) for m in modules]
        gate_up, rows = build.stack(d, inputs)
        down, _ = build.stack(f, outputs, own)
        if gate_up is None or down is None:
            return None, rows
        if build.shard.lockstep is not None:
            raise ConfigError(
                "adapters cannot change experts whose ranks compute each other's rows; leave experts out of "
                "--lora-target-modules, or --dp-attention out",
                param="lora_target_modules",
            )
        away = set(range(self.experts)) - set(self.held)
        adapters.absent |= {f"{name}.{e}.{p}_proj": d + f for e in away for p in (*self.parts, "down")}
        return ExpertStacks(gate_up, down), rows

    def _declare_each(self, build: Build, name: str) -> None:
        d, f, each = self.hidden, self.intermediate, len(self.parts)
        inputs = [f"{name}.{e}.{which}_proj" for e in range(self.experts) for which in self.parts]
        outputs = [f"{name}.{e}.down_proj" for e in range(self.experts)]
        for i, part in enumerate(inputs):
            which = divmod(i, each)
            take, give = partial(self._take_input, *which), partial(self._give_input, *which)
            build.declare(f"{part}.weight", (f, d), take, give=give)
        for e, part in enumerate(outputs):
            give = partial(self._give_output, e)
            build.declare(f"{part}.weight", (d, f), partial(self._take_output, e), give=give)
        halves = range(f), range(f, 2 * f)
        build.stacks[f"{name}.{'_'.join(self.parts)}_proj"] = (
            (self.experts, each * f, d),
            [StackPart(f"{part}.weight", i // each, halves[i % each]) for i, part in enumerate(inputs)],
        )
        build.stacks[f"{name}.down_proj"] = (
            (self.experts, d, f),
            [StackPart(f"{part}.weight", e, range(d)) for e, part in enumerate(outputs)],
        )

    def _take_input(self, expert: int, part: int, source: Share) -> None:
        """Gate or up of one, if it is here."""
        if expert in self.held:
            fill(self.gate_up, self._first_input(expert, part), source, self.own)

    def _give_input(self, expert: int, part: int, wanted: range) -> Tensor:
        there, shape = expert in self.held, (self.intermediate, self.hidden)
        at = self._first_input(expert, part) if there else 0
        return drawn(self.gate_up, at, wanted, shape, self.own if there else range(0))

    def _first_input(self, expert: int, part: int) -> int:
        return (self.held.index(expert) * len(self.parts) + part) * len(self.own)

    def _take_output(self, expert: int, source: Share) -> None:
        if expert in self.held:
            at = self.held.index(expert) * self.hidden
            fill(self.down, at, source, range(self.hidden), self.own)

    def _give_output(self, expert: int, wanted: range) -> Tensor:
        there, shape = expert in self.held, (self.hidden, self.intermediate)
        at = self.held.index(expert) * self.hidden if there else 0
        return drawn(self.down, at, wanted, shape, range(self.hidden if there else 0), self.own)

    def _declare_shared(self, build: Build, name: str) -> None:
        """A shared expert, whose channels are those of the last experts, one behind the other."""
        d, f, own, each = self.hidden, self.intermediate, self.own, len(self.parts)
        wide, size = f * self.routing.common, len(own)
        owns = [range(f * i + own.start, f * i + own.stop) for i in range(self.routing.common)]

        def take_input(part: int, source: Share) -> None:
            for i, rows in enumerate(owns):
                fill(self.gate_up, ((self.experts + i) * each + part) * size, source, rows)

        def take_output(source: Share) -> None:
            for i, columns in enumerate(owns):
                fill(self.down, (self.experts + i) * d, source, range(d), columns)

        for part, which in enumerate(self.parts):
            build.declare(f"{name}.{which}_proj.weight", (wide, d), partial(take_input, part))
        build.declare(f"{name}.down_proj.weight", (d, wide), take_output)
        halves = range(wide), range(wide, 2 * wide)
        both = [
            StackPart(f"{name}.{which}_proj.weight", None, rows) for which, rows in zip(self.parts, halves)
        ]
        build.stacks[f"{name}.gate_up_proj.weight"] = (each * wide, d), both

    def _declare_crossed(self, build: Build, name: str, halves: bool) -> None:
        d, f, own, size = self.hidden, self.intermediate, self.own, len(self.own)

        def take_gate_up(source: Share) -> None:
            for e, crossed in _experts(source, self.held):
                for i in (0, 1):
                    part = crossed[:, i * f : (i + 1) * f] if halves else crossed[:, i::2]
                    self.gate_up.put(own, None, Values(part.t()), (2 * e + i) * size)

        def take_down(source: Share) -> None:
            for e, crossed in _experts(source, self.held):
                self.down.put(range(d), own, Values(crossed.t()), e * d)

        build.declare(f"{name}.gate_up_proj", (self.experts, d, 2 * f), take_gate_up)
        build.declare(f"{name}.down_proj", (self.experts, f, d), take_down)

    def _declare_biases(self, build: Build, name: str, crossed: bool) -> tuple[Tensor, Tensor | None]:
        """Of the products; that of ``down`` enters the sum over the ranks once."""
        inner, own = torch.zeros(len(self.held), 2 * len(self.own)), self.own
        outer = torch.zeros(len(self.held), self.hidden)

        def take(part: int, step: int, source: SourceTensor) -> None:
            mine = inner[:, part * len(own) : (part + 1) * len(own)]
            here = source.dense()[list(self.held)]
            mine.copy_(here[:, part % step :: step][:, own.start : own.stop])

        def take_outer(source: SourceTensor) -> None:
            outer.copy_(source.dense()[list(self.held)])

        def take_both(source: SourceTensor) -> None:
            for part in (0, 1):
                take(part, 2, source)

        if crossed:
            build.declare(f"{name}.gate_up_proj_bias", (self.experts, 2 * self.intermediate), take_both)
        else:
            for i, part in enumerate(("gate", "up")):
                shape = self.experts, self.intermediate
                build.declare(f"{name}.{part}_proj_bias", shape, partial(take, i, 1))
        shape = self.experts, self.hidden
        build.declare(f"{name}.down_proj_bias", shape, take_outer)
        return inner, outer if self.shard.rank == 0 or self.shard.whole_experts else None

    def weigh(self, factor: Tensor) -> None:
        """Multiply the weights of each expert by its ``factor`` [E]."""
        self.biases = self.biases._replace(factor=factor)

    def chosen(self, x: Tensor, routed: Tensor | None, fixed: Tensor | None = None) -> Tensor:
        """What each token's experts make of x together, on this rank. ``routed`` and
        ``fixed``: see ``ops.moe``."""
        if self.lockstep is not None and self.lockstep.sends:
            assert fixed is None
            given = self.router, self.gate_up, self.down, self.routing, self.activation, self.biases
            return sent_moe(self.lockstep, self.slots, x, *given, routed, self.counts)
        run: Callable[..., Tensor] = ops.moe
        if self.stacks is not None and self.rows is not None and self.rows.active:
            run = partial(lora_moe, (self.stacks, self.rows, self.rows.are_sampled(x)))
        return run(
            x,
            self.router,
            self.gate_up,
            self.down,
            self.routing,
            self.activation,
            self.biases,
            routed,
            self.counts,
            *(() if fixed is None else (fixed,)),
        )

    def part(self, x: Tensor, routed: Tensor | None = None, fixed: Tensor | None = None) -> Tensor:
        """Of which the sum over the ranks is the output."""
        y = self.chosen(x, routed, fixed)
        return y if self.shared is None else self.shared.add(y, x)

    def __call__(self, x: Tensor, routed: Tensor | None = None, fixed: Tensor | None = None) -> Tensor:
        if self.lockstep is not None:
            assert routed is fixed is None
            if self.lockstep.traffic is None:
                return self.lockstep.share(self.part, x)
            chosen = partial(self.chosen, routed=None)
            y = chosen(x) if self.lockstep.sends else self.lockstep.share(chosen, x)
            return y if self.shared is None else self.shared.add(y, x)
        y = self.part(x, routed, fixed)
        return y if self.shard.size == 1 else ops.all_reduce(y, self.shard)


class SharedExpert:
    """The MLP of a mixture that every token goes through: ``[T, d] -> [T, d]``, of which the sum over the
    ranks is wanted. ``gated``: each token's is multiplied by the sigmoid of a number made of x."""

    def __init__(self, build: Build, name: str, hidden: int, mlp: GatedMLP | PlainMLP, gated: bool) -> None:
        self.mlp = mlp
        self.gate: Tensor | None = None
        if gated:
            self.gate = gate = torch.zeros(1, hidden)
            build.declare(
                f"{name}.shared_expert_gate.weight",
                (1, hidden),
                lambda source: _copy(gate, source),
                give=partial(given, gate),
            )

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """y, and what it makes of x."""
        part = self.mlp.part(x)
        return y + part if self.gate is None else ops.gated_add(y, part, x, self.gate)


def _experts(source: Share, held: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """The experts of a stack that are in a share of it, one after the other, by their places among those
    ``held``."""
    places = {expert: i for i, expert in enumerate(held)}
    for e in range(source.index, source.shape[0], source.count):
        if e in places:
            yield places[e], source.dense(range(e, e + 1))[0]


def _copy(target: Tensor, source: SourceTensor) -> None:
    target.copy_(source.dense())


def _whole(build: Build, name: str, shape: tuple[int, int], weight: Weight, at: int) -> None:
    """A matrix that lies in rows of ``weight`` from ``at`` on."""
    rows = range(shape[0])
    build.declare(
        name,
        shape,
        lambda source: fill(weight, at, source, rows),
        give=lambda wanted: drawn(weight, at, wanted, shape, rows),
    )

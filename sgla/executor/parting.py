"""What ranks are told of a plan that has a part for each: their own as it is, which may be nearly as large as
their ring, and an outline of each other one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from sgla.messages import StepPlan


def outline(part: StepPlan) -> StepPlan:
    """What other ranks have to know of a step: which of its rows compute how many tokens of what kind. New
    requests, and pages, are of no use to them."""
    return StepPlan(
        step=part.step,
        slots=part.slots,
        starts=part.starts,
        q_lens=part.q_lens,
        flags=part.flags,
        drafts=part.drafts,
        state_reads=part.state_reads,
        checkpoints=part.checkpoints,
    )


def known_to(plan: StepPlan, ranks: range) -> StepPlan:
    """For a host that has these of all ranks; in each stage and set the same have the parts."""
    count = len(plan.parts)
    own = {rank % count for rank in ranks} if count else set[int]()
    parts = [part if part is None or i in own else outline(part) for i, part in enumerate(plan.parts)]
    return replace(plan, parts=parts)


def records(plan: StepPlan, ranks: range, encode: Callable[[Any], bytes]) -> list[bytes]:
    """For each of these ranks, encoded."""
    if not plan.parts:
        return [encode(plan)] * len(ranks)
    others = [None if part is None else msgspec.Raw(encode(outline(part))) for part in plan.parts]
    made: dict[int, bytes] = {}
    for i in {rank % len(others) for rank in ranks}:
        parts: list[Any] = [*others[:i], plan.parts[i], *others[i + 1 :]]
        made[i] = encode(replace(plan, parts=parts))
    return [made[rank % len(others)] for rank in ranks]

"""What heads of latent attention make of what they have seen, where shares of histories are joined."""

from __future__ import annotations

from sgla.kernels.gpu.record import Node
from sgla.kernels.gpu.rewrite import Work

NAME = "values of shares"
SERVES = False  # off until a step has been timed with it (bench/gpu/few.sh)
ROWS = 4  # at most: each reads the weights


def refuses(work: Work, attention: Node, values: Node) -> str | None:
    if not SERVES:
        return "it was not timed yet"
    if work.rows(values) > ROWS:
        return f"it takes at most {ROWS} rows"
    return (
        "scores are bounded or have sinks" if attention.given["softcap"] or attention.given["sinks"] else None
    )


def make(work: Work, attention: Node, values: Node) -> list[Node]:
    given = {name: attention.given[name] for name in ("q", "kv", "batch", "scale")}
    return [Node(NAME, None, given | {"v_up": values.given["v_up"]}, values.results, values.rows)]

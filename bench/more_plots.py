"""Further plots of ``plots.py``: share of the limit for each workload, cost by context and rows, start-up,
levels of CPU kernels, growth of the host's cost, and throughput against latency for each rate (W9).

A plot whose lines are not there is not drawn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from limits import Limits

Line = dict[str, Any]
Save = Callable[[Any, str], None]
COLOURS = "#3f6fd8", "#e08a3c", "#7aa874", "#8a8a8a", "#b05fb0"
PHASES = "import", "weights", "kernels", "warmup", "graphs"
LIMITED = {  # workload -> field of its lines, and of its limit
    "W7": ("turns_s", "limit_turns_s"),
    "W8": ("in_tok_s", "limit_in_tok_s"),
    "W9": ("goodput", "limit_rate"),
    "W10": ("out_tok_s", "limit_out_tok_s"),
}
CONTEXTS = [1 << n for n in range(9, 18)]


def axes_of(pyplot: Any, title: str, height: float = 3.2) -> tuple[Any, Any]:
    figure, axes = pyplot.subplots(figsize=(7.5, height))
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def of_users(lines: Sequence[Line], names: dict[str, str]) -> list[tuple[str, float]]:
    """Workloads whose lines bring their limit: medians of the share, of W9 the rate with the most chats."""
    found: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for line in lines:
        model = line["model"].rpartition("/")[2]
        field, bound = LIMITED.get(line["w"], ("", ""))
        if model in names and bound in line:
            size = f" {line['bs']} x {line['tokens']:,}" if line["w"] == "W8" else ""
            found[line["w"], size, model].append(line[field] / line[bound])
    return [
        (f"{workload}{size}, {names[model]}", max(values) if workload == "W9" else median(values))
        for (workload, size, model), values in sorted(found.items(), key=lambda item: int(item[0][0][1:]))
    ]


def shares(pyplot: Any, save: Save, found: dict[str, dict[str, float]], limit: dict[str, dict[str, float]],
           names: dict[str, str], more: set[str], users: list[tuple[str, float]]) -> None:  # fmt: skip
    """``more``: workloads of which more is better. ``users``: those of ``of_users``."""
    rows = [
        (f"{workload}, {names[model]}", value / bound if workload in more else bound / value)
        for workload, bounds in limit.items()
        if isinstance(bounds, dict)
        for model, bound in bounds.items()
        if model in names and (value := found.get(workload, {}).get(model))
    ]
    rows = [*rows, *users][::-1]
    figure, axes = axes_of(pyplot, "Share of what the chip could do at most", 0.24 * len(rows) + 0.9)
    drawn = axes.barh([name for name, _ in rows], [100 * share for _, share in rows], color=COLOURS[0])
    axes.bar_label(drawn, [f"{100 * share:.0f} %" for _, share in rows], fontsize=7, padding=2)
    axes.set_xlim(0, 108)
    axes.tick_params(axis="y", labelsize=7)
    save(figure, "shares")


def contexts(pyplot: Any, save: Save, lines: Sequence[Line], folder: str) -> None:
    """Steps of W5, W6 and W8, and lines of what must be read."""
    limits = Limits.of(folder, {})
    figure, axes = axes_of(pyplot, "A decode step of Qwen3-8B by context, ms (lines: the limit)")
    measured: dict[tuple[int, int], list[float]] = defaultdict(list)
    for line in lines:
        if "ms_per_step" in line and line["w"] in ("W5", "W6", "W8"):
            tokens, outputs = line.get("lengths") or (line.get("tokens", 512), 256)
            measured[line["bs"], tokens + outputs // 2].append(line["ms_per_step"])
    for rows, colour in zip((1, 8, 64, 256), COLOURS):
        bound = [1e3 * limits.step([tokens] * rows) for tokens in CONTEXTS]
        axes.plot(CONTEXTS, bound, color=colour, linewidth=1, label=f"{rows} rows")
        points = [(tokens, median(values)) for (bs, tokens), values in measured.items() if bs == rows]
        axes.plot(*zip(*points), "o", color=colour) if points else None
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(CONTEXTS, [f"{n:,}" for n in CONTEXTS], fontsize=7)
    axes.set_yticks([4, 8, 16, 32, 64, 128], ["4", "8", "16", "32", "64", "128"])
    axes.set_ylim(3, 130)
    axes.legend(frameon=False)
    save(figure, "contexts")


def starts(pyplot: Any, save: Save, lines: Sequence[Line], names: dict[str, str]) -> None:
    told: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.get("w") == "startup" and line.get("timings"):
            told[line["model"]].append(line)
    models = [model for model in names if model in told]
    if not models:
        return
    figure, axes = axes_of(pyplot, "From the call to a ready engine, random weights, s", 2.4)
    left = [0.0] * len(models)
    for phase, colour in zip((*PHASES, "all else"), (*COLOURS, "#c8b560")):
        if phase == "all else":
            whole = [median(line["s"] for line in told[model]) for model in models]
            took = [max(0.0, a - b) for a, b in zip(whole, left)]
        else:
            took = [median(line["timings"].get(phase, 0.0) for line in told[model]) for model in models]
        axes.barh([names[model] for model in models], took, left=left, color=colour, label=phase)
        left = [a + b for a, b in zip(left, took)]
    axes.invert_yaxis()
    axes.legend(frameon=False, ncols=6, fontsize=7, loc="lower center", bbox_to_anchor=(0.45, -0.45))
    save(figure, "startup")


def levels(pyplot: Any, save: Save, lines: Sequence[Line], order: Sequence[str], bars: Any) -> None:
    cases = {"model decode 1": "1 row", "model decode 8": "8 rows", "model decode 32": "32 rows",
             "model prefill": "prompt of 1,024"}  # fmt: skip
    found = {(line["isa"], line["w"]): line["tok_s"] for line in lines
             if line.get("w") in cases and line.get("kind") == "bf16"}  # fmt: skip
    names = [level for level in order if any(level == isa for isa, _ in found)]
    figure, axes = axes_of(
        pyplot, "SmolLM2-135M in bf16 on two cores of a Xeon by level, tok/s of the kernels"
    )
    series = {
        level: ([found.get((level, case)) for case in cases], colour) for level, colour in zip(names, COLOURS)
    }
    bars(axes, list(cases.values()), series)
    axes.legend(frameon=False)
    save(figure, "levels")


def growth(pyplot: Any, save: Save, lines: Sequence[Line]) -> None:
    rows = {line["rows"]: line["token_us"] for line in lines if line.get("part") == "rows"}
    figure, axes = axes_of(pyplot, "CPU time of the scheduler for a token by rows of a step, us", 2.6)
    axes.plot([*rows], [*rows.values()], "o-", color=COLOURS[0])
    axes.set_xscale("log", base=2)
    axes.set_xticks([*rows], [f"{count:,}" for count in rows])
    axes.set_ylim(0)
    save(figure, "growth")


def rates(pyplot: Any, save: Save, lines: Sequence[Line]) -> None:
    found: dict[str, list[Line]] = defaultdict(list)
    for line in lines:
        if line.get("w") == "W9" and "rate" in line:
            found[line["engine"]].append(line)
    if not found:
        return
    figure, axes = axes_of(pyplot, "Chats as they arrive: tok/s out against the 99th percentile of TTFT, ms")
    for (engine, told), colour in zip(found.items(), COLOURS):
        told.sort(key=lambda line: float(line["rate"]))
        axes.plot([line["ttft_p99_ms"] for line in told], [line["out_tok_s"] for line in told], "o-",
                  label=engine, color=colour)  # fmt: skip
        for line in told:
            axes.annotate(f"{line['rate']:g}/s", (line["ttft_p99_ms"], line["out_tok_s"]), fontsize=7)
    axes.set_xscale("log")
    axes.legend(frameon=False)
    save(figure, "rates")

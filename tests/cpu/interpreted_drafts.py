"""Rows that guess on a GPU, without one: see ``interpreted_gpu.py``. Here graphs run, too, each as what it
was captured from.

``python interpreted_drafts.py [--ranks] [--rows] [--sets] [CASE ...]``: prints for each case what a CPU's
runner, which does not guess, and a GPU's answer, as JSON. ``--ranks``: two GPUs, each a process, which are
told of no plans and make the same ones; ``--rows``: they share the rows of nearly all steps out
(``--sequence-parallel``); ``--sets``: each has all of the model, and they share prompts out (``--cp``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from config_cases import MIMO, deepseek
from interpreted_gpu import (
    BESIDE,
    CONVOLUTIONS,
    DECODER,
    SMALL_STEPS,
    STATES_KEPT,
    WINDOWS,
    become_gpu,
    source,
)
from msgspec.structs import replace as replace_struct
from stages import Stages
from tiny import VOCAB, Launching, Transcript, make_core, run, submit, tiny_config
from token_tables import row

from sgla.dist import Shard, gpus
from sgla.dist.context import Context
from sgla.grammar.protocol import Vocabulary
from sgla.grammar.source import source_of
from sgla.kernels.cuda import thresholds
from sgla.kernels.gpu import regions
from sgla.kernels.triton import attention, sampling
from sgla.kernels.triton.tokens import put_tokens
from sgla.messages import Control, Grammar, StepPlan, Submit
from sgla.sched.core import Core
from sgla.worker import chains, gpu_context, gpu_model, gpu_setup
from sgla.worker.start_cpu import cpu_runner
from sgla.worker.start_gpu import cuda_runner
from sgla.worker.state import column

DRAFTS = 4
RANK, MEETING = "SGLA_TEST_RANK", "SGLA_TEST_MEETING"  # variables of the second rank
LETTERS = Vocabulary(
    [bytes([i]) for i in range(256)] + [b""] * (VOCAB - 257) + [b"</s>"], [VOCAB - 1], [VOCAB - 1]
)
REGEX = source_of(Grammar(kind="regex", text="[ab]{3}(xyzw)+"), {"</s>": VOCAB - 1})


class Capture:
    def __call__(self, body: Callable[[], None]) -> Any:
        return Graph(body)

    unrun = __call__


class Graph(NamedTuple):
    replay: Callable[[], None]


def requests() -> list[Submit]:
    """Outputs that have little choice, so that there is much to guess."""
    stem = [5, 9, 2, 7]
    return [
        submit("always", [5, 6, 7], 12, allowed=[9]),
        submit("drawn", [4, 4, 8], 9, allowed=[3, 4], temperature=1.0, seed=4, logprobs=1),
        submit("ruled", [5], 14, allowed=[8, 9], logit_bias=[(9, 30.0)], bad_words=[[9, 9, 9]]),
        submit("stops", stem, 12, allowed=[3, 4], temperature=1.0, seed=2, stop_ids=[4]),
        submit("prompt", list(range(20)), 3, prompt_logprobs=1),
        submit("grammar", [5, 9], 8, grammar=REGEX, temperature=1.0, seed=6),
        submit("again", list(b"babxyzwxyzw") * 2, 13, grammar=REGEX, seed=6),
    ]


def texts() -> list[Submit]:
    """For models that guess, which know nothing of rules."""
    return [
        submit("free", [5, 9, 2], 12),
        submit("warm", [7] * 9, 8, temperature=0.7, seed=3),
        submit("cut", [7] * 3, 5, temperature=1.0, seed=3, top_k=9, top_p=0.9),
        submit("ruled", [5], 5, allowed=[8, 9], temperature=1.0, seed=1),
        submit("prompt", list(range(20)), 3, prompt_logprobs=1),
        submit("grammar", [5, 9], 4, grammar=REGEX, temperature=1.0, seed=6),
    ]


LATENT = deepseek(
    3,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_nextn_predict_layers=1,
    vocab_size=VOCAB,
    max_position_embeddings=256,
)
WINDOW_MTP = MIMO | {
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "num_hidden_layers": 2,
    "hybrid_layer_pattern": [0, 1],
    "moe_layer_freq": [0, 1],
}
EAGLE = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 200}
MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 2}  # fewer than may be guessed
DFLASH = DECODER | {
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 2,
    "block_size": DRAFTS + 1,
    "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 7},
}
ROUNDED = {"speculative_head_quantization": "int4"}
STAGES = {"attention_backend": "triton", "pp": 2}
LEAVES = {"attention_backend": "triton", "speculative_eagle_topk": 2}
DEEPER = DECODER | {"num_hidden_layers": 4}
FOUR_KEPT = STATES_KEPT | {"num_hidden_layers": 4, "layer_types": 2 * STATES_KEPT["layer_types"]}
SHALLOW = DECODER | {"num_hidden_layers": 1}
# model, settings, those of the GPU alone, limits of the scheduler
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "graphs": (SHALLOW, {}, {"attention_backend": "triton"}, {"depth": 2}),
    "windows": (WINDOWS, SMALL_STEPS | {"step_tokens": 16}, {"attention_backend": "torch"}, {"depth": 3}),
    "model": (DECODER, {}, {"attention_backend": "triton"}, {"depth": 2}),
    "itself": (WINDOWS, SMALL_STEPS | {"step_tokens": 16}, {"attention_backend": "torch"}, {"depth": 3}),
    "eagle3": (DEEPER, {"step_tokens": 16}, {"attention_backend": "torch"}, {"depth": 2}),
    "eagle": (DECODER, {"step_tokens": 16}, {"attention_backend": "triton"}, {"depth": 2}),
    "latent": (LATENT, {"step_tokens": 16}, {"attention_backend": "torch"}, {"depth": 1}),
    "states": (STATES_KEPT, {}, {"attention_backend": "triton"}, {"depth": 2}),
    "states, eagerly": (STATES_KEPT, {"step_tokens": 16}, {"attention_backend": "torch"}, {"depth": 3}),
    "convolutions": (CONVOLUTIONS, {"step_tokens": 16}, {"attention_backend": "torch"}, {"depth": 2}),
    "a scan beside attention": (BESIDE, {"step_tokens": 16}, {"attention_backend": "torch"}, {"depth": 2}),
    "hybrid": (STATES_KEPT, {"step_tokens": 16}, {"attention_backend": "triton"}, {"depth": 2}),
    "rounded": (DEEPER, {"step_tokens": 16}, {"attention_backend": "torch"} | ROUNDED, {"depth": 2}),
    "rounded blocks": (DEEPER, {"step_tokens": 16}, {"attention_backend": "triton"} | ROUNDED, {"depth": 2}),
    "rounded and narrowed": (
        DECODER,
        {"step_tokens": 16},
        {"attention_backend": "torch"} | ROUNDED,
        {"depth": 2},
    ),
    "narrowed": (LATENT, {"step_tokens": 16}, {"attention_backend": "torch"}, {"depth": 2}),
    "a window of its own": (WINDOW_MTP, SMALL_STEPS, {"attention_backend": "torch"}, {"depth": 2}),
    "medusa": (DECODER, {"step_tokens": 16}, {"attention_backend": "triton"}, {"depth": 2}),
    "dflash": (DEEPER, {"step_tokens": 16}, {"attention_backend": "triton"}, {"depth": 2}),
    "others": (SHALLOW, {"step_tokens": 16}, {"attention_backend": "torch"}, {"depth": 2}),
    "stages": (DECODER, {}, STAGES, {"depth": 3}),
    "windows in stages": (
        WINDOWS,
        SMALL_STEPS | {"step_tokens": 16},
        STAGES | {"attention_backend": "torch"},
        {"depth": 3},
    ),
    "states in stages": (FOUR_KEPT, {}, STAGES, {"depth": 3}),
    "states in stages, eagerly": (
        FOUR_KEPT,
        {"step_tokens": 16},
        STAGES | {"attention_backend": "torch"},
        {"depth": 3},
    ),
    "itself in stages": (
        WINDOWS,
        SMALL_STEPS | {"step_tokens": 16},
        STAGES | {"attention_backend": "torch"},
        {"depth": 3},
    ),
    "eagle in stages": (DECODER, {"step_tokens": 16}, STAGES, {"depth": 3}),
    "latent in stages": (LATENT, {"step_tokens": 16}, STAGES | {"attention_backend": "torch"}, {"depth": 3}),
    "eagle3 in stages": (DEEPER, {"step_tokens": 16}, STAGES, {"depth": 3}),
    "dflash in stages": (
        DEEPER,
        {"step_tokens": 16},
        STAGES | {"attention_backend": "torch", "pp": 3},
        {"depth": 4},
    ),
    "hybrid in stages": (FOUR_KEPT, {"step_tokens": 16}, STAGES, {"depth": 3}),
    "medusa in stages": (DECODER, {"step_tokens": 16}, STAGES, {"depth": 3}),
    "leaves": (SHALLOW, {"step_tokens": 36}, LEAVES, {"depth": 3, "drafts": 2 * DRAFTS - 1}),
    "leaves of a head": (DEEPER, {"step_tokens": 36}, LEAVES, {"depth": 2, "drafts": 2 * DRAFTS}),
}
# What guesses: random weights go by their names, so a model with fewer layers is right at times.
MODELS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "model": ("draft_model", SHALLOW),
    "itself": ("draft_model", WINDOWS),
    "eagle3": ("eagle3", DECODER | EAGLE),
    "rounded": ("eagle3", DECODER | EAGLE),
    "rounded blocks": ("dflash", DFLASH),
    "rounded and narrowed": ("eagle", SHALLOW),
    "eagle": ("eagle", SHALLOW),
    "latent": ("mtp", None),
    "hybrid": ("mtp", None),
    "narrowed": ("mtp", None),
    "a window of its own": ("mtp", None),
    "medusa": ("medusa", MEDUSA),
    "dflash": ("dflash", DFLASH),
    "itself in stages": ("draft_model", WINDOWS),
    "eagle in stages": ("eagle", SHALLOW),
    "latent in stages": ("mtp", None),
    "medusa in stages": ("medusa", MEDUSA),
    "hybrid in stages": ("mtp", None),
    "eagle3 in stages": ("eagle3", DECODER | EAGLE),
    "dflash in stages": ("dflash", DFLASH),
    "leaves": ("draft_model", SHALLOW),
    "leaves of a head": ("eagle3", DECODER | EAGLE),
}
HEADS = MODELS.keys() - {"model", "itself", "leaves", "itself in stages"}
NARROWED = [*range(0, VOCAB, 3)]  # tokens that a head may guess


def shown(transcript: Transcript) -> dict[str, Any]:
    entries = [e for rid in sorted(transcript) for delta in transcript[rid] for e in delta.logprobs or []]
    return {
        "tokens": transcript.tokens(),
        "finish": transcript.finish(),
        "ranks": [entry.rank for entry in entries],
        "logprobs": [entry.logprob for entry in entries],
    }


def branching() -> list[Submit]:
    """For guesses beside which stand others."""
    stem = list(range(40, 57))
    return [
        submit("free", [5, 9, 2], 30),
        submit("shown", stem, 20, temperature=0.8, seed=3, logprobs=2),
        submit("shared", [*stem, 3], 12, temperature=1.0, seed=4, stop_ids=[79]),
        submit("cut", [7] * 3, 14, temperature=1.0, seed=3, top_k=9, top_p=0.9),
        submit("ruled", [5], 11, temperature=1.0, seed=1, frequency=1.5, logprobs=1),
        submit("prompt", list(range(45)), 7, prompt_logprobs=1),
        submit("grammar", [5, 9], 6, grammar=REGEX, temperature=1.0, seed=6),
        submit("two", [8, 1], 2),
    ]


def behind(told: dict[str, list[int]]) -> list[Submit]:
    """The text of "free" and "shown", whose pages are there, goes on."""
    (free, shown, *_), texts = branching(), ("free", "shown")
    return [submit(f"{rid} on", one.tokens + told[rid][:-2], 4) for one, rid in zip((free, shown), texts)]


def few() -> list[Submit]:
    """For heads with random weights, which are never right."""
    return [submit("free", [5, 9, 2], 7), submit("cut", list(range(30, 50)), 5)]


def answers() -> list[Submit]:
    """The same text again, in other namespaces and in none."""
    said = [("first", ""), ("apart", "salt"), ("second", ""), ("apart too", "salt")]
    asked = [replace_struct(submit(rid, [5, 9, 2], 20), namespace=space) for rid, space in said]
    return asked


def wanted(case: str) -> list[Submit]:
    if case == "others":
        return answers()
    if "leaves" in case:
        return branching()[: 4 if case in HEADS else None]
    if case in HEADS:
        return few()
    if case == "model":
        return [submit("free", [5, 9, 2], 7), submit("warm", [7] * 9, 3, temperature=0.7, seed=3)]
    return texts() if case in MODELS else requests()


class Guesses(dict[str, list[int]]):
    """What was guessed, by the text before."""

    def of_cpu(self, runner: Any) -> None:
        drafter, tables = runner._drafter, runner.tables
        guess = drafter.guess

        def spied(plan: StepPlan) -> Any:
            found = guess(plan)
            if found is not None:
                for slot, start, length in zip(column(plan.slots), *found):
                    self._note(tables.tokens[slot], start + 1, length - 1)
            return found

        drafter.guess = spied

    def of_gpu(self, runner: Any) -> None:
        state, guess = runner.steps.drafts, runner.chains._guess

        def spied(slots: Any, most: Any, pair: tuple[int, int], leaves: Any) -> None:
            guess(slots, most, pair, leaves)
            for slot, n in zip(slots.tolist(), most.tolist()):
                known = int(state.computed[slot]) + 1
                count = min(n, int(state.limits[slot]) - known - 1)
                self._note(np.array(row(state.tokens, slot, known + count)), known, count)

        runner.chains._guess = spied

    def _note(self, tokens: Any, known: int, count: int) -> None:
        if count > 0:
            self[str(tokens[:known].tolist())] = tokens[known : known + count].tolist()


class Oracle:
    """Puts others in the place of guesses, of which some are right, or the one beside the first wrong one is.
    ``texts``: what comes. ``taken``: leaves that counted, as steps tell."""

    def __init__(self, runner: Any, texts: list[list[int]]) -> None:
        self._state, self._texts, self.taken = runner.steps.drafts, texts, 0
        guess, learn = runner.chains._guess, runner.chains._pace.learn_second

        def told(slots: Any, most: Any, pair: tuple[int, int], leaves: Any) -> None:
            guess(slots, most, pair, leaves)
            for each in zip(slots.tolist(), most.tolist(), leaves.tolist()):
                self._tell(*each)

        def learned(slots: Any, right: Any) -> None:
            learn(slots, right)
            self.taken += int(right.sum())

        runner.chains._guess, runner.chains._pace.learn_second = told, learned

    def _tell(self, slot: int, deep: int, leaves: int) -> None:
        known = int(self._state.computed[slot]) + 1
        begun = row(self._state.tokens, slot, known)
        left = int(self._state.limits[slot]) - known - 1
        comes = next((text[known:] for text in self._texts if text[:known] == begun), [])
        rng = np.random.default_rng(known)
        deep, leaves = min(deep, left), min(leaves, left - deep)
        right = min(int(rng.integers(0, deep + 1)), len(comes)) if deep > 0 else 0
        tokens = rng.integers(0, VOCAB, max(deep, 0) + max(leaves, 0)).astype(np.int32)
        tokens[:right] = comes[:right]
        if right < min(deep, len(comes)):
            tokens[right] = (comes[right] + 1) % VOCAB
            if right < leaves and rng.random() < 0.9:
                tokens[deep + right] = comes[right]
        places = known + np.arange(len(tokens), dtype=np.int32)
        columns = np.full_like(places, slot), places, tokens
        put_tokens(*map(torch.from_numpy, columns), self._state.tokens)


class LaunchingStages(Launching):
    """The stages before the last compute a step when it is planned."""

    def __init__(self, stages: Stages) -> None:
        super().__init__(stages.runners[-1])
        self._before = stages.runners[:-1]

    def submit(self, plan: StepPlan) -> None:
        for runner in self._before:
            assert runner.execute(plan).tokens == b""
        super().submit(plan)


def guessed(made: Any, case: str) -> dict[str, Any]:
    """``rights``: right guesses of each request, where they come one after another."""
    limits = {"drafts": DRAFTS, "guided_drafts": made.facts.guided_drafts} | CASES[case][3]
    staged = isinstance(made, Stages)
    executor = LaunchingStages(made) if staged else Launching(made)
    runner = made.runners[-1] if staged else made
    limits |= {"stages": len(made.runners)} if staged else {}
    if case == "others":
        rights, tokens = [], {}
        for one in answers():  # each from a scheduler of its own, whose steps begin with the first
            own = make_core(runner.facts, **limits)
            tokens |= run(runner, [one], own, executor=executor).tokens()
            rights.append(sum(own.stats().right_at))
        return {"tokens": tokens, "rights": rights}
    core: Core = make_core(made.facts, **limits)
    found = shown(run(runner, wanted(case), core, executor=executor))
    holds = runner.shard.draws and case not in MODELS.keys() - {"itself", "itself in stages"}
    assert executor.held > 0 or not holds
    stats = core.stats()
    if runner.steps.drafts.leaves:
        found["behind"] = run(runner, behind(found["tokens"]), core, executor=executor).tokens()
    return found | {"verifies": stats.verifies, "guessed": stats.draft_tokens, "right": stats.right_at}


def check_padding(tables: Any) -> None:
    """From now on batches of decode rows must know which are padding, guesses that are none among them."""
    batch = tables.batch

    def checked(slots: torch.Tensor, ids: torch.Tensor, **more: Any) -> Any:
        made = batch(slots, ids, **more)
        if made.live is not None and made.tokens == made.decode_rows:
            assert torch.equal(made.live > 0, slots != tables.tokens.slots - 1)
        return made

    tables.batch = checked


def meet(rank: int, meeting: str, sets: bool) -> None:
    """Ranks are those of a GPU from now on."""
    shard = Shard(context=Context(rank, 2, None)) if sets else Shard(rank, 2)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    gpus.join_gpus = lambda *args, **settings: gpus.Joined(shard, "")


def main() -> None:
    torch.manual_seed(0)
    second, asked = RANK in os.environ, sys.argv[1:]
    ranks = second or "--ranks" in asked
    shared = {"sequence_parallel": True} if "--rows" in asked else {}
    sets = "--sets" in asked
    regions.LEAST = gpu_context.LEAST = 4
    flags = [arg for arg in asked if arg.startswith("--")]
    asked = [arg for arg in asked if arg not in flags]
    for case in set(CASES) - set(asked or CASES):
        del CASES[case]
    found: dict[str, Any] = {case: {} for case in CASES}
    settings = {"max_running_requests": 4}

    def make(maker: Any, case: str, **own: Any) -> Any:
        model, common, _, _ = CASES[case]
        with tempfile.NamedTemporaryFile() as file:
            if case in ("narrowed", "rounded and narrowed") and "speculative_algorithm" in own:
                own["speculative_token_map"] = file.name
                Path(file.name).write_text(json.dumps(NARROWED))
            several = {"cp": 2} if sets else {"tp": 2}
            over = several | shared if ranks and "device" in own else {}
            changes = settings | common | own | over
            config = tiny_config(**changes)
            files = source(Path("."), model)
            draft = MODELS[case][1] if config.speculative_algorithm and case in MODELS else None
            if draft is not None:
                files = replace(files, draft=source(Path("."), draft))
            made: Any
            if config.pp > 1:
                made = Stages(files, config.pp, maker, **changes)
                runners = made.runners
            else:
                made = maker(config, files, int(second), config.ranks, "", lambda progress: None)
                runners = [made]
            Path(file.name).write_bytes(LETTERS.encoded())
            for each in runners:
                each.control(Control(verb="vocabulary", args={"path": file.name}))
        return made

    for case in CASES:
        if second and "leaves" not in case:
            continue
        runner = make(cpu_runner, case)
        found[case] = {"cpu": shown(run(runner, wanted(case), depth=1))}
        if "leaves" in case:
            cpu = found[case]["cpu"]
            cpu["behind"] = run(runner, behind(cpu["tokens"]), depth=1).tokens()
        if case in HEADS and not second:
            guesses = Guesses()
            settled = {"speculative_algorithm": MODELS[case][0], "speculative_num_draft_tokens": DRAFTS}
            runner = make(cpu_runner, case, speculative_adaptive=False, **settled)
            guesses.of_cpu(runner)
            run(runner, wanted(case), depth=1, drafts=DRAFTS)
            found[case]["guesses of a cpu"] = guesses
    if ranks:
        meeting = os.environ.get(MEETING) or tempfile.mktemp()
        if not second:
            os.environ[MEETING] = meeting
            other = subprocess.Popen([sys.executable, __file__, *flags, *CASES], env=os.environ | {RANK: "1"})
        meet(int(second), meeting, sets)
    become_gpu()
    gpu_model.rehearse, gpu_setup.Capture = (lambda *args: None), Capture  # type: ignore[assignment, misc]
    chains.Chains.rehearse = chains.Chains.time = lambda *args: None  # type: ignore[method-assign, assignment]
    attention.splits_for = lambda *args: 1
    thresholds.find_thresholds = sampling.find_thresholds
    sampling.NEAR = 1  # so that tokens of a small vocabulary are pieces of their own
    for case, (_, _, own, _) in CASES.items():
        algorithm = MODELS[case][0] if case in MODELS else "ngram"
        guessing = {"speculative_algorithm": algorithm, "speculative_num_draft_tokens": DRAFTS}
        made = make(cuda_runner, case, device="cuda", **guessing | own)
        runner = made.runners[-1] if isinstance(made, Stages) else made
        assert runner._captures == (own["attention_backend"] == "triton")
        check_padding(runner.steps.tables)
        guesses = Guesses()
        if case in HEADS:
            guesses.of_gpu(runner)
        if runner.steps.drafts.leaves:
            told = found[case]["cpu"]["tokens"]
            prompts = {one.rid: one.tokens for one in wanted(case)}
            oracle = Oracle(runner, [[*prompts[rid], *text] for rid, text in told.items()])
        found[case]["gpu"] = guessed(made, case)
        if runner.steps.drafts.leaves:
            found[case]["taken"] = oracle.taken
        found[case]["guesses"] = guesses
    if second:
        return
    if ranks:
        assert not other.wait()
    print(json.dumps(found))


if __name__ == "__main__":
    main()

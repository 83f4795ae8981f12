"""Rows that guess on a GPU bring what a CPU brings without guesses, as far as that shows without a GPU."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_script
from token_tables import in_rows

pytest.importorskip("triton")
from sgla.kernels.triton import drafts
from sgla.messages import StepPlan
from sgla.worker.cuda import DECODE_FLAGS, CudaRunner
from sgla.worker.ngrams import LONGEST, SHORTEST, NGrams
from sgla.worker.others import BITS, PRIME, RUN, Outputs

MOST = 8


def answers_of(*cases: str) -> dict[str, Any]:
    """In a process of its own: see ``interpreted_drafts.py``."""
    found: dict[str, Any] = json.loads(run_script("interpreted_drafts.py", *cases)[-1])
    return found


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    cases = "graphs", "itself", "eagle3", "states, eagerly", "dflash", "others", "leaves of a head", "stages"
    return answers_of(*cases)


def test_text_is_that_of_a_cpu_without_guesses(answers: dict[str, Any]) -> None:
    check_text(answers["graphs"])


def test_text_is_that_of_a_cpu_where_the_last_stage_guesses(answers: dict[str, Any]) -> None:
    check_text(answers["stages"])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["windows", "windows in stages"])
def test_text_is_that_of_a_cpu_with_windows(case: str) -> None:
    check_text(answers_of(case)[case])


def test_states_go_back_behind_wrong_guesses(answers: dict[str, Any]) -> None:
    check_text(answers["states, eagerly"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    ["states", "convolutions", "a scan beside attention", "states in stages", "states in stages, eagerly"],
)
def test_other_states_go_back_behind_wrong_guesses(case: str) -> None:
    check_text(answers_of(case)[case])


def check_text(found: dict[str, Any]) -> None:
    """With graphs and without, steps in flight, beside prompts, with rules, a grammar and logprobs; requests
    end in the middle of what a row brings."""
    cpu, gpu = found["cpu"], found["gpu"]
    for kind in ("tokens", "finish", "ranks"):
        assert gpu[kind] == cpu[kind]
    assert gpu["logprobs"] == pytest.approx(cpu["logprobs"], abs=1e-4)
    assert {"length", "stop"} <= set(cpu["finish"].values())
    assert gpu["guessed"] > sum(gpu["right"]) > 5
    assert gpu["verifies"] + sum(gpu["right"]) < sum(map(len, cpu["tokens"].values()))


def test_a_head_guesses_behind_second_guesses_as_on_a_cpu(answers: dict[str, Any]) -> None:
    """It reads what its target has made of those that count, wherever that stood."""
    found = answers["leaves of a head"]
    check_leaves(found)
    cpu, gpu = found["guesses of a cpu"], found["guesses"]
    both = cpu.keys() & gpu.keys()
    assert len(both) > 12
    for place in both:
        count = min(len(cpu[place]), len(gpu[place]))
        assert gpu[place][:count] == cpu[place][:count]


@pytest.mark.slow
def test_text_is_that_of_a_cpu_where_second_guesses_count() -> None:
    check_leaves(answers_of("leaves")["leaves"])


def check_leaves(found: dict[str, Any]) -> None:
    """Beside rows with rules and grammars, which have none, behind shared prefixes and parts of prompts; and
    what comes behind all that, whose pages are used again."""
    cpu, gpu = found["cpu"], found["gpu"]
    for kind in ("tokens", "finish", "ranks", "behind"):
        assert gpu[kind] == cpu[kind]
    assert gpu["logprobs"] == pytest.approx(cpu["logprobs"], abs=1e-4)
    assert found["taken"] > 5
    texts = *cpu["tokens"].values(), *cpu["behind"].values()
    assert gpu["verifies"] + sum(gpu["right"]) <= sum(map(len, texts))


@pytest.mark.parametrize("read", [[], [3]])
def test_no_leaves_beside_the_last_token_of_a_picture(
    read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that ends with one may leave one token to a step of decode rows, which has no graph then."""
    runner = CudaRunner.__new__(CudaRunner)
    monkeypatch.setattr(CudaRunner, "_decodes", lambda self, plan: True)
    monkeypatch.setattr(CudaRunner, "_reads_pictures", lambda self, slots, starts: slots.tolist() == read)
    three = np.array([3], np.int32).tobytes()
    plan = StepPlan(step=1, slots=three, starts=three, q_lens=three, drafts=three, flags=DECODE_FLAGS, new=[])
    assert runner._bears(plan, counted=False) == (not read)


def test_a_second_answer_like_the_first_is_guessed(answers: dict[str, Any]) -> None:
    """Not where texts are apart."""
    found = answers["others"]
    assert found["gpu"]["tokens"] == found["cpu"]["tokens"]
    first, apart, second, apart_too = found["gpu"]["rights"]
    assert apart == apart_too == first
    assert second > first + 8


def test_text_is_that_of_a_cpu_where_a_model_guesses_for_itself(answers: dict[str, Any]) -> None:
    """It is right wherever no rule is in the way: so it has read all that its target has."""
    check_guesses(answers["itself"], 15)


@pytest.mark.slow
def test_text_is_that_of_a_cpu_where_a_model_guesses_beside_the_last_stage() -> None:
    check_guesses(answers_of("itself in stages")["itself in stages"], 15)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["eagle", "eagle3", "dflash", "latent", "hybrid", "medusa"])
def test_a_head_guesses_beside_the_last_stage_as_on_a_cpu(head: str) -> None:
    """But for the first step behind a prompt."""
    check_head(answers_of(f"{head} in stages")[f"{head} in stages"], 6)


@pytest.mark.slow
def test_text_is_that_of_a_cpu_where_a_smaller_model_guesses() -> None:
    check_guesses(answers_of("model")["model"], 1)


def check_guesses(found: dict[str, Any], right: int) -> None:
    cpu, gpu = found["cpu"], found["gpu"]
    for kind in ("tokens", "finish", "ranks"):
        assert gpu[kind] == cpu[kind]
    assert gpu["guessed"] > sum(gpu["right"]) >= right


def test_a_head_guesses_as_on_a_cpu(answers: dict[str, Any]) -> None:
    """From the same hidden states, behind a prompt that is read in parts and behind wrong guesses."""
    check_head(answers["eagle3"])


def test_a_block_is_guessed_as_on_a_cpu(answers: dict[str, Any]) -> None:
    check_head(answers["dflash"])


def test_text_is_that_of_a_cpu_with_several_ranks() -> None:
    check_text(answers_of("--ranks", "graphs")["graphs"])


@pytest.mark.slow
def test_second_guesses_count_with_several_ranks() -> None:
    found = answers_of("--ranks", "leaves", "leaves of a head")
    check_leaves(found["leaves"])
    check_leaves(found["leaves of a head"])


@pytest.mark.slow
def test_models_and_heads_guess_with_several_ranks() -> None:
    found = answers_of("--ranks", "model", "eagle3", "latent", "medusa", "dflash", "others")
    assert found["others"]["gpu"]["tokens"] == found["others"]["cpu"]["tokens"]
    assert found["others"]["gpu"]["rights"][2] > 8
    check_guesses(found["model"], 1)
    check_head(found["eagle3"])
    check_head(found["latent"])
    check_head(found["medusa"])
    check_head(found["dflash"])


@pytest.mark.slow
def test_rows_guess_where_sets_share_prompts_out() -> None:
    found = answers_of("--ranks", "--sets", "graphs", "leaves", "leaves of a head", "dflash", "narrowed")
    check_text(found["graphs"])
    check_leaves(found["leaves"])
    check_leaves(found["leaves of a head"])
    check_head(found["dflash"])
    check_head(found["narrowed"])


@pytest.mark.slow
def test_models_and_heads_guess_where_ranks_share_rows_out() -> None:
    found = answers_of("--ranks", "--rows", "model", "eagle3", "latent", "medusa", "dflash")
    check_guesses(found.pop("model"), 1)
    for head in found.values():
        check_head(head)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["eagle", "latent", "hybrid", "a window of its own", "medusa"])
def test_other_heads_guess_as_on_a_cpu(case: str) -> None:
    check_head(answers_of(case)[case])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(), ("--ranks",)])
def test_a_head_guesses_some_tokens_alone(ranks: tuple[str, ...]) -> None:
    found = answers_of(*ranks, "narrowed")["narrowed"]
    check_head(found)
    assert {token % 3 for guesses in found["guesses"].values() for token in guesses} == {0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        ("rounded",),
        ("--ranks", "rounded"),
        ("rounded blocks",),
        ("rounded and narrowed",),
        ("--ranks", "rounded and narrowed"),
    ],
)
def test_a_head_guesses_with_an_output_layer_of_its_own(cases: tuple[str, ...]) -> None:
    """Its numbers are rounded to 4 bits, and the guesses are those of the exact ones, since all tokens are
    compared by these."""
    (found,) = answers_of(*cases).values()
    check_head(found)


def check_head(found: dict[str, Any], places: int = 8) -> None:
    assert found["gpu"]["tokens"] == found["cpu"]["tokens"]
    cpu, gpu = found["guesses of a cpu"], found["guesses"]
    assert len(gpu) == places
    assert gpu == {place: cpu[place] for place in gpu}


def columns(*values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and no interpreter")
def test_kernels_guess_and_accept_as_a_cpu_does() -> None:
    """Slots 0 to 4: what may be guessed is limited by trust, by the request, by the plan; one has all its
    tokens, and one does not guess. Behind guesses of which some are right, trust and places are those of
    ``NGrams``."""
    rng, found = np.random.default_rng(0), np.zeros((2, 4), int)
    for _ in range(12):
        tokens = torch.from_numpy(rng.integers(0, 3, (6, 80)).astype(np.int32))
        before = tokens.clone()
        computed = torch.from_numpy(rng.integers(1, 60, 6).astype(np.int32))
        limits = computed + 1 + columns([9, 9, 3, 0, 9, 0])[0]
        trusts = columns([9, 2, 9, 9, 9, 9])[0]
        most = [5, 5, 5, 5, -1]
        first = np.cumsum([0, 6, 6, 6, 6]).tolist()
        slots = columns([r for r, n in enumerate(most) for _ in range(max(n, 0) + 1)])[0]
        starts, where, ends = torch.full_like(slots, 7), slots.clone(), torch.full_like(slots, 8)
        ends[-1] = 33
        rows, state = columns(list(range(5)), most, first), (computed.clone(), limits, trusts.clone())
        answers, forced = answered(rng), force(rng, before, computed)
        apart = columns([0, 1, 0, 0, 0, 0])[0]
        others = drafts.Others(torch.from_numpy(answers.memory), apart, forced, (RUN, BITS, PRIME))
        asked = rows, in_rows(tokens), *state, slots, starts, where, ends, 5
        drafts.guess(*asked, (LONGEST, SHORTEST), MOST, others)
        out, ids = torch.zeros_like(slots), torch.zeros_like(slots)
        expected = []
        for slot, limit in enumerate([5, 2, 2, -1]):
            known, at = int(computed[slot]) + 1, first[slot]
            text, most_forced = before[slot, :known].numpy(), (5, 5, 2, -1)[slot]
            guess = looked_up(answers, forced[slot], slot, text, limit, most_forced)
            found[int(len(guess) > 0), slot] += 1
            real = len(guess) + (limit >= 0)
            assert tokens[slot, known : known + len(guess)].tolist() == guess.tolist()
            assert (
                slots[at : at + 6].tolist() == where[at : at + 6].tolist() == [slot] * real + [5] * (6 - real)
            )
            assert starts[at : at + 6].tolist() == [*range(known - 1, known - 1 + real)] + [0] * (6 - real)
            assert ends[at : at + 6].tolist() == [*range(known, known + real)] + [0] * (6 - real)
            right = int(rng.integers(0, len(guess) + 1))
            ids[at + 1 : at + 1 + len(guess)] = out[at : at + len(guess)] = torch.from_numpy(guess.copy())
            if right < len(guess):
                out[at + right] += 1
            trust = min(2 * int(trusts[slot]), MOST) if right == len(guess) > 0 else right + 2
            trust = trust if len(guess) else int(trusts[slot])
            expected.append(
                (right + 1 if real else 0, len(guess), known + right if real else known - 1, trust)
            )
        expected.append((1, 0, 33, 9))
        counts = torch.zeros(2, 5, dtype=torch.int32)
        drafts.accept(rows, ids, out, ends, state[0], state[2], counts, MOST)
        assert list(zip(*counts.tolist(), state[0].tolist(), state[2].tolist())) == expected
    assert found[1, :3].min() > 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and no interpreter")
def test_kernels_take_a_second_guess_where_the_first_is_wrong() -> None:
    """What it keeps, in pages of two layers and in a ring, goes to the place of the first. Slot 3 has all its
    tokens, and slot 4 no guess beside its last."""
    rng, deep, found = np.random.default_rng(0), 3, [0, 0, 0]
    kv = torch.arange(2 * 6 * 2 * 16 * 4, dtype=torch.float32).view(2, 6, 2, 16, 4).transpose(2, 3)
    for _ in range(12):
        tokens = torch.from_numpy(rng.integers(0, 3, (6, 64)).astype(np.int32))
        table = torch.from_numpy(rng.permutation(6)[:, None].repeat(4, 1)).int()  # of a page each
        known = torch.from_numpy(rng.integers(2, 9, 6).astype(np.int32))
        computed, left = known - 1, columns([9, 6, 4, -1, 9, 9])[0]
        most = [6, 6, 6, 6, 5]
        first = np.cumsum([0, 7, 7, 7, 7]).tolist()
        total = first[-1] + 6
        slots, starts, where, ends = torch.zeros(4, total, dtype=torch.int32)
        rows = columns(list(range(5)), most, first)
        drafts.place(rows, computed, known + 1 + left, slots, starts, where, ends, 5, MOST, deep)
        ids = tokens[slots.long(), starts.long()]
        out = torch.from_numpy(rng.integers(0, 3, total).astype(np.int32))
        counts, moves = torch.zeros(3, 5, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int32)
        text, before = in_rows(tokens), tokens.clone()
        drafts.take_leaf(rows, ids, out, ends, text, computed, counts, moves, deep, MOST)
        pool = kv.clone()
        places = torch.tensor([[i * 768, 128, 4, 64, 2, 4] for i in range(2)])
        drafts.move(rows, moves, table, 16, pool.view(torch.int32), places)
        ring = torch.arange(6 * 16 * 3).view(6, 16, 3).float()
        drafts.move_hidden(rows, moves, ring)
        for slot, (at, n) in enumerate(zip(first, most)):
            real, begin = min(n, int(left[slot])), int(known[slot])
            chain, drawn = min(real, deep), out[at : at + n + 1].tolist()
            assert starts[at : at + real + 1].tolist() == [*range(begin - 1, begin + real)]
            behind = [*range(begin, begin + chain + 1), *range(begin + 1, begin + 1 + max(real - deep, 0))]
            assert ends[at : at + n + 1].tolist() == [*behind, *[0] * (n - real)] if real >= 0 else [0] * 7
            if real < 0:
                assert counts[:, slot].tolist() == [0, 0, 0]
                assert int(computed[slot]) == begin - 1
                continue
            guesses = before[slot, begin : begin + real].tolist()
            right = next((i for i in range(chain) if guesses[i] != drawn[i]), chain)
            leaf = deep + right
            taken = right < chain and leaf < real and guesses[leaf] == drawn[right]
            brought = drawn[: right + 1] + ([drawn[leaf + 1]] if taken else [])
            assert counts[:, slot].tolist() == [len(brought), chain, leaf + 1 if taken else 0]
            assert int(computed[slot]) == begin + len(brought) - 1
            assert tokens[slot, begin : begin + len(brought)].tolist() == brought
            page, source = int(table[slot, 0]), begin + leaf if taken else begin + right
            assert (pool[:, page, begin + right] == kv[:, page, source]).all()
            assert ring[slot, (begin + right) % 16, 0] == slot * 48 + source % 16 * 3
            found[0 if taken else 1 if right < chain else 2] += 1
        assert (pool != kv).any(-1).any(-1).sum() == 2 * int((moves[0] > 0).sum())
    assert min(found) > 1


def answered(rng: Any) -> Outputs:
    """Parts like the texts; slot 1 is apart."""
    made = Outputs(4)
    made.admit(1, True)
    for slot in (0, 2, 3):
        made.add(slot, rng.integers(0, 3, 30).tolist())
        made.admit(slot, False)
    return made


def force(rng: Any, before: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
    """Runs that begin a bit before what is known of a slot ends; slot 2's says what has not come, and slot
    1's is over."""
    made = torch.zeros(6, MOST + 2, dtype=torch.int32)
    for slot in (0, 1, 2):
        known, back = int(computed[slot]) + 1, int(rng.integers(0, 3)) + (slot > 0)
        start = max(known - back, 0)
        run = [*before[slot, start:known].tolist(), *([] if slot == 1 else [7, 8, 9])]
        run[0] += slot == 2
        made[slot, : 2 + len(run)] = columns([start, len(run), *run])[0]
    return made if rng.integers(0, 2) else torch.zeros_like(made)


def looked_up(answers: Outputs, forced: torch.Tensor, slot: int, text: Any, limit: int, most: int) -> Any:
    """What is forced, or else what ``NGrams`` finds."""
    start, size = forced[:2].tolist()
    run, ahead = forced[2 : 2 + size].numpy(), len(text) - start
    if most > 0 and 0 <= ahead < size and (run[:ahead] == text[start:]).all():
        return run[ahead : ahead + most]
    guess = NGrams.propose(text, limit, LONGEST)
    guess = guess if len(guess) or limit <= 0 else answers.behind(slot, text, limit)
    return guess if len(guess) else NGrams.propose(text, limit)

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import ForkedExecutor
from tiny import VOCAB, check_draws, make_core, run, run_executor, submit, tiny_config, tiny_source

from sgla.device import check as check_device
from sgla.device import nvidia
from sgla.errors import ConfigError, InvalidField, OutOfMemory, UnsupportedField
from sgla.executor.inline import InlineExecutor
from sgla.executor.procs import ProcsExecutor
from sgla.kernels.batch import ForwardBatch
from sgla.layers.spec import StateTensor
from sgla.messages import PROMPT_LOGPROBS, SAMPLE, Control, NewRow, RowSampling, StepPlan, Submit
from sgla.model.state import Demand, LayerState, Pool, kv_groups
from sgla.worker.batch import Columns, build, cut, read
from sgla.worker.cpu import CpuRunner
from sgla.worker.kv import allocate_kv, zero_pages
from sgla.worker.memory import MIB, available_bytes, resident_bytes, size_kv
from sgla.worker.state import SlotTables


def ints(values: Any) -> bytes:
    return array("i", values).tobytes()


def make_runner(**changes: Any) -> CpuRunner:
    return CpuRunner(tiny_config(**changes), tiny_source(), 0, 1, "", lambda progress: None)


@pytest.mark.parametrize(
    ("capability", "changes", "param"),
    [
        ((8, 0), {"quantization": "fp8"}, "quantization"),
        ((9, 0), {"quantization": "fp8", "dtype": "float32"}, "dtype"),
        ((8, 0), {"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ((9, 0), {"kv_cache_dtype": "fp8", "dtype": "float32"}, "kv_cache_dtype"),
        ((8, 9), {"quantization": "fp8", "kv_cache_dtype": "fp8"}, None),
        ((8, 0), {"deterministic": True}, None),
        ((9, 0), {"quantization": "int8"}, None),
        ((9, 0), {"quantization": "int4"}, None),
        ((7, 5), {}, "device"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused_by_name(
    capability: tuple[int, int], changes: dict[str, Any], param: str | None
) -> None:
    config = tiny_config(**{"dtype": "bfloat16"} | changes)
    gpu, model = nvidia("a GPU", capability), (config.dtype, None, None)
    if param is None:
        return check_device(gpu, config, *model)
    with pytest.raises(ConfigError) as caught:
        check_device(gpu, config, *model)
    assert caught.value.param == param


@pytest.fixture(scope="module", params=["torch", "native"])
def runner(request: pytest.FixtureRequest) -> CpuRunner:
    runner = make_runner(native_kernels=request.param == "native")
    if request.param == "native" and "torch" in runner.facts.notes[0]:
        pytest.skip(runner.facts.notes[0])
    return runner


def make_requests(seed: int = 2) -> list[Submit]:
    """Greedy and seeded, with and without rules; two share a prefix of several pages."""
    rng = random.Random(seed)
    prompt = lambda n: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731
    shared = prompt(70)
    return [
        submit("greedy", prompt(5), 20),
        submit("long", prompt(150), 12),
        submit("one", prompt(1), 30, temperature=0.8, seed=3),
        submit("shared-a", shared + prompt(3), 15, temperature=1.0, top_p=0.9, seed=4, frequency=0.3),
        submit("shared-b", shared + prompt(4), 15, repetition=1.2, logit_bias=[(7, 1.5)]),
        submit("top-k", prompt(33), 25, temperature=1.1, top_k=20, min_p=0.01, seed=2**62),
        submit("least", prompt(8), 16, min_tokens=9, stop_ids=list(range(0, VOCAB, 3))),
        submit("page", prompt(16), 17, temperature=0.5, seed=9, presence=0.5),
    ]


@pytest.fixture(scope="module")
def alone() -> dict[str, list[int]]:
    """What each request gives by itself: torch, depth 1, cold cache, the prompt in as few steps as it
    fits."""
    runner = make_runner()
    check_draws(runner)
    tokens: dict[str, list[int]] = {}
    for request in make_requests():
        tokens |= run(runner, [request], depth=1, prefix_cache=False).tokens()
    assert len({tuple(t) for t in tokens.values()}) == len(tokens)
    return tokens


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_batch_gives_what_each_request_gives_alone(
    runner: CpuRunner, alone: dict[str, list[int]], depth: int
) -> None:
    assert run(runner, make_requests(), depth=depth).tokens() == alone


@pytest.mark.parametrize("step_tokens", [9, 16, 23])
def test_chunked_prefill_equals_whole(
    runner: CpuRunner, alone: dict[str, list[int]], step_tokens: int
) -> None:
    assert run(runner, make_requests(), step_tokens=step_tokens, depth=2).tokens() == alone


def test_a_warm_cache_equals_a_cold_one(runner: CpuRunner, alone: dict[str, list[int]]) -> None:
    core = make_core(runner.facts)
    assert run(runner, make_requests(), core).tokens() == alone
    warm = run(runner, make_requests(), core)
    assert warm.tokens() == alone
    assert max(d.cached_tokens for deltas in warm.values() for d in deltas) >= 64


def test_preempted_requests_resume_the_same_stream(runner: CpuRunner, alone: dict[str, list[int]]) -> None:
    core = make_core(runner.facts, pages=18, depth=2, reserve=0.0)
    assert run(runner, make_requests(), core).tokens() == alone
    assert core.stats().preemptions > 0


@pytest.mark.parametrize("kind", ["inline", "procs", "procs tp 2", "procs tp 2 pp 2"])
async def test_executors_equal_the_runner(kind: str, alone: dict[str, list[int]]) -> None:
    tp, pp = 2 if "tp 2" in kind else 1, 2 if "pp 2" in kind else 1
    config = tiny_config(tp=tp, pp=pp, native_kernels=kind != "inline")
    executors = {"inline": InlineExecutor, "procs": ProcsExecutor}
    executor = executors.get(kind, ForkedExecutor)(config, tiny_source())
    try:
        facts = await executor.start(lambda progress: None)
        for depth in (1, 3):
            found = await run_executor(executor, facts, make_requests(), depth=depth, stages=pp)
            assert found.tokens() == alone
        replies = (await executor.control(Control(verb="memory")))["ranks"]
        assert len(replies) == config.ranks
        assert all(reply["ledger"]["rss"] > 10 * MIB for reply in replies)
    finally:
        await executor.close()


def test_logprobs_of_prompt_and_outputs_are_the_models(runner: CpuRunner) -> None:
    rng = random.Random(5)
    prompt = [rng.randrange(VOCAB) for _ in range(90)]
    request = submit("r", prompt, 6, logprobs=3, prompt_logprobs=2, temperature=1.0, seed=1)
    whole = run(runner, [request])["r"]
    chunked = run(runner, [request], step_tokens=13)["r"]
    outputs = [t for d in whole for t in d.tokens]
    text = prompt + outputs
    expected = forward(runner, text).log_softmax(-1)
    for deltas in (whole, chunked):
        scored = [lp for d in deltas for lp in d.prompt_logprobs or []]
        assert scored[0] is None
        scored += [lp for d in deltas for lp in d.logprobs or []]
        assert len(scored) == len(text)
        for position, lp in enumerate(scored[1:], 1):
            assert lp is not None
            row = expected[position - 1]
            assert lp.token == text[position]
            assert lp.logprob == pytest.approx(float(row[lp.token]), abs=2e-4)
            top = row.topk(2 if position < len(prompt) else 3)
            assert [t for t, _ in lp.top] == top.indices.tolist()
            assert [v for _, v in lp.top] == pytest.approx(top.values.tolist(), abs=2e-4)
            assert lp.rank == 1 + int((row > row[lp.token]).sum())


def forward(runner: CpuRunner, tokens: list[int]) -> torch.Tensor:
    """Logits [T, V] of one sequence in one step."""
    tables = SlotTables(1, runner.facts.context_len, runner.facts.page_size)
    pages = range(1, 2 + len(tokens) // runner.facts.page_size)
    new = NewRow(
        slot=0, tokens=ints(tokens), prompt_len=len(tokens), pages=[ints(pages)], sampling=RowSampling()
    )
    plan = StepPlan(
        step=1, slots=ints([0]), starts=ints([0]), q_lens=ints([len(tokens)]), flags=b"\0", new=[new]
    )
    tables.apply(plan)
    return runner.model.logits(runner.model.forward(build(read(plan, tables)[0], tables), runner.kv))


def test_batches_match_a_token_by_token_construction() -> None:
    rng = random.Random(7)
    for _ in range(200):
        page_size = rng.choice((1, 4, 16))
        tables = SlotTables(6, 100, page_size)
        slots = rng.sample(range(6), rng.randint(1, 6))
        known = {slot: rng.randint(1, 100) for slot in slots}
        tokens = {slot: [rng.randrange(1000) for _ in range(n)] for slot, n in known.items()}
        pages = {
            slot: [rng.randrange(1, 500) for _ in range(-(-n // page_size))] for slot, n in known.items()
        }
        told = {slot: rng.randint(0, len(pages[slot])) for slot in slots}
        late = [slot for slot in slots if told[slot] < len(pages[slot])]
        starts = [rng.randrange(known[slot]) for slot in slots]
        q_lens = [
            1 if rng.random() < 0.3 else rng.randint(1, known[s] - start) for s, start in zip(slots, starts)
        ]
        flags = [rng.choice((0, SAMPLE, PROMPT_LOGPROBS)) if n == 1 else rng.randrange(4) for n in q_lens]
        prompt_len = {
            s: rng.randint(start + 2, start + (n if flag & SAMPLE and n > 1 else 200))
            for s, start, n, flag in zip(slots, starts, q_lens, flags)
        }
        plan = StepPlan(
            step=1,
            slots=ints(slots),
            starts=ints(starts),
            q_lens=ints(q_lens),
            flags=bytes(flags),
            page_slots=ints(late),
            page_counts=ints(len(pages[s]) - told[s] for s in late),
            page_ids=[ints(p for s in late for p in pages[s][told[s] :])],
            new=[
                NewRow(
                    slot=s,
                    tokens=ints(tokens[s]),
                    prompt_len=prompt_len[s],
                    pages=[ints(pages[s][: told[s]])],
                    sampling=RowSampling(),
                )
                for s in slots
            ],
        )
        tables.apply(plan)
        columns, batch = read(plan, tables)
        f = build(columns, tables)
        spots = [(r, s, p) for r, s in enumerate(slots) for p in range(starts[r], starts[r] + q_lens[r])]
        assert (f.rows, f.tokens, f.page_size) == (len(slots), len(spots), page_size)
        assert f.ids.tolist() == [tokens[s][p] for _, s, p in spots]
        assert f.positions.tolist() == [p for _, _, p in spots]
        assert f.out_loc.tolist() == [
            [pages[s][p // page_size] * page_size + p % page_size for _, s, p in spots]
        ]
        assert f.kv_len.tolist() == [a + n for a, n in zip(starts, q_lens)]
        assert f.slots.tolist() == slots
        assert all(f.page_table[0, s, : len(pages[s])].tolist() == pages[s] for s in slots)
        last = [max(i for i, spot in enumerate(spots) if spot[0] == r) for r in range(len(slots))]
        assert f.q_start.tolist() == [0, *(i + 1 for i in last)]
        wanted = [i for i, flag in zip(last, flags) if flag & SAMPLE]
        assert batch.tokens.tolist() == wanted
        assert batch.rows.tolist() == [r for r, flag in enumerate(flags) if flag & SAMPLE]
        assert all(
            t.dtype == torch.int32 for t in (f.ids, f.positions, f.slots, f.q_start, f.kv_len, f.out_loc)
        )
        for span in batch.prompt_spans:
            positions = [p for r, s, p in spots if r == span.row and p + 1 < prompt_len[s]]
            assert [p for _, _, p in spots[span.first : span.end]] == positions
            assert span.start == positions[0] + 1
            wanted += range(span.first, span.end)
        assert f.sample_rows.tolist() == sorted(wanted)
        check_parts(columns, f, rng.choice((1, 2, 7)), tables)
        assert [s.row for s in batch.prompt_spans] == [
            r for r, flag in enumerate(flags) if flag & PROMPT_LOGPROBS
        ]


def check_parts(columns: Columns, whole: ForwardBatch, most: int, tables: SlotTables) -> None:
    """The parts of a step are the step."""
    parts = [build(part, tables) for part in cut(columns, most)]
    assert all(p.sample_rows.numel() <= most for p in parts)
    for name in ("ids", "positions", "out_loc"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts], -1), getattr(whole, name))
    at, logits = 0, []
    for p in parts:
        assert p.q_start[-1] == p.tokens == len(p.ids)
        assert (p.kv_len == p.positions[(p.q_start[1:] - 1).long()] + 1).all()
        logits += (p.sample_rows + at).tolist()
        at += p.tokens
    assert logits == whole.sample_rows.tolist()


def test_a_slot_forgets_its_previous_request() -> None:
    tables = SlotTables(2, 50, 4)
    for count in (5, 2):
        row = NewRow(
            slot=1, tokens=ints(range(9)), prompt_len=9, pages=[ints(range(1, count))], sampling=RowSampling()
        )
        tables.apply(StepPlan(step=1, slots=b"", starts=b"", q_lens=b"", flags=b"", new=[row]))
    append = StepPlan(
        step=2,
        slots=b"",
        starts=b"",
        q_lens=b"",
        flags=b"",
        page_slots=ints([1]),
        page_counts=ints([2]),
        page_ids=[ints([8, 9])],
    )
    tables.apply(append)
    assert tables.page_table[0, 1, :3].tolist() == [1, 8, 9]
    assert tables.page_count.tolist() == [0, 3]


def test_layers_keep_what_they_say() -> None:
    """k and v of other widths and another type, a latent without v, another layer's, and nothing."""
    state = [
        LayerState(0, (StateTensor("k", (2, 8)), StateTensor("v", (2, 6), "float32"))),
        LayerState(0, (StateTensor("k", (1, 40)),)),
        LayerState(0, (), reads=0),
        LayerState(0, ()),
    ]
    [group] = kv_groups(state, 64, "bfloat16")
    assert group.token_bytes == 2 * 16 + 4 * 12 + 2 * 40
    first, latent, second, nothing = allocate_kv(state, [group], [3], 4, "bfloat16")
    assert [tuple(x.shape) for x in (first.k, first.v, latent.k, latent.v)] == [
        (3, 4, 2, 8), (3, 4, 2, 6), (3, 4, 1, 40), (3, 4, 1, 0),
    ]  # fmt: skip
    assert (first.k.dtype, first.v.dtype) == (torch.bfloat16, torch.float32)
    first.k[1] = 1
    assert second.k[1].all()
    latent.k[:] = 1
    assert latent.latent(32).v.shape[3] == 32
    zero_pages([first, latent, second, nothing], [torch.tensor([1])])
    assert not second.k.any()
    assert [bool(page.any()) for page in latent.k] == [True, False, True]


KEPT = StateTensor("k", (2, 64)), StateTensor("v", (2, 64))
STATE = [LayerState(0, KEPT)] * 4  # 4 KiB a token in float32, 64 KiB a page


def sized(**changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "budget": None,
        "available": 4096 * MIB,
        "wanted_context": None,
        "model_context": 2048,
    }
    return size_kv(Pool(kv_groups(STATE, 2048, "float32"), 16, Demand(32, 512)), **arguments | changes)


def test_the_kv_cache_is_sized_by_budget_memory_and_context() -> None:
    page = 64 << 10
    assert sized().bytes == 512 * MIB + page
    assert [pages * page for pages in sized().pages] == [sized().bytes]
    assert sized(available=400 * MIB).bytes == 100 * MIB + page
    assert sized(model_context=200_000).context_len == 200_000  # more than 512 MiB, and there is room
    assert sized(budget=1 * MIB, wanted_context=256) == ([17], 256, 17 * page, "")
    cut = sized(budget=1 * MIB)
    assert cut.context_len == 256
    assert "--kv-cache-bytes" in cut.note
    with pytest.raises(OutOfMemory, match=r"needs 8 MiB .*, 7 MiB more .*--context-length"):
        sized(budget=1 * MIB, wanted_context=2048)
    with pytest.raises(OutOfMemory, match=r"64 MiB are missing; lower --kv-cache-bytes"):
        sized(budget=128 * MIB, available=64 * MIB)


def test_memory_is_only_touched_when_used() -> None:
    available = available_bytes()
    before = resident_bytes()["rss"]
    runner = make_runner(kv_cache_bytes=available // 2, max_running_requests=4096)
    assert resident_bytes()["rss"] - before < 64 * MIB
    assert runner.facts.ledger["kv"] >= available // 2
    assert runner.facts.groups[0].pages * runner.facts.page_size > 1 << 20


def test_wrong_settings_are_typed_errors() -> None:
    with pytest.raises(ConfigError, match="256"):
        make_runner(context_length=512)
    with pytest.raises(OutOfMemory, match="--kv-cache-bytes"):
        make_runner(kv_cache_bytes=1 << 50)


def test_control_commands(runner: CpuRunner, tmp_path: Path) -> None:
    assert runner.control(Control(verb="memory"))["ledger"]["weights"] > 0
    with pytest.raises(InvalidField):
        runner.control(Control(verb="profile_stop"))
    runner.control(Control(verb="profile_start", args={"folder": str(tmp_path / "a")}))
    run(runner, [submit("r", [1, 2, 3], 3)])
    path = runner.control(Control(verb="profile_stop"))["file"]
    assert "aten::" in Path(path).read_text()
    runner.control(Control(verb="profile_start", args={"folder": str(tmp_path / "a"), "steps": 2}))
    run(runner, [submit("r", [1, 2, 3], 3)])
    [written] = set((tmp_path / "a").iterdir()) - {Path(path)}
    before = written.read_text()
    run(runner, [submit("r", [1, 2, 3], 3)])
    assert runner.control(Control(verb="profile_stop")) == {"file": str(written)}
    assert written.read_text() == before
    with pytest.raises(InvalidField):
        runner.control(Control(verb="profile_stop"))
    with pytest.raises(UnsupportedField, match="'fly'"):
        runner.control(Control(verb="fly"))

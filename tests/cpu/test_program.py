"""Recorded programs against eager runs, and the passes over recorded nodes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from levels import STORAGES
from torch import Tensor

from sgla.config import Config
from sgla.kernels import build, ops
from sgla.kernels.batch import ForwardBatch
from sgla.kernels.cpu import native
from sgla.kernels.cpu.fuse import Buffer, Node, fuse, place
from sgla.kernels.cpu.instructions import LOWERINGS
from sgla.kernels.cpu.native import Opcode
from sgla.kernels.cpu.panels import PAIR_LEVELS
from sgla.kernels.cpu.program import Program, ProgramLimits
from sgla.kernels.cpu.record import Recorder
from sgla.kernels.dispatch import using
from sgla.kernels.ops import KVLayer
from sgla.kernels.routing import Routing
from sgla.messages import Progress
from sgla.quant.weight import Weight, pack
from sgla.sampling.draw import Distribution, draw
from sgla.worker import start_cpu

pytestmark = pytest.mark.native

WIDTH, HEADS, KV_HEADS, DIM, FFN, VOCAB, PAGE, PAGES = 48, 6, 2, 16, 64, 100, 4, 60


class Tiny:
    """Two layers with a shared embedding, optional sharding hooks after the row-parallel linears."""

    def __init__(
        self, kind: str, dtype: torch.dtype = torch.float32, reduce: Callable[[Tensor], None] | None = None
    ):
        torch.manual_seed(7)
        self.reduce = reduce
        self.head = self.weight(VOCAB, WIDTH, kind)
        qkv = (HEADS + 2 * KV_HEADS) * DIM
        shapes = [(qkv, WIDTH), (WIDTH, HEADS * DIM), (2 * FFN, WIDTH), (WIDTH, FFN)]
        self.layers = [[self.weight(n, k, kind) for n, k in shapes] for _ in range(2)]
        self.norms = [torch.rand(WIDTH) + 0.5 for _ in range(5)]
        angles = torch.rand(64, DIM // 2) * 3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        shape = (PAGES, PAGE, KV_HEADS, DIM)
        self.kv = [
            KVLayer(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in range(2)
        ]

    @staticmethod
    def weight(n: int, k: int, kind: str) -> Weight:
        return pack(torch.randn(n, k) * k**-0.5, kind)

    def reduced(self, x: Tensor) -> Tensor:
        return x if self.reduce is None else ops.inplace(self.reduce, x)

    def __call__(self, b: ForwardBatch) -> Tensor:
        h = ops.embedding(b.ids, self.head, 2.0)
        x = ops.rms_norm(h, self.norms[0], 1e-5)
        for i, ((qkv, out, gate_up, down), kv) in enumerate(zip(self.layers, self.kv, strict=True)):
            q = ops.qk_norm_rope_store(
                ops.linear(x, qkv), b.positions, self.cos_sin, None, None, 1e-5, kv, b.out_loc
            )
            x = self.reduced(ops.linear(ops.attention(q, kv, b, DIM**-0.5), out))
            x, h = ops.add_rms_norm(x, h, self.norms[2 * i + 1], 1e-5)
            x = self.reduced(ops.linear(ops.act_mul(ops.linear(x, gate_up), "silu"), down))
            x, h = ops.add_rms_norm(x, h, self.norms[2 * i + 2], 1e-5)
        return ops.linear(ops.gather(x, b.sample_rows), self.head)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(rows: list[tuple[list[int], int]]) -> ForwardBatch:
    """Rows of (new token ids, history). Row r has slot r and the pages 1 + 10 r and following; the last token
    is sampled."""
    table = torch.arange(1, 1 + 10 * 5, dtype=torch.int32).view(5, 10)
    positions = [p for ids, old in rows for p in range(old, old + len(ids))]
    owner = [r for r, (ids, _) in enumerate(rows) for _ in ids]
    starts = [sum(len(ids) for ids, _ in rows[:r]) for r in range(len(rows) + 1)]
    return ForwardBatch(
        rows=len(rows),
        tokens=starts[-1],
        ids=ints([token for ids, _ in rows for token in ids]),
        positions=ints(positions),
        slots=ints(list(range(len(rows)))),
        q_start=ints(starts),
        kv_len=ints([len(ids) + old for ids, old in rows]),
        out_loc=ints(
            [int(table[r, p // PAGE]) * PAGE + p % PAGE for r, p in zip(owner, positions, strict=True)]
        ),
        page_table=table,
        page_size=PAGE,
        sample_rows=ints([s - 1 for s in starts[1:]]),
    )


PROMPTS = [[5, 17, 3, 80, 41], [9], [33, 2] * 12]
STEPS = [
    [(PROMPTS[0], 0), (PROMPTS[1], 0), (PROMPTS[2][:7], 0)],
    [([11], 5), ([60], 1), (PROMPTS[2][7:], 7)],
    [([12], 6), ([61], 2), ([62], 24)],
]


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("threads", [1, 2])
def test_recorded_model_equals_eager(kind: str, threads: int) -> None:
    eager, model = Tiny(kind), Tiny(kind)
    program = Program.record(model, ProgramLimits(40, 5), threads)
    tolerance = 2e-5
    if kind != "f32" and program._lib.isa != "generic":  # others round activations
        tolerance = 0.05 if program._lib.isa in PAIR_LEVELS else 0.005
    for rows in STEPS:
        want = eager(step(rows))
        torch.testing.assert_close(program.run(step(rows)), want, rtol=0, atol=tolerance)


def test_what_is_tapped_is_as_it_was_there() -> None:
    """Shown at the end of a step, though later instructions take the memory of what nobody reads."""

    def tapped(seen: list[Tensor]) -> Callable[[ForwardBatch], Tensor]:
        model = Tiny("f32")
        _, _, up, down = model.layers[0]

        def forward(b: ForwardBatch) -> Tensor:
            h = ops.tap(lambda x: seen.append(x.clone()), ops.embedding(b.ids, model.head, 2.0))
            for norm in model.norms:
                x = ops.act_mul(ops.linear(ops.rms_norm(h, norm, 1e-5), up), "silu")
                h = ops.tap(lambda x: seen.append(x.clone()), ops.add(h, ops.linear(x, down)))
            rows = ops.tap(lambda x: seen.append(x.clone()), ops.gather(h, b.sample_rows))
            return ops.linear(rows, model.head)

        return forward

    want, found = list[Tensor](), list[Tensor]()
    program = Program.record(tapped(found), ProgramLimits(40, 5), 2)
    for rows in STEPS:
        want.clear()
        found.clear()
        expected = tapped(want)(step(rows))
        torch.testing.assert_close(program.run(step(rows)), expected, rtol=0, atol=2e-5)
        assert len(found) == len(want) == len(program.taps) == 7
        for mine, theirs in zip(found, want):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-5)


DISTRIBUTIONS = [None, Distribution(0.8), Distribution(1.5, 20, 0.9), Distribution(0.3, 0, 0.8, 0.1)]


@pytest.mark.parametrize("threads", [1, 2])
def test_draws_behind_the_logits_are_those_of_the_sampler(threads: int) -> None:
    program = Program.record(Tiny("f32"), ProgramLimits(40, 5), threads)
    for position in range(30):
        data = step(STEPS[0])
        asked = [(2, 2**63 - 1, DISTRIBUTIONS[position % 4]), (0, position, DISTRIBUTIONS[position // 4 % 4])]
        data.draws = np.array(
            [
                (row, position, seed, each.top_k, each.temperature, each.top_p, each.min_p, -1)
                if each
                else (row, position, seed, 0, 0.0, 1.0, 0.0, -1)
                for row, seed, each in asked
            ],
            native.DRAW,
        )
        logits = program.run(data).numpy()
        wanted = [
            draw(logits[row], each, seed, position) if each else int(logits[row].argmax())
            for row, seed, each in asked
        ]
        assert data.draws["token"].tolist() == wanted
    program.run(step(STEPS[0]))
    assert data.draws["token"].tolist() == wanted


class Mixture(Tiny):
    """Two layers of experts; FFN is not a multiple of a panel in the second."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        experts = 5
        self.experts = [
            (
                self.weight(experts, WIDTH, "f32"),
                self.weight(experts * 2 * f, WIDTH, kind),
                self.weight(experts * WIDTH, f, kind),
            )
            for f in (FFN, 40)
        ]

    def __call__(self, b: ForwardBatch) -> Tensor:
        h = ops.embedding(b.ids, self.head)
        for weights, norm in zip(self.experts, self.norms):
            h = ops.add(h, ops.moe(ops.rms_norm(h, norm, 1e-5), *weights, Routing(2, normalize=True), "silu"))
        return ops.linear(ops.gather(h, b.sample_rows), self.head)


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("threads", [1, 2])
def test_recorded_mixture_equals_eager(kind: str, threads: int) -> None:
    eager, model = Mixture(kind), Mixture(kind)
    program = Program.record(model, ProgramLimits(40, 5), threads)
    again = Program.record(model, ProgramLimits(40, 5), threads)  # experts keep their panels
    exact = kind == "f32" or program._lib.isa == "generic"
    for rows in STEPS:
        want = eager(step(rows))
        for recorded in (program, again):
            out = recorded.run(step(rows))
            torch.testing.assert_close(out, want, rtol=0, atol=2e-5 if exact else 0.05)
    for _, gate_up, down in model.experts:
        assert not any(
            w.data.numel() for half in (gate_up, down) for w in (half, *half.split(5))
        )  # no second copy


def test_a_step_may_sample_nothing() -> None:
    """As the first chunks of a long prompt do."""
    whole, parts = (Program.record(Tiny("bf16"), ProgramLimits(40, 5), 2) for _ in range(2))
    want = whole.run(step([(PROMPTS[2], 0)])).clone()
    first = step([(PROMPTS[2][:9], 0)])
    first.sample_rows = first.sample_rows[:0]
    assert parts.run(first).shape == (0, VOCAB)
    assert torch.equal(parts.run(step([(PROMPTS[2][9:], 9)])), want)


def test_bf16_pages_are_close() -> None:
    eager = Tiny("f32")
    program = Program.record(Tiny("f32", torch.bfloat16), ProgramLimits(40, 5), 2)
    for rows in STEPS:
        torch.testing.assert_close(program.run(step(rows)), eager(step(rows)), rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", STORAGES)
def test_logits_do_not_depend_on_batch_or_chunks(kind: str) -> None:
    together, alone = (Program.record(Tiny(kind), ProgramLimits(40, 5), 2) for _ in range(2))
    for rows in STEPS:
        last = together.run(step(rows))[2].clone()
    alone.run(step([(PROMPTS[2], 0)]))
    assert torch.equal(alone.run(step([([62], 24)]))[0], last)


def test_python_calls_run_between_native_segments() -> None:
    halve: Callable[[Tensor], None] = lambda x: x.mul_(0.5)  # type: ignore[assignment,return-value]  # noqa: E731
    eager, recorded = Tiny("f32", reduce=halve), Tiny("f32", reduce=halve)
    program = Program.record(recorded, ProgramLimits(40, 5), 2)
    for rows in STEPS:
        torch.testing.assert_close(program.run(step(rows)), eager(step(rows)), rtol=0, atol=2e-5)


def test_call_fills_a_wider_output() -> None:
    w = pack(torch.randn(7, 5), "f32")
    table = torch.randn(VOCAB, 5)

    def twice(x: Tensor, out: Tensor) -> None:
        out[:, :7], out[:, 7:] = x, -x

    def model(b: ForwardBatch) -> Tensor:
        return ops.call(twice, ops.linear(ops.embedding(b.ids, table), w), 14)

    batch = step(STEPS[0])
    torch.testing.assert_close(Program.record(model, ProgramLimits(40, 5)).run(batch), model(batch))


def test_two_programs_from_two_threads() -> None:
    rows = STEPS[0]
    programs = [Program.record(Tiny("bf16"), ProgramLimits(40, 5), 2) for _ in range(2)]
    want = programs[0].run(step(rows)).clone()
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            results = list(pool.map(lambda p: p.run(step(rows)).clone(), programs))
            assert all(torch.equal(r, want) for r in results)


def recorded(model: Tiny, isa: str) -> tuple[list[Node], list[Buffer]]:
    recorder = Recorder(LOWERINGS, isa)
    with using(recorder):
        outputs = [recorder.buffer(model(recorder.batch()))]
    return fuse(recorder.nodes, outputs, isa), outputs


def test_fusion_leaves_eight_instructions_a_layer() -> None:
    nodes, _ = recorded(Tiny("bf16"), "avx512")
    layer = [
        Opcode.LINEAR,
        Opcode.ROPE_STORE,
        Opcode.ATTENTION,
        Opcode.LINEAR,
        Opcode.RMS_NORM,
        Opcode.LINEAR,
        Opcode.LINEAR,
        Opcode.RMS_NORM,
    ]
    assert [n.op for n in nodes] == [
        Opcode.EMBEDDING,
        Opcode.RMS_NORM,
        *layer,
        *layer,
        Opcode.GATHER,
        Opcode.LINEAR,
    ]


def test_bf16_inputs_come_from_their_producers() -> None:
    """Only the gathered rows need a conversion of their own; nothing reads bfloat16 that wants float32."""
    nodes, _ = recorded(Tiny("bf16"), "avx512_bf16")
    assert [n.op for n in nodes].count(Opcode.TO_BF16) == 1
    for node in nodes:
        for b in node.inputs[:1]:
            if b is not None:
                assert (b.dtype == torch.bfloat16) == (node.op == Opcode.LINEAR)


def test_live_buffers_never_overlap() -> None:
    rows = {False: 37, True: 5}
    for isa in ("avx512", "avx512_bf16"):
        nodes, outputs = recorded(Tiny("bf16"), isa)
        size = place(nodes, outputs, rows)
        spans: dict[Buffer, list[int]] = {}
        for time, node in enumerate(nodes):
            for b in (*node.inputs, *node.outputs):
                if b is not None:
                    spans.setdefault(b, []).append(time)
        spans[outputs[0]].append(len(nodes))
        ends = {b: b.offset + rows[b.sampled] * b.stride * b.dtype.itemsize for b in spans}
        assert max(ends.values()) <= size < sum(ends[b] - b.offset for b in spans)
        for a, b in itertools.combinations(spans, 2):
            together = spans[a][0] <= spans[b][-1] and spans[b][0] <= spans[a][-1]
            assert not together or ends[a] <= b.offset or ends[b] <= a.offset


def test_no_compiler_is_no_failure(tmp_path: Path) -> None:
    """With an empty cache and no g++, recording raises BuildError and the note says what to install."""
    code = (
        "from sgla.kernels import build\nfrom sgla.kernels.cpu import native\n"
        "print(native.note())\n"
        "try: native.library()\n"
        "except build.BuildError: print('refused')\n"
    )
    env = {
        "PATH": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "apt-get install g++" in done.stdout
    assert done.stdout.endswith("refused\n")


def test_a_better_level_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent builders agree on one file; nothing temporary stays behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "source_folder", lambda device: source)
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build.build, [build.level("generic")] * 4))
    (path,) = paths
    assert sorted(p.name for p in path.parent.iterdir()) == ["generic.lock", "generic.so"]
    (source / "one.cpp").write_text("syntax error")
    with pytest.raises(build.BuildError, match="syntax"):
        build.build(build.level("generic"))


def test_compilation_is_a_phase_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is counted in files, comes before the weights, and is left out where the library is there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("one", "two"):
        (tmp_path / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return 1; }}\n')
    monkeypatch.setattr(build, "source_folder", lambda device: tmp_path)
    monkeypatch.setattr(build, "supported", lambda: [build.level("generic")])
    monkeypatch.setattr(native, "_FOUND", [])
    monkeypatch.setattr(start_cpu, "read_pooling", lambda source, task: None)
    monkeypatch.setattr(start_cpu, "CpuRunner", lambda *arguments: arguments[5](Progress(phase="load")))
    seen: list[Progress] = []
    for _ in range(2):
        source = SimpleNamespace(config={"architectures": ["LlamaForCausalLM"]})
        start_cpu.cpu_runner(Config(), source, 0, 1, "", seen.append)  # type: ignore[arg-type]
        native._FOUND.clear()
    assert [(one.phase, one.done, one.total) for one in seen] == [
        *[("compile", done, 2) for done in range(3)],
        *[("load", 0, 0)] * 2,
    ]

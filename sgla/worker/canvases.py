"""Blocks that come out of noise: those of the requests in slots, and what a step makes of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sgla.kernels.batch import Canvas, ForwardBatch
from sgla.kernels.ops import Layer
from sgla.layers.vocab import VocabEmbedding
from sgla.messages import DENOISE, NewRow, StepPlan, StepResult
from sgla.model.base import CausalLM
from sgla.model.diffusion_gemma_spec import Denoising
from sgla.model.spec import ModelSpec
from sgla.sampling import faults
from sgla.sampling.denoise import Block
from sgla.sampling.draw import Distribution, Draw
from sgla.worker.batch import Columns, build
from sgla.worker.state import Int32s, SlotTables

FEW = 64  # tokens whose logits exist at a time


def canvas_bytes(spec: ModelSpec, slots: int) -> int:
    """That blocks of so many slots take, with what a step needs for them."""
    return 4 * (slots * spec.canvas * spec.hidden + 3 * FEW * spec.vocab) if spec.canvas else 0


class Canvases:
    """``draw``: what draws tokens; ``device``: where blocks are, if not on the host."""

    def __init__(
        self,
        tables: SlotTables,
        spec: ModelSpec,
        how: Denoising,
        draw: Draw,
        device: torch.device | None = None,
    ) -> None:
        self._tables, self._spec, self._how, self._draw, self._device = tables, spec, how, draw, device
        self._blocks: list[Block | None] = [None] * len(tables.limit)
        self._sampling = [(0, Distribution(0.0))] * len(tables.limit)

    def admit(self, new: NewRow) -> None:
        """A request takes its slot: it begins with the block behind what it knows."""
        own = new.sampling
        self._blocks[new.slot] = None
        self._sampling[new.slot] = own.seed, Distribution(own.temperature, own.top_k, own.top_p, own.min_p)

    @torch.inference_mode()
    def step(self, plan: StepPlan, columns: Columns, model: CausalLM, kv: list[Layer]) -> StepResult:
        """Predict the blocks among the rows of a step once more, and read its prompts."""
        rows = np.flatnonzero(np.frombuffer(plan.flags, np.uint8) & DENOISE).astype(np.int32)
        blocks = [self._block(int(columns.slots[row]), int(columns.starts[row])) for row in rows]
        batch = self._shown(columns, rows, blocks)
        assert batch.canvas is not None
        assert isinstance(model.embed, VocabEmbedding)
        hidden = model.forward(batch, kv, batch.canvas.tokens.int())
        embedding = model.embed.weight.dequant(model.embed.dtype)
        found = []
        for row, block, own in zip(rows, blocks, hidden.split(self._spec.canvas)):
            slot = int(columns.slots[row])
            done = self._predicted(block, slot, own, model, embedding)
            if done is not None and len(done):
                self._tables.tokens[slot, block.start : block.start + len(done)] = done
            found.append(done)
        return self._told(plan.step, columns, rows, found)

    def _told(self, step: int, columns: Columns, rows: Int32s, found: list[Int32s | None]) -> StepResult:
        """The result of a step that has ``found`` this of its blocks, some of which are over now."""
        for row, done in zip(rows, found):
            if done is not None and len(done):
                self._blocks[int(columns.slots[row])] = None
        tokens = [done for done in found if done is not None]
        lost = [row for row, done in zip(rows.tolist(), found) if done is None]
        return StepResult(
            step=step,
            tokens=np.concatenate([np.empty(0, np.int32), *tokens]).tobytes(),
            counts=np.array([0 if done is None else len(done) for done in found], np.int32).tobytes(),
            failed=[faults.no_token(row, faults.NOT_NUMBERS, ruled=False) for row in lost],
        )

    def _block(self, slot: int, start: int) -> Block:
        """The one that the slot is at, or a new one."""
        block, spec = self._blocks[slot], self._spec
        if block is None:
            seed, _ = self._sampling[slot]
            block = Block(start, spec.canvas, spec.hidden, spec.vocab, seed, self._how, self._device)
            self._blocks[slot] = block
        assert block.start == start, "a block is read before the next one begins"
        return block

    def _shown(self, columns: Columns, rows: Int32s, blocks: list[Block]) -> ForwardBatch:
        """The batch, in which the tokens of ``rows`` are those of ``blocks``."""
        size, first = self._spec.canvas, np.cumsum(columns.q_lens) - columns.q_lens
        for row, block in zip(rows, blocks):
            self._tables.tokens[columns.slots[row], block.start : block.start + size] = block.tokens
        batch = build(columns, self._tables)
        tokens = (first[rows][:, None] + np.arange(size)).flatten()
        origin = batch.positions.long()
        until = origin + 1
        origin[tokens] = torch.from_numpy(np.repeat(columns.starts[rows], size)).long()
        until[tokens] = origin[tokens] + size
        predicted = torch.cat([block.predicted for block in blocks])
        batch.canvas = Canvas(torch.from_numpy(tokens), predicted, until, origin)
        return batch

    def _predicted(
        self, block: Block, slot: int, hidden: Tensor, model: CausalLM, embedding: Tensor
    ) -> Int32s | None:
        """What a step has brought of a block: its tokens if it is done, else none; None: no numbers."""
        _, sampling = self._sampling[slot]
        likely, drawn, entropies = [], [], []
        for at in range(0, len(hidden), FEW):
            logits = model.logits(hidden[at : at + FEW])
            if not bool(logits.isfinite().all()):
                return None
            places = range(at, at + len(logits))
            drawn.append(block.drawn(logits.numpy(), places, sampling, self._draw))
            likely.append(logits.argmax(-1).int())
            logs = torch.log_softmax(logits / block.temperature, -1)
            sure = logs.exp()
            entropies.append(-(sure * logs).sum(-1))
            block.predicted[places.start : places.stop] = (
                sure.to(embedding.dtype) @ embedding
            ).float() * self._spec.embedding_scale
        found = torch.cat(likely).numpy()
        done = block.take(found, np.concatenate(drawn), torch.cat(entropies))
        return found if done else found[:0]

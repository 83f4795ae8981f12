"""Tiny random checkpoints in HF's format, and a driver that runs a model eagerly over paged KV, without a
worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgla.kernels.batch import ForwardBatch, StateRows
from sgla.kernels.cpu.program import ProgramLimits
from sgla.model.base import CausalLM
from sgla.model.state import kv_groups
from sgla.worker.forward import make_forward
from sgla.worker.kv import allocate_kv

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB = 311
SHIFTED = {"gemma", "gemma2", "gemma3_text", "vaultgemma", "recurrent_gemma"}  # norms of weights and 1
ALONE = {"mistral4": "Mistral4ForCausalLM"}  # which transformers knows as part of another alone
E4M3, BLOCK = torch.float8_e4m3fn, 16  # rows and columns that have a scale in store_as_fp8's blocks
BLOCKS = {"block": BLOCK, "block of 128": 128}
TIE = 1e-4  # nats; rounding, which differs with the batch in torch's products, is a hundredth of it
DELTA_NET = {  # heads of gated delta nets, and of the attention beside them
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_checkpoint(
    folder: Path, model_type: str, shard_size: str = "1GB", seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """Write a random float32 model to ``folder`` and return it. Norms and biases are random too, so none can
    be forgotten."""
    import transformers  # seconds, which spawned ranks need not spend
    from transformers import AutoConfig, AutoModelForCausalLM

    if model_type == "deepseek":
        import deepseek

        deepseek.register()
    if model_type == "bailing_moe":
        import bailing

        bailing.register()
    if model_type == "exaone":
        import exaone

        exaone.register()
    if model_type == "mimo":
        import mimo

        mimo.register()
    torch.manual_seed(seed)
    sizes = {key: value for key, value in (SMALL | changes).items() if value is not ...}
    config = AutoConfig.for_model(model_type, **sizes)
    own = getattr(transformers, ALONE.get(model_type, ""), None)
    make = AutoModelForCausalLM.from_config if own is None else own._from_config
    model = make(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shift = 1.0 if "norm" in name and model_type not in SHIFTED else 0.0
            if name.endswith("A_log"):
                shift = -3.0  # states that last for tens of tokens
            # A tied embedding must be small beside the layers' updates, or the model repeats its input.
            small = "embed" in name and config.tie_word_embeddings
            parameter.normal_(shift, 0.04 if small else 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.15)
            elif name.endswith("layer_scalar"):
                buffer.normal_(0.8, 0.15)
    model.save_pretrained(folder, max_shard_size=shard_size)
    if model_type == "olmo_hybrid":
        join_convolutions(folder / "model.safetensors")
    return model


def join_convolutions(path: Path) -> None:
    """Those of q, k and v, which transformers cuts in three equal parts, however wide they are."""
    tensors, convs = load_file(path), {}
    for name in sorted(name for name in tensors if name.endswith("q_conv1d.weight")):
        parts = [tensors.pop(name.replace("q_conv1d", f"{part}_conv1d")) for part in "qkv"]
        convs[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    save_file(tensors | convs, path, {"format": "pt"})


def rounded(w: Tensor, layout: str) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors by suffix, and the matrix they stand for."""
    if layout in BLOCKS:
        (n, k), size = w.shape, BLOCKS[layout]
        padded = torch.nn.functional.pad(w, (0, -k % size, 0, -n % size))
        tiles = padded.view(-(-n // size), size, -(-k // size), size)
        scale = tiles.abs().amax((1, 3)) / 448
        full = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)[:n, :k]
        suffix = "_scale_inv"
    elif layout == "tensor":
        scale = full = w.abs().max() / 448
        suffix = "_scale"
    else:
        scale = full = w.abs().amax(1, keepdim=True) / 448
        suffix = "_scale"
    q = (w / full).to(E4M3)
    return {"": q, suffix: scale}, q.float() * full


def store_as_fp8(folder: Path, layout: str) -> dict[str, Tensor]:
    """Put ``folder``'s linear layers into e4m3, and return the plain tensors of the same values."""
    plain, stored = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(plain.items()):
        if "_proj" in name:
            parts, plain[name] = rounded(tensor, layout)
            stored |= {name + suffix: part for suffix, part in parts.items()}
            layer, module = name.removesuffix(".weight").rsplit(".", 1)
            # Of activations, and of a KV cache as ModelOpt and compressed-tensors name them.
            for unused in (f"{module}.input_scale", f"{module}.k_scale", "v_scale"):
                stored[f"{layer}.{unused}"] = torch.tensor(1.0)
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return plain


def random_prompts(lengths: Sequence[int], vocab: int = VOCAB, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab, (length,), generator=generator).tolist() for length in lengths]


@dataclass
class Row:
    tokens: list[int]
    done: int = 0  # tokens whose KV is computed
    logprobs: list[float] = field(default_factory=list)  # of the generated tokens
    margin: float = float("inf")  # by how much the least certain of them was ahead of the next best


@dataclass
class Eager:
    """Greedy decoding of several sequences together; each step takes at most ``budget`` tokens, so prefill is
    chunked.

    Pages are handed out in a scattered order, so that reading a wrong one shows. ``native``: through the CPU
    program.
    """

    model: CausalLM
    budget: int = 1024
    page_size: int = 4
    dtype: torch.dtype | str = torch.float32  # of the KV cache
    native: bool = False

    def generate(self, prompts: list[list[int]], new: int) -> list[Row]:
        rows = [Row(list(prompt)) for prompt in prompts]
        ends = [len(prompt) + new for prompt in prompts]
        self._allocate(len(rows), max(ends))
        while pending := [i for i, row in enumerate(rows) if len(row.tokens) < ends[i]]:
            self._step(rows, pending)
        return rows

    def prompt_logprobs(self, prompts: list[list[int]]) -> Tensor:
        """Log-probabilities ``[all tokens, vocab]`` after each prompt token, in one step."""
        self._allocate(len(prompts), max(map(len, prompts)))
        spans = [(slot, 0, len(prompt)) for slot, prompt in enumerate(prompts)]
        batch = self.batch([Row(prompt) for prompt in prompts], spans)
        return self.model.logits(self.model.forward(batch, self.kv)).log_softmax(-1)

    def _allocate(self, slots: int, length: int) -> None:
        per_row = -(-length // self.page_size)
        order = torch.randperm(slots * per_row, generator=torch.Generator().manual_seed(7)) + 1
        self.page_table = order.to(torch.int32).view(slots, per_row)
        state, dtype = self.model.state(), str(self.dtype).removeprefix("torch.")
        groups = kv_groups(state, 0, dtype)
        units = [slots + 1] if groups[-1].unit_bytes else []
        self.kv = allocate_kv(state, groups, [slots * per_row + 1, *units], self.page_size, dtype)

        self.forward, _ = make_forward(self.model, self.kv, ProgramLimits(self.budget, slots), 1, self.native)

    def _step(self, rows: list[Row], pending: list[int]) -> None:
        spans, left = [], self.budget
        for slot in pending:
            take = min(left, len(rows[slot].tokens) - rows[slot].done)
            if take > 0:
                spans.append((slot, rows[slot].done, rows[slot].done + take))
                left -= take
        batch = self.batch(rows, spans)
        best, chosen = self.forward(batch).log_softmax(-1).topk(2)
        for (slot, _, end), (logprob, second), (token, _) in zip(spans, best.tolist(), chosen.tolist()):
            row = rows[slot]
            row.done = end
            if end == len(row.tokens):
                row.tokens.append(token)
                row.logprobs.append(logprob)
                row.margin = min(row.margin, logprob - second)

    def batch(self, rows: list[Row], spans: list[tuple[int, int, int]]) -> ForwardBatch:
        """Spans are (slot, first token, end)."""
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        slots = torch.cat([torch.full((end - start,), slot) for slot, start, end in spans])
        pages = self.page_table[slots, positions // self.page_size]
        lengths = torch.tensor([0] + [end - start for _, start, end in spans])
        ids = [token for slot, start, end in spans for token in rows[slot].tokens[start:end]]
        starts = lengths.cumsum(0)

        def ints(values: Tensor | list[int]) -> Tensor:
            return torch.as_tensor(values).to(torch.int32)

        return ForwardBatch(
            rows=len(spans),
            tokens=len(ids),
            ids=ints(ids),
            positions=ints(positions),
            slots=ints([slot for slot, _, _ in spans]),
            q_start=ints(starts),
            kv_len=ints([end for _, _, end in spans]),
            out_loc=ints(pages * self.page_size + positions % self.page_size),
            page_table=self.page_table,
            page_size=self.page_size,
            sample_rows=ints(starts[1:] - 1),
            states=StateRows(
                ints([slot + 1 if start else 0 for slot, start, _ in spans]),
                ints([slot + 1 for slot, *_ in spans]),
                ints([]).view(0, 3),
            ),
        )


@torch.no_grad()
def check_against_hf(rows: list[Row], new: int, hf: PreTrainedModel, tolerance: float = 1e-3) -> None:
    """Every generated token must be HF's greedy choice after the same prefix, or tie with it, with the same
    logprob.

    By induction that is equality of the greedy continuations.
    """
    for row in rows:
        logits = hf(torch.tensor([row.tokens[:-1]])).logits[0, -new:].float()
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(row.tokens[-new:])[:, None])[:, 0]
        assert (logprobs.max(-1).values - chosen).max().item() <= TIE
        assert (chosen - torch.tensor(row.logprobs)).abs().max().item() <= tolerance


def decided(rows: list[Row]) -> list[list[int]]:
    """The tokens of all rows, of which none may be one that rounding decides."""
    assert min(row.margin for row in rows) > TIE, "take other prompts"
    return [row.tokens for row in rows]

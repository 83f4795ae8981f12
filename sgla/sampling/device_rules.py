"""The rules of ``rules.py`` on a GPU. What a request asks for goes there once, when it takes its slot, as one
record; a step launches kernels that read the records of its rows, whatever they hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgla.grammar.matcher import set_bits
from sgla.kernels.triton import rules, sampling
from sgla.kernels.triton.tokens import TokenTable
from sgla.messages import MAX_BIASES, MAX_STOP_IDS, MAX_WORD_TOKENS, RowSampling
from sgla.sampling.device_transcripts import DeviceTranscripts

Int32s = NDArray[np.int32]
# Numbers of the largest record.
# A word of one token is an entry, two numbers; a longer one has less than two for each token.
WIDTH = rules.HEAD.value + 1 + 2 * (MAX_BIASES + MAX_STOP_IDS + MAX_WORD_TOKENS)
AT_ONCE = 64  # rows whose tokens are counted at a time
# What a row wants.
PENALIZED, BIASED, WORDS, ALLOWED, THINKING, NGRAMS, TRANSCRIBING = (1 << i for i in range(7))


class DeviceRules:
    """``tokens``: those of all slots."""

    def __init__(self, tokens: TokenTable, vocab_size: int) -> None:
        slots, device = tokens.slots, tokens.device
        self._tokens, self._vocab = tokens, vocab_size
        self._records = torch.zeros(slots, WIDTH, dtype=torch.int32, device=device)
        self._counts = torch.zeros(min(slots, AT_ONCE), vocab_size, dtype=torch.int32, device=device)
        self._wants = np.zeros(slots, np.uint8)
        self._words = np.zeros(slots, np.int32)  # how many of more than one token
        self._transcripts = DeviceTranscripts(tokens)
        self._allowed: dict[int, Tensor] = {}  # slot -> int32[ceil(V / 32)]: bits of the only tokens

    def admit(self, slot: int, prompt_len: int, sampling: RowSampling) -> bool:
        """A request takes ``slot``; whatever the slot had is forgotten. Returns whether it has rules."""
        s = sampling
        words = [word for word in s.bad_words if max(word) < self._vocab]
        longer = [word for word in words if len(word) > 1]
        entries = self._entries(s, [word[0] for word in words if len(word) == 1])
        wants = {
            PENALIZED: s.repetition != 1 or s.frequency or s.presence,
            BIASED: entries,
            WORDS: longer,
            ALLOWED: s.allowed,
            THINKING: s.thinking is not None,
            NGRAMS: s.ngram,
            TRANSCRIBING: s.transcript,
        }
        had = self._wants[slot]
        self._wants[slot] = sum(flag for flag, wanted in wants.items() if wanted)
        self._words[slot] = len(longer)
        if had or self._wants[slot]:
            record = make_record(s, prompt_len, entries, longer)
            self._records[slot, : len(record)].copy_(pinned(record, self._tokens.device), non_blocking=True)
        self._transcripts.admit(slot, prompt_len, s.transcript)
        self._allowed.pop(slot, None)
        if s.allowed:
            bits = np.zeros(-(-self._vocab // 32), np.uint32)
            allowed = np.array(s.allowed, np.intp)
            set_bits(bits, allowed[(allowed >= 0) & (allowed < self._vocab)])
            self._allowed[slot] = send(bits.view(np.int32), self._tokens.device)
        return bool(self._wants[slot])

    def _entries(self, s: RowSampling, banned: list[int]) -> dict[int, float]:
        """Tokens and their biases; ``~token`` for one that is a stop token, too, and may be too early."""
        biases = {token: value for token, value in s.logit_bias if 0 <= token < self._vocab}
        biases |= dict.fromkeys(banned, -np.inf)
        stops = [token for token in s.stop_ids if 0 <= token < self._vocab] if s.min_tokens > 0 else []
        early = {~token: biases.pop(token, 0.0) for token in stops}
        return biases | early

    def apply(self, logits: Tensor, slots: Tensor, positions: Tensor, on_host: tuple[Int32s, Int32s]) -> None:
        """Change ``logits`` float32[S, V] of the tokens that will stand at ``positions`` of ``slots``,
        int32[S] there and ``on_host``; in the order of ``rules.py``: biases, penalties, runs that come once,
        bad words, allowed tokens, limits of reasoning."""
        host_slots, host_positions = on_host
        wants = self._wants[host_slots]
        where = slots, positions, self._records
        if (wants & BIASED).any():
            rules.bias(logits, *where)
        penalized = host_positions[wants & PENALIZED != 0]
        if len(penalized):
            rules.penalize(logits, self._tokens, *where, self._counts, int(penalized.max()))
        repeating = host_positions[wants & NGRAMS != 0]
        if len(repeating):
            rules.lower_repeats(logits, self._tokens, *where, int(repeating.max()))
        if (wants & WORDS).any():
            rules.forbid(logits, self._tokens, *where, int(self._words[host_slots].max()))
        kept = np.flatnonzero(wants & ALLOWED)
        if len(kept):
            bits = torch.stack([self._allowed[slot] for slot in host_slots[kept].tolist()])
            sampling.mask(logits, send(kept.astype(np.int32), logits.device), bits)
        if (wants & THINKING).any():
            rules.end_thinking(logits, self._tokens, *where)
        transcribing = np.flatnonzero(wants & TRANSCRIBING)
        if len(transcribing):
            self._transcripts.apply(logits, transcribing, host_slots, host_positions)


def make_record(
    s: RowSampling, prompt_len: int, entries: dict[int, float], longer: list[list[int]]
) -> Int32s:
    """See ``kernels/triton/rules.py``."""
    limit = s.thinking
    thinking = (limit.tokens + 1, limit.open, limit.close, limit.opened) if limit else (0, 0, 0, 0)
    counted = 1 if s.repetition != 1 else prompt_len + 1 if s.frequency or s.presence else 0
    numbers = len(entries), len(longer), prompt_len, prompt_len + s.min_tokens, counted
    floats = np.array([s.repetition, s.frequency, s.presence, *entries.values()], np.float32).view(np.int32)
    head = np.minimum([*numbers, *floats[:3], *thinking, s.ngram], 2**31 - 1)
    begins = np.cumsum([0, *map(len, longer)])
    tokens = np.array([token for word in longer for token in word], np.int64)
    return np.concatenate([head, np.array(list(entries), np.int64), floats[3:], begins, tokens]).astype(
        np.int32
    )


def pinned(values: NDArray[Any], device: torch.device) -> Tensor:
    """In memory that a GPU copies from while the host goes on."""
    host = torch.from_numpy(values if values.flags.writeable else values.copy())  # torch knows no others
    return host.pin_memory() if device.type == "cuda" else host


def send(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device. Waits for nothing: a step is launched while the one before runs."""
    return pinned(values, device).to(device, non_blocking=True)

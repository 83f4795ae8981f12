"""Qwen3-Reranker (arXiv 2506.05176): a model of text that is asked whether a document fits a query. Its score
is the probability of "yes" against "no"; the prompt is that of its model card."""

from __future__ import annotations

from typing import Protocol

from sgla.errors import UnsupportedTask
from sgla.text.vectors import raw, softmax

ANSWERS = ("no", "yes")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PROMPT = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


class Encodes(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def prompt(query: str, document: str, instruction: str | None = None) -> str:
    return PROMPT.format(instruction=instruction or INSTRUCTION, query=query, document=document)


def answer_ids(tokenizer: Encodes) -> list[int]:
    """Token ids of the two answers. Raises UnsupportedTask if they are not one token each."""
    ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in ANSWERS]
    if any(len(one) != 1 for one in ids):
        raise UnsupportedTask(
            "this model's tokenizer has no single tokens for yes and no, so it cannot rerank"
        )
    return [one[0] for one in ids]


def relevance(logprobs: bytes) -> float:
    """From the log-probabilities of the two answers."""
    return float(softmax(raw(logprobs))[1])

"""How large a job is, and what preparing it costs, in bytes of text."""

from __future__ import annotations

from typing import Any

from sgla.actors.lanes import INLINE_SIZE
from sgla.messages import Job

MESSAGE = 64  # bytes that a message of a chat takes beside its text
INLINE_IDS = 32768  # they are only looked at: ~1 us per 100
JOB, CHOICE, IDS_A_BYTE = 512, 512, 10  # a job, a choice and an id cost as much as so many bytes


def job_bytes(job: Job) -> int:
    """Approximate size of the prompt in bytes."""
    if job.text is not None:
        return len(job.text) + len(job.pair or "")
    if job.token_ids is not None:
        return 8 * len(job.token_ids)
    messages = job.messages or []
    parts = sum(len(part) if isinstance(part, str) else 64 for m in messages for part in _texts(m))
    return parts + MESSAGE * len(messages)


def _texts(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    if isinstance(content, list):
        return [part.get("text") if isinstance(part, dict) else part for part in content]
    return [content]


def lane_size(job: Job) -> int | None:
    """The size of the job's work in a lane, in bytes of text; None: it is prepared in the loop."""
    added = added_bytes(job)
    if job.token_ids is not None and added <= INLINE_SIZE:
        return None if len(job.token_ids) <= INLINE_IDS else INLINE_SIZE
    size = job_bytes(job) + added
    if job.messages is not None:  # a template may take its time, and reads tools and other fields, too
        return max(size, job.size)
    return size if size > INLINE_SIZE else None


def cost(job: Job) -> int:
    """What preparing the job costs the loop, in bytes of text. Long texts and all chats are prepared in
    lanes, so they cost the loop little."""
    if job.messages is not None:
        return JOB + CHOICE * job.sampling.n
    text = job_bytes(job) if job.token_ids is None else len(job.token_ids) // IDS_A_BYTE
    return JOB + CHOICE * job.sampling.n + min(INLINE_SIZE, text + added_bytes(job))


def added_bytes(job: Job) -> int:
    """What preparing costs beside the prompt, in bytes: texts that are encoded or compiled to an automaton,
    and ids that are checked and sorted (~0.1 us each, as a byte)."""
    sampling = job.sampling
    ids = len(sampling.allowed_token_ids or ()) + len(sampling.logit_bias)
    texts = (*sampling.bad_words, *sampling.stop, *sampling.stop_regex)
    return ids + len(job.suffix or "") + sum(map(len, texts))

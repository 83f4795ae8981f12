"""POST /v1/score: vLLM's pairs of texts,
and SGLang's items behind a query, told apart by the fields there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from aiohttp import web

from sgla.errors import InvalidField, TooLarge, UnsupportedTask
from sgla.http import answer_types as to
from sgla.http.answer.collect import Choice
from sgla.http.answer.whole import answered, each
from sgla.http.bodies import SHARE
from sgla.http.operation import operation
from sgla.http.pooling.common import ENTRY, PooledFields, head, pooling_of, run, text_prompt, usage, vector
from sgla.http.request.intake import intake
from sgla.http.request.schema import MAX_CHOICES, Schema, as_list, check_count
from sgla.http.server import ASKED, UID, Server
from sgla.text import reranking
from sgla.text.parts import check_one
from sgla.text.vectors import cosine, raw, scores, softmax

Texts = str | dict[str, Any] | list[str | dict[str, Any]] | None
PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


class PairFields(PooledFields, kw_only=True):
    """``instruct``: what fitting means, for models that are told."""

    instruct: str | None = None


ROWS = 16  # lists of scores that are encoded in one go
LABELS = 512  # of an item; a step's scores travel through a ring of 4 MiB (executor/child.py)


class ScoreRequest(PairFields, kw_only=True):
    """vLLM's names for the two sides of pairs are ``PAIRS``;
    an object among them has ``text``, or ``content`` with parts of text."""

    text_1: Texts = None
    text_2: Texts = None
    data_1: Texts = None
    data_2: Texts = None
    queries: Texts = None
    documents: Texts = None
    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: list[int] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class GenerativeScoringRequest(PooledFields, kw_only=True):
    """``apply_softmax`` (the default): the labels' probabilities add up to 1."""

    query: str | list[int]
    items: list[str | list[int]]
    label_token_ids: list[int]
    apply_softmax: bool | None = None
    item_first: bool | None = None


SCHEMA = Schema(ScoreRequest)
GENERATIVE = Schema(GenerativeScoringRequest)


@operation("vLLM, SGLang: scores of pairs of texts, or of labels behind items", ScoreRequest, to.Scores)
async def score(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    if fields.query is not None or (fields.items is not None and fields.queries is None):
        value, choices = await item_scores(request, server, fields)
        count = len(as_list(fields.items))

        def scored() -> dict[str, Any]:
            found = each(count, value, ROWS)
            return {"object": "scoring", "scores": found, "model": model, "usage": usage(choices)}

        return await answered(request, count * (ENTRY + len(fields.label_token_ids or ())), scored)
    names = pair_names(fields)
    left, right = (texts(getattr(fields, name), name) for name in names)
    value, choices = await similarities(request, server, fields, left, right, names)

    def compared() -> dict[str, Any]:
        data = each(len(right), lambda i: {"index": i, "object": "score", "score": value(i)})
        return {**head("score", request[UID], model), "data": data, "usage": usage(choices)}

    return await answered(request, ENTRY * len(right), compared)


@operation("vLLM: how probable a label is behind items", GenerativeScoringRequest, to.Classes)
async def generative_scoring(request: web.Request) -> web.StreamResponse:
    """For each item the probability of the first label as the token behind it."""
    server = request[ASKED]
    fields = await intake(request, GENERATIVE)
    model = server.model(fields.model)
    pooled = {name: getattr(fields, name) for name in PooledFields.__struct_fields__}
    asked = ScoreRequest(
        **pooled,
        query=fields.query,
        items=fields.items,
        label_token_ids=fields.label_token_ids,
        apply_softmax=fields.apply_softmax is not False,
        item_first=fields.item_first,
    )
    value, choices = await item_scores(request, server, asked)

    def scored() -> dict[str, Any]:
        data = each(len(choices), lambda i: {"index": i, "object": "score", "score": value(i)[0]}, ROWS)
        return {**head("generative-scoring", request[UID], model), "data": data, "usage": usage(choices)}

    return await answered(request, len(choices) * (ENTRY + len(fields.label_token_ids)), scored)


def pair_names(fields: ScoreRequest) -> tuple[str, str]:
    """The names under which the pairs are given. Raises InvalidField for more than one of them."""
    given = {name for pair in PAIRS for name in pair if getattr(fields, name) is not None}
    names = max(PAIRS, key=lambda pair: len(given.intersection(pair)))
    if others := given.difference(names):
        raise InvalidField(f"give either {names[0]} and {names[1]} or {min(others)}", param=min(others))
    return names


def texts(value: Any, param: str) -> list[str]:
    if value is None:
        raise InvalidField(f"{param} is required", param=param)
    items = as_list(value)
    check_count(param, items, MAX_CHOICES)
    given = [text_of(item, param) for item in items]
    if not given:
        raise InvalidField(f"{param}: the list is empty", param=param)
    for text in given:
        text_prompt(text, param)
    return given


def text_of(item: Any, param: str) -> Any:
    """The text of an object in place of one, which may have it in the parts of its ``content``."""
    if not isinstance(item, dict):
        return item
    parts = [item]
    if item.get("content") is not None:
        check_one(item, ("content",), param)
        parts = as_list(item["content"])
    found = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if not found or len(found) < len(parts):
        raise InvalidField(
            f"{param}: an object must have a text, or content with parts of type text", param=param
        )
    for part in parts:
        check_one(part, ("text",), param)
    return "\n".join(found)


async def similarities(
    request: web.Request,
    server: Server,
    fields: PairFields,
    left: list[str],
    right: list[str],
    names: tuple[str, str] = ("query", "items"),
) -> tuple[Callable[[int], float], list[Choice]]:
    """What gives the score of each pair: of one text with each of ``right``, or of texts at the same places.
    ``names``: of the fields.

    A cross-encoder reads both texts, and so does a model of text that is served for reranking; of an
    embedding model it is the cosine of their embeddings.
    """
    if len(left) not in (1, len(right)):
        raise InvalidField(
            f"{names[0]} has {len(left)} texts and {names[1]} has {len(right)}; send one, or as many",
            param=names[0],
        )
    pairs = list(zip(left * (len(right) // len(left)), right))
    if server.config.task == "rerank":
        labels = reranking.answer_ids(server.ingress.tokenizer)
        instruct = fields.instruct or ""
        make_room(request, server, ((a, b, instruct, reranking.PROMPT) for a, b in pairs))
        prompts = [{"text": reranking.prompt(a, b, instruct)} for a, b in pairs]
        choices = await run(request, server, fields, prompts, labels)
        return lambda i: reranking.relevance(vector(choices[i])), choices
    pooling = pooling_of(server, "classify", "embed")
    if pooling.task == "embed":
        choices = await run(request, server, fields, [{"text": text} for text in left + right])
        first, second = choices[: len(left)], choices[len(left) :]
        return lambda i: cosine(vector(first[i % len(first)]), vector(second[i])), choices
    if pooling.size != 1:
        raise UnsupportedTask(
            f"this server's model tells {pooling.size} classes apart; scores need a model with one label "
            "(a cross-encoder), or use /classify",
            param="model",
        )
    choices = await run(request, server, fields, [{"text": a, "pair": b} for a, b in pairs])
    return lambda i: float(scores(vector(choices[i]), pooling)[0]), choices


async def item_scores(
    request: web.Request, server: Server, fields: ScoreRequest
) -> tuple[Callable[[int], Any], list[Choice]]:
    """What gives for each item behind the query:
    probabilities of the labels as the next token; of a cross-encoder, its score."""
    if fields.query is None or fields.items is None:
        raise InvalidField("query and items are required", param="query" if fields.query is None else "items")
    query, items = fields.query, as_list(fields.items)
    if not items:
        raise InvalidField("items: the list is empty", param="items")
    facts = server.ingress.facts
    if facts is not None and facts.pooling is not None:
        if fields.label_token_ids:
            raise InvalidField("label_token_ids needs a model that makes text", param="label_token_ids")
        return await similarities(request, server, fields, texts(query, "query"), texts(items, "items"))
    labels = fields.label_token_ids
    if not labels:
        raise InvalidField(
            "label_token_ids is required with a model that makes text", param="label_token_ids"
        )
    if len(labels) > LABELS:
        raise InvalidField(
            f"label_token_ids has {len(labels)} ids; at most {LABELS} are possible", param="label_token_ids"
        )
    check_count("items", items, MAX_CHOICES)
    make_room(request, server, ((query, item) for item in items))
    prompts = [joined(query, item, bool(fields.item_first)) for item in items]
    choices = await run(request, server, fields, prompts, labels)
    # log-probabilities: their softmax is that of the logits
    chances = softmax if fields.apply_softmax else np.exp
    return lambda i: chances(raw(vector(choices[i]))).tolist(), choices


def make_room(request: web.Request, server: Server, prompts: Iterable[tuple[str | list[int], ...]]) -> None:
    """Count the prompts that are to be made of these parts as if they were sent: each may repeat the query.

    Raises TooLarge beyond ``max_body_bytes``,
    and Overloaded where the request's share gets no memory for them.
    """
    size = sum(sum(map(len, parts)) * max(map(width, parts)) for parts in prompts)
    limit = server.config.max_body_bytes
    if size > limit:
        raise TooLarge(
            f"the query joined with each of its items takes {size} bytes, the limit is {limit}; send a "
            "shorter query or fewer items, or start the server with a larger --max-body-bytes"
        )
    request[SHARE].take(size)


def width(part: str | list[int]) -> int:
    """Bytes that one character or id takes at most."""
    return 8 if isinstance(part, list) else 1 if part.isascii() else 4


def joined(query: Any, item: Any, item_first: bool) -> dict[str, Any]:
    """Job fields of a query and an item behind it, both texts or both token ids."""
    if type(query) is not type(item):
        raise InvalidField("query and items must both be texts or both be token ids", param="items")
    whole = item + query if item_first else query + item
    return {"text": whole} if isinstance(whole, str) else {"token_ids": whole}

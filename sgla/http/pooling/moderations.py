"""POST /v1/moderations: OpenAI's answer, made by a classification model."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import web

from sgla.errors import InvalidField, UnsupportedTask
from sgla.http import answer_types as to
from sgla.http.answer.whole import answered, each
from sgla.http.operation import operation
from sgla.http.pooling.common import PooledFields, inputs, pooling_of, run, vector
from sgla.http.request.intake import intake
from sgla.http.request.schema import MAX_PARTS, Schema, check_count
from sgla.http.server import ASKED, UID
from sgla.text.parts import check_one
from sgla.text.vectors import scores

CATEGORIES = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
# What common models call these categories, in lower case and with hyphens; "" stands for nothing to flag.
USUAL = {
    "": "safe ok neutral normal none clean benign sfw nothate not-hate non-hate no-hate not-hate-speech "
    "not-toxic non-toxic not-offensive non-offensive",
    "harassment": "hr toxic toxicity severe-toxic severe-toxicity insult obscene offensive",
    "harassment/threatening": "threat harassment-threatening",
    "hate": "h hate-speech identity-hate identity-attack",
    "hate/threatening": "h2 hate-threatening",
    "illicit/violent": "illicit-violent",
    "self-harm": "sh",
    "self-harm/instructions": "self-harm-instructions",
    "self-harm/intent": "self-harm-intent",
    "sexual": "s sexual-explicit sexual-content nsfw",
    "sexual/minors": "s3 sexual-minors",
    "violence": "v",
    "violence/graphic": "v2 violence-graphic",
}
CATEGORY_OF = {name: category for category, names in USUAL.items() for name in names.split()}
FLAGGED = 0.5


class ModerationRequest(PooledFields, kw_only=True):
    """``input``: a text, texts, or parts of one message of type ``text``."""

    input: str | list[str | dict[str, Any]]


SCHEMA = Schema(ModerationRequest)


@operation("OpenAI: what of a text is harmful", ModerationRequest, to.Moderations)
async def moderations(request: web.Request) -> web.StreamResponse:
    server = request[ASKED]
    fields = await intake(request, SCHEMA)
    model = server.model(fields.model)
    pooling = pooling_of(server, "classify")
    categories = label_map(pooling.labels, server.config.moderation_labels)
    choices = await run(request, server, fields, inputs(texts(fields.input), "input"))

    def shown(i: int) -> dict[str, Any]:
        return result(scores(vector(choices[i]), pooling).tolist(), categories)

    def whole() -> dict[str, Any]:
        return {"id": f"modr-{request[UID]}", "model": model, "results": each(len(choices), shown)}

    return await answered(request, len(choices) * (3 * len(CATEGORIES) + pooling.size), whole)


def texts(value: Any) -> Any:
    """The texts to judge; parts of a message are one text."""
    if isinstance(value, str):
        return value
    check_count("input", value, MAX_PARTS)
    if not any(isinstance(item, dict) for item in value):
        return value
    parts = [
        item.get("text") if isinstance(item, dict) and item.get("type") == "text" else None for item in value
    ]
    if not all(isinstance(part, str) for part in parts):
        raise InvalidField("input: only parts of type text can be judged by this model", param="input")
    for i, part in enumerate(value):
        check_one(part, ("text",), f"input[{i}]")
    return "\n".join(str(part) for part in parts)


def label_map(labels: list[str], given: list[str]) -> list[str]:
    """The category of each label, "" for none:
    as ``--moderation-labels LABEL=CATEGORY`` says, else by its name.

    Raises UnsupportedTask if no label is a category of OpenAI's and none is given.
    """
    named = dict(entry.split("=", 1) for entry in given)
    categories = [named[label] if label in named else category(label) for label in labels]
    if not given and not any(name in CATEGORIES for name in categories):
        raise UnsupportedTask(
            f"the classes of this server's model ({', '.join(labels[:8])}) are no categories of harm; start "
            "it with --moderation-labels LABEL=CATEGORY for those that are",
            param="model",
        )
    return categories


def category(label: str) -> str:
    plain = re.sub(r"[\s_]+", "-", label.strip().lower())
    return CATEGORY_OF.get(plain, plain)


def result(values: list[float], categories: list[str]) -> dict[str, Any]:
    """One entry of OpenAI's results: all its categories, and those of the model that it does not have."""
    found: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
    for value, name in zip(values, categories):
        if name:
            found[name] = max(found.get(name, 0.0), value)
    flags = {name: value >= FLAGGED for name, value in found.items()}
    return {
        "flagged": any(flags.values()),
        "categories": flags,
        "category_scores": found,
        "category_applied_input_types": {name: ["text"] if name in categories else [] for name in found},
    }

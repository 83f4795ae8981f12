"""How ``gen`` is to choose tokens, under SGLang's names."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from sgla.errors import InvalidField

USUAL = 128  # tokens of an output for which nobody has said how many
RUN = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}  # as ``run`` calls them
# Types of an output: what it looks like, and which texts end it.
TYPES: dict[str, tuple[str, list[str]]] = {
    "int": (r"[+-]?\d{1,20}[ \n]?", [" ", "\n"]),
    "float": (r"[+-]?\d{1,20}(\.\d{1,20})?[ \n]?", [" ", "\n"]),
    "bool": (r"True|False", []),
    "str": (r'"[^"\\\n]*"', []),
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """None: as ``run`` says, else as the backend does; ``max_tokens`` is then 128."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    regex: str | None = None
    json_schema: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None

    @classmethod
    def of_run(cls, named: dict[str, Any]) -> Self:
        """What ``run`` is given beside the program's arguments. Raises InvalidField."""
        found = {RUN.get(name, name): value for name, value in named.items()}
        for name in found.keys() - NAMES:
            raise InvalidField(f"{name} is no argument of the program, nor one of run()", param=name)
        return cls(**found)

    def given(self) -> dict[str, Any]:
        """The fields that say something. An empty list is none."""
        values = {name: getattr(self, name) for name in NAMES}
        return {name: value for name, value in values.items() if value is not None and value != []}

    def over(self, defaults: Self) -> Self:
        """With ``defaults`` where this says nothing."""
        return replace(defaults, **self.given())


NAMES = {field.name for field in fields(Sampling)}


def typed(sampling: Sampling, dtype: Any) -> Sampling:
    """For outputs of ``dtype``: int, float, bool or str, or the name of one. Raises InvalidField."""
    name = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    if name not in TYPES:
        raise InvalidField(f"dtype must be one of {', '.join(TYPES)}, got {name}", param="dtype")
    if sampling.regex is not None or sampling.json_schema is not None:
        raise InvalidField("dtype, regex and json_schema exclude each other", param="dtype")
    regex, ends = TYPES[name]
    stop = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []
    return replace(sampling, regex=regex, stop=[*stop, *ends])


def schema_text(schema: Any) -> str | None:
    """A JSON schema as text: of a text, a dict, or a class of pydantic's."""
    if schema is None or isinstance(schema, str):
        return schema
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return json.dumps(schema)

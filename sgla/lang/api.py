"""What programs are written with, under SGLang's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sgla.errors import InvalidField, UnsupportedField
from sgla.lang.backends.local import EngineBackend
from sgla.lang.choices import ChoicesMethod, token_length_normalized
from sgla.lang.default import backend_of
from sgla.lang.media import address
from sgla.lang.parts import Begin, End, Gen, Medium, Part, Select, Several, as_part
from sgla.lang.program import Function
from sgla.lang.sampling import Sampling, schema_text, typed


def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a Python function whose first argument is its state. A decorator."""
    if num_api_spec_tokens is not None:
        raise UnsupportedField(
            "num_api_spec_tokens is not supported; leave it out", param="num_api_spec_tokens"
        )
    return function if func is None else Function(func)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    *,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    json_schema: Any = None,
    **sampling: Any,
) -> Part:
    """Text by the model, which is the variable ``name``. What ``sampling`` may have: see Sampling. ``dtype``:
    int, float, bool or str; ``json_schema``: a text, a dict or a class of pydantic's. With ``choices`` it is
    ``select``. Raises InvalidField."""
    for field in sampling.keys() - Sampling.__dataclass_fields__.keys():
        raise InvalidField(f"gen() has no argument {field}", param=field)
    if choices is not None:
        return select(name, choices, sampling.get("temperature") or 0.0, choices_method)
    asked = Sampling(max_tokens=max_tokens, json_schema=schema_text(json_schema), **sampling)
    return Gen(name, asked if dtype is None else typed(asked, dtype))


def gen_int(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Part:
    """A whole number."""
    return gen(name, max_tokens, dtype=int, **sampling)


def gen_string(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Part:
    """A text between quotation marks."""
    return gen(name, max_tokens, dtype=str, **sampling)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Part:
    """The choice that the model finds most probable here; ``choices_method``: see ``choices``.
    Raises InvalidField."""
    if not choices or isinstance(choices, str) or not all(choices):
        raise InvalidField("select() needs a list of choices, none of which is empty", param="choices")
    if temperature > 0:
        raise InvalidField(
            "select() takes the most probable choice; leave out temperature", param="temperature"
        )
    return Select(name, tuple(choices), choices_method or token_length_normalized)


def image(source: Any) -> Part:
    """A picture of a message: a path, a URL, what is in a file, or an image of PIL's. Raises InvalidField."""
    return Medium("image", address(source, "image"))


def video(source: Any, num_frames: int | None = None) -> Part:
    """A video of a message, of which ``num_frames`` are seen: a path, a URL, or what is in a file. Raises
    InvalidField."""
    if num_frames is not None and (type(num_frames) is not int or num_frames < 1):
        raise InvalidField("video() sees a whole number of frames, one or more", param="num_frames")
    return Medium("video", address(source, "video"), num_frames)


def role(name: str, part: Any) -> Part:
    inner = () if part is None else (as_part(part),)
    return Several((Begin(name), *inner, End(name)))


def system(part: Any = None) -> Part:
    """A message of the system."""
    return role("system", part)


def user(part: Any = None) -> Part:
    """A message of the user."""
    return role("user", part)


def assistant(part: Any = None) -> Part:
    """A message of the assistant: what ``gen`` and ``select`` write, and texts around it."""
    return role("assistant", part)


def system_begin() -> Part:
    return Begin("system")


def system_end() -> Part:
    return End("system")


def user_begin() -> Part:
    return Begin("user")


def user_end() -> Part:
    return End("user")


def assistant_begin() -> Part:
    return Begin("assistant")


def assistant_end() -> Part:
    return End("assistant")


def flush_cache(backend: Any = None) -> bool:
    """Empty the prefix cache of the backend."""
    return backend_of(backend).flush_cache()


def get_server_info(backend: Any = None) -> dict[str, Any]:
    """Settings and counters of the backend's server."""
    return backend_of(backend).get_server_info()


def Runtime(model_path: str, **settings: Any) -> EngineBackend:
    """An engine in this process as a backend; ``settings`` as of ``sgla.Engine``. ``shutdown`` ends it."""
    from sgla.engine import Engine

    return EngineBackend(Engine(model_path, **settings), owned=True)

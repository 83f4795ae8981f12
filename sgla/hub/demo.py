"""Which model the demo is: one of a hub that knows more, where that answers, else the packaged one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from sgla.config import Config
from sgla.errors import ConfigError, NotDownloaded
from sgla.hub import packaged
from sgla.hub.disk import bytes_text, free_bytes
from sgla.hub.fetch import find_local
from sgla.hub.huggingface import hub_answers

T = TypeVar("T")
DEMO = "demo"
SPARE = 1.1  # times a model's size that must be free where nobody asked for it


@dataclass(frozen=True)
class Candidate:
    """An instruct model of a hub. ``size``: bytes of its download; ``speed``: tokens a second of one client
    on two cores of an AMD EPYC with AVX2, in bfloat16, of random weights in its shape; ``thinks``: unless it
    is told not to."""

    hub_id: str
    licence: str
    size: int
    speed: int
    thinks: bool = False

    @property
    def about(self) -> str:
        return f"{self.hub_id.partition('/')[2]} ({self.licence}) is a small model, which errs."


# The first that the hub has is taken: small downloads first. bench/questions.py measures what they answer.
CANDIDATES = (
    Candidate("Qwen/Qwen2.5-0.5B-Instruct", "Apache-2.0", 999_000_000, 30),
    Candidate("Qwen/Qwen3-0.6B", "Apache-2.0", 1_519_000_000, 21, thinks=True),
)


def choose_model(config: Config, say: Callable[[str], None], ask: bool = True) -> Config:
    """``config``, with the hub's model in place of ``demo`` if that is what is to be served; ``say`` is told
    in a line what was chosen. A demo that is on this disk stays what it is. ``ask``: the hub may be asked,
    for two seconds. Raises ConfigError where ``--demo hub`` cannot be had."""
    if config.model != DEMO or config.demo == "packaged" or config.executor == "fake":
        return config
    if config.demo == "auto" and (not _is_plain(config) or find_local(config)):
        return config
    for candidate in CANDIDATES:
        if find_local(_with(config, candidate)):
            return _with(config, candidate)
    if not ask:
        return config
    for candidate in CANDIDATES:
        if config.model_source == "modelscope" or hub_answers(candidate.hub_id):
            if config.demo == "auto" and (free := _free(config)) < SPARE * candidate.size:
                say(
                    f"the demo is {_packaged()}: {candidate.hub_id}, which knows more, is a download of "
                    f"{bytes_text(candidate.size)}, and {bytes_text(free)} are free for it"
                )
                return config
            say(
                f"the demo is {candidate.hub_id} ({candidate.licence}, a download of "
                f"{bytes_text(candidate.size)}); --demo packaged takes {_packaged()}, which knows less"
            )
            return _with(config, candidate)
    if config.demo == "hub":
        raise ConfigError(
            "--demo hub: the hub does not answer, or has none of "
            f"{', '.join(each.hub_id for each in CANDIDATES)}; check the network (HF_ENDPOINT names a "
            "mirror), or give --demo packaged",
            param="demo",
        )
    say(f"the demo is {_packaged()}: the model hub, which has larger ones, cannot be reached (--demo hub)")
    return config


def with_demo(config: Config, say: Callable[[str], None], start: Callable[[Config], T]) -> T:
    """What ``start`` returns for the model that ``choose`` takes. Where the hub does not bring it, and
    nobody asked for the hub's, ``say`` is told why, and ``start`` is called again, with the packaged one."""
    chosen = choose_model(config, say)
    try:
        return start(chosen)
    except NotDownloaded as error:
        if chosen.model == config.model or config.demo == "hub":
            raise
        reason = error.message
    say(f"the demo is {_packaged()} after all: {reason}")
    return start(msgspec.structs.replace(config, demo="packaged"))


def about(model: str) -> str:
    """What a user should know of a demo or packaged model; "" of others."""
    return next((each.about for each in CANDIDATES if each.hub_id == model), "") or packaged.about(model)


def _is_plain(config: Config) -> bool:
    """Whether nothing is asked for that the models of the hub might not do."""
    return (
        config.model_source == "huggingface"
        and config.load_format in ("auto", "safetensors")
        and config.revision is None
        and config.quantization != "gguf"
    )


def _with(config: Config, candidate: Candidate) -> Config:
    variables = {"enable_thinking": False} if candidate.thinks else {}
    return msgspec.structs.replace(
        config,
        model=candidate.hub_id,
        served_model_name=config.served_model_name or [DEMO, candidate.hub_id],
        default_chat_template_kwargs=variables | config.default_chat_template_kwargs,
    )


def _free(config: Config) -> int:
    """Bytes on the disk where the hub's models go."""
    from huggingface_hub import constants

    folder = (
        packaged.cache_folder(config.download_dir) if config.download_dir else Path(constants.HF_HUB_CACHE)
    )
    return free_bytes(folder)


def _packaged() -> str:
    model = packaged.MODELS[DEMO]
    return f"{(model.hub_id or model.file).rpartition('/')[2]} ({bytes_text(model.download)})"

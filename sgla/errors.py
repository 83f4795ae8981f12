"""The exception tree. Every error a user can cause carries its HTTP status and a stable code.

SglaError
  BadRequest 400            InvalidField, ContextTooLong, UnsupportedField, UnsupportedTask, InvalidAdapter
  Unauthorized 401
  Forbidden 403             the key is right, and may not do that
  NotFound 404              ModelNotFound
  TooLarge 413
  Overloaded 429            retryable
  NotReady 503              Loading, Draining, WorkerDied, WorkerStuck   (retryable)
  DeadlineExceeded 408
  BackendFailed 502         a server that a program of sgla.lang asks is out of reach
  StorageFailed 507         what clients store is out of reach; requests that store nothing go on
  InvalidLogits 500         the model's logits or vectors are no numbers; other requests go on
  ConfigError               wrong flags or files: the command line prints it and exits 2
  OutOfMemory (ConfigError) says how many bytes are missing and which setting frees them
  WeightError (ConfigError) names the tensors
  UnknownArchitecture (ConfigError) of a model that transformers has no class for
  UnsupportedValue (ConfigError) of a key of config.json, for which transformers' module may have code
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgla.messages import Rejected

MAX_MESSAGE = 4096  # characters


class SglaError(Exception):
    """Base. ``message`` says what happened and what to change."""

    status = 500
    code = "internal_error"
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        if len(message) > MAX_MESSAGE:  # it quotes what somebody sent
            message = f"{message[:MAX_MESSAGE]}..."
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after

    @staticmethod
    def from_rejected(rejected: Rejected) -> SglaError:
        """The exception that a Rejected stands for, for those who wait for a whole answer: of the class that
        has its code."""
        kind = next((kind for kind in _kinds(SglaError) if kind.code == rejected.code), SglaError)
        error = kind(rejected.message, param=rejected.param, retry_after=rejected.retry_after)
        error.status, error.code, error.type = rejected.status, rejected.code, rejected.type
        return error

    def rejected(self, rid: str) -> Rejected:
        """The message that ends request ``rid`` with this error."""
        from sgla.messages import Rejected  # a build of wheels has no msgspec, and imports this file

        return Rejected(
            rid=rid,
            status=self.status,
            code=self.code,
            message=self.message,
            type=self.type,
            param=self.param,
            retry_after=self.retry_after,
        )


def _kinds(kind: type[SglaError]) -> Iterator[type[SglaError]]:
    """``kind`` and all below it, from the top."""
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


class BadRequest(SglaError):
    status = 400
    code = "bad_request"
    type = "invalid_request_error"


class InvalidField(BadRequest):
    code = "invalid_value"


class UnsupportedField(BadRequest):
    code = "unsupported_parameter"


class UnsupportedTask(BadRequest):
    """The model cannot do what the route is for."""

    code = "unsupported_task"


class InvalidAdapter(BadRequest):
    """Files that are no adapter of the model, or of a kind that is not supported."""

    code = "invalid_adapter"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"

    @classmethod
    def of(cls, limit: int, prompt: int, new: int, param: str = "messages") -> ContextTooLong:
        """``limit`` context length, ``prompt`` tokens given as the field ``param``, ``new`` tokens asked for.
        Clients match this wording."""
        asked = f" ({prompt} in the prompt and {new} for the completion)" if new else ""
        return cls(
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + new} "
            f"tokens{asked}. Please shorten the prompt or ask for fewer tokens.",
            param="max_tokens" if new else param,
        )


class Unauthorized(SglaError):
    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class Forbidden(SglaError):
    status = 403
    code = "forbidden"
    type = "permission_error"


class NotFound(SglaError):
    status = 404
    code = "not_found"
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class TooLarge(SglaError):
    status = 413
    code = "request_too_large"
    type = "invalid_request_error"


class Overloaded(SglaError):
    status = 429
    code = "overloaded"
    type = "rate_limit_error"


class NotReady(SglaError):
    status = 503
    code = "not_ready"
    type = "service_unavailable"


class Loading(NotReady):
    code = "model_loading"


class Draining(NotReady):
    code = "draining"


class WorkerDied(NotReady):
    """``killed``: from outside, so it is no consequence of what happened to others."""

    code = "worker_died"
    killed = False


class WorkerStuck(NotReady):
    code = "worker_stuck"


class DeadlineExceeded(SglaError):
    status = 408
    code = "deadline_exceeded"
    type = "timeout_error"


class InvalidLogits(SglaError):
    code = "invalid_logits"


class BackendFailed(SglaError):
    """What a program of ``sgla.lang`` asks does not answer, or not as it should."""

    status = 502
    code = "backend_failed"


class StorageFailed(SglaError):
    """The disk is full, or does not work."""

    status = 507
    code = "storage_failed"


class ConfigError(SglaError):
    status = 500
    code = "config_error"


class NotDownloaded(ConfigError):
    """A hub does not give a model, or not all of it."""

    code = "not_downloaded"


class OutOfMemory(ConfigError):
    code = "out_of_memory"


class WeightError(ConfigError):
    code = "weight_error"


class UnknownArchitecture(ConfigError):
    """Transformers has no class of a model's architecture."""


class UnsupportedValue(ConfigError):
    """A key of config.json has a value that its family's code does not compute, and transformers' class
    does."""

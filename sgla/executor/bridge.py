"""What node 0 and the agents of the other nodes say to each other (``peers.py`` says how)."""

from __future__ import annotations

from typing import Any

import msgspec

from sgla import errors
from sgla.config import Config
from sgla.errors import SglaError, WorkerDied
from sgla.messages import Control, Facts, Moved, StepPlan, StepResult
from sgla.peers import Beat

BEAT = 0.3  # seconds between signs of life
SILENCE = 1.5  # seconds without one after which a node is lost: its requests end within 2 s
PARTING = 0.5  # seconds for last words to be sent


class Fault(msgspec.Struct, array_like=True):
    """An error, by the name of its class."""

    kind: str
    message: str
    param: str | None = None
    retry_after: float | None = None
    killed: bool = False

    @classmethod
    def of(cls, error: SglaError) -> Fault:
        killed = getattr(error, "killed", False)
        return cls(type(error).__name__, error.message, error.param, error.retry_after, killed)

    def error(self, where: str = "") -> SglaError:
        """``where``: on which node it came up."""
        kind = getattr(errors, self.kind, SglaError)
        if not (isinstance(kind, type) and issubclass(kind, SglaError)):
            kind = SglaError
        made = kind(where + self.message, param=self.param, retry_after=self.retry_after)
        if isinstance(made, WorkerDied):
            made.killed = self.killed
        return made


class Join(msgspec.Struct, tag=True, array_like=True):
    """Agent, first: who it is. ``store``: the port on which its rank 0 would listen; 0 if it has none."""

    node: int
    store: int = 0


class Setup(msgspec.Struct, tag=True, array_like=True):
    """Node 0, when all are there. ``host``, ``port``: where the ranks find each other."""

    config: Config
    host: str
    port: int


class Started(msgspec.Struct, tag=True, array_like=True):
    """Agent: its ranks have loaded."""

    facts: Facts


class Planned(msgspec.Struct, tag=True, array_like=True):
    plan: StepPlan


class Computed(msgspec.Struct, tag=True, array_like=True):
    """Agent: results of steps, and copies that have ended on its ranks."""

    results: list[StepResult]
    moved: list[Moved]


class Command(msgspec.Struct, tag=True, array_like=True):
    """``file``: content of the file that its ``path`` names on node 0, or None. ``inquiry``: instead of it,
    how the workers are."""

    number: int
    command: Control
    file: bytes | None = None
    inquiry: bool = False


class Reply(msgspec.Struct, tag=True, array_like=True):
    """Agent: of each of its ranks."""

    number: int
    ranks: list[Any]
    fault: Fault | None = None


class Ended(msgspec.Struct, tag=True, array_like=True):
    """Agent: its ranks, or it itself, have ended."""

    fault: Fault


class Leave(msgspec.Struct, tag=True, array_like=True):
    """Node 0: all is over; ``why``, if that is a failure. ``saving``: seconds that a store of replicas may
    take for what requests have left."""

    why: str = ""
    saving: float = 0.0


FromAgent = Join | Started | Computed | Reply | Ended | Beat
ToAgent = Setup | Planned | Command | Leave | Ended | Beat

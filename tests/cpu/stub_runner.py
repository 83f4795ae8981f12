"""A runner without a model for the tests of the process boundary. The ``source`` argument says how it
misbehaves."""

from __future__ import annotations

import os
import signal
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgla.config import Config
from sgla.errors import UnsupportedField, WeightError
from sgla.messages import CacheGroup, Control, Facts, Progress, StepPlan, StepResult


class StubRunner:
    """Answers ``slot + start`` for every row. Facts carry what the parent wants to know."""

    def __init__(
        self,
        config: Config,
        source: dict[str, Any],
        rank: int,
        size: int,
        rendezvous: str,
        report: Callable[[Progress], None],
    ) -> None:
        self.trouble = source if source.get("rank", rank) == rank else {}
        self.executed = 0
        print(f"rank {rank} of {size} loads")
        report(Progress(phase="load", message=f"rank {rank}"))
        self.misbehave("load")
        notes = [" ".join({"pytest", "torch"} & sys.modules.keys()), rendezvous]
        self.facts = Facts(
            groups=[CacheGroup(100 + rank)],
            page_size=16,
            slots=8,
            context_len=64,
            vocab_size=len(source.get("blob", "")),
            step_tokens=64,
            dtype="none",
            device="stub",
            ledger={"pid": os.getpid()},
            notes=notes,
        )

    def __del__(self) -> None:
        if (gone := getattr(self, "trouble", {}).get("gone")) is not None:
            Path(gone).touch()

    def misbehave(self, when: str) -> None:
        match self.trouble.get(when):
            case "kill":
                print("these are my last words", file=sys.stderr)
                os.kill(os.getpid(), signal.SIGKILL)
            case "real-time signal":
                os.kill(os.getpid(), signal.SIGRTMIN + 6)
            case "exit":
                os._exit(3)
            case "raise":
                raise ZeroDivisionError("a bug")
            case "typed":
                raise WeightError("lm_head is missing", param="model")
            case "hang":
                time.sleep(60)

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.step == self.trouble.get("at"):
            self.misbehave("step")
        tokens = array("i", (s + t for s, t in zip(array("i", plan.slots), array("i", plan.starts))))
        self.executed += 1
        return StepResult(step=plan.step, tokens=tokens.tobytes())

    def close(self) -> None: ...

    def control(self, command: Control) -> dict[str, Any]:
        if command.verb == "signals":
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            return {"pid": os.getpid(), "executed": self.executed}
        if command.verb == "fail":
            raise ZeroDivisionError("a bug")
        raise UnsupportedField(f"no verb {command.verb}")

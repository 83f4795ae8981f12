"""Who of the lines of all batches runs next."""

from __future__ import annotations

import asyncio
from collections import Counter

from sgla import census
from sgla.http.batches.store import Batch

LINE_BYTES = 32 << 20  # of lines that run and are not small, together; a line alone may be longer
PASSES = 64  # lines that may pass one for whose bytes there is no room


class Admission:
    """What a line of ``size`` bytes takes while it runs:
    a place for each of its choices, and its bytes unless it is small."""

    def __init__(self, batch: Batch, number: int, size: int) -> None:
        self.batch = batch
        self.number = number  # of the line
        self.bytes = size if size > census.SMALL else 0
        self.choices = 1  # as far as is known
        self.passed = 0  # by others
        self.held = False


class Turns:
    """Places for as many choices as the model has slots, and room for bytes.

    Who has the fewest choices running is first, among clients, then among the batches of one; then the first
    line of a batch. Small lines wait for no bytes. A line that waits for them lets others pass, but not for
    ever. A place that is given to a line before it is known how many choices it has may turn out to be
    several: then the next ones are given when all are below the number of slots again.
    """

    def __init__(self) -> None:
        self.slots = self._free = 0
        self._bytes = 0
        self._running: Counter[str] = Counter()  # choices, by client
        self._waiting: dict[Admission, asyncio.Future[None]] = {}

    def open(self, slots: int) -> None:
        """Begin to hand out places."""
        self.slots = self._free = slots
        self._hand_out()

    async def admit(self, admission: Admission) -> None:
        """Wait for it. What a cancelled caller had got goes back."""
        turn = self._waiting[admission] = asyncio.get_running_loop().create_future()
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            self._waiting.pop(admission, None)
            self.release(admission)
            raise

    def release(self, admission: Admission) -> None:
        """Idempotent."""
        if admission.held:
            admission.held = False
            self._bytes -= admission.bytes
            self._count(admission, -admission.choices)
            self._hand_out()

    def resize(self, admission: Admission, choices: int) -> None:
        """A line that runs has so many choices."""
        choices = min(choices, self.slots)  # one that has more is refused
        self._count(admission, choices - admission.choices)
        admission.choices = choices
        self._hand_out()

    def _count(self, admission: Admission, choices: int) -> None:
        name = admission.batch.client.name
        self._free -= choices
        admission.batch.running += choices
        self._running[name] += choices
        if not self._running[name]:
            del self._running[name]

    def _hand_out(self) -> None:
        while self._free > 0 and (admission := self._next()) is not None:
            self._waiting_longer(admission)
            turn = self._waiting.pop(admission)
            if turn.cancelled():  # whoever waits for it does not know yet
                continue
            admission.held, admission.passed = True, 0
            self._bytes += admission.bytes
            self._count(admission, admission.choices)
            turn.set_result(None)

    def _next(self) -> Admission | None:
        small = min(
            (admission for admission in self._waiting if not admission.bytes), key=self._order, default=None
        )
        large = self._large()
        return min(filter(None, (small, large)), key=self._order, default=None)

    def _large(self) -> Admission | None:
        for admission in sorted(
            (admission for admission in self._waiting if admission.bytes), key=self._order
        ):
            if not self._bytes or self._bytes + admission.bytes <= LINE_BYTES:
                return admission
            if admission.passed >= PASSES:
                break
        return None

    def _waiting_longer(self, next_: Admission) -> None:
        """Those that ``next_`` passes."""
        for admission in self._waiting:
            if next_.bytes and admission.bytes and self._order(admission) < self._order(next_):
                admission.passed += 1

    def _order(self, admission: Admission) -> tuple[int, int, int, int]:
        batch = admission.batch
        return self._running[batch.client.name], batch.running, batch.number, admission.number

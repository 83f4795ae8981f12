"""Trainers that this rank has weights from, each with a group of its own. To wait for them is the work of a
thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from math import prod
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from sgla.dist import trainer
from sgla.dist.trainer import Rendezvous, TrainerGroup
from sgla.errors import InvalidField, WeightError
from sgla.loading.buckets import check_room, from_server
from sgla.worker.memory import available_bytes

Wanted = dict[str, tuple[list[int], torch.dtype]]
Take = Callable[[dict[str, Tensor]], None]


class Trainers:
    def __init__(self, begin: Callable[[], None]) -> None:
        """``begin``: of a thread."""
        self._groups: dict[str, TrainerGroup] = {}
        self._begin = begin
        self._thread = ThreadPoolExecutor(1, "trainer", begin)

    def join(self, meeting: Rendezvous) -> Future[dict[str, Any]]:
        """Raises InvalidField, at once or later."""
        self._check_new(meeting.name)
        return self._thread.submit(self._join, meeting)

    def receive(self, name: str, wanted: Wanted, take: Take) -> Future[Any]:
        """``take`` gets what comes. Raises InvalidField, at once or later: the group is gone then."""
        if name not in self._groups:
            raise InvalidField(f"there is no group {name!r}", param="group_name")
        return self._thread.submit(self._receive, name, wanted, take)

    def fetch(self, address: str, look: Take, keep: Take) -> Future[dict[str, Any]]:
        """``look`` at each part of what a parameter server brings, and ``keep`` the whole. Raises
        InvalidField, later."""
        return self._thread.submit(self._fetch, address, look, keep)

    def leave(self, name: str) -> None:
        if (group := self._groups.pop(name, None)) is None:
            raise InvalidField(f"there is no group {name!r}", param="group_name")
        group.close()

    def close(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _check_new(self, name: str) -> None:
        if name in self._groups:
            raise InvalidField(f"there is a group {name!r} already", param="group_name")

    def _join(self, meeting: Rendezvous) -> dict[str, Any]:
        """In a thread of its own, since libraries wait for ever for who listens and says nothing."""
        self._check_new(meeting.name)  # another one by this name may have been in front of it
        made = Future[TrainerGroup]()
        Thread(target=self._meet, args=(meeting, made), name="trainer-join", daemon=True).start()
        wait([made], trainer.PATIENCE)
        try:
            if made.cancel():
                where = f"{meeting.address}:{meeting.port}"
                raise TimeoutError(f"not all of it have met at {where} within {trainer.PATIENCE:.0f} s")
            self._groups[meeting.name] = made.result()
        except Exception as error:
            raise InvalidField(
                f"the trainer's group cannot be joined: {str(error)[:300]}", param="master_address"
            ) from error
        return {}

    def _meet(self, meeting: Rendezvous, made: Future[TrainerGroup]) -> None:
        try:
            self._begin()
            group = TrainerGroup(meeting)
        except Exception as error:
            with suppress(InvalidStateError):
                made.set_exception(error)
            return
        try:
            made.set_result(group)
        except InvalidStateError:  # nobody waits any more
            group.close()

    def _fetch(self, address: str, look: Take, keep: Take) -> dict[str, Any]:
        try:
            found = from_server(address, look, available_bytes)
        except WeightError as error:
            raise InvalidField(f"{error.message}; the old weights stay", param="zmq_handles") from error
        keep(found)
        return {}

    def _receive(self, name: str, wanted: Wanted, take: Take) -> dict[str, Any]:
        group = self._groups[name]
        try:
            if group.device == "cpu":
                size = sum(prod(shape) * dtype.itemsize for shape, dtype in wanted.values())
                check_room(size, available_bytes)
            tensors = group.receive(wanted)
        except WeightError as error:
            raise self._left(name, error.message) from error
        except RuntimeError as error:
            raise self._left(name, f"the trainer has not sent what it said: {str(error)[:300]}") from error
        take(tensors)
        return {}

    def _left(self, name: str, why: str) -> InvalidField:
        self.leave(name)
        return InvalidField(
            f"{why}; the old weights stay, and the group is closed: begin it anew", param="group_name"
        )

"""Ids."""

from __future__ import annotations

import re

import pytest

from sgla.http import ids


def test_no_id_comes_twice_and_the_system_is_asked_for_many(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    urandom = ids.os.urandom

    def told(size: int) -> bytes:
        asked.append(size)
        return urandom(size)

    monkeypatch.setattr(ids.os, "urandom", told)
    monkeypatch.setattr(ids, "_made", [])
    made = [ids.random_id() for _ in range(3 * ids.AT_ONCE)]
    assert len(set(made)) == len(made)
    assert all(re.fullmatch(r"[0-9a-f]{32}", each) for each in made)
    assert asked == [ids.BYTES * ids.AT_ONCE] * 3

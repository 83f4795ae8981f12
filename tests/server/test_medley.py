"""``bench/medley.py`` made small: requests of all kinds at once, each of which gets what it gets alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import medley


def test_requests_of_all_kinds_leave_nothing_behind() -> None:
    args = medley.arguments(["--requests", "70", "--abreast", "8", "--texts", "16"])[0]
    found = medley.played(10, args, ["--max-running-requests", "6"])
    assert found["faults"] == []
    kinds = {kind.rsplit(" ", 1)[0] for kind in found["asked"]}
    assert kinds >= {"upload", "background", "nonsense", "sleep", "flush", "turn", "abort all"}, kinds


async def test_what_should_not_be_is_noticed(tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as session:
        played = medley.Medley(session, 0, 0, ["adapters"], tmp_path)
        ask = medley.Ask("/generate", {}, [["abc"], ["xyz"]])

        def faults(text: str, streams: bool, weights: int | None) -> int:
            before = len(played.faults)
            played.compare(ask, text, streams, weights)
            return len(played.faults) - before

        def event(**fields: Any) -> str:
            return f"data: {json.dumps(fields)}\n\n"

        whole = event(text="abc") + "data: [DONE]\n\n"
        assert not faults('{"text": "abc"}', False, 0)
        assert faults('{"text": "abc"}', False, 1), "of other weights"
        assert not faults('{"text": "xyz"}', False, None)
        assert faults('{"text": "abcd"}', False, None)
        assert not faults(whole, True, 0)
        assert faults(event(text="abc"), True, 0), "no end"
        assert not faults(event(error={"code": "request_aborted"}), True, None)
        played.count("a", 500, "", False)
        played.count("a", 503, "", False)
        played.count("a", 503, "", True)
        assert [fault[:9] for fault in played.faults[-2:]] == ["a got 500", "a got 503"]

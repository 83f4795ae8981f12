"""Pages of lists, as OpenAI's API has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from sgla.errors import InvalidField
from sgla.http.wire import json_response


def page_of(request: web.Request, default: int = 20, most: int = 100) -> tuple[int, bool]:
    """The ``limit`` of a page, and whether its ``order`` is ascending. Raises InvalidField."""
    limit, order = request.query.get("limit", str(default)), request.query.get("order", "desc")
    if not re.fullmatch(r"[0-9]{1,6}", limit) or not 1 <= int(limit) <= most:
        raise InvalidField(f"limit must be from 1 to {most}", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidField("order must be asc or desc", param="order")
    return int(limit), order == "asc"


def page(data: list[Any], ids: Sequence[str], more: bool) -> web.Response:
    """``ids``: those of ``data``; ``more``: there are others behind them."""
    first, last = (ids[0], ids[-1]) if ids else (None, None)
    return json_response(
        {"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": more}
    )

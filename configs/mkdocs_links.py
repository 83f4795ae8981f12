"""For the site: links from docs/ to other files of the repository lead to where it is published, and are
plain text where that is unknown."""

from __future__ import annotations

import os
import re
from typing import Any

SERVER, REPOSITORY = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
BASE = f"{SERVER}/{REPOSITORY}/blob/main/" if SERVER and REPOSITORY else None


def on_page_markdown(markdown: str, **context: Any) -> str:
    def link(match: re.Match[str]) -> str:
        text, path = match.groups()
        return f"[{text}]({BASE}{path})" if BASE else text

    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", link, markdown)

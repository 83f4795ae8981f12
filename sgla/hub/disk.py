"""Bytes of models and of disks."""

from __future__ import annotations

import shutil
from pathlib import Path


def bytes_text(size: int) -> str:
    """A size as hubs show it, in powers of 1000."""
    return f"{size / 1e9:.1f} GB" if size >= 999.95e6 else f"{size / 1e6:.1f} MB"


def free_bytes(folder: Path) -> int:
    """On the disk where ``folder`` is, or will be."""
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free

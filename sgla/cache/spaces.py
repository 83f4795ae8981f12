"""Namespaces of prefixes: whose texts share nothing with others', though they may be equal. Each is what a
request may use (a client's salt), behind its adapter, if it has one, and behind the name of weights that have
come since the start."""

from __future__ import annotations

ADAPTED = "\1"  # stands before and behind a hash of the adapter's weights
RENEWED = "\2"  # and those of a name of weights


def difference(ours: str, theirs: str) -> str:
    """Why two requests of these share nothing: ``weights``, ``adapter`` or ``salt``."""
    names = "weights", "adapter", "salt"
    return next(name for name, a, b in zip(names, _parts(ours), _parts(theirs)) if a != b)


def weights_of(namespace: str) -> str:
    """The name of its weights; "" for those of the start."""
    return _parts(namespace)[0]


def _parts(namespace: str) -> tuple[str, str, str]:
    weights = adapter = ""
    if namespace.startswith(RENEWED):
        _, weights, namespace = namespace.split(RENEWED, 2)
    if namespace.startswith(ADAPTED):
        _, adapter, namespace = namespace.split(ADAPTED, 2)
    return weights, adapter, namespace

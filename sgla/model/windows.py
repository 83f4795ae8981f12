"""Which layers have a sliding window, and which do not rotate: rules that the table of families names.
Loads no torch.

A rule of windows takes the configuration and the number of layers and returns the window of each, 0 for
none. One of rotation takes the configuration and those windows and returns the layers that do not rotate.
All raise ConfigError, naming the key.
"""

from __future__ import annotations

from collections.abc import Callable

from sgla.errors import ConfigError
from sgla.hub.reader import Reader, shown
from sgla.model.limits import LAYERS, POSITIONS

Windows = Callable[[Reader, int], tuple[int, ...]]
Unrotated = Callable[[Reader, tuple[int, ...]], frozenset[int]]
_FULL, _SLIDING = "full_attention", "sliding_attention"


def everywhere(c: Reader, layers: int) -> tuple[int, ...]:
    return (_window(c),) * layers


def switched(rule: Windows) -> Windows:
    """There are windows only with ``use_sliding_window``."""

    def windows(c: Reader, layers: int) -> tuple[int, ...]:
        if c.flag("use_sliding_window"):
            return rule(c, layers)
        return rule(Reader(c.architecture, {**c.values, "sliding_window": None}), layers)

    return windows


def listed(otherwise: Windows, optional: bool = False) -> Windows:
    """Those of ``layer_types``. ``otherwise``: without that key. ``optional``: a list may stand beside no
    window, if none of its layers has one."""

    def windows(c: Reader, layers: int) -> tuple[int, ...]:
        if not c.given("layer_types"):
            return otherwise(c, layers)
        window = _window(c)
        if not window and not optional:
            raise c.error("sliding_window", "a number of tokens")
        return tuple(window if kind == _SLIDING else 0 for kind in layer_types(c, layers, window))

    return windows


def late(c: Reader, layers: int) -> tuple[int, ...]:
    """From layer ``max_window_layers`` on."""
    first, window = _first(c), _window(c)
    return tuple(window if i >= first else 0 for i in range(layers))


def early(c: Reader, layers: int) -> tuple[int, ...]:
    """In every other layer before ``max_window_layers``."""
    first, window = _first(c), _window(c)
    return tuple(window if i % 2 == 0 and i < first else 0 for i in range(layers))


def unrotated(c: Reader, layers: int) -> tuple[int, ...]:
    """In the layers that ``named`` says."""
    flat, window = named(c, (0,) * layers), _window(c)
    return tuple(window if i in flat else 0 for i in range(layers))


def every(step: int = 0, optional: bool = False) -> Windows:
    """In all layers but every ``step``-th; 0: ``sliding_window_pattern`` says it. ``optional``: without a
    window ``layer_types`` are needed."""

    def windows(c: Reader, layers: int) -> tuple[int, ...]:
        window = _window(c)
        if not window and optional:
            raise c.error("layer_types", "a list, where sliding_window is null")
        pattern = step or c.integer("sliding_window_pattern", LAYERS)
        if c.values.get("_sliding_window_pattern") not in (None, pattern):
            raise c.error(
                "_sliding_window_pattern", f"that of sliding_window_pattern, {pattern}, or with layer_types"
            )
        if not window and pattern > 1:
            raise c.error("sliding_window", "a number of tokens")
        return tuple(window if (i + 1) % pattern else 0 for i in range(layers))

    return windows


def but_first_of(step: int) -> Windows:
    """In all layers but the first of ``step`` each."""

    def windows(c: Reader, layers: int) -> tuple[int, ...]:
        window = _window(c)
        if not window:
            raise c.error("sliding_window", "a number of tokens")
        return tuple(window if i % step else 0 for i in range(layers))

    return windows


def none(c: Reader, windows: tuple[int, ...]) -> frozenset[int]:
    """All layers rotate."""
    return frozenset()


def named(c: Reader, windows: tuple[int, ...]) -> frozenset[int]:
    """Those with a 0 in ``no_rope_layers``, or every ``no_rope_layer_interval``-th, do not rotate."""
    layers, flags = len(windows), c.integers("no_rope_layers", LAYERS)
    if not c.given("no_rope_layers"):
        step = c.integer("no_rope_layer_interval", LAYERS)
        flags = [(i + 1) % step for i in range(layers)]
    if len(flags) != layers:
        raise c.error("no_rope_layers", f"a list of {layers} numbers, one for each layer")
    return frozenset(i for i, flag in enumerate(flags) if not flag)


def full(c: Reader, windows: tuple[int, ...]) -> frozenset[int]:
    """Layers without a window do not rotate."""
    return frozenset(i for i, window in enumerate(windows) if not window)


def full_among_windows(c: Reader, windows: tuple[int, ...]) -> frozenset[int]:
    """As ``full``, but all layers rotate where there is no ``sliding_window``."""
    return full(c, windows) if c.given("sliding_window") else frozenset()


def _window(c: Reader) -> int:
    return c.integer("sliding_window", POSITIONS) if c.given("sliding_window") else 0


def _first(c: Reader) -> int:
    """A null is one without windows."""
    key = "max_window_layers"
    return 0 if not c.given(key) and not _window(c) else c.integer(key, POSITIONS, 0)


def layer_types(c: Reader, layers: int, window: int) -> list[str]:
    kinds = c.values["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers:
        count = len(kinds) if isinstance(kinds, list) else shown(kinds)
        raise ConfigError(f"config.json: {count} layer_types for {layers} layers", param="model")
    for kind in kinds:
        if kind not in (_FULL, _SLIDING):
            raise ConfigError(
                f"config.json: layer_types has {shown(kind)}; {_FULL} and {_SLIDING} are supported",
                param="model",
            )
    if _SLIDING in kinds and not window:
        raise ConfigError(
            f"config.json: layer_types has {_SLIDING}, but there is no sliding_window in use",
            param="model",
        )
    return kinds


def dual_chunk(c: Reader) -> int:
    """How many tokens Qwen's dual chunk attention (arXiv 2402.17463) reads as full attention does;
    0: it is not wanted."""
    name = "dual_chunk_attention_config"
    table = c.table(name)
    if not table:
        return 0
    known = ("chunk_size", "local_size", "original_max_position_embeddings")
    for key in table:
        if key not in known and not key.startswith("sparse_attention"):
            raise c.error(name, f"an object of {', '.join(known)} and sparse_attention settings")
    sizes = Reader(f"{c.architecture}, {name}", table)
    chunk = sizes.integer("chunk_size", POSITIONS) - sizes.integer("local_size", POSITIONS)
    if chunk < 1:
        raise c.error(name, "a chunk_size above the local_size")
    return chunk

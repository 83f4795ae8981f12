"""How grouped products are cut, from measurements (``bench/gpu_moe.py tune``): data, no code beside the look-up."""

from __future__ import annotations

from sgla.kernels.triton.moe import Tile, Tiles

# (experts, width of an expert, width of the model, bytes of a weight) -> from few tokens to many.
TUNED: dict[tuple[int, int, int, int], list[Tiles]] = {}

SMALL, MEDIUM = Tile(64, 128, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)
LARGE, WIDE = Tile(128, 64, 8, 3, False, True), Tile(256, 64, 8, 3, False, True)


def choose(tokens: int, experts: int, top_k: int, f: int, d: int, itemsize: int) -> Tiles:
    """For ``tokens`` tokens of a mixture; untuned shapes go by the mean number of pairs of an expert."""
    for tiles in TUNED.get((experts, f, d, itemsize), ()):
        if tokens <= tiles.tokens:
            return tiles
    mean = tokens * top_k / experts
    if mean <= 8:
        return Tiles(tokens, 16, SMALL, SMALL)
    if mean <= 24:
        return Tiles(tokens, 32, MEDIUM, MEDIUM)
    if mean <= 64:
        return Tiles(tokens, 64, LARGE, LARGE)
    return Tiles(tokens, 128, LARGE, WIDE)

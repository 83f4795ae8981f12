"""How grouped products are cut, from measurements (``bench/gpu_moe.py tune``):
data, no code beside the look-up."""

from __future__ import annotations

from sgla.kernels.triton.moe import Tile, Tiles

# (experts, width of an expert, width of the model, bytes of a weight) -> from few tokens to many.
TUNED: dict[tuple[int, int, int, int], list[Tiles]] = {
    # Qwen3-30B-A3B, bfloat16, NVIDIA H200
    (128, 768, 2048, 2): [
        Tiles(8, 16, Tile(64, 128, 4, 3, False, True), Tile(64, 64, 4, 5, True, True)),
        Tiles(16, 16, Tile(64, 128, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(32, 16, Tile(32, 128, 4, 3, False, True), Tile(128, 128, 8, 3, True, True)),
        Tiles(64, 16, Tile(64, 128, 4, 3, True, True), Tile(128, 128, 4, 3, True, True)),
        Tiles(128, 16, Tile(64, 128, 4, 2, True, True), Tile(128, 64, 4, 3, True, True)),
        Tiles(256, 32, Tile(128, 128, 8, 3, True, True), Tile(64, 64, 4, 4, True, True)),
        Tiles(512, 64, Tile(64, 64, 4, 3, False, True), Tile(128, 64, 8, 4, False, True)),
        Tiles(1024, 128, Tile(128, 64, 8, 4, False, True), Tile(256, 64, 8, 4, False, True)),
        Tiles(2048, 128, Tile(128, 64, 8, 4, False, True), Tile(256, 64, 8, 4, False, True)),
    ],
    # The same in e4m3
    (128, 768, 2048, 1): [
        Tiles(8, 16, Tile(64, 256, 4, 2, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(16, 16, Tile(64, 256, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(32, 16, Tile(64, 256, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(64, 16, Tile(64, 256, 4, 3, True, False), Tile(128, 128, 4, 3, True, True)),
        Tiles(128, 16, Tile(64, 256, 4, 2, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(256, 32, Tile(64, 128, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(512, 64, Tile(64, 128, 4, 3, False, True), Tile(128, 128, 4, 3, False, True)),
        Tiles(1024, 64, Tile(64, 128, 4, 3, False, True), Tile(128, 128, 4, 3, False, True)),
        Tiles(2048, 128, Tile(128, 128, 8, 4, False, True), Tile(128, 128, 8, 3, False, True)),
        Tiles(8192, 128, Tile(128, 128, 8, 4, False, True), Tile(128, 128, 4, 3, False, True)),
    ],
}

SMALL, MEDIUM = Tile(64, 128, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)
LARGE, WIDE = Tile(128, 64, 8, 3, False, True), Tile(256, 64, 8, 3, False, True)


def tiles_for(tokens: int, experts: int, top_k: int, f: int, d: int, itemsize: int, hopper: bool) -> Tiles:
    """For ``tokens`` tokens of a mixture; untuned shapes go by the mean number of pairs of an expert.

    Without the copy engine and the shared memory of ``hopper``, and for float32, cuts are small."""
    mean = tokens * top_k / experts
    if not hopper or itemsize == 4:
        portable = Tile(64, 128 // itemsize, 4, 3, False, False)
        return Tiles(tokens, 16 if mean <= 24 else 64, portable, portable)
    if tuned := TUNED.get((experts, f, d, itemsize)):
        return next((tiles for tiles in tuned if tokens <= tiles.tokens), tuned[-1])
    if mean <= 8:
        return Tiles(tokens, 16, SMALL, SMALL)
    if mean <= 24:
        return Tiles(tokens, 32, MEDIUM, MEDIUM)
    if mean <= 64:
        return Tiles(tokens, 64, LARGE, LARGE)
    return Tiles(tokens, 128, LARGE, WIDE)

"""How grouped products are cut, from measurements (``bench/gpu_moe.py tune``):
data, no code beside the look-up. They are of an NVIDIA H200; other Hopper cards are cut alike."""

from __future__ import annotations

from sgla.kernels.triton.moe import Tile, Tiles

# (experts, width of an expert, width of the model, bytes of a weight) -> from few tokens to many.
TUNED: dict[tuple[int, int, int, int], list[Tiles]] = {
    # Qwen3-30B-A3B, bfloat16
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
    # Qwen3.6-35B-A3B with its shared expert, bfloat16
    (257, 512, 2048, 2): [
        Tiles(512, 32, Tile(128, 128, 4, 3, True, True), Tile(128, 64, 4, 3, True, True)),
        Tiles(1024, 64, Tile(64, 64, 4, 3, False, True), Tile(128, 64, 4, 3, False, True)),
        Tiles(2741, 128, Tile(128, 64, 8, 4, False, True), Tile(256, 64, 8, 4, False, True)),
    ],
    # The same in e4m3
    (257, 512, 2048, 1): [
        Tiles(128, 16, Tile(64, 256, 4, 3, True, True), Tile(128, 128, 4, 3, True, True)),
        Tiles(256, 16, Tile(64, 256, 4, 3, True, True), Tile(128, 128, 4, 2, True, True)),
        Tiles(512, 32, Tile(128, 128, 4, 3, True, True), Tile(128, 128, 4, 2, True, True)),
        Tiles(2048, 64, Tile(64, 128, 4, 3, False, True), Tile(128, 128, 4, 3, False, True)),
        Tiles(8192, 128, Tile(128, 128, 8, 4, False, True), Tile(128, 128, 4, 3, False, True)),
    ],
    # GLM-4.7-Flash with its shared expert, bfloat16
    (65, 1536, 2048, 2): [
        Tiles(512, 64, Tile(64, 64, 4, 3, False, True), Tile(128, 64, 8, 3, False, True)),
        Tiles(1024, 64, Tile(256, 64, 8, 3, False, True), Tile(256, 64, 4, 4, False, True)),
        Tiles(1248, 128, Tile(128, 64, 8, 4, False, True), Tile(256, 64, 8, 4, False, True)),
    ],
    # The same in e4m3
    (65, 1536, 2048, 1): [
        Tiles(4, 16, Tile(64, 256, 4, 3, True, True), Tile(128, 256, 4, 3, True, True)),
        Tiles(16, 16, Tile(64, 256, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(64, 16, Tile(64, 256, 4, 3, True, True), Tile(64, 256, 4, 2, True, True)),
        Tiles(128, 16, Tile(64, 256, 4, 2, True, True), Tile(128, 256, 4, 2, True, True)),
        Tiles(256, 32, Tile(64, 128, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(1024, 64, Tile(64, 128, 4, 3, False, True), Tile(128, 128, 4, 3, False, True)),
        Tiles(8192, 128, Tile(128, 128, 8, 4, False, True), Tile(256, 128, 8, 4, False, True)),
    ],
    # DeepSeek-V2-Lite with its shared expert as two, bfloat16
    (66, 1408, 2048, 2): [
        Tiles(512, 64, Tile(64, 64, 4, 3, False, True), Tile(128, 64, 4, 3, False, True)),
        Tiles(792, 128, Tile(128, 64, 8, 4, False, True), Tile(256, 64, 8, 4, False, True)),
    ],
    # The same in e4m3
    (66, 1408, 2048, 1): [
        Tiles(16, 16, Tile(64, 256, 4, 3, True, True), Tile(64, 128, 4, 4, True, True)),
        Tiles(64, 16, Tile(64, 256, 4, 2, True, True), Tile(128, 128, 4, 3, True, True)),
        Tiles(128, 32, Tile(64, 128, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(512, 64, Tile(64, 128, 4, 3, False, True), Tile(128, 128, 4, 3, False, True)),
        Tiles(1024, 128, Tile(64, 128, 8, 3, False, True), Tile(128, 128, 4, 3, False, True)),
        Tiles(8192, 128, Tile(128, 128, 8, 4, False, True), Tile(128, 128, 4, 3, False, True)),
    ],
    # OLMoE 1B-7B, bfloat16
    (64, 1024, 2048, 2): [
        Tiles(512, 64, Tile(64, 64, 4, 3, False, True), Tile(128, 64, 4, 3, False, True)),
        Tiles(768, 128, Tile(128, 64, 8, 4, False, True), Tile(128, 64, 8, 3, False, True)),
    ],
    # The same in e4m3
    (64, 1024, 2048, 1): [
        Tiles(16, 16, Tile(64, 256, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(64, 16, Tile(64, 256, 4, 2, True, True), Tile(128, 128, 4, 3, True, True)),
        Tiles(128, 32, Tile(128, 128, 4, 3, True, True), Tile(128, 128, 4, 3, True, True)),
        Tiles(512, 64, Tile(64, 128, 4, 3, False, True), Tile(128, 128, 4, 3, False, True)),
        Tiles(8192, 128, Tile(128, 128, 8, 4, False, True), Tile(128, 128, 4, 3, False, True)),
    ],
}

# Of other shapes, by bytes of a weight: what wins with most of those above. In the place of tokens stands
# how many pairs an expert has on average, at most; 0: more.
BY_MEAN: dict[int, list[Tiles]] = {
    2: [
        Tiles(8, 16, Tile(64, 128, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(24, 32, Tile(64, 128, 4, 3, True, True), Tile(64, 128, 4, 3, True, True)),
        Tiles(80, 64, Tile(64, 64, 4, 3, False, True), Tile(128, 64, 4, 3, False, True)),
        Tiles(0, 128, Tile(128, 64, 8, 4, False, True), Tile(256, 64, 8, 4, False, True)),
    ],
    1: [
        Tiles(12, 16, Tile(64, 256, 4, 3, True, True), Tile(128, 128, 4, 3, True, True)),
        Tiles(24, 32, Tile(64, 128, 4, 3, True, True), Tile(128, 128, 4, 3, True, True)),
        Tiles(80, 64, Tile(64, 128, 4, 3, False, True), Tile(128, 128, 4, 3, False, True)),
        Tiles(0, 128, Tile(128, 128, 8, 4, False, True), Tile(128, 128, 4, 3, False, True)),
    ],
}


def tiles_for(tokens: int, experts: int, top_k: int, f: int, d: int, itemsize: int, hopper: bool) -> Tiles:
    """For ``tokens`` tokens of a mixture. Shapes that were not tuned go by the mean number of pairs of an
    expert; so do others, up to a quarter of the fewest tokens that they were tuned for.

    Without the copy engine and the shared memory of ``hopper``, and for float32, cuts are small."""
    mean = tokens * top_k / experts
    if not hopper or itemsize == 4:
        portable = Tile(64, 128 // itemsize, 4, 3, False, False)
        return Tiles(tokens, 16 if mean <= 24 else 64, portable, portable)
    tuned = TUNED.get((experts, f, d, itemsize))
    if tuned and tokens > tuned[0].tokens // 4:
        return next((tiles for tiles in tuned if tokens <= tiles.tokens), tuned[-1])
    *cuts, last = BY_MEAN[itemsize]
    return next((tiles for tiles in cuts if mean <= tiles.tokens), last)._replace(tokens=tokens)

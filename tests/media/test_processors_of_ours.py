"""Image processors that are ours: sizes as in transformers', which needs torchvision."""

from __future__ import annotations

import numpy as np
import pytest

from sgla.media.processors import KimiK25, Llama4, best_shape, bfloat16, shapes_of

SHAPES = [(224, 672), (672, 224), (224, 448), (448, 224), (224, 224)]


def test_shapes_of_tiles() -> None:
    """The examples of ``find_supported_resolutions`` and ``get_best_fit``."""
    expected = {(1, 4), (2, 2), (1, 1), (4, 1), (1, 3), (3, 1), (1, 2), (2, 1)}
    assert set(shapes_of(4)) == expected
    assert len(shapes_of(4)) == 8
    assert best_shape((200, 300), SHAPES, largest=False) == (224, 448)


@pytest.mark.parametrize(
    ("size", "ratios", "tiles"),
    [((30, 30), (1, 1), 1), ((336, 672), (1, 2), 3), ((700, 340), (3, 2), 7), ((2000, 100), (6, 1), 7)],
)
def test_tiles_of_llama4(size: tuple[int, int], ratios: tuple[int, int], tiles: int) -> None:
    made = Llama4({})([np.full((*size, 3), 255, np.uint8)])
    assert made["aspect_ratios"].tolist() == [list(ratios)]
    assert made["pixel_values"].shape == (tiles, 3, 336, 336)
    assert set(np.unique(made["pixel_values"])) <= {-1.0, 1.0}


def test_numbers_are_rounded_as_in_bfloat16() -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).normal(0, 3, 4000).astype(np.float32)
    assert (bfloat16(values) == torch.from_numpy(values).bfloat16().float().numpy()).all()


@pytest.mark.parametrize(
    ("size", "grid"),
    [((28, 28), (2, 2)), ((29, 13), (4, 2)), ((3000, 3000), (130, 130)), ((8000, 20), (512, 2))],
)
def test_grids_of_kimi(size: tuple[int, int], grid: tuple[int, int]) -> None:
    """A picture is made smaller, but not larger, and filled up to whole tokens."""
    made = KimiK25({})([np.zeros((*size, 3), np.uint8)])
    assert made["image_grid_thw"].tolist() == [[1, *grid]]
    assert made["pixel_values"].shape == (grid[0] * grid[1], 3, 14, 14)


@pytest.mark.parametrize("size", [{"height": 3, "width": 4}, {"shortest_edge": 3}])
def test_sizes_that_are_no_squares(size: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="size must have height and width"):
        Llama4({"size": size})([np.zeros((5, 5, 3), np.uint8)])

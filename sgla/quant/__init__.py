"""Weight formats: plain, 8, 5 and 4 bits in groups of 32, fp8 per channel."""

from sgla.quant.weight import GROUP, HALF, LEVELS, Kind, Weight, concat, pack

__all__ = ["GROUP", "HALF", "LEVELS", "Kind", "Weight", "concat", "pack"]

"""Weight formats: plain, int8 and int4 in groups of 32, fp8 per channel."""

from sgla.quant.weight import GROUP, Kind, Weight, concat, pack

__all__ = ["GROUP", "Kind", "Weight", "concat", "pack"]

"""Weight formats: plain, int8 and fp8 per channel, int4 in groups of 32."""

from sgla.quant.weight import GROUP, Kind, Weight, concat, pack

__all__ = ["GROUP", "Kind", "Weight", "concat", "pack"]

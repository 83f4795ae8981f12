"""The scheduler: pure and synchronous. Time comes in as ``now``; the same calls give the same plans."""

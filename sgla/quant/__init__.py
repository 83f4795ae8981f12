"""Storages of matrices, and the formats in which checkpoints hold them. Loads no torch by itself."""

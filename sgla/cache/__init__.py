"""Paged KV bookkeeping: the free list and the radix tree of cached prefixes. Pages are ints; no tensor enters here."""

"""Paged KV bookkeeping: pools of pages and the radix tree of cached prefixes.
Pages are ints; no tensor enters here."""

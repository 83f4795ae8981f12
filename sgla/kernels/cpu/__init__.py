"""The CPU program: ops recorded as native instructions, and what runs them."""

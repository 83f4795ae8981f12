"""Reasoning in outputs: ``think`` for tags around it, ``harmony`` for gpt-oss's channels."""

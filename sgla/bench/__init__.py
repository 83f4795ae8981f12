"""Load generator for OpenAI-style servers."""

"""``python -m sgla`` is ``sgla``."""

from sgla.cli import entry

if __name__ == "__main__":
    entry()

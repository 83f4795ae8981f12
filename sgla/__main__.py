"""``python -m sgla`` is ``sgla``."""

import sys

from sgla.cli import main

if __name__ == "__main__":
    sys.exit(main())

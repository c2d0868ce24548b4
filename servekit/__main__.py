"""`python -m servekit` is the same as `servekit`."""

import sys

from servekit.cli import main

if __name__ == "__main__":
    sys.exit(main())

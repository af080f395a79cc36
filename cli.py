"""`python cli.py VERB`: the same as the console script `lit-dps`."""

import sys

from lit_dps.cli import main

if __name__ == "__main__":
    sys.exit(main())

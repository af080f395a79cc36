"""`python -m lit_dps VERB` does what the console script `lit-dps` does."""

import sys

from lit_dps.cli import main

if __name__ == "__main__":
    sys.exit(main())

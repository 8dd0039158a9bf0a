"""`python -m offbeat` is the `offbeat` command."""

import sys

from offbeat.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m rollout` is the command `rollout`."""

import sys

from rollout.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

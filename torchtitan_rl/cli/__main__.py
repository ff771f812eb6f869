"""`python -m torchtitan_rl.cli` is the command `torchtitan-rl`."""

import sys

from torchtitan_rl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

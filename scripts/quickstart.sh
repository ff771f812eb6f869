#!/usr/bin/env bash
# The first run: sets up, then trains configs/quickstart.py. Arguments go to `torchtitan-rl train`, such as --seed 1.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh
exec .venv/bin/torchtitan-rl train configs/quickstart.py "$@"

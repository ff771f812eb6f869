#!/usr/bin/env bash
# The first run: sets up, then trains configs/quickstart.py. Arguments go to `torchtitan-rl train`, such as --seed 1.
# TORCHTITAN_RL_PYTHON names an interpreter to use as it is instead of setting up.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
python=${TORCHTITAN_RL_PYTHON:-}
if [[ -z $python ]]; then
  scripts/setup.sh
  python=$PWD/.venv/bin/python
fi
exec "$python" -m torchtitan_rl.cli train configs/quickstart.py "$@"

#!/usr/bin/env bash
# Every check that wants a GPU, one after the other: scripts/gpu_battery.sh [--only NAME] [--dry-run] [--out DIR].
# Stopped and started again it goes on. --help lists the options, docs/gpu.md says what to watch.
#
# Sets up first; TORCHTITAN_RL_PYTHON names an interpreter to use as it is instead, such as one with parts of the stack.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
python=${TORCHTITAN_RL_PYTHON:-}
if [[ -z $python ]]; then
  scripts/setup.sh test
  python=$PWD/.venv/bin/python
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m scripts.gpu_battery "$@"

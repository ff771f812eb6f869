#!/usr/bin/env bash
# Simulates the controller on a virtual clock: scripts/simulate.sh --seeds 10000, or --seed 17 for one with its history.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
exec "${TORCHTITAN_RL_PYTHON:-$root/.venv/bin/python}" -m tests.simulation "$@"

#!/usr/bin/env bash
# Kills a run again and again and compares it with an undisturbed one: scripts/chaos.sh [--kills 20] [--who run|...].
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
exec "${TORCHTITAN_RL_PYTHON:-$root/.venv/bin/python}" "$root/scripts/chaos.py" "$@"

#!/usr/bin/env bash
# Trains a config on this host: scripts/train_local.sh CONFIG [--field.path value ...].
set -euo pipefail
python=${TORCHTITAN_RL_PYTHON:-$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python}
if [[ ! -x $python ]]; then
  echo "error: $python: is not there; run scripts/setup.sh, or set TORCHTITAN_RL_PYTHON" >&2
  exit 1
fi
exec "$python" -m torchtitan_rl.cli train "$@"

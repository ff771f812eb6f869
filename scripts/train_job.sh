#!/usr/bin/env bash
# Trains a config as a Slurm or Kubernetes job: scripts/train_job.sh slurm|kubernetes CONFIG --num-hosts N [--dry-run] ...
# Validated by --dry-run only, which prints what would be submitted. --help lists the options.
set -euo pipefail
python=${TORCHTITAN_RL_PYTHON:-$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python}
[[ -x $python ]] || { echo "error: $python: is not there; run scripts/setup.sh, or set TORCHTITAN_RL_PYTHON" >&2; exit 1; }
exec "$python" -m torchtitan_rl.jobs "$@"

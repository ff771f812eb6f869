#!/usr/bin/env bash
# Trains a config as a job: scripts/train_job.sh slurm|kubernetes CONFIG --num-hosts N [--dry-run] [--field.path value].
# Gives a run that goes on further hosts: scripts/train_job.sh slurm-join RUN --num-hosts N [--dry-run].
# --dry-run prints what would be submitted; no Kubernetes has been given more than that. --help lists the options.
# docs/slurm.md says what a Slurm job does when it is preempted, queued again, out of time or cancelled.
set -euo pipefail
python=${TORCHTITAN_RL_PYTHON:-$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python}
if [[ ! -x $python ]]; then
  echo "error: $python: is not there; run scripts/setup.sh, or set TORCHTITAN_RL_PYTHON" >&2
  exit 1
fi
exec "$python" -m torchtitan_rl.launch.jobs "$@"

#!/usr/bin/env bash
# Trains a config on several hosts: scripts/train_torchrun.sh CONFIG [--max-restarts N] [--field.path value ...], the
# same line on each. After a failure torchrun starts all hosts again, at most N times, and the run goes on from its newest
# checkpoint in --output-dir.
#
# torchrun starts one process per host; its settings come from the environment, and the defaults make one host, which
# needs no torchrun:
#   NNODES                      number of hosts (1)
#   NODE_RANK                   this host's, 0 on the one that drives the run (0)
#   MASTER_ADDR, MASTER_PORT    where rank 0 can be reached (127.0.0.1, 29500)
#   TORCHTITAN_RL_HOST_ADDRESS  this host's address, to bind and to be reached at (the one that leads to MASTER_ADDR)
#   TORCHTITAN_RL_JOIN_S        seconds within which all hosts must be there (300)
# Code, configs and the run's directory must be at the same path on every host. Nothing authenticates anybody: whoever
# reaches the ports of a run can run code on its hosts. Bind private interfaces; see docs/at_scale.md.
set -euo pipefail
python=${TORCHTITAN_RL_PYTHON:-$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)/.venv/bin/python}
if [[ ! -x $python ]]; then
  echo "error: $python: is not there; run scripts/setup.sh, or set TORCHTITAN_RL_PYTHON" >&2
  exit 1
fi
max_restarts=0
arguments=()
while (($#)); do
  case $1 in
    --max-restarts) max_restarts=${2:?--max-restarts: has no number; write --max-restarts N}; shift ;;
    --max-restarts=*) max_restarts=${1#*=} ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
if [[ ${NNODES:-1} == 1 ]]; then # no host to meet: torchrun's store would listen on every interface for nobody
  exec "$python" -m torchtitan_rl.cli train "${arguments[@]}" --max-restarts "$max_restarts"
fi
"$python" -m torchtitan_rl.launch.addresses # before torchrun waits for hosts that cannot find each other
exec "$python" -m torch.distributed.run --nnodes "$NNODES" --node-rank "${NODE_RANK:-0}" --nproc-per-node 1 \
  --master-addr "${MASTER_ADDR:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
  --rdzv-conf "timeout=${TORCHTITAN_RL_JOIN_S:-300}" --max-restarts "$max_restarts" -m torchtitan_rl.launch.torchrun "${arguments[@]}"

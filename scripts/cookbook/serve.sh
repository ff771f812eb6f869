#!/usr/bin/env bash
# Serves the base model of base.py to the cookbook's recipes, and trains it first where HUB has no weights.
#   scripts/cookbook/serve.sh HUB [OPTION ...]
# HUB is the directory of stand_ins.py. OPTIONs are those of `torchtitan-rl serve-tinker`, such as --port 8000.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$1" # the paths of base.py are relative to it
shift
model=Qwen/Qwen3-4B-Instruct-2507
if [[ ! -e $model/model.safetensors ]]; then
    "$root/.venv/bin/torchtitan-rl" train "$root/scripts/cookbook/base.py" --output-dir runs/base
    cp runs/base/checkpoints/step-0/hf/* "$model/"
fi
exec "$root/.venv/bin/torchtitan-rl" serve-tinker "$root/scripts/cookbook/base.py" --base-model "$model" "$@"

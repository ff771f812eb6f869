#!/usr/bin/env bash
# Checks `serve` with agent frameworks: scripts/agent_frameworks.sh CHECKPOINT|URL [PYTEST ARGUMENT ...]. CHECKPOINT is one
# of a run of configs/calculator_tools.py, such as runs/tools/checkpoints/step-20: it is served here, with a context of
# 16,384 tokens, because some frameworks write long prompts. URL is of a server of such a checkpoint, with /v1. The
# frameworks get an environment of their own, FRAMEWORKS_ENV or .frameworks. Nothing is sent but to the server.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
environment=${FRAMEWORKS_ENV:-.frameworks}
needed=tests/frameworks/requirements.txt
(($#)) || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

for uv in uv .uv/bin/uv ''; do [[ -z $uv ]] || ! "$uv" --version >/dev/null 2>&1 || break; done
if ! cmp -s "$needed" "$environment/requirements.txt"; then
  printf 'agent_frameworks: installing %s into %s\n' "$needed" "$environment" >&2
  if [[ -n $uv ]]; then
    # uv does not read pip's settings: pass on where packages come from, unless uv has been told itself.
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}
    [[ -n $UV_FIND_LINKS ]] || unset UV_FIND_LINKS
    [[ -n $UV_DEFAULT_INDEX ]] || unset UV_DEFAULT_INDEX
    "$uv" venv --quiet --clear --python "${UV_PYTHON:-python3}" "$environment"
    # Two of these are newer than pyproject.toml's exclude-newer, which uv applies to every command that is given here.
    "$uv" pip install --quiet --exclude-newer 2026-11-26 --python "$environment/bin/python" -r "$needed"
  else
    python3 -m venv --clear "$environment"
    "$environment/bin/python" -m pip install --quiet -r "$needed"
  fi
  cp "$needed" "$environment/requirements.txt"
fi

address=$1 && shift
if [[ $address != http://* && $address != https://* ]]; then
  work=$(mktemp -d)
  trap '[[ -z ${server:-} ]] || { kill "$server" 2>/dev/null || true; wait "$server" 2>/dev/null || true; }; rm -rf "$work"' EXIT
  # The policy's positions are rotations: a longer table of them changes nothing about short prompts.
  .venv/bin/python - "$address" "$work/model" <<'PYTHON'
import json, shutil, sys
from pathlib import Path
from torchtitan_rl.weights.checkpoint import hf_weights

copy = Path(shutil.copytree(hf_weights(Path(sys.argv[1])), sys.argv[2]))
config = json.loads((copy / "config.json").read_text())
(copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
PYTHON
  .venv/bin/torchtitan-rl serve "$work/model" --port 0 --tool-parser pythonic --dtype float32 --max-model-len 16384 --ignore reasoning_effort \
    --output-dir "$work/run" >"$work/log" 2>&1 &
  server=$!
  until address=$(grep -oE 'http://127\.0\.0\.1:[0-9]+/v1' "$work/log" 2>/dev/null); do
    kill -0 "$server" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
    sleep 0.2
  done
fi
"$environment/bin/python" -m pytest -c tests/frameworks/pytest.ini tests/frameworks --base-url "$address" "$@"

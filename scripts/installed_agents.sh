#!/usr/bin/env bash
# Installs the agents of torchtitan_rl/rollout/agents and trains one step with each: scripts/installed_agents.sh [PYTEST
# ARGUMENT ...]. They get environments of their own below INSTALLED_AGENTS or .agents, 1.8 GB; needs npm.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
place=${INSTALLED_AGENTS:-.agents}
mkdir -p "$place"
place=$(cd "$place" && pwd)

python_program() { # DIRECTORY REQUIREMENT
  [[ $(cat "$place/$1/installed" 2>/dev/null) == "$2" ]] && return
  printf 'installed_agents: installing %s\n' "$2" >&2
  python3 -m venv --clear "$place/$1"
  "$place/$1/bin/python" -m pip install --quiet "$2"
  printf '%s\n' "$2" >"$place/$1/installed"
}

python_program mini mini-swe-agent==2.4.6
python_program aider aider-chat==0.86.2
printf 'installed_agents: installing programs of npm\n' >&2
npm install --prefix "$place/npm" --no-audit --no-fund --loglevel error \
  @anthropic-ai/claude-code@2.1.197 @openai/codex@0.171.0 opencode-ai@1.18.33

PATH="$place/mini/bin:$place/aider/bin:$place/npm/node_modules/.bin:$PATH" \
  .venv/bin/python -m pytest tests/integration/test_installed_agents.py "$@"

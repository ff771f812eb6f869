#!/usr/bin/env bash
# Runs the shell blocks of README.md, AGENTS.md and docs/*.md that are marked `slow`, as written, in one temporary
# directory and in the order of the pages: half an hour on two cores. Arguments are pages, such as README.md
# docs/tasks.md (whose block goes on with the README's first run). The suite runs or checks all other blocks.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test
exec .venv/bin/python -m tests.examples "$@"

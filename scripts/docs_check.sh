#!/usr/bin/env bash
# Runs the shell blocks of README.md, AGENTS.md and docs/*.md that are marked `slow`, as written, in one temporary
# directory and in the order of the pages: half an hour on two cores. Arguments are pages, such as README.md
# docs/tasks.md (whose block goes on with the README's first run). Without arguments docs/controller.ipynb runs first.
# The suite runs or checks all other blocks, and the notebook's cells in one process.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test
status=0
if (($# == 0)); then .venv/bin/python -m pytest -q -m slow tests/integration/test_notebook.py || status=$?; fi
.venv/bin/python -m tests.examples "$@" || status=$?
exit "$status"

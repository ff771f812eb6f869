#!/usr/bin/env bash
# What is checked without running the code: lint, formatting, the layers of imports, types, names. About half a minute on two
# cores once .venv is there. All of them run, whichever fails.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test
failed=()
.venv/bin/ruff check . || failed+=("ruff check")
.venv/bin/ruff format --check . || failed+=("ruff format")
.venv/bin/lint-imports --no-logo || failed+=("lint-imports")
.venv/bin/mypy || failed+=("mypy")
.venv/bin/python scripts/structure.py || failed+=("structure")
if ((${#failed[@]})); then
  printf 'check: %s failed\n' "${failed[@]}" >&2
  exit 1
fi

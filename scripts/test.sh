#!/usr/bin/env bash
# Sets up with the test extra and runs pytest. Arguments go to pytest; without -m, slow and gpu tests are left out.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test
select=(-m "not slow and not gpu")
for argument in "$@"; do
  # -m takes its value apart (-m slow) or attached (-mslow); long options start with two dashes.
  if [[ $argument == -m* ]]; then select=(); fi
done
exec .venv/bin/python -m pytest "${select[@]}" "$@"

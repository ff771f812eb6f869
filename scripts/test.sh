#!/usr/bin/env bash
# Sets up with the test extra and runs pytest: the unit tests in two processes, then the others. Arguments go to one
# pytest for all tests; without -m, slow and gpu tests are left out.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh test
select=(-m "not slow and not gpu")
if (($# == 0)); then
  status=0
  .venv/bin/python -m pytest "${select[@]}" -n 2 tests/unit || status=$?
  .venv/bin/python -m pytest "${select[@]}" --ignore tests/unit || status=$? # they start processes: one at a time
  exit $status
fi
for argument in "$@"; do
  # -m takes its value apart (-m slow) or attached (-mslow); long options start with two dashes.
  if [[ $argument == -m* ]]; then select=(); fi
done
exec .venv/bin/python -m pytest "${select[@]}" "$@"

#!/usr/bin/env bash
# Sets up with the test extra, or uses the interpreter that TORCHTITAN_RL_PYTHON names, and runs pytest.
#   scripts/test.sh               the tests of every day, with real actors, engine and store: 6 minutes
#   scripts/test.sh --all         every test but the slow and gpu ones: what has to pass before a change is merged
#   scripts/test.sh ARGUMENT ...  one pytest with these arguments; without -m, slow and gpu tests are left out
# The first two run the unit tests in three processes, then the others, a file at a time in each of three: there is one more
# than the two cores that they are measured on, since tests wait for deadlines and for processes that they start.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
python=${TORCHTITAN_RL_PYTHON:-}
if [[ -z $python ]]; then
  scripts/setup.sh test
  python=$PWD/.venv/bin/python
fi
if (($# == 0)) || [[ $* == --all ]]; then
  marks="not slow and not gpu"
  (($#)) || marks+=" and not whole"
  status=0
  "$python" -m pytest -m "$marks" -n 3 tests/unit || status=$?
  "$python" -m pytest -m "$marks" -n 3 --dist loadfile --no-loadscope-reorder --ignore tests/unit || status=$?
  exit $status
fi
select=(-m "not slow and not gpu")
for argument in "$@"; do
  # -m takes its value apart (-m slow) or attached (-mslow); long options start with two dashes.
  if [[ $argument == -m* ]]; then select=(); fi
done
exec "$python" -m pytest "${select[@]}" "$@"

#!/usr/bin/env bash
# What the quickstart promises: three seeds, a shuffled control, time to the first step. Five runs of up to four minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh test
exec .venv/bin/python -m pytest -m slow tests/integration/test_quickstart.py -s "$@"

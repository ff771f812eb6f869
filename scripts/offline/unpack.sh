#!/usr/bin/env bash
# Makes an environment out of the pieces of pack.sh, on a machine that has no network (docs/offline.md):
#   scripts/offline/unpack.sh --pieces DIR --into ENV [--from SITE_PACKAGES] [--finish]
#
# Needs an interpreter of the pieces' version of Python and its standard library; PYTHON names another than python3.
set -euo pipefail
exec "${PYTHON:-python3}" "$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)/unpack.py" "$@"

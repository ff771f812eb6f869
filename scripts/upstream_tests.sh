#!/usr/bin/env bash
# Runs tests of others against a server: scripts/upstream_tests.sh openai|vllm DIRECTORY URL [PYTEST ARGUMENT ...]. DIRECTORY
# is a checkout of openai-python, or of vLLM, or its source distribution unpacked; URL is the server's, with /v1. They get an
# environment of their own, UPSTREAM_ENV or .upstream, and are run from a copy in which the server's model has the place of
# theirs. Nothing is sent but to the server. See docs/dev/upstream_tests.md.
set -euo pipefail
started=$PWD
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
environment=${UPSTREAM_ENV:-.upstream}
needed=tests/conformance/upstream/requirements.txt
(($# > 2)) || { sed -n '2,5s/^# //p' "${BASH_SOURCE[0]}" >&2; exit 2; }

for uv in uv .uv/bin/uv ''; do [[ -z $uv ]] || ! "$uv" --version >/dev/null 2>&1 || break; done
if ! cmp -s "$needed" "$environment/requirements.txt"; then
  printf 'upstream_tests: installing %s into %s\n' "$needed" "$environment" >&2
  if [[ -n $uv ]]; then
    # uv does not read pip's settings: pass on where packages come from, unless uv has been told itself.
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}
    [[ -n $UV_FIND_LINKS ]] || unset UV_FIND_LINKS
    [[ -n $UV_DEFAULT_INDEX ]] || unset UV_DEFAULT_INDEX
    "$uv" venv --quiet --clear --python "${UV_PYTHON:-python3}" "$environment"
    "$uv" pip install --quiet --python "$environment/bin/python" -r "$needed"
  else
    python3 -m venv --clear "$environment"
    "$environment/bin/python" -m pip install --quiet -r "$needed"
  fi
  cp "$needed" "$environment/requirements.txt"
fi

suite=$1 directory=$(cd "$started" && realpath "$2") address=$3
shift 3
exec "$environment/bin/python" tests/conformance/upstream "$suite" "$directory" "$address" "$@"

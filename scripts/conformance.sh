#!/usr/bin/env bash
# Checks a server that speaks the protocol of the public tinker SDK: scripts/conformance.sh [URL] [PYTEST ARGUMENT ...],
# such as `scripts/conformance.sh http://127.0.0.1:8000 --weights DIR -k losses`. Without URL only the kit's own
# arithmetic. The SDK gets an environment of its own, CONFORMANCE_ENV or .conformance; see tests/conformance/README.md.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
environment=${CONFORMANCE_ENV:-.conformance}
needed=tests/conformance/requirements.txt

for uv in uv .uv/bin/uv ''; do [[ -z $uv ]] || ! "$uv" --version >/dev/null 2>&1 || break; done
if ! cmp -s "$needed" "$environment/requirements.txt"; then
  printf 'conformance: installing %s into %s\n' "$needed" "$environment" >&2
  if [[ -n $uv ]]; then
    # uv does not read pip's settings: pass on where packages come from, unless uv has been told itself.
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}
    [[ -n $UV_FIND_LINKS ]] || unset UV_FIND_LINKS
    [[ -n $UV_DEFAULT_INDEX ]] || unset UV_DEFAULT_INDEX
    # The oracles are small: torch for the CPU, from its own index unless there is a place with wheels.
    backend=(--torch-backend cpu)
    [[ -z ${UV_FIND_LINKS:-} ]] || backend=()
    "$uv" venv --quiet --clear --python "${UV_PYTHON:-python3}" "$environment"
    "$uv" pip install --quiet --python "$environment/bin/python" "${backend[@]}" -r "$needed"
  else
    python3 -m venv --clear "$environment"
    "$environment/bin/python" -m pip install --quiet -r "$needed"
  fi
  cp "$needed" "$environment/requirements.txt"
fi

address=()
if (($#)) && [[ $1 != -* ]]; then address=(--base-url "$1") && shift; fi
tests=(tests/conformance)
for argument in "$@"; do [[ $argument != tests/conformance/* ]] || tests=(); done
exec "$environment/bin/python" -m pytest -c tests/conformance/pytest.ini "${tests[@]}" "${address[@]}" "$@"

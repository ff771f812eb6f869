#!/usr/bin/env bash
# Packs an installation for CUDA into pieces, to be carried to a machine that has no network (docs/offline.md):
#   scripts/offline/pack.sh --out DIR [--python PATH] [--extra NAME ...] [--slim] [--arch 90] [--piece-mib N] ...
#
# Installs it first, by scripts/setup.sh in .offline, which leaves .venv as it is and is used again by the next call.
# --python is an interpreter of the version that the other machine has, --extra an extra of pyproject.toml, such as
# test. With --site PATH that site-packages is packed as it is. --help lists the options of packing itself.
set -euo pipefail
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
copy=$root/.offline

python=${UV_PYTHON:-} extras=() options=() ready=
while (($#)); do
  case $1 in
    --python | --extra)
      (($# > 1)) || { echo "error: $1: needs a value" >&2; exit 2; }
      if [[ $1 == --python ]]; then python=$2; else extras+=("$2"); fi
      shift 2 ;;
    --python=*) python=${1#*=}; shift ;;
    --extra=*) extras+=("${1#*=}"); shift ;;
    --site | --site=* | -h | --help) ready=1 options+=("$1"); shift ;;
    *) options+=("$1"); shift ;;
  esac
done

if [[ $ready ]]; then
  interpreter=${TORCHTITAN_RL_PYTHON:-$root/.venv/bin/python}
  [[ -x $interpreter ]] || { echo "error: $interpreter: is not there; run scripts/setup.sh" >&2; exit 2; }
else
  # Minutes pass before there is something to pack: options that do not fit are refused by any Python first.
  for checker in "${python:-python3}" python3 python3.13 python3.12 python3.11; do
    "$checker" -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null || continue
    PYTHONPATH=$root "$checker" -m scripts.offline.pack --check-only --site "$copy" "${options[@]}" || exit
    break
  done
  mkdir -p "$copy/scripts"
  echo '*' >"$copy/.gitignore"
  rm -rf "$copy/torchtitan_rl"
  cp -a "$root"/{pyproject.toml,README.md,torchtitan_rl} "$copy"
  cp -a "$root/scripts/setup.sh" "$copy/scripts"
  if [[ $python ]]; then export UV_PYTHON=$python; fi
  PATH=$PATH:$root/.uv/bin TORCHTITAN_RL_EXTRA=cuda bash "$copy/scripts/setup.sh" "${extras[@]}"
  interpreter=$copy/.venv/bin/python
  options+=(--site "$(echo "$copy"/.venv/lib/python3.*/site-packages)")
fi
PYTHONPATH=$root exec "$interpreter" -m scripts.offline.pack "${options[@]}"

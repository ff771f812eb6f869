#!/usr/bin/env bash
# Runs scripts/build_wheel.sh, then the two lines of docs/install.md in an empty virtual environment, those with pip and
# those with uv, and the quickstart in an empty directory. Arguments go to `torchtitan-rl quickstart`; without any it is a
# dry run. Needs uv and a network. Where pip finds torch's CPU build itself (PIP_FIND_LINKS), the lines run without their
# public index of torch.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/build_wheel.sh
page=$PWD/docs/install.md dist=$PWD/dist
PATH=$PATH:$PWD/.uv/bin
unset PYTHONPATH VIRTUAL_ENV
if [[ -n ${PIP_FIND_LINKS:-} ]]; then export UV_FIND_LINKS=$PIP_FIND_LINKS; fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for tool in "pip" "uv pip"; do
  mapfile -t lines < <(grep "^$tool install --no-deps" "$page")
  ((${#lines[@]} == 2)) || { echo "install_check: $page: ${#lines[@]} lines of $tool install; want 2" >&2; exit 1; }
  rm -rf "$scratch"/*
  uv venv --quiet --seed --python python3 "$scratch/venv"
  mkdir "$scratch/files" "$scratch/empty"
  cp "$dist"/* "$scratch/files"
  (
    source "$scratch/venv/bin/activate"
    cd "$scratch/files"
    for line in "${lines[@]}"; do
      if [[ -n ${PIP_FIND_LINKS:-} ]]; then line=${line% --extra-index-url *} line=${line% --torch-backend cpu}; fi
      echo "install_check: $line"
      bash -ec "$line --quiet"
    done
    cd "$scratch/empty"
    torchtitan-rl quickstart "${@:---dry-run}"
  )
done

#!/usr/bin/env bash
# Makes dist/, which installs without a checkout (docs/install.md): the wheel, and requirements-cpu.txt, the list of every
# package that the wheel needs, each in one version. The list depends on pyproject.toml alone, is kept in the repository,
# and holds for Linux and Python 3.11 to 3.13. Needs uv, whose own settings say where packages come from.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
uv=$(command -v uv || echo .uv/bin/uv)
"$uv" --version >/dev/null 2>&1 || { echo "build_wheel: uv: is not installed; run pip install uv" >&2; exit 1; }

list=requirements-cpu.txt
rm -rf dist
mkdir dist
# Without local wheels, which may exist for one version of Python only.
env -u UV_FIND_LINKS "$uv" pip compile pyproject.toml --extra cpu --universal --python-version 3.11 --quiet \
  --no-annotate --no-header --no-emit-index-url --no-emit-find-links >dist/all
{
  echo "# Made by scripts/build_wheel.sh: every package that torchtitan-rl[cpu] needs, to be installed with --no-deps."
  # torch's build for CPUs needs no CUDA libraries, and is a version of its own.
  sed -E "/^(nvidia|cuda)-|'never'/d; s/^torch==([0-9.]+)$/torch==\1+cpu/" dist/all
} >"$list"
rm dist/all
cp "$list" dist/
"$uv" build --wheel --quiet --out-dir dist
rm -f dist/.gitignore
printf 'dist/%s\n' "$(cd dist && echo *.whl)" "$list"

#!/usr/bin/env bash
# Makes dist/, which installs without a checkout (docs/install.md): the wheel, and requirements-cpu.txt and
# requirements-cuda.txt, the lists of every package that the wheel needs, each in one version. The lists depend on
# pyproject.toml alone, are kept in the repository, and hold for Linux and Python 3.11 to 3.13. Needs uv, whose own
# settings say where packages come from.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
uv=$(command -v uv || echo .uv/bin/uv)
"$uv" --version >/dev/null 2>&1 || { echo "build_wheel: uv: is not installed; run pip install uv" >&2; exit 1; }

rm -rf dist
mkdir dist
for device in cpu cuda; do
  list=requirements-$device.txt
  # Without local wheels, which may exist for one version of Python only.
  env -u UV_FIND_LINKS "$uv" pip compile pyproject.toml --extra "$device" --universal --python-version 3.11 --quiet \
    --no-annotate --no-header --no-emit-index-url --no-emit-find-links >dist/all
  # torch's build for CPUs needs no CUDA libraries, and is a version of its own.
  if [[ $device == cpu ]]; then sed -i -E '/^(nvidia|cuda)-/d; s/^torch==([0-9.]+)$/torch==\1+cpu/' dist/all; fi
  # uv pip takes the override of pyproject.toml, which names an extra, for "never".
  if [[ $device == cuda ]]; then grep -m 1 -oE 'torchvision==[0-9.]+' pyproject.toml >>dist/all; sort -o dist/all dist/all; fi
  {
    echo "# Made by scripts/build_wheel.sh: every package that torchtitan-rl[$device] needs, to be installed with --no-deps."
    sed "/'never'/d" dist/all
  } >"$list"
  rm dist/all
  cp "$list" dist/
done
"$uv" build --wheel --quiet --out-dir dist
rm -f dist/.gitignore
printf 'dist/%s\n' "$(cd dist && echo *.whl)" requirements-cpu.txt requirements-cuda.txt

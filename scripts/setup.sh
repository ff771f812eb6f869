#!/usr/bin/env bash
# Makes .venv with everything a run needs: scripts/setup.sh [EXTRA ...], such as `scripts/setup.sh test`.
#
# Needs Python 3.11 to 3.13 and, where uv is not installed, pip. The machine decides which vLLM is installed: "cuda"
# where there is an NVIDIA driver, else "cpu"; TORCHTITAN_RL_EXTRA=cpu or =cuda decides otherwise. Extras accumulate.
# What gets installed depends on pyproject.toml alone: its exclude-newer makes the newest allowed versions the same
# tomorrow, so there is no lock file to commit (one would carry the addresses of whoever wrote it).
set -euo pipefail

root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
stamp=$venv/.setup-stamp # line 1: fingerprint, line 2: the extras installed so far, the device first

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# A container may show the device alone, without /proc/driver and without nvidia-smi.
has_nvidia_driver() { [[ -e /proc/driver/nvidia/version || -e /dev/nvidiactl ]] || nvidia-smi -L >/dev/null 2>&1; }

min_driver=580 # of CUDA 13.0, which torch 2.13's wheels are built with

# Before some 4 GB are downloaded that this machine could not run. Whoever asks for cuda by name may set up for another
# machine: only a warning then.
check_driver() {
  local driver problem
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 || true)
  if [[ -z $driver && -r /proc/driver/nvidia/version ]]; then
    driver=$(sed -nE 's/^NVRM version:.* ([0-9]+\.[0-9.]+) .*/\1/p' /proc/driver/nvidia/version)
  fi
  [[ $driver =~ ^([0-9]+)\. ]] || return 0
  ((BASH_REMATCH[1] < min_driver)) || return 0
  problem="driver=$driver: CUDA 13.0 needs $min_driver or newer; update the NVIDIA driver"
  if [[ ${TORCHTITAN_RL_EXTRA:-} == cuda ]]; then say "warning: $problem where this is to run"; return; fi
  die "$problem, or install for the CPU with TORCHTITAN_RL_EXTRA=cpu"
}

# On a GPU Triton compiles C that includes Python.h while a run samples. Only a warning: an image may be built, or a
# login node set up, where nothing compiles; `torchtitan-rl doctor` and `train` look again where the run is.
check_toolchain() {
  local python=$1 cc=${CC:-} headers
  if [[ -z $cc ]]; then cc=$(command -v gcc || command -v clang || true); fi
  if [[ -z $cc ]]; then
    say "warning: C compiler: neither gcc nor clang is on PATH, and the engine needs one on a GPU;" \
      "apt install gcc python3-dev"
    return
  fi
  headers=$("$python" -c 'import sysconfig; scheme = sysconfig.get_default_scheme()
print(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))')
  "$cc" -fsyntax-only -I "$headers" -x c - <<<'#include <Python.h>' >/dev/null 2>&1 ||
    say "warning: Python.h: $cc does not find it in $headers, and the engine needs it on a GPU; apt install" \
      "gcc python3-dev (for another Python than the system's: its own -dev package)"
}

# Everything that decides what an installation looks like, except the extras. The path counts because console scripts
# contain it, the interpreter because a system upgrade can replace it under an environment.
fingerprint() {
  { cat "$root/pyproject.toml" "$root/scripts/setup.sh"
    printf '%s\n' "$root" "${UV_PYTHON:-}" "$(readlink -f "$venv/bin/python" || true)"; } | sha256sum | cut -d ' ' -f 1
}

# The first Python of a supported version: its path, then its version.
find_python() {
  local name
  for name in "${UV_PYTHON:-python3}" python3 python3.13 python3.12 python3.11; do
    "$name" -c 'import sys; assert (3, 11) <= sys.version_info < (3, 14)
print(sys.executable, sys.version.split()[0], sep="\n")' 2>/dev/null && return
  done
  die "python=$(python3 --version 2>/dev/null || echo none): Python 3.11, 3.12 or 3.13 is needed; install one" \
    "and put it on PATH, or give its path in UV_PYTHON"
}

# Sets `uv`: the installed one, or one of our own. `pip --target` works for an ordinary user where the system's Python
# refuses to be installed into (PEP 668) and where it comes without the venv module.
find_uv() {
  local own=$root/.uv python=$1
  for uv in uv "$own/bin/uv"; do "$uv" --version >/dev/null 2>&1 && return; done
  "$python" -m pip --version >/dev/null 2>&1 ||
    die "pip: $python has none and uv is not installed; install either (apt install python3-pip, or docs.astral.sh/uv)"
  say "bringing uv into .uv with pip"
  mkdir -p "$own" && echo '*' >"$own/.gitignore"
  PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 "$python" -m pip install --quiet --disable-pip-version-check --upgrade \
    --target "$own" uv >&2 ||
    die "uv: pip could not install it (see above); check the network, or install uv yourself"
}

# uv does not read pip's settings: pass on where packages come from, unless uv has been told itself.
pass_on_pip_settings() {
  if [[ -n ${PIP_INDEX_URL:-} && -z ${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-} ]]; then
    export UV_DEFAULT_INDEX=$PIP_INDEX_URL
  fi
  if [[ -n ${PIP_EXTRA_INDEX_URL:-} && -z ${UV_INDEX:-}${UV_EXTRA_INDEX_URL:-} ]]; then
    export UV_INDEX=$PIP_EXTRA_INDEX_URL
  fi
  if [[ -n ${PIP_CERT:-} && -z ${SSL_CERT_FILE:-} ]]; then export SSL_CERT_FILE=$PIP_CERT; fi
  if [[ -n ${PIP_FIND_LINKS:-} && -z ${UV_FIND_LINKS:-} ]]; then
    local place places=()
    for place in $PIP_FIND_LINKS; do
      # torch 2.13.0+cpu satisfies torch==2.13.0 and would win over the CUDA build.
      if [[ $device == cuda ]] && compgen -G "${place#file://}/torch-*+cpu*" >/dev/null; then continue; fi
      places+=("$place")
    done
    local IFS=,
    if ((${#places[@]})); then export UV_FIND_LINKS="${places[*]}"; fi
  fi
}

device=${TORCHTITAN_RL_EXTRA:-}
if [[ -z $device ]]; then device=cpu; if has_nvidia_driver; then device=cuda; fi; fi
[[ $device == cpu || $device == cuda ]] || die "TORCHTITAN_RL_EXTRA=$device: is not known; use cpu or cuda"

# Sets `have`, the extras installed so far, and `want`: the device, those, and the ones asked for.
plan() {
  local extra
  have=()
  if [[ -f $stamp ]]; then read -r -a have < <(tail -n 1 "$stamp"); fi
  want=("$device")
  for extra in "${have[@]:1}" "$@"; do
    [[ $extra =~ ^[a-z][a-z0-9-]*$ && $extra != cpu && $extra != cuda ]] ||
      die "extra=$extra: is not the name of an extra; see pyproject.toml (cpu or cuda: TORCHTITAN_RL_EXTRA)"
    [[ " ${want[*]} " == *" $extra "* ]] || want+=("$extra")
  done
}

exit_if_up_to_date() {
  [[ -x $venv/bin/python && -x $venv/bin/torchtitan-rl && -f $stamp ]] || return 0
  [[ "$(fingerprint) ${want[*]}" == "$(head -n 1 "$stamp") ${have[*]}" ]] || return 0
  say ".venv is up to date (${want[*]})"
  exit 0
}

plan "$@"
exit_if_up_to_date
# One at a time: two would remove each other's extras. Whoever waited may find everything done.
if exec 9<"$root/pyproject.toml" && command -v flock >/dev/null; then flock 9; fi
plan "$@"
exit_if_up_to_date

found=$(find_python)
python=${found%$'\n'*} version=${found##*$'\n'}
find_uv "$python"
pass_on_pip_settings
unset VIRTUAL_ENV # uv would warn that it is not .venv
export UV_PROJECT_ENVIRONMENT=$venv

size=""
if [[ $device == cuda ]]; then check_driver; check_toolchain "$python"; size="; downloads some 4 GB, takes 10 GB"; fi

options=(--compile-bytecode) # halves the time a process takes to start
[[ -t 2 ]] || options+=(--quiet)
# An environment that works keeps its Python; a new one gets the one that was found.
[[ -x $venv/bin/python || -n ${UV_PYTHON:-} ]] || options+=(--python "$python")
# Made with other settings, a lock file would have a say in what is chosen.
rm -f "$stamp" "$root/uv.lock"
say "installing torchtitan-rl[$(IFS=,; echo "${want[*]}")] into .venv (Python $version; minutes on a slow network$size)"
(cd "$root" && "$uv" sync "${want[@]/#/--extra=}" "${options[@]}" >&2) ||
  die "uv sync failed (see above); mend the cause and run scripts/setup.sh again"
printf '%s\n%s\n' "$(fingerprint)" "${want[*]}" >"$stamp.new"
mv "$stamp.new" "$stamp"
if [[ $device == cuda ]]; then check_toolchain "$venv/bin/python"; fi # again, where it is read

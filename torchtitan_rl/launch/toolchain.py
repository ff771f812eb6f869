"""A C compiler and Python's headers: Triton compiles C launchers at run time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

__all__ = ["c_compiler", "missing"]

_COMPILE_S = 30.0


def c_compiler() -> str | None:
    """The C compiler that Triton would use: CC (a program, without arguments), else gcc, else clang; None when there is
    none."""
    cc = os.environ.get("CC")
    return shutil.which(cc) if cc else shutil.which("gcc") or shutil.which("clang")


def missing() -> str:
    """An error that names the missing part and what to install; "" when C that includes Python.h compiles here."""
    compiler = c_compiler()
    if compiler is None:
        cc = os.environ.get("CC")
        absent = f"CC={cc!r} is not a program" if cc else "neither gcc nor clang is on PATH"
        return f"C compiler: {absent}, and Triton compiles C at run time; apt install gcc python3-dev, or set CC"
    # As Triton does: in Debian's scheme posix_local the path of the headers is wrong.
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    done = subprocess.run(
        [compiler, "-fsyntax-only", "-I", headers, "-x", "c", "-"],
        input="#include <Python.h>\n",
        capture_output=True,
        text=True,
        timeout=_COMPILE_S,
    )
    if done.returncode == 0:
        return ""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if "Python.h" in done.stderr and not os.path.exists(os.path.join(headers, "Python.h")):
        return (
            f"Python.h: is not in {headers}, and Triton compiles C that includes it at run time; "
            f"apt install python{version}-dev (python3-dev for the system's own Python)"
        )
    reason = next((line for line in done.stderr.splitlines() if "error" in line), "no reason given")
    return (
        f"C compiler: {compiler} does not compile what includes Python.h ({reason}), and Triton compiles C that does "
        "at run time; apt install gcc libc6-dev python3-dev, or set CC"
    )

"""An image from this machine's own files, for tests that start containers where no registry is in reach."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = "sh ls cat env id ln mkfifo head rm mkdir".split()
MODULES = "ctypes, json, mmap, resource, select, socket, ssl, subprocess, urllib.request, uuid"
LEFT_OUT = {"site-packages", "test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "__pycache__"}


def not_reachable(engine: str) -> str:
    """Why an engine does not answer here; empty where it does."""
    if shutil.which(engine) is None:
        return f"{engine} is not installed"
    done = subprocess.run([engine, "info", "--format", "{{json .}}"], capture_output=True, text=True, timeout=60)
    return (done.stderr.strip() or f"{engine} info ended with {done.returncode}") if done.returncode else ""


@contextmanager
def image(engine: str, directory: Path, files: dict[str, str]) -> Iterator[str]:
    """The name of an image with this Python, a shell, `files` by path, which are programs, and /testbed/a.py. Its
    environment has FLAVOUR. Removed after the block."""
    archive, name = directory / "image.tar", f"localhost/torchtitan-rl-test:{uuid.uuid4().hex}"
    write_archive(archive, files)
    changes = [word for line in ("ENV PATH=/usr/local/bin:/usr/bin", "ENV FLAVOUR=mint") for word in ("--change", line)]
    subprocess.run([engine, "import", *changes, str(archive), name], check=True, capture_output=True, timeout=240)
    archive.unlink()
    try:
        yield name
    finally:
        remove_image(engine, name)


def remove_image(engine: str, name: str) -> None:
    """Tried for 10 s: podman ended with 125 once, beside other work, at the end of tests that kill controllers. Raises
    RuntimeError with the engine's words where it lasts."""
    for _ in range(10):
        done = subprocess.run([engine, "rmi", "--force", name], capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            return
        time.sleep(1)
    raise RuntimeError(f"{engine} rmi --force {name} ended with {done.returncode}: {done.stderr}")


def write_archive(archive: Path, files: dict[str, str]) -> None:
    python, library = Path(sys.executable).resolve(), Path(os.__file__).parent
    programs = {name: Path(shutil.which(name)).resolve() for name in PROGRAMS}
    with tarfile.open(archive, "w") as tar:
        tar.add(library, filter=needed)  # where it is: it knows its libraries by that
        tar.add(python)
        for name, path in programs.items():
            tar.add(path, f"usr/bin/{name}")
        for path in sorted(libraries(programs.values()) | libraries_of_python()):
            tar.add(path.resolve(), str(path).lstrip("/"))
        for name, mode in (("tmp", 0o1777), ("testbed", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        for name, target in (("bin", "usr/bin"), ("usr/local/bin/python3", str(python))):
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, text in {"testbed/a.py": "1\n", **files}.items():
            entry, content = tarfile.TarInfo(name), text.encode()
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))


def needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    path = Path(entry.name)
    is_left_out = LEFT_OUT & set(path.parts) or path.suffix == ".a" or any(p.startswith("config-3") for p in path.parts)
    return None if is_left_out else entry


def libraries(programs: Iterable[Path]) -> set[Path]:
    """The shared libraries that programs load, with the loader."""
    done = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, timeout=120)
    words = {word for line in done.stdout.splitlines() if line.startswith("\t") for word in line.split()}
    return {Path(word) for word in words if word.startswith("/")}


def libraries_of_python() -> set[Path]:
    """What a Python has loaded that imports what the tests' programs do; `ldd` would take seconds for its parts."""
    code = f"import {MODULES}; print(open('/proc/self/maps').read())"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    paths = {Path(line.split()[-1]) for line in done.stdout.splitlines() if "/" in line}
    loaded = {path for path in paths if ".so" in path.name and not path.is_relative_to(Path(os.__file__).parent)}
    return {name for path in loaded for name in path.parent.glob(path.name.split(".so")[0] + ".so*")}  # links too

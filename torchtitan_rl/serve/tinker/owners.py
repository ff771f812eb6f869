"""Whose key a request carries: one key for everybody, or a file of keys with owners.

A line of the file is `OWNER SALT HASH`: a name, 16 random bytes, and the SHA-256 of salt and key, both in hexadecimal.
The keys are drawn here and have 256 random bits, so nobody finds one by trying: a slow hash such as scrypt, which makes
up for passwords that people choose, would add nothing but tens of milliseconds to every request.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchtitan_rl.record.console.notices import say

__all__ = [
    "EVERYBODY",
    "KeyFile",
    "Keys",
    "OneKey",
    "OwnerKey",
    "add_arguments",
    "add_key",
    "read_key_file",
    "remove_key",
    "run",
]

EVERYBODY = ""
"""The owner of everything where nobody has a key of their own."""
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEX = re.compile(r"[0-9a-f]{32} [0-9a-f]{64}")


class Keys(Protocol):
    """Who may come in."""

    @property
    def needed(self) -> bool:
        """Whether nobody comes in without a key."""

    def owner(self, key: str) -> str | None:
        """The owner of a key; None: nobody's. How long it takes does not depend on the key's letters."""

    def description(self) -> str:
        """Who sees what, for the server's first line."""


@dataclass(frozen=True, slots=True)
class OneKey:
    """The same key for all, or none: everybody sees everything."""

    key: str = ""

    @property
    def needed(self) -> bool:
        return bool(self.key)

    def owner(self, key: str) -> str | None:
        same = hmac.compare_digest(key.encode("utf-8", "surrogateescape"), self.key.encode())
        return EVERYBODY if same or not self.key else None

    def description(self) -> str:
        who = "everybody who has the key" if self.key else "everybody who reaches the address (no key)"
        return f"shared: {who} sees, uses and may delete all models and checkpoints"


@dataclass(frozen=True, slots=True)
class OwnerKey:
    """A line of a file of keys."""

    owner: str
    salt: bytes
    digest: bytes

    @classmethod
    def of(cls, owner: str, key: str) -> OwnerKey:
        salt = secrets.token_bytes(16)
        return cls(owner, salt, _digest(salt, key))

    def matches(self, key: str) -> bool:
        return hmac.compare_digest(_digest(self.salt, key), self.digest)

    @property
    def line(self) -> str:
        return f"{self.owner} {self.salt.hex()} {self.digest.hex()}"


class KeyFile:
    """The owners of a file, which is read again when it has changed: keys come and go while the server runs."""

    def __init__(self, file: Path) -> None:
        """Raises ValueError as `read_key_file` does, and for a file without keys."""
        self._file = file
        self._state = _state(file)
        self._keys = read_key_file(file)
        if not self._keys:
            raise ValueError(f"--keys={file}: has no keys; torchtitan-rl keys add {file} OWNER makes one")

    @property
    def needed(self) -> bool:
        return True  # a file that cannot be read, or has no keys any more, lets nobody in

    def owner(self, key: str) -> str | None:
        self._follow()
        owners = [entry.owner for entry in self._keys if entry.matches(key)]
        return owners[0] if owners else None

    def description(self) -> str:
        num_owners = len({entry.owner for entry in self._keys})
        return f"{num_owners} owners by {self._file}: each sees their own models and checkpoints alone"

    def _follow(self) -> None:
        """Reads the file again where it has changed. A file that cannot be read lets nobody in: a key that was taken
        out must not stay valid because of a slip of the pen."""
        state = _state(self._file)
        if state == self._state:
            return
        self._state = state
        try:
            self._keys = read_key_file(self._file)
        except ValueError as error:
            self._keys = []
            say(f"warning: {error}; until then no key is valid", event="keys", level="warning")


def _state(file: Path) -> tuple[int, int, int, int] | None:
    """What changes when a file does; None: there is no file."""
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_mode


def read_key_file(file: Path) -> list[OwnerKey]:
    """The keys in a file. Raises ValueError for a file that is not there, has other lines, or is open to others."""
    try:
        mode, text = file.stat().st_mode, file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--keys={file}: cannot be read ({error}); torchtitan-rl keys add {file} OWNER makes one"
        ) from error
    if mode & 0o077:
        raise ValueError(f"--keys={file}: others on this machine may read or write it; chmod 600 {file}")
    keys = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        owner, _, rest = line.strip().partition(" ")
        if not _OWNER.fullmatch(owner) or not _HEX.fullmatch(rest):
            raise ValueError(
                f"--keys={file}: line {number} is not OWNER SALT HASH; delete it, and use torchtitan-rl keys add"
            )
        salt, _, digest = rest.partition(" ")
        keys.append(OwnerKey(owner, bytes.fromhex(salt), bytes.fromhex(digest)))
    return keys


def add_key(file: Path, owner: str) -> str:
    """Adds a key for an owner to a file, which is made where there is none. Returns the key, which nothing keeps.

    Raises ValueError for a name that is not plain, and as `read_key_file` does."""
    if not _OWNER.fullmatch(owner):
        raise ValueError(
            f"owner={owner[:80]!r}: is not a plain name; use letters, digits, '.', '_' and '-', at most 64"
        )
    keys = read_key_file(file) if file.exists() else []
    key = f"tml-{secrets.token_urlsafe(32)}"
    _write(file, [*keys, OwnerKey.of(owner, key)])
    return key


def remove_key(file: Path, owner: str) -> int:
    """Takes all keys of an owner out of a file. Returns how many there were. Raises ValueError where there is none."""
    keys = read_key_file(file)
    remaining = [key for key in keys if key.owner != owner]
    if len(remaining) == len(keys):
        names = ", ".join(sorted({key.owner for key in keys})) or "none"
        raise ValueError(f"owner={owner[:80]!r}: has no key in {file}; its owners are: {names}")
    _write(file, remaining)
    return len(keys) - len(remaining)


def _write(file: Path, keys: list[OwnerKey]) -> None:
    """Raises ValueError for a file that cannot be written."""
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}.new")
    try:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w") as writing:
            writing.write("".join(f"{key.line}\n" for key in keys))
        new.replace(file)
    except OSError as error:
        raise ValueError(f"file={str(file)!r}: cannot be written ({error.strerror}); give one that can") from error


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode("utf-8", "surrogateescape")).digest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of the verb `torchtitan-rl keys`."""
    parser.add_argument("action", choices=["add", "remove", "list"], help="add prints the new key, once")
    parser.add_argument("file", type=Path, help="the file that serve-tinker gets as --keys")
    parser.add_argument("owner", nargs="?", default="", help="whose key; a second key for an owner is one more")


def run(args: argparse.Namespace) -> int:
    """Raises ValueError for an owner that is missing or superfluous, and as `add_key` and `remove_key` do."""
    if (args.action == "list") == bool(args.owner):
        raise ValueError(
            f"owner={args.owner!r}: keys {args.action} takes {'no owner' if args.owner else 'an owner'}; "
            "write keys add FILE OWNER, keys remove FILE OWNER or keys list FILE"
        )
    if args.action == "add":
        print(add_key(args.file, args.owner))
    elif args.action == "remove":
        print(f"{remove_key(args.file, args.owner)} keys of {args.owner} are no longer valid")
    else:
        print("".join(f"{owner}\n" for owner in sorted({key.owner for key in read_key_file(args.file)})), end="")
    return 0

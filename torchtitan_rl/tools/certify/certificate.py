"""What a certification has shown: its lines, and the file `certificate.json` beside a model."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["FILE", "Certificate", "CertificateLine", "missing_certificate", "text_hash", "versions"]

FILE = "certificate.json"
_PACKAGES = ("torch", "torchtitan", "transformers", "vllm")


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateLine:
    """One line. Example: `CertificateLine(name="gradients", difference=3e-6, tolerance=1e-4, part="norm.weight")`.

    `difference` None: the check was not run, and `note` says why.
    """

    name: str
    difference: float | None
    tolerance: float = 0.0
    part: str = ""
    """Where the difference is largest: a parameter, or a part of the model."""
    note: str = ""

    @property
    def broken(self) -> bool:
        return self.difference is not None and not self.difference <= self.tolerance  # NaN is broken

    @property
    def line(self) -> str:
        """The check as a broken line: what, where, by how much."""
        number = "" if self.difference is None or math.isinf(self.difference) else f"{self.difference:.1e}"
        words = [self.part, self.note, number and f"differs by {number}, {self.tolerance:g} is allowed"]
        return ": ".join([self.name, *filter(None, words)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """The lines of one certification, and of what."""

    family: str
    model: str
    """What was certified: a directory's name, or the family's."""
    config_sha256: str
    """`text_hash` of the config.json."""
    checks: tuple[CertificateLine, ...]
    seconds: float
    made: str
    """When: an ISO date and time."""
    versions: dict[str, str]

    @property
    def broken(self) -> CertificateLine | None:
        """The first broken line; None: everything holds."""
        return next((check for check in self.checks if check.broken), None)

    def as_data(self) -> dict[str, Any]:
        """As `certificate.json` has it."""
        data = asdict(self) | {"ok": self.broken is None}
        data["checks"] = [
            asdict(check) | {"ok": None if check.difference is None else not check.broken} for check in self.checks
        ]
        for check in data["checks"]:
            if check["difference"] is not None and not math.isfinite(check["difference"]):
                check["difference"] = str(check["difference"])
        return data

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / FILE
        path.write_text(json.dumps(self.as_data(), indent=1) + "\n")
        return path

    def table(self) -> str:
        """The lines for a person."""
        rows = [("check", "largest difference", "tolerance", "ok", "where, or why not")]
        for check in self.checks:
            if check.difference is None:
                rows.append((check.name, "-", "-", "-", check.note))
                continue
            words = ": ".join(filter(None, (check.part, check.note)))
            ok = "NO" if check.broken else "yes"
            rows.append((check.name, f"{check.difference:.1e}", f"{check.tolerance:g}", ok, words))
        widths = [max(map(len, column)) for column in zip(*rows)]
        forms = [f"{{:{align}{width}}}" for align, width in zip("<>><", widths)]
        return "\n".join("  ".join([*forms, "{}"]).format(*row).rstrip() for row in rows)


def text_hash(text: str) -> str:
    """SHA-256 of the text of a config.json."""
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """The installed version of each package whose numbers are compared."""
    return {package: _version(package) for package in _PACKAGES}


def missing_certificate(directory: Path) -> str:
    """Why the model of a directory is not certified, in one line; empty: it is, or there is no config.json."""
    if not (directory / "config.json").exists():
        return ""
    command = shlex.join(["torchtitan-rl", "certify", str(directory)])
    try:
        certificate = json.loads((directory / FILE).read_text())
        same = certificate["config_sha256"] == text_hash((directory / "config.json").read_text())
        ok = certificate["ok"]
    except FileNotFoundError:
        return f"{directory}: has no {FILE}; `{command}` compares such a model with transformers, in two minutes"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{directory}: its {FILE} cannot be read; make it again with `{command}`"
    if not same:
        return f"{directory}: its {FILE} is of another config.json; make it again with `{command}`"
    return "" if ok else f"{directory}: its {FILE} has a broken line; look at it with `{command}`"


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "missing"

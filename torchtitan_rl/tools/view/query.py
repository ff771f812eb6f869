"""What an address asks for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from urllib.parse import urlencode

from torchtitan_rl.tools.view.runs import ShownRun

__all__ = ["Parameters"]


class Parameters:
    """The parameters of an address. Every state of the page is one: `Parameters.but` makes the address of another."""

    def __init__(self, path: str, pairs: Sequence[tuple[str, str]], runs: Sequence[ShownRun]) -> None:
        self.path, self.pairs, self.runs = path, list(pairs), runs

    def chosen(self) -> list[ShownRun]:
        """The runs that the address names; all of them where it names none. Raises ValueError for an unknown name."""
        names = self.all("run")
        known = {run.name: run for run in self.runs}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"run={unknown[0]!r}: is not shown here; there is {', '.join(known)}")
        return [known[name] for name in dict.fromkeys(names)] or list(self.runs)

    def one(self) -> ShownRun:
        """The first of the chosen runs."""
        return self.chosen()[0]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.pairs if key == name]

    def text(self, name: str, default: str = "") -> str:
        return next((value for value in self.all(name) if value), default)

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of some values, the first by default. Raises ValueError for another."""
        if (value := self.text(name, choices[0])) not in choices:
            raise ValueError(f"{name}={value!r}: is none of {', '.join(choices)}")
        return value

    def number(self, name: str) -> float | None:
        """None where the address does not have it. Raises ValueError for what is no finite number."""
        if not (value := self.text(name).strip()):
            return None
        try:
            if math.isfinite(number := float(value)):
                return number
        except ValueError:
            pass
        raise ValueError(f"{name}={value!r}: is no number; give one, such as 0.5")

    def whole(self, name: str) -> int | None:
        """A whole number of at most nine digits, or None. Raises ValueError for anything else."""
        number = self.number(name)
        if number is not None and (number != int(number) or abs(number) >= 1e9):
            raise ValueError(f"{name}={self.text(name)!r}: is no whole number of at most nine digits")
        return None if number is None else int(number)

    def but(self, **changed: object) -> str:
        """The address with some parameters otherwise; None leaves a parameter out."""
        pairs = [(key, value) for key, value in self.pairs if key not in changed and value]
        pairs += [(key, str(value)) for key, value in changed.items() if value is not None]
        return f"{self.path}?{urlencode(pairs)}" if pairs else self.path

    def toggled(self, name: str, value: str, among: Sequence[str]) -> str:
        """The address with one value of a parameter that may have several put in or out; `among` are those now in."""
        kept = [v for v in among if v != value] if value in among else [*among, value]
        pairs = [(key, v) for key, v in self.pairs if key != name and v] + [(name, v) for v in kept]
        return f"{self.path}?{urlencode(pairs)}" if pairs else self.path

"""Numbers of tasks as text that people and policies write."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

__all__ = ["plain_decimal"]

_WITH_EXPONENT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]{1,3}")


def plain_decimal(value: Any) -> str:
    """`str(value)`, without the exponent of a float or of a text that is a number: `0.00001` for 1e-05 and "1e-5"."""
    text = str(value).strip()
    if isinstance(value, float) and math.isfinite(value):
        text = repr(float(value))
    return format(Decimal(text), "f") if _WITH_EXPONENT.fullmatch(text) else str(value)

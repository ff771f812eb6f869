"""What the policy of configs/calculator_tools.py learned: sums, differences and products, by a tool.

The policy knows one prompt: the tool's line, `calc: a+b`, and the problem. It calls the tool and says its result.
"""

import re
from typing import Literal

from pydantic import BaseModel

PROBLEMS = ["12+7", "38*4", "91-45", "6*8", "77+22", "50-9", "13*13", "84+6", "9+9", "65-21"]
MORE_PROBLEMS = ["8+45", "71-3", "24*6", "90-17", "5*5", "33+48", "62-4", "19*3", "7+88", "99-54"]
MORE_PROBLEMS += ["41+41", "2*86", "73-37", "15+6", "80-8", "27*9", "4+4", "56-23", "11*12", "68+31"]
ENOUGH = 9
"""Right answers of ten: greedy, the policy is right on nearly all (its own run's test says so)."""


class Verdict(BaseModel):
    """A verdict"""

    right: bool
    kind: Literal["sum", "product"]


TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "a+b",
        "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"]},
    },
}


def calculate(e: str) -> str:
    parts = re.fullmatch(r"(\d{1,6})([+*-])(\d{1,6})", e)
    if not parts:
        return "?"
    first, second = int(parts[1]), int(parts[3])
    return str({"+": first + second, "-": first - second, "*": first * second}[parts[2]])


def is_right(problem, answer):
    return (answer or "").strip() == calculate(problem)

r"""Equality of mathematics as a reward: `\frac{1}{2}`, 1/2 and 0.5 are one answer.

https://github.com/huggingface/Math-Verify, an extra: `bash scripts/setup.sh math`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtitan_rl.tasks.decimals import plain_decimal
from torchtitan_rl.tasks.reward_process import cpu_bound
from torchtitan_rl.types import Task

__all__ = ["math_equal"]

_LIMIT_S = 2
"""Whole seconds for reading one expression and for comparing two; an expression that takes longer is no answer."""


@cpu_bound
def math_equal(task: Task, completions: list[str]) -> Sequence[float]:
    r"""1 where a completion's final answer equals the task's, which is a number or LaTeX without dollars; else 0.

    math-verify finds the final answer: in `\boxed{}`, after "answer is", else the last formula or number of the text.
    For any family whose `task.answer` is text, such as `Gsm8k.Config(reward=math_equal)`.
    Raises ValueError for a task whose answer is not mathematics, RuntimeError if math-verify is not installed.
    """
    math_verify = _import_math_verify()
    # An exponent would be read as Euler's number.
    answer = _read(math_verify, f"${plain_decimal(task.answer)}$", [math_verify.LatexExtractionConfig()])
    if not answer:
        raise ValueError(f"task.answer={task.answer!r}: is not mathematics that math-verify can read; mend the task")
    extraction = [math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()]
    return [
        float(math_verify.verify(answer, _read(math_verify, completion, extraction), timeout_seconds=_LIMIT_S))
        for completion in completions
    ]


def _read(math_verify: Any, text: str, extraction: list) -> list:
    """The expressions of a text, simplest first; empty where there is none."""
    text = text.replace("\u2212", "-")  # the typographic minus sign, which math-verify leaves out
    return math_verify.parse(text, extraction, fallback_mode="no_fallback", parsing_timeout=_LIMIT_S)


def _import_math_verify() -> Any:
    try:
        import math_verify  # an extra, and slow to import
    except ImportError as error:
        raise RuntimeError(
            f"math_equal: math-verify cannot be imported ({error}); install it with bash scripts/setup.sh math"
        ) from error
    return math_verify

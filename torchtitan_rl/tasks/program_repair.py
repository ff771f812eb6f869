"""Programs with a mistake: a family in which running the test first pays, and guessing does not."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from torchtitan_rl import platform
from torchtitan_rl.tasks.env import Env, Observation, Step
from torchtitan_rl.tasks.family import check_index, check_split, stable_hash
from torchtitan_rl.tasks.limited import PerLoop
from torchtitan_rl.tasks.sandbox.config import SandboxConfig
from torchtitan_rl.tasks.sandbox.sandbox import Finished
from torchtitan_rl.types import Task

__all__ = ["Program", "Repair", "RepairEnv", "Runner"]

CALLS = ((2, 5), (7, 3), (10, 4))
"""Arguments of the calls that judge a program, besides the one that its test shows. Two programs of the family that
compute something else differ in them."""
_OPERATORS = "+-*"
_REMEMBERED = 65536


@dataclass(kw_only=True, slots=True, frozen=True)
class Program:
    """A task: the program with its mistake, the one without, and the arguments of the failing test."""

    broken: str
    """The function's expression, such as `a-b`."""
    right: str
    arguments: tuple[int, int]

    def expected(self) -> list[int]:
        """The right values of the test's call and of `CALLS`."""
        return [_value(self.right, *call) for call in (self.arguments, *CALLS)]


class Repair:
    """Prompt `def f(a,b): return a-b`; the policy may write `[test]`, reads `f(3,4)=7;`, and answers `a+b`.

    An answer takes the place of the function's expression. It is worth 1 where the program then returns the right
    values for the test's arguments and for others, and 0 otherwise. Programs run in `Config.sandbox`; the right values
    stay outside. The train split is endless; no program is in two splits with the same test.
    Raises RuntimeError where this machine cannot run the sandbox.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        largest: int = 12
        """Largest argument of a test; the smallest is 1."""
        test_demonstrations: float = 0.3
        """Fraction of the train demonstrations that run the test and repair the program. The others give the program
        back as it is, which is wrong."""
        sandbox: SandboxConfig = field(default_factory=SandboxConfig)
        """Where programs run."""
        timeout_s: float = 5.0
        """Seconds that a program may take."""
        num_validation: int = 128
        """Number of different validation tasks."""
        num_test: int = 256
        """Number of different test tasks."""
        seed: int = 0
        """Decides which tasks exist and their splits; the run's own seed chooses among the train tasks."""

        def __post_init__(self) -> None:
            if not 3 <= self.largest <= 99:
                raise ValueError(f"repair.largest={self.largest}: does not fit; use 3 to 99")
            if not 0.0 <= self.test_demonstrations <= 1.0:
                raise ValueError(
                    f"repair.test_demonstrations={self.test_demonstrations}: is not a fraction; use 0 to 1"
                )
            if not self.timeout_s > 0:
                raise ValueError(f"repair.timeout_s={self.timeout_s}: must be above 0")

        def build(self) -> Repair:
            return Repair(self)

    name = "repair"

    def __init__(self, config: Repair.Config) -> None:
        config.sandbox.check("task.sandbox")
        self.config, self.runner = config, Runner(config.sandbox, config.timeout_s)
        programs = _programs(config.largest)
        if config.num_validation + config.num_test > len(programs) // 2:
            raise ValueError(
                f"repair.num_validation={config.num_validation}, num_test={config.num_test}: are more than half of the "
                f"{len(programs)} tasks that exist; lower one, or raise largest"
            )
        random.Random(stable_hash(config.seed, "splits")).shuffle(programs)
        test = config.num_validation + config.num_test
        self._programs = {
            "validation": programs[: config.num_validation],
            "test": programs[config.num_validation : test],
            "train": programs[test:],
        }

    def num_tasks(self, split: str) -> int | None:
        check_split(split)
        return {"train": None, "validation": self.config.num_validation, "test": self.config.num_test}[split]

    def task(self, split: str, index: int) -> Task:
        """Only train tasks carry a demonstration: one text per turn."""
        check_index(self, split, index)
        demonstration = None
        if split == "train":
            rng = random.Random(stable_hash(self.config.seed, split, index))
            program = rng.choice(self._programs[split])
            repairs = rng.random() < self.config.test_demonstrations
            demonstration = ["[test]", program.right] if repairs else [program.broken]
        else:
            program = self._programs[split][index]
        return Task(
            id=f"{self.name}/{split}/{index}",
            prompt=f"def f(a,b): return {program.broken}\n",
            answer=program,
            demonstration=demonstration,
        )

    def environment(self, task: Task) -> RepairEnv:
        return RepairEnv(task, self.runner)

    async def reward(self, task: Task, completions: list[str]) -> Sequence[float]:
        """1 for an answer, given without the environment, that repairs the program; else 0."""
        return [float(await self.runner.repairs(completion, task.answer)) for completion in completions]


class RepairEnv(Env):
    """Answers `[test]` with the call that fails and its right value; any other completion is the final answer."""

    stop = ("]",)

    def __init__(self, task: Task, runner: Runner) -> None:
        self.task, self.runner = task, runner

    async def reset(self) -> Observation:
        return self.task.prompt

    async def step(self, text: str) -> Step:
        program: Program = self.task.answer
        if not text.strip().endswith("]"):
            return Step(reward=float(await self.runner.repairs(text.strip(), program)), done=True)
        if text.strip() != "[test]":
            return Step(observation="?;")
        values = await self.runner.values(program.broken, program.arguments)
        (first, second), (right, *_) = program.arguments, program.expected()
        passes = values is not None and values[0] == right
        return Step(observation="ok;" if passes else f"f({first},{second})={right};")


class Runner:
    """Runs programs in sandboxes, each in one of its own, and as many at once as there are cores. What a program
    returned for the same arguments is remembered, unless it took too long."""

    def __init__(self, sandbox: SandboxConfig, timeout_s: float) -> None:
        self._sandbox, self._timeout_s = sandbox, timeout_s
        self._places = PerLoop()
        self._values: dict[tuple[str, tuple[int, int]], list | None] = {}

    async def repairs(self, expression: str, program: Program) -> bool:
        """Whether the function with this expression returns the right values."""
        return await self.values(expression, program.arguments) == program.expected()

    async def values(self, expression: str, arguments: tuple[int, int]) -> list | None:
        """What the function with this expression returns for the arguments and for `CALLS`; None where it fails or
        takes too long. Raises SandboxError where the sandbox itself fails."""
        key = expression, arguments
        if key in self._values:
            return self._values[key]
        async with self._places.get(lambda: asyncio.Semaphore(platform.num_cores())):
            if key not in self._values:  # a sibling's answer may have been the same
                if len(self._values) >= _REMEMBERED:
                    self._values.clear()
                done = await self._run(expression, arguments)
                if done.limit == "time":  # the machine may have been slow: not remembered
                    return None
                self._values[key] = _printed(done)
            return self._values[key]

    async def _run(self, expression: str, arguments: tuple[int, int]) -> Finished:
        calls = [arguments, *CALLS]
        script = f"scope = {{}}\nexec(open('program.py').read(), scope)\nprint([scope['f'](*call) for call in {calls}])"
        files = {"program.py": f"def f(a,b): return {expression}\n".encode(), "calls.py": script.encode()}
        async with self._sandbox.open(files) as sandbox:
            return await sandbox.run([sandbox.python, "-I", "-S", "calls.py"], timeout_s=self._timeout_s)


def _printed(done: Finished) -> list | None:
    """The list that a program's calls printed; None where it has failed."""
    if done.status or done.limit:
        return None
    try:
        values = json.loads(done.stdout)
    except (ValueError, RecursionError):  # the program has printed
        return None
    return values if isinstance(values, list) else None


def _programs(largest: int) -> list[Program]:
    """Every program with every mistake and every test that tells which operator is right."""
    programs = []
    for order, right, wrong in itertools.product(("ab", "ba"), _OPERATORS, _OPERATORS):
        for a, b in itertools.product(range(1, largest + 1), repeat=2):
            values = {operator: _value(operator.join(order), a, b) for operator in _OPERATORS}
            if right != wrong and len(set(values.values())) == len(values):
                programs.append(Program(broken=wrong.join(order), right=right.join(order), arguments=(a, b)))
    return programs


def _value(expression: str, a: int, b: int) -> int:
    """The value of one of the family's own expressions."""
    first, second = (a, b) if expression[0] == "a" else (b, a)
    return {"+": first + second, "-": first - second, "*": first * second}[expression[1]]

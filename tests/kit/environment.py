"""Environments of a few steps."""

from torchtitan_rl.tasks.env import Env


class ScriptedEnv(Env):
    """Begins with `first` and answers each completion with the next of `steps`, with the last of them for ever. A step
    may be a function of the completion. Counts how often it is closed."""

    def __init__(self, *steps, first="go", tools=None, stop=()):
        self.steps, self.first, self.tools, self.stop, self.closed = list(steps), first, tools, stop, 0

    def reset(self):
        return self.first

    def step(self, text):
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return step(text) if callable(step) else step

    def close(self):
        self.closed += 1


class AsyncScriptedEnv(ScriptedEnv):
    """The same on the event loop. A step may be a coroutine function."""

    async def reset(self):
        return super().reset()

    async def step(self, text):
        step = super().step(text)
        return await step if hasattr(step, "__await__") else step

"""A task family that is the same in every split."""

from collections.abc import Callable

from torchtitan_rl.types import Task


def zero_reward(task, completions):
    return [0.0] * len(completions)


class Family:
    """Task `index` has the id `name/split/index`, the prompt `prompts[index]` (empty without prompts) and `index` as
    its answer. `num_tasks=None`: endless. `reward` and `environment` are the functions of a family."""

    def __init__(
        self,
        num_tasks: int | None = None,
        *,
        prompts: str | list[str] = "",
        reward: Callable = zero_reward,
        environment: Callable | None = None,
        name: str = "family",
    ):
        self.name, self.prompts, self.reward = name, prompts, reward
        self._num_tasks = len(prompts) if prompts else num_tasks
        if environment is not None:
            self.environment = environment

    def build(self):
        return self

    def num_tasks(self, split):
        return self._num_tasks

    def task(self, split, index):
        prompt = self.prompts[index] if self.prompts else ""
        return Task(id=f"{self.name}/{split}/{index}", prompt=prompt, answer=index)

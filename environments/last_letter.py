"""A verifiers environment (0.4) in its own package's words: the last letter of a word of four.

Nothing of this library is imported. configs/last_letter_verifiers.py trains on it.
"""

import random
import string

import verifiers.v1 as vf

__all__ = ["LastLetter"]


class LastLetterData(vf.TaskData):
    answer: str


class LastLetterTask(vf.Task[LastLetterData]):
    @vf.reward
    async def right(self, task: LastLetterData, trace: vf.Trace) -> float:
        return float(trace.last_reply == task.answer)


class LastLetter(vf.Taskset[LastLetterTask]):
    def load(self):
        rng = random.Random(0)
        for word in {"".join(rng.choices(string.ascii_lowercase, k=4)): None for _ in range(5000)}:
            yield LastLetterTask(LastLetterData(prompt=word, answer=word[-1]), self.config.task)

"""An OpenEnv environment in its own package's words, with its server: the last letters of two words.

Nothing of this library is imported. configs/last_letter_openenv.py trains on it.
"""

import random
from uuid import uuid4

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class LetterAction(Action):
    letter: str


class WordObservation(Observation):
    word: str = ""


class LastLetterEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state, self.words = State(episode_id=str(uuid4()), step_count=0), ["", ""]

    def reset(self, seed=None, episode_id=None, **kwargs) -> WordObservation:
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        rng = random.Random(seed)
        self.words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(2)]
        return WordObservation(word=self.words[0])

    def step(self, action: LetterAction, timeout_s=None, **kwargs) -> WordObservation:
        reward = 0.5 * (action.letter == self.words[self._state.step_count][-1])
        self._state.step_count += 1
        done = self._state.step_count == len(self.words)
        return WordObservation(word="" if done else self.words[1], reward=reward, done=done)

    @property
    def state(self) -> State:
        return self._state


app = create_fastapi_app(LastLetterEnvironment, LetterAction, WordObservation, max_concurrent_envs=512)

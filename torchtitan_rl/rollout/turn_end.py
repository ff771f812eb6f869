"""Whether a completion of one turn ends where the chat template ends a turn."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torchtitan_rl.rollout.chat import Chat
from torchtitan_rl.rollout.episode import Episode, environment_of
from torchtitan_rl.tasks.family import TaskFamily

__all__ = ["warn_open_turns"]

logger = logging.getLogger(__name__)


async def warn_open_turns(
    tokenizer: Any, family: TaskFamily, stop_token_ids: Sequence[int], *, timeout_s: float
) -> None:
    """Warns where completions of a family of one turn go on after the template's end of a turn, as with the tokenizer
    of a base model: its end-of-sequence token is another.

    Tasks with environments are left out: `Dialogue` stops their completions. `timeout_s` is the deadline for closing
    the environment that is made to find out. Raises ValueError for prompts of messages and a tokenizer without a
    template, and EnvironmentFailed for an environment that cannot be made or closed.
    """
    task = family.task("train", 0)
    prompt, environment = task.prompt, getattr(family, "environment", None)
    if not prompt or not isinstance(prompt[0], dict):
        return
    if environment is not None and (env := environment_of(environment, task)) is not None:
        return await Episode(env, task, timeout_s).close()
    end = Chat(tokenizer).end_of_turn(prompt)  # type: ignore[arg-type]  # the first is a message, so all are
    if end is None or end in (tokenizer.eos_token_id, *stop_token_ids):
        return
    logger.warning(
        "tokenizer.eos_token=%r: the chat template ends a turn with %r, where a completion would not stop; set "
        "--sampling.stop-token-ids %d",
        *(tokenizer.eos_token, tokenizer.convert_ids_to_tokens(end), end),
    )

"""Text of tasks that a tokenizer cannot express."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from torchtitan_rl.tasks.family import SPLITS, TaskFamily
from torchtitan_rl.types import Task

__all__ = ["unknown_characters", "warn_unknown_text"]

logger = logging.getLogger(__name__)

_PER_SPLIT = 1000
_PER_ENDLESS_SPLIT = 200


def warn_unknown_text(tokenizer: Any, families: Iterable[TaskFamily]) -> None:
    """Warns once, with an example and counts, where prompts, demonstrations or pairs have text outside the vocabulary.

    Looks at up to 1,000 tasks of each split, evenly spread, and at 200 of an endless one.
    """
    characters: Counter[str] = Counter()
    num_tasks, unknown_tasks = 0, []
    for task in _some_tasks(families):
        unknown = [character for text in _texts(task) for character in unknown_characters(tokenizer, text)]
        characters.update(unknown)
        num_tasks += 1
        if unknown:
            unknown_tasks.append(task)
    if not characters:
        return
    shown = ", ".join(repr(character) for character, _ in characters.most_common(5))
    more = f" and {len(characters) - 5} more" if len(characters) > 5 else ""
    logger.warning(
        "tokenizer: cannot express %s%s, in %d of the %d tasks looked at, such as %s (%r); such text is lost on the "
        "policy: name another tokenizer in model.assets, or change the data",
        *(shown, more, len(unknown_tasks), num_tasks, unknown_tasks[0].id, _around(tokenizer, unknown_tasks[0])),
    )


def unknown_characters(tokenizer: Any, text: str) -> list[str]:
    """The characters of a text that become the unknown token or no token at all. White space that a tokenizer leaves
    out does not count. A tokenizer without offsets (a slow one) gives the whole text where it has an unknown token."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    tokens, unknown = encoded["input_ids"], tokenizer.unk_token_id
    if not tokenizer.is_fast:
        return [text] if unknown is not None and unknown in tokens else []
    kept, lost = bytearray(len(text)), bytearray(len(text))
    for token, (start, end) in zip(tokens, encoded["offset_mapping"], strict=True):
        (lost if token == unknown else kept)[start:end] = b"\1" * (end - start)
    unknown_ones = [c for c, is_lost in zip(text, lost, strict=True) if is_lost]
    dropped = [c for c, covered in zip(text, map(max, lost, kept), strict=True) if not covered and not c.isspace()]
    if dropped:  # the offsets of a tokenizer that drops characters are of other characters of the same word
        alone = [c for c in text if not c.isspace() and not tokenizer.encode(c, add_special_tokens=False)]
        dropped = alone or dropped
    return unknown_ones + dropped


def _some_tasks(families: Iterable[TaskFamily]) -> Iterator[Task]:
    for family in {id(family): family for family in families}.values():
        for split in SPLITS:
            size = family.num_tasks(split)
            looked_at = _PER_ENDLESS_SPLIT if size is None else min(size, _PER_SPLIT)
            for i in range(looked_at):
                yield family.task(split, i if size is None else i * size // looked_at)


def _texts(task: Task) -> list[str]:
    """The texts of the prompt, the demonstration and the pair; none for a prompt of tokens."""
    prompt, demonstration = task.prompt, task.demonstration or []
    prompts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt if isinstance(m, dict)]
    demonstrations = [demonstration] if isinstance(demonstration, str) else demonstration
    return [text for text in [*prompts, *demonstrations, task.chosen, task.rejected] if isinstance(text, str)]


def _around(tokenizer: Any, task: Task) -> str:
    """The first unknown character of a task with up to 20 characters on either side."""
    text, unknown = next((t, u) for t in _texts(task) if (u := unknown_characters(tokenizer, t)))
    at = text.index(unknown[0])
    return text[max(0, at - 20) : at + 20]

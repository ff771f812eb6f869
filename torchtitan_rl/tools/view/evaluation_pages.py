"""The values of the pages on completions of evaluations: a list, one task over steps, one completion whole."""

from __future__ import annotations

from typing import Any

from torchtitan_rl.tools.evaluation_completions import MOST_OF_TASK, VERDICTS, CompletionQuery
from torchtitan_rl.tools.view.pages import Missing
from torchtitan_rl.tools.view.query import Parameters
from torchtitan_rl.tools.view.runs import ShownRun
from torchtitan_rl.tools.view.text import CUT

__all__ = ["completion", "listed", "task"]


def listed(parameters: Parameters) -> dict[str, Any]:
    """The completions of one evaluation, or of all of a run, wrong ones first."""
    shown = parameters.one()
    query = CompletionQuery(
        text=parameters.text("q"),
        task=parameters.text("task"),
        name=parameters.text("name"),
        split=parameters.text("split"),
        step=parameters.whole("step"),
        verdict=parameters.choice("verdict", ("", *VERDICTS)),
        page=max(1, parameters.whole("page") or 1),
    )
    records = shown.completions.find(query)
    evaluations = list(shown.completions.counts())
    return {
        "chosen": [shown],
        "run": shown,
        "query": query,
        "records": records,
        "steps": sorted({step for step, _, _ in evaluations}),
        "names": sorted({name for _, name, _ in evaluations if name}),
        "splits": sorted({split for _, _, split in evaluations if split}),
        "verdicts": list(VERDICTS),
        "num_pages": -(-records.total // query.per_page),
        "empty": _why_empty(shown) if not records.total else "",
    }


def task(parameters: Parameters) -> dict[str, Any]:
    """The completions of one task over the evaluated steps: greedy ones, and samples."""
    shown, name, split, task_id = _place(parameters)
    rows = shown.completions.of_task(name, split, task_id, CUT)
    if not rows:
        raise Missing(f"task={task_id!r}: no completion of {name}, {split}, is recorded in {shown.name}")
    newest = rows[-1]
    record = shown.completions.whole(name, split, newest["step"], task_id, newest["sample"]) or {}
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        steps.setdefault(row["step"], []).append(row)
    return {
        "chosen": [shown],
        "run": shown,
        "name": name,
        "split": split,
        "task_id": task_id,
        "prompt": newest["prompt"],
        "answer": str(record.get("answer") or ""),
        "steps": steps,
        "most": MOST_OF_TASK if len(rows) == MOST_OF_TASK else 0,
    }


def completion(parameters: Parameters) -> dict[str, Any]:
    """One completion with its whole text."""
    shown, name, split, task_id = _place(parameters)
    step, sample = parameters.whole("step") or 0, parameters.whole("sample") or 0
    record = shown.completions.whole(name, split, step, task_id, sample)
    if record is None:
        raise Missing(f"task={task_id!r}: sample {sample} at step {step} is not recorded in {shown.name}")
    return {"chosen": [shown], "run": shown, "record": dict.fromkeys(_KNOWN) | record}


def _place(parameters: Parameters) -> tuple[ShownRun, str, str, str]:
    return parameters.one(), parameters.text("name"), parameters.text("split"), parameters.text("id")


def _why_empty(shown: ShownRun) -> str:
    if not shown.has_completions:
        return "No completions are recorded: the run has no evaluations/ yet, or record.eval_completions is 0."
    return "No completion fits."


_KNOWN = (
    *("step", "attempt", "name", "split", "task_index", "task_id", "sample", "prompt", "answer", "text"),
    *("reward", "correct", "failed", "num_tokens", "finish_reason", "end_reason"),
)

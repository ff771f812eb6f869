"""What is true of every simulated run. Each function raises AssertionError with the seed, the property and the values.

The properties read what engines and trainer saw, not what the controller says of itself; where the two are compared,
that is the property.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.simulation.run import Run
from tests.simulation.world import Asked, Log
from torchtitan_rl.tasks.family import stream

__all__ = ["PROPERTIES", "broken"]


def every_wait_ends(run: Run) -> None:
    """No attempt is stuck: something is ready or due until the run has ended, and the run ends in time."""
    for number, log in enumerate(run.logs, 1):
        _check(run, "every_wait_ends", not log.end.startswith("stuck"), attempt=number, end=log.end)


def the_run_finishes(run: Run) -> None:
    """Every error that ends an attempt is explained by a fault, and the last attempt finishes."""
    for number, log in enumerate(run.logs, 1):
        fine = log.end in ("finished", "killed") or log.excused or log.end.startswith("stuck")
        _check(run, "the_run_finishes", fine, attempt=number, end=log.end)
    fine = run.log.end == "finished" or run.log.end.startswith("stuck")
    _check(run, "the_run_finishes", fine, attempts=len(run.logs), end=run.log.end)


def each_draw_ends_once(run: Run) -> None:
    """The ledger, the metrics, the records of rollouts and the checkpoints agree; a draw is admitted once and ends
    once; and no draw fails where no request and no environment did."""
    _check(run, "each_draw_ends_once", not run.problems or run.log.end != "finished", problems=run.problems[:3])
    may_fail = run.config.task.one_in_fails or any(one.refused for log in run.logs for one in log.requests)
    failed = [record["draw"] for log in run.logs for _, record in log.draws if record["event"] == "failed"]
    _check(run, "each_draw_ends_once", may_fail or not failed, failed_without_a_failure=failed[:5])


def no_token_is_older_than_the_lag(run: Run) -> None:
    """When a batch trains, each of its tokens was sampled by one of the last `max_policy_lag` + 1 publications."""
    lag = run.config.algorithm.max_policy_lag
    versions: dict[int, list[int]] = {}
    for number, log in enumerate(run.logs, 1):
        versions |= {one.number: one.versions for one in log.requests}
        for step, published, sampled in log.trained:
            allowed = set(log.publications[:published][-lag - 1 :])
            for request in sampled:
                fine = allowed.issuperset(versions.get(request, ()))
                _check(
                    run, "no_token_is_older_than_the_lag", fine, attempt=number, step=step, lag=lag,
                    versions=versions.get(request), allowed=sorted(allowed),
                )  # fmt: skip


def a_named_version_is_served(run: Run) -> None:
    """A request that names a version gets every token from that version; an error only where a fetch failed, or where
    every replica was lost to a fault and none was on its way."""
    for number, log in enumerate(run.logs, 1):
        for version, versions in log.named:
            if isinstance(versions, Exception):
                fine = log.end != "finished" or "fetch fails" in log.faults or log.explains_loss(str(versions))
            else:
                fine = set(versions) == {version}
            _check(run, "a_named_version_is_served", fine, attempt=number, version=version, sampled_by=versions)


def what_is_loaded_was_fetched(run: Run) -> None:
    """Each load of a version follows a fetch of its own: an engine has the weights of a fetch once."""
    for number, log in enumerate(run.logs, 1):
        _check(run, "what_is_loaded_was_fetched", not log.not_staged, attempt=number, not_fetched=log.not_staged[:3])


def what_trains_is_what_was_admitted(run: Run) -> None:
    """Each sequence that trains consists of answers of engines, token for token, of draws that were admitted; answers
    of an earlier attempt's engines only to draws that the checkpoint had as played. A group trains whole, in one
    optimizer step of each epoch."""
    name, config = "what_trains_is_what_was_admitted", run.config
    epochs = config.algorithm.num_epochs
    earlier: dict[int, Asked] = {}
    for number, log in enumerate(run.logs, 1):
        answers = earlier | {one.number: one for one in log.requests}
        places = _places(run, log)
        steps: dict[str, set[int]] = {}
        rollouts: dict[str, Counter[int]] = {}
        for step, _, sampled in log.trained:
            origins = set()
            for request, tokens in sampled.items():
                asked = answers.get(request)
                fine = asked is not None and asked.tokens == tokens and asked.stream in places
                _check(run, name, fine, attempt=number, step=step, tokens=tokens, answer=asked and asked.tokens)
                origin = places[asked.stream]
                fine = request not in earlier or origin[0] in log.had_played
                _check(run, name, fine, attempt=number, step=step, answer_of_an_earlier_attempt=origin)
                origins.add(origin)
            _check(run, name, len(origins) == 1, attempt=number, step=step, rollouts_in_one_sequence=sorted(origins))
            draw, rollout = origins.pop()
            steps.setdefault(draw, set()).add(step)
            rollouts.setdefault(draw, Counter())[rollout] += 1
        for draw, trained in rollouts.items():
            fine = trained == dict.fromkeys(range(config.algorithm.group_size), epochs) and len(steps[draw]) == epochs
            _check(run, name, fine, attempt=number, draw=draw, sequences_of_rollouts=dict(trained), steps=steps[draw])
        _check(run, name, not log.misplaced, attempt=number, misplaced=log.misplaced[:3])
        earlier = answers


def a_request_has_one_answer(run: Run) -> None:
    """No request is sent again while an engine in use has it, or after its answer."""
    for number, log in enumerate(run.logs, 1):
        _check(run, "a_request_has_one_answer", not log.twice, attempt=number, sent_again=log.twice[:3])


def a_resumed_run_goes_on(run: Run) -> None:
    """An attempt begins with the weights that the checkpoint's state names, every slot has the task that is due in it,
    and at lag 0 the weights after every step are those of an undisturbed run of the seed."""
    name, config = "a_resumed_run_goes_on", run.config
    reference = run.undisturbed.log.weights if run.undisturbed is not None else {}
    for number, log in enumerate(run.logs, 1):
        if log.loaded is not None:
            steps, version, asked = log.loaded
            _check(run, name, version == asked, attempt=number, steps=steps, version=version, state_says=asked)
        per_step = config.algorithm.tasks_per_step
        for step, record in log.draws:
            slot, _, filled = record["draw"].partition("/")
            if record["event"] != "admitted" or filled != "0":
                continue
            due = int(slot) // per_step * config.algorithm.steps_per_batch
            in_time = step <= due if config.algorithm.tasks_per_minibatch else step == due  # fewer groups, fewer steps
            in_time = in_time or config.algorithm.batch_order == "finished"
            fine = record["task_id"] == run.expected_tasks.get(int(slot)) and in_time
            _check(
                run, name, fine, attempt=number, draw=record["draw"], task=record["task_id"], step=step,
                due=run.expected_tasks.get(int(slot)), due_after_step=due,
            )  # fmt: skip
        for step, weights in log.weights.items() if reference else ():
            _check(
                run, name, weights == reference.get(step), attempt=number, step=step, weights=weights,
                undisturbed=reference.get(step),
            )  # fmt: skip


def what_had_finished_is_not_played_again(run: Run) -> None:
    """An attempt sends no request of a draw that had been played to its end when its checkpoint was staged."""
    name = "what_had_finished_is_not_played_again"
    for number, log in enumerate(run.logs, 1):
        places = _places(run, log) if log.had_played else {}
        for one in log.requests:
            draw, _ = places.get(one.stream, ("", 0))
            _check(run, name, draw not in log.had_played, attempt=number, draw=draw, sent_at=one.began)


def an_evaluation_has_one_version(run: Run) -> None:
    """All tokens of the evaluations after a step are of one version."""
    turns, config = range(run.config.task.max_turns), run.config
    tries = range(1 + config.algorithm.rollout_retries)
    steps = {}
    for step in range(config.controller.num_steps + 1):
        for split in ("validation", "test"):
            for retry in tries:
                seed = stream(config.seed, f"eval/{step}/play/{split}/0", 0, retry)
                steps |= {stream(seed, turn): step for turn in turns}
    for number, log in enumerate(run.logs, 1):
        versions: dict[int, set[int]] = {}
        for one in log.requests:
            if one.stream in steps:
                versions.setdefault(steps[one.stream], set()).update(one.versions)
        for step, found in versions.items():
            fine = len(found) <= 1
            _check(run, "an_evaluation_has_one_version", fine, attempt=number, step=step, versions=sorted(found))


def every_evaluation_is_made_once(run: Run) -> None:
    """A finished run has one line for each evaluation: before the first step, after every `eval_every` steps, and two
    after the last step."""
    if run.log.end != "finished":
        return
    last, every = max(step for step, _ in run.evaluated), run.config.controller.eval_every
    per_batch = run.config.algorithm.steps_per_batch
    between = [step for step, _ in run.evaluated if 0 < step < last]
    due = list(range(every, last, every)) if every else []
    made = [sum(least <= step < least + per_batch for step in between) for least in due]
    all_made = all(number == 1 or least + per_batch > last for least, number in zip(due, made, strict=True))
    fine = all_made and max(Counter(run.evaluated).values()) == 1 and len(between) == sum(made)
    _check(run, "every_evaluation_is_made_once", fine, evaluated=run.evaluated, due=due)


def nothing_is_left_over(run: Run) -> None:
    """After a finished run nobody counts a request, and the store holds the versions that are in use and no other."""
    left = run.log.left
    if run.log.end != "finished":
        return
    requests, in_use = left["requests that somebody counts"], left["versions in use"]
    _check(run, "nothing_is_left_over", requests == 0, requests_counted=requests)
    held, stored = left["versions that somebody holds"], left["versions in the store"]
    fine = set(held) == set(stored) == set(in_use)
    _check(run, "nothing_is_left_over", fine, held=held, store=stored, in_use=in_use)


PROPERTIES: dict[str, Callable[[Run], None]] = {
    check.__name__: check
    for check in (
        every_wait_ends,
        the_run_finishes,
        each_draw_ends_once,
        no_token_is_older_than_the_lag,
        a_named_version_is_served,
        what_is_loaded_was_fetched,
        what_trains_is_what_was_admitted,
        a_request_has_one_answer,
        a_resumed_run_goes_on,
        what_had_finished_is_not_played_again,
        an_evaluation_has_one_version,
        every_evaluation_is_made_once,
        nothing_is_left_over,
    )
}


def broken(run: Run) -> dict[str, str]:
    """Name of each property that the run breaks -> what it says."""
    found = {}
    for name, check in PROPERTIES.items():
        try:
            check(run)
        except AssertionError as error:
            found[name] = str(error)
    return found


def _places(run: Run, log: Log) -> dict[int, tuple[str, int]]:
    """Stream of a request -> (draw, index of the rollout in its group), for every draw that was admitted."""
    if log.places is not None:
        return log.places
    algorithm, places = run.config.algorithm, {}
    tries = 1 + algorithm.rollout_retries * (algorithm.on_rollout_failure == "retry")
    for _, record in log.draws:
        if record["event"] != "admitted":
            continue
        for rollout in range(algorithm.group_size):
            for retry in range(tries):
                seed = stream(run.config.seed, record["draw"], rollout, retry)
                for turn in range(run.config.task.max_turns):
                    places[stream(seed, turn)] = record["draw"], rollout
    log.places = places
    return places


def _check(run: Run, name: str, fine: Any, **values: Any) -> None:
    if not fine:
        said = ", ".join(f"{key}={value!r}" for key, value in values.items())
        raise AssertionError(f"seed={run.seed}: {name}: {said}; scripts/simulate.sh --seed {run.seed}")

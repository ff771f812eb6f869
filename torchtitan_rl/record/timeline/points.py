"""Where the timeline looks: functions and methods of the package by name, and what their time is called.

No function knows that it is timed. `wrapping.wrap` replaces the functions of this table when a process begins to
record, and puts them back at the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Point", "POINTS", "GARBAGE", "WRITE_S"]

WRITE_S = 1.0
"""Seconds after which a process's spans are on disk; a process that is killed loses what is younger."""
GARBAGE = "collect garbage"
"""Work of Python's garbage collector, which stops every thread of the process, whichever it is in."""


@dataclass(frozen=True, slots=True)
class Point:
    """One function, and how its time becomes spans.

    `how` is `whole`: a call is one span. `phase`: a call is one span that other spans lie in. `running`: of an async
    function, `name` is the time in which it runs, and `wait` the time in which it is suspended. `sent`: a call that
    returns an awaitable; `name` is the call, `wait` lasts until the answer. `served`: `name` is a call, an awaitable
    answer included, and `wait` is the time between two calls. `given`: `name` is the time of the function that is
    the first argument.

    Names are formatted with the function's positional arguments: `{0}` is the first one, of a method that after `self`.
    An argument that is a function, such as an operation, is formatted as its name.
    """

    where: str
    """`module:function` or `module:Class.method`. Of a function that another module imports by name: that module."""
    name: str
    """What the work is called; empty: it is not recorded."""
    how: Literal["whole", "phase", "running", "sent", "served", "given"] = "whole"
    wait: str = ""
    """What the wait is called, after what is waited for; empty: it is not recorded."""
    attributes: dict[str, str] = field(default_factory=dict)
    """Name -> format of its value, which must give a whole number."""
    least_us: float = 0.0
    """Shorter spans are left out, such as a look into an empty queue."""


_RUN, _ROLLOUT, _DISPATCH = "torchtitan_rl.train", "torchtitan_rl.rollout", "torchtitan_rl.dispatch"
_ROLE = "{self.role}.{0}"

_CONTROLLER = (
    Point(f"{_RUN}.controller:Controller._reinforce", "run the loop", "running"),
    # Generation.
    Point(f"{_ROLLOUT}.draws:Draws.next", "draw tasks"),
    Point(f"{_ROLLOUT}.draws:Draws.replace", "draw tasks"),
    Point(f"{_ROLLOUT}.batches:BatchPlayer.play", "play a batch", "phase"),
    Point(f"{_ROLLOUT}.ahead:BatchesAhead._next", "admit draws", "running", "wait for a batch"),
    Point(f"{_ROLLOUT}.lagged_batches:check_lag", "check the lag"),
    Point(f"{_RUN}.overlap:Overlap.metrics", "count metrics"),
    Point(f"{_ROLLOUT}.first_finished:FirstFinished._next", "admit draws", "running", "wait for a batch"),
    Point(f"{_ROLLOUT}.player:Rollouts.play", "play rollouts", "running"),
    Point(f"{_ROLLOUT}.player:run_group", "play rollouts", "running"),
    Point("torchtitan_rl.rollout.policy:Policy.complete", "play rollouts", "running"),
    Point("torchtitan_rl.rollout.episode:Episode._call", "run an environment", "running", "wait for an environment"),
    Point("torchtitan_rl.rollout.episode:_in_thread", "run an environment", "given"),
    Point("torchtitan_rl.rollout.external:External._played", "", "running", "wait for an agent"),
    Point("torchtitan_rl.rollout.group:judge", "judge rollouts", "running", "wait for rewards"),
    Point("torchtitan_rl.tasks.judging:outcome_in_thread", "compute rewards", "given"),
    Point(f"{_ROLLOUT}.batches:fill_batch", "filter groups", "running"),
    # Training.
    Point(f"{_RUN}.step:to_datums", "make training data"),
    Point(f"{_RUN}.controller:lines.of_batch", "count metrics"),
    Point(f"{_RUN}.step:policy_objective", "make training data"),
    Point(f"{_DISPATCH}.training_client:TrainingClient._submit", "pack microbatches"),
    Point(f"{_DISPATCH}.training_client:_merge", "read the trainer's answer"),
    Point("torchtitan_rl.mismatch.explainer:MismatchExplainer._chosen", "explain the mismatch", "running"),
    Point("torchtitan_rl.mismatch.explainer:MismatchExplainer._score", "explain the mismatch", "running"),
    Point("torchtitan_rl.mismatch.explainer:MismatchExplainer._explained", "explain the mismatch", "running"),
    Point("torchtitan_rl.mismatch.explainer:MismatchExplainer.note_trained", "explain the mismatch"),
    # Calls to the other processes.
    Point(f"{_DISPATCH}.role_mesh:RoleMesh.call_split", f"send {_ROLE}", "sent", f"wait for {_ROLE}"),
    Point(f"{_DISPATCH}.role_mesh:RoleMesh.call_each", f"send {_ROLE}", "sent", f"wait for {_ROLE}"),
    Point(f"{_DISPATCH}.role_mesh:RoleMesh.call_rank", "send {self.role}.{1}", "sent", "wait for {self.role}.{1}"),
    Point(f"{_DISPATCH}.local_mesh:LocalMesh.call_all", f"send {_ROLE}", "sent", f"wait for {_ROLE}"),
    Point(f"{_DISPATCH}.sampling_client:SamplingClient._send", "hand requests and answers over", "running"),
    Point(f"{_DISPATCH}.sampling_client:SamplingClient._some_healthy", "", "running", "wait for a replacement"),
    Point(f"{_DISPATCH}.replica:Replica._until", "", "running", "wait for pinned requests"),
    # Between steps.
    Point("torchtitan_rl.record.run_log:RunDirWriter.metrics", "write records"),
    Point("torchtitan_rl.record.run_log:RunDirWriter.rollouts", "write records"),
    Point(f"{_RUN}.evaluation:evaluate", "evaluate", "phase"),
    Point(f"{_RUN}.evaluation:run_attempts", "play rollouts", "running"),
    Point(f"{_RUN}.checkpoints:Checkpoints.save", "begin a checkpoint", "phase"),
    Point(f"{_RUN}.checkpoints:Checkpoints.finish", "", "running", "wait for a checkpoint on disk"),
)
"""The controller."""

_STORE = "torchtitan_rl.weights"
_RANKS = (
    Point("torchtitan_rl.actors.trainer_rank:TrainerRank.run", _ROLE, "served", "wait for a request"),
    Point("torchtitan_rl.actors.trainer_rank:clip_and_step", "clip and step"),
    Point("torchtitan_rl.model.train_step:head_outputs", "forward"),
    Point("torch:Tensor.backward", "backward"),
    Point("torchtitan_rl.actors.generator_rank:GeneratorRank.fetch", "fetch weights", attributes={"version": "{0}"}),
    Point("torchtitan_rl.engine.engine:Engine._next", "", "whole", "wait for a request", least_us=1000.0),
    Point("torchtitan_rl.engine.engine:Engine._step", "engine step", least_us=100.0),
    Point("torchtitan_rl.engine.engine:Engine._add_all", "add requests", least_us=50.0),
    Point("torchtitan_rl.engine.engine:Engine._load_staged", "load weights", attributes={"version": "{0}"}),
    Point(f"{_STORE}.versioned:VersionedStore.publish", "publish weights", "running", "wait for the store"),
    Point(f"{_STORE}.versioned:VersionedStore.fetch", "read weights", "running", "wait for the store"),
    Point(f"{_STORE}.versioned:VersionedStore.discard", "discard weights", "running", "wait for the store"),
)
"""Trainer ranks and generator ranks, and their store."""

_REWARDS = (Point("torchtitan_rl.tasks.reward_worker:_called", "compute rewards", "served", "wait for a request"),)
"""Processes of `cpu_bound` rewards."""

POINTS = (*_CONTROLLER, *_RANKS, *_REWARDS)

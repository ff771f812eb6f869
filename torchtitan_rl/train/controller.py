"""One controller drives a run: it starts the meshes, owns every loop and cadence, and shuts down.

Scripts, the command line and the notebook drive the same object::

    async with await Controller.launch(config) as controller:
        await controller.train()
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtitan_rl.config.model import Qwen3Shape
from torchtitan_rl.config.run import RunConfig, Split
from torchtitan_rl.dispatch.policy_weights import PolicyWeights
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.launch.attach import Hosts
from torchtitan_rl.launch.backend import Stack
from torchtitan_rl.launch.choice import hosts_for, launcher_for, settled_for
from torchtitan_rl.mismatch.explainer import ExplainMismatch
from torchtitan_rl.record import attempts
from torchtitan_rl.record.progress import Progress
from torchtitan_rl.record.recorder import Recorder
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.rollout import finished
from torchtitan_rl.rollout.draws import Draw, Draws
from torchtitan_rl.rollout.player import Rollouts
from torchtitan_rl.serve.run_gateway import open_gateway
from torchtitan_rl.train import listeners, resume
from torchtitan_rl.train.ahead import BatchesAhead
from torchtitan_rl.train.checkpoints import Checkpoints
from torchtitan_rl.train.early_stop import EarlyEnd, end_early, watch_for_collapse
from torchtitan_rl.train.evaluation import Evaluation, Evaluations
from torchtitan_rl.train.evaluation_beside import EvaluationBeside
from torchtitan_rl.train.first_finished import FirstFinished
from torchtitan_rl.train.numeric_guard import note_bad_step
from torchtitan_rl.train.overlap import Overlap
from torchtitan_rl.train.profiles import Profiles
from torchtitan_rl.train.start import Inputs, read_inputs, start, stopped_on_failure
from torchtitan_rl.train.supervised import supervise
from torchtitan_rl.train.training import Batches, Reinforcement
from torchtitan_rl.types import RolloutGroup
from torchtitan_rl.types.ends import Ended, StopRequest
from torchtitan_rl.types.run_state import RunState
from torchtitan_rl.validation.rewards import check_reward
from torchtitan_rl.validation.run import missing_weights, validate
from torchtitan_rl.weights import checkpoint

if TYPE_CHECKING:
    from torchtitan_rl.serve.gateway import Gateway

__all__ = ["Controller"]


class Controller(Reinforcement, AbstractAsyncContextManager):
    """A running policy, made by `launch`. `trainer` and `generator` are the clients; `weights` sends the trainer's
    weights to the generators. The steps of reinforcement are in `Reinforcement` (`train/training.py`).

    `state.step` counts the optimizer steps of the reinforcement phase; `policy_version` counts the steps of all phases.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        run_dir: RunDir,
        recorder: Recorder,
        stack: Stack,
        state: RunState | None = None,
    ) -> None:
        self.config, self.run_dir, self.recorder = config, run_dir, recorder
        self.tokenizer, self.family, self.draws = inputs.tokenizer, inputs.family, Draws(inputs.source)
        self.supervised_family = inputs.supervised_family
        self.launcher, self.roles, self.generator = stack.launcher, stack.roles, stack.generator
        self.versions, self.placement = stack.versions, stack.placement
        self.state = state or RunState(seed=config.seed)
        self.stop, self.ended_early = StopRequest(config.controller.max_hours), ""
        self.gateway: Gateway | None = None
        """Where agents meet the policy; None: the workflow asks for none."""
        watch_for_collapse(config.controller.stop, self.state, self.stop, recorder)
        self.weights = PolicyWeights(self.roles, self.generator, self.versions)
        self.player = Rollouts(config, self.family, self.tokenizer, self.generator, self.weights, self.state.calls)
        self.evaluations = Evaluations(config, self.family, inputs.eval_families, self.player, recorder)
        arguments = config, self.player.play, self.draws, self.state, self._admitted
        self.batches = Batches(*arguments)
        if config.algorithm.max_policy_lag and self.versions is not None:
            played = finished.Finished(self.player.run_group)
            self.player.run_group = played.run_group
            kind = FirstFinished if config.algorithm.batch_order == "finished" else BatchesAhead
            self.batches = ahead = kind(*arguments, publications=self.versions.publications, finished=played)
            beside = EvaluationBeside(config.controller, self.evaluations, self.versions, self.state, recorder)
            self.evaluate_all, self.publish = beside.begin, beside.then(self.publish)
            ahead.beside = beside
            recorder.listeners.insert(0, Overlap(ahead, self.generator, self.versions.publications))
        if config.record.profile.steps:
            chosen, per_batch = config.record.profile, config.algorithm.steps_per_batch
            told = self.state, self.roles, self.generator, run_dir.path / "timeline" / "profile"
            recorder.listeners.insert(0, Profiles(chosen, per_batch, *told))
        if config.record.explain_mismatch_every:
            explained = ExplainMismatch(config, stack, self.state, recorder)
            self.train_on = explained.beside(self.train_on)
            if config.algorithm.max_policy_lag:
                self.player.run_group = explained.played(self.player.run_group)
            recorder.listeners.insert(0, explained)
        self.checkpoints = Checkpoints(
            config, run_dir, self.roles, self.weights, self.tokenizer, self.batches.state_dict, self.state, recorder
        )

    # Starting and stopping.

    @classmethod
    async def launch(
        cls,
        config: RunConfig,
        *,
        progress: Progress | None = None,
        hf_weights: Path | None = None,
        hosts: Hosts | None = None,
        backend: Literal["actors", "local", "tinker"] = "actors",
        resume_from: str = "",
    ) -> Controller:
        """Starts trainer, generators and store, and gives the generators the trainer's weights.

        With `hf_weights` only generators start and load the weights of that Hugging Face directory: enough to sample
        and evaluate. `hosts` come from `attach.attach`; None means this machine alone. `backend="local"` starts no
        process: the whole run is in this process, on one device, for a debugger. `backend="tinker"` trains and samples
        at the service at TINKER_BASE_URL. `resume_from` goes on with a run: `latest`, `auto`, a run directory or a
        checkpoint, as `resume.find` says. Raises ValueError, before anything starts, for a config that `validate`,
        `check_hosts`, `check_local`, `check_remote` or `resume.find` refuses.
        """
        validate(config)
        config = settled_for(config, backend)
        hosts = hosts_for(config, backend, hosts, generators_only=hf_weights is not None)
        if hf_weights is not None:
            Qwen3Shape.from_hf(hf_weights / "config.json")  # refuses weights of another model
        if hf_weights is None and backend != "tinker" and (missing := missing_weights(config)):
            raise ValueError(missing)
        inputs = read_inputs(config)
        if hf_weights is None:
            await check_reward(config, inputs.family)
        absolute = hosts is not None and hosts.attached
        run_dir, found = resume.open_run(config, resume_from, absolute=absolute)
        recorder = listeners.recorder_of(
            config, run_dir, inputs.tokenizer.decode, progress, debugger=backend == "local"
        )
        for note in found.notes if found is not None else ():
            recorder.fact("note", text=note)
        launcher = launcher_for(config, hosts, str(run_dir.path / "logs"), backend)
        with recorder.span("starting trainer, generators and store", expected_s=15, shown=True):
            async with stopped_on_failure(launcher, run_dir, recorder):
                stack = await start(config, inputs, launcher, run_dir.path / "model", hf_weights)
                state = None if found is None or found.checkpoint is None else resume.state_of(found)
                controller = cls(config, inputs, run_dir, recorder, stack, state)
                recorder.fact("generator", client=stack.generator)
                controller.gateway = await open_gateway(config)
                if state is not None:
                    await resume.restore(found, config, state, stack.roles, controller.weights, controller.draws)
                    if isinstance(controller.batches, BatchesAhead):
                        played = finished.read(checkpoint.finished_file(found.checkpoint))
                        for note in controller.batches.resume(state.draws, played):
                            recorder.fact("note", text=note)
                elif hf_weights is None:
                    await controller.publish()
        return controller

    async def close(self) -> None:
        """Stops every process of the run."""
        self.generator.close()  # first: a call in flight would report its generator as lost
        if self.gateway is not None:
            await self.gateway.close()
        await self.launcher.stop()
        self.recorder.close()
        attempts.unlock(self.run_dir)

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    def role(self, name: str) -> TrainingClient:
        """The client of a role. Raises ValueError for a role that the run does not have."""
        if name not in self.roles:
            raise ValueError(
                f"role={name!r}: is not configured (this run has {', '.join(self.roles)}); set roles.{name}"
            )
        return self.roles[name]

    @property
    def trainer(self) -> TrainingClient:
        """The policy's client."""
        return self.role("policy")

    # The run.

    async def train(self) -> dict[str, Evaluation]:
        """Warm start, reinforcement, and one evaluation on the test split. Returns the evaluations by name."""
        try:
            return await self._train()
        except Ended as end:
            attempts.end_for_good(self.run_dir, str(end))
            raise

    async def _train(self) -> dict[str, Evaluation]:
        config, state, warm = self.config.controller, self.state, self.config.supervised.num_steps > 0
        if state.phase in ("start-up", "supervised"):
            if warm:
                await self.supervise()
            state.phase, state.phase_step = "reinforcement", 0
            if config.checkpoint_every:
                await self.checkpoints.save()
        if state.warm_start is None:
            first = await self.evaluate("validation", pass_at_k=config.pass_at_k if warm else 0)
            await self.evaluate_sets()
            state.warm_start = first.summary_data()
        try:
            end_early(config, state, self.recorder)  # a run that is resumed may have ended
            await self.reinforce()
        except EarlyEnd as end:
            self.ended_early = str(end)
        await self.checkpoints.save(last=True)
        report = {"warm start": Evaluation(**state.warm_start)}
        for name in ("validation", *config.eval_sets):
            report[name] = await self._evaluation_now(name)
        report["test"] = await self.evaluate("test")
        await self.checkpoints.require_written()
        return report

    async def supervise(self) -> None:
        """Runs the supervised phase, then gives its weights to the generators and to the roles that start from the
        policy."""
        limit = self.config.controller.max_skipped_steps
        await supervise(
            self.config,
            self.supervised_family,
            self.player,
            self.trainer,
            self.state,
            self.recorder,
            bad_step=partial(note_bad_step, self.run_dir, self.state, max_skipped=limit),
            between_steps=self._between_steps,
        )
        await self.publish()
        if self.weights.teacher_version is not None:  # reinforcement starts from the new weights
            await self.weights.set_teacher(self.policy_version)
        for name, role in self.config.roles.configured().items():
            if name in ("reference", "critic") and role.model is None:  # reference and critic start here too
                await self.weights.copy_to(name)

    # Parts of a step, for the notebook and for loops of your own.

    async def rollouts(self, draws: list[Draw]) -> list[RolloutGroup]:
        """`group_size` rollouts of each draw's task, with rewards, from the newest policy, grouped as the algorithm
        says.

        Draws come from `controller.draws.next(n)`; the same draw of the same policy gives the same rollouts.
        """
        return await self.player.play(draws, Counter())

    async def evaluate_all(self) -> None:
        await self.evaluate("validation")
        await self.evaluate_sets()
        end_early(self.config.controller, self.state, self.recorder)

    async def evaluate(self, split: Split, *, num_tasks: int | None = None, pass_at_k: int = 0) -> Evaluation:
        """Greedy accuracy on a split, and with `pass_at_k` the chance that one of k samples is correct. The result is
        recorded."""
        result = await self.evaluations.own(split, self.state.step, num_tasks=num_tasks, pass_at_k=pass_at_k)
        self._note_evaluations({split: result})
        return result

    async def _evaluation_now(self, name: str) -> Evaluation:
        """The evaluation after the present step, on the validation split or of one of `controller.eval_sets`. It is
        made unless it has been: before the first step, or before a rule of `controller.stop` ended the phase."""
        if (result := self.state.evaluation_now(name)) is not None:
            return Evaluation(**result)
        if name == "validation":
            return await self.evaluate("validation")
        made = await self.evaluations.of_set(name, self.state.step)
        self._note_evaluations({name: made})
        return made

    async def evaluate_sets(self) -> dict[str, Evaluation]:
        """The evaluations of `controller.eval_sets`, by name. The results are recorded."""
        results = await self.evaluations.sets(self.state.step)
        self._note_evaluations(results)
        return results

    def _note_evaluations(self, results: dict[str, Evaluation]) -> None:
        for name, result in results.items():
            self.state.note_evaluation(name, self.state.step, result.summary_data())

    async def save_checkpoint(self) -> Path:
        """Writes a checkpoint, marker last, with the weights as a Hugging Face directory unless
        `controller.checkpoint_export` is `none`. Returns its directory. Raises RuntimeError when it could not be
        written."""
        path = await self.checkpoints.save(last=True)
        await self.checkpoints.require_written()
        return path

"""One controller drives a run: it starts the meshes, owns every loop and cadence, and shuts down.

Scripts, the command line and the notebook drive the same object::

    async with await Controller.launch(config) as controller:
        await controller.train()
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtitan_rl.algorithm.inputs import minibatches
from torchtitan_rl.config.run import RunConfig, Split
from torchtitan_rl.dispatch.policy_weights import PolicyWeights
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.launch.backend import Backend, Stack
from torchtitan_rl.launch.choice import backend_of
from torchtitan_rl.mismatch.explainer import MismatchExplainer
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.record import attempts
from torchtitan_rl.record.console.json_progress import JsonProgress
from torchtitan_rl.record.console.progress import Progress
from torchtitan_rl.record.console.step_numbers import step_line
from torchtitan_rl.record.recorder import (
    DrawEvents,
    GeneratorStarted,
    Metrics,
    Note,
    Published,
    Recorder,
    RolloutsEnded,
    TrainedOn,
)
from torchtitan_rl.record.records import Trained
from torchtitan_rl.record.run_dir import RunDir
from torchtitan_rl.record.schedule import Schedules, environment, schedule_of, write_environment
from torchtitan_rl.record.tracing import running, span
from torchtitan_rl.rollout import finished
from torchtitan_rl.rollout.batch_sources import lagged_batches, synchronous_batches
from torchtitan_rl.rollout.batches import BatchSource
from torchtitan_rl.rollout.draws import Batch, Draw, Draws, NothingToTrainOn, admissions, outcomes
from torchtitan_rl.rollout.lag import age_metrics
from torchtitan_rl.rollout.lagged_batches import LaggedBatches
from torchtitan_rl.rollout.player import RolloutPlayer
from torchtitan_rl.rollout.reward_model import RewardModel
from torchtitan_rl.rollout.turn_end import warn_open_turns
from torchtitan_rl.serve.run_gateway import external_of, open_gateway
from torchtitan_rl.train import listeners, resume, step_metrics
from torchtitan_rl.train.checkpoints import Checkpoints
from torchtitan_rl.train.early_stop import CollapseRule, EarlyEnd, end_early
from torchtitan_rl.train.entropy_coefficient import AdaptiveEntropy
from torchtitan_rl.train.evaluation import Evaluation, Evaluations
from torchtitan_rl.train.kl_coefficient import AdaptiveKL
from torchtitan_rl.train.lag_metrics import LagMetrics
from torchtitan_rl.train.numeric_guard import count_step
from torchtitan_rl.train.overlapped_evaluations import OverlappedEvaluations
from torchtitan_rl.train.preference import PairTrainer, prefer
from torchtitan_rl.train.profiles import Profiles
from torchtitan_rl.train.recorded_attempt import RecordedAttempt
from torchtitan_rl.train.role_step import RoleStep
from torchtitan_rl.train.run_record import finish_record
from torchtitan_rl.train.start import Inputs, read_inputs, start, stopped_on_failure
from torchtitan_rl.train.step import take_step, training_data
from torchtitan_rl.train.step_metrics import StepMetrics
from torchtitan_rl.train.supervised import supervise
from torchtitan_rl.train.trainer_speed import TrainerSpeed
from torchtitan_rl.types import Datum, RolloutGroup
from torchtitan_rl.types.ends import Ended, Preempted, StopRequest
from torchtitan_rl.types.run_state import RunState
from torchtitan_rl.validation.rewards import check_reward
from torchtitan_rl.validation.run import validate
from torchtitan_rl.weights import checkpoint

if TYPE_CHECKING:
    from torchtitan_rl.launch.attach import Hosts
    from torchtitan_rl.serve.gateway import Gateway

__all__ = ["Controller"]


class Controller(AbstractAsyncContextManager):
    """A running policy, made by `launch`. `trainer` and `generator` are the clients; `weights` sends the trainer's
    weights to the generators; `batches` plays and judges what trains next; `replicas.scale(3)` changes how many
    generators there are, where that is not None.

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
        device_name: str | None = None,
        recorded: RecordedAttempt | None = None,
    ) -> None:
        """`device_name`: what `Backend.device_name` says of the trainers. `recorded`: what a replay follows."""
        self.config, self.run_dir, self.recorder = config, run_dir, recorder
        self.tokenizer, self.family, self.draws = inputs.tokenizer, inputs.family, Draws(inputs.source)
        self.supervised_family, self.preference_family = inputs.supervised_family, inputs.preference_family
        self.launcher, self.roles, self.generator = stack.launcher, stack.roles, stack.generator
        self.versions, self.placement = stack.versions, stack.placement
        self.replicas, self.joined_hosts = stack.replicas, stack.joined_hosts
        self.state = state or RunState(seed=config.seed)
        self.stop, self.ended_early = StopRequest(config.controller.max_hours), ""
        self._until: int | None = None
        """The step of reinforcement after which the run stops with a checkpoint; None: it goes on to its last."""
        self.gateway: Gateway | None = None
        """Where agents meet the policy; None: the workflow asks for none."""
        self.weights = PolicyWeights(self.roles, self.generator, self.versions)
        self.speed = None if device_name is None else TrainerSpeed.of(config, device_name)
        """What is known of the policy's trainer as a computer; None: nothing."""

        # What a run may use or not; None: it does not.
        lag, stopping, record = config.algorithm.max_policy_lag, config.controller.stop, config.record
        lagging = bool(lag and self.versions is not None)
        self.collapse: CollapseRule | None = None
        if stopping.min_entropy or stopping.max_no_signal:
            self.collapse = CollapseRule(stopping, self.state.collapse, self.stop)
        self.adaptive_kl: AdaptiveKL | None = None
        if config.algorithm.kl_target:
            self.adaptive_kl = AdaptiveKL(config.algorithm, self.state)
        self.adaptive_entropy: AdaptiveEntropy | None = None
        if config.algorithm.entropy_control is not None:
            initial_coef = config.algorithm.entropy_coef
            self.adaptive_entropy = AdaptiveEntropy(config.algorithm.entropy_control, initial_coef, self.state)
        self.explainer: MismatchExplainer | None = None
        if record.explain_mismatch_every:
            self.explainer = MismatchExplainer(config, stack, self.state, recorder)
        self.profiles: Profiles | None = None
        if record.profile.steps:
            directory, per_batch = run_dir.path / "timeline" / "profile", config.algorithm.steps_per_batch
            self.profiles = Profiles(record.profile, per_batch, self.state, self.roles, self.generator, directory)
        self.reward_model: RewardModel | None = None
        if config.roles.reward_model is not None and "reward_model" in self.roles:  # not with generators alone
            self.reward_model = RewardModel(self.roles["reward_model"], config.roles.reward_model)
        finished_groups = finished.FinishedGroups() if lagging else None

        self.player = RolloutPlayer(
            config,
            self.family,
            self.tokenizer,
            self.generator,
            self.weights,
            self.state.calls,
            finished=finished_groups,
            score_early=self.explainer.score_early if self.explainer is not None and lag else None,
            reward_model=self.reward_model,
        )
        self.evaluations = Evaluations(config, self.family, inputs.eval_families, self.player, recorder)
        arguments = config, self.player, self.draws, self.state, self._record_admitted
        self.lagged: LaggedBatches | None = None
        """`batches`, where they are played while earlier ones train."""
        self.overlapped_evaluations: OverlappedEvaluations | None = None
        self.lag_metrics: LagMetrics | None = None
        if lagging:
            publications = self.versions.publications
            self.lagged = lagged_batches(
                *arguments,
                publications=publications,
                finished=finished_groups,
                recorded=() if recorded is None else recorded.batches,
            )
            self.lag_metrics = LagMetrics(self.lagged, self.generator, publications)
            self.overlapped_evaluations = OverlappedEvaluations(
                config.controller, self.evaluations, self.versions, self.state, recorder
            )
        self.batches: BatchSource = synchronous_batches(*arguments) if self.lagged is None else self.lagged
        self.checkpoints = Checkpoints(
            config,
            run_dir,
            self.roles,
            self.weights,
            self.tokenizer,
            self.batches.state_dict,
            self.state,
            recorder,
            num_requests=lambda: self.generator.num_requests,
        )

    # Starting and stopping.

    @classmethod
    async def launch(
        cls,
        config: RunConfig,
        *,
        progress: Progress | JsonProgress | None = None,
        hf_weights: Path | None = None,
        hosts: Hosts | None = None,
        backend: Literal["actors", "local", "tinker"] = "actors",
        resume_from: str = "",
        recorded: RecordedAttempt | None = None,
    ) -> Controller:
        """Starts trainer, generators and store, and gives the generators the trainer's weights.

        With `hf_weights` only generators start and load the weights of that Hugging Face directory: enough to sample
        and evaluate. `hosts` come from `attach.attach`; None means this machine alone. `backend="local"` starts no
        process: the whole run is in this process, on one device, for a debugger. `backend="tinker"` trains and samples
        at the service at TINKER_BASE_URL. `resume_from` goes on with a run: `latest`, `auto`, a run directory or a
        checkpoint, as `resume.find` says. `recorded` replays an attempt at another run, in a new directory. Raises
        ValueError, before anything starts, for a config that `validate`, `Backend.hosts_for` or `resume.find` refuses,
        and RuntimeError for a sandbox that this machine cannot run.
        """
        validate(config)
        run_backend = backend_of(backend)
        config = run_backend.settle(config)
        hosts = run_backend.hosts_for(config, hosts, generators_only=hf_weights is not None)
        if hf_weights is not None:
            resolve_shape(config.model).require_described_by(hf_weights / "config.json")
        if hf_weights is None and (missing := run_backend.missing_weights(config)):
            raise ValueError(missing)
        inputs = read_inputs(config)
        if config.algorithm.workflow is None:
            stop_token_ids, timeout_s = config.sampling.stop_token_ids, config.controller.reward_timeout_s
            await warn_open_turns(inputs.tokenizer, inputs.family, stop_token_ids, timeout_s=timeout_s)
        if (external := external_of(config.algorithm.workflow)) is not None:
            external.check_sandbox(inputs.family)
        if hf_weights is None:
            await check_reward(config, inputs.family)
        attached = hosts is not None and hosts.attached  # paths are absolute then: other hosts work elsewhere
        async with AsyncExitStack() as on_failure:
            if recorded is None:
                run_dir, resumption = resume.open_run(config, resume_from, absolute=attached)
            else:
                run_dir, resumption = resume.open_copy(config, recorded.checkpoint, absolute=attached)
            on_failure.callback(attempts.unlock, run_dir)
            recorder = listeners.recorder_of(
                config, run_dir, inputs.tokenizer.decode, progress, debugger=run_backend.in_this_process
            )
            on_failure.callback(recorder.close)
            for note in resumption.notes if resumption is not None else ():
                recorder.record(Note(text=note))
            schedules: Schedules | None = None
            if config.record.schedule and run_backend.has_engines and hf_weights is None:
                schedules = _schedules(config, run_dir, run_backend, recorded)
            launcher = run_backend.launcher(config, hosts, str(run_dir.path / "logs"), schedules)
            if schedules is not None:
                machine = environment(backend, shares_cores=not (run_backend.in_this_process or attached))
                write_environment(Path(schedules.directory), machine | {"after_load": schedules.after_load})
            with recorder.span("starting trainer, generators and store", expected_s=15, shown=True):
                async with stopped_on_failure(launcher, recorder) as closing:
                    stack = await start(config, inputs, launcher, run_dir.path / "model", hf_weights)
                    closing.callback(stack.generator.close)  # else its probes would replace what is being stopped
                    state = None
                    if resumption is not None and resumption.checkpoint is not None:
                        state = resume.state_of(resumption)
                    device_name = run_backend.device_name(hosts)
                    controller = cls(config, inputs, run_dir, recorder, stack, state, device_name, recorded)
                    recorder.record(GeneratorStarted(client=stack.generator))
                    controller.gateway = await open_gateway(config)
                    if controller.gateway is not None:
                        on_failure.push_async_callback(controller.gateway.close)
                    if state is not None:
                        await controller._restore(resumption, recorded)
                    elif hf_weights is None:
                        await controller.publish()
            on_failure.pop_all()  # the controller closes them
        return controller

    async def _restore(self, resumption: resume.Resumption, recorded: RecordedAttempt | None) -> None:
        """Goes on from the checkpoint of `resumption`, whose state the controller has already. With a lag the groups
        that had been played by then need not be played again, unless a fork plays or judges them otherwise, or a replay
        asks its engines for all of them."""
        await resume.restore(resumption, self.config, self.state, self.roles, self.weights, self.draws)
        if self.lagged is None:
            return
        played = [] if resumption.plays_again else finished.read(checkpoint.finished_file(resumption.checkpoint))
        if recorded is not None and recorded.answers is not None:
            # The engines take the steps since the last load again, and what was asked in them is asked again: also for
            # groups and evaluations that had ended by the checkpoint.
            played = []
            self.state.make_due(self.config.controller.evaluation_names)
            self.generator.answer_from(recorded.answers)
        for note in self.lagged.resume(self.state.draws, played):
            self.recorder.record(Note(text=note))

    async def close(self) -> None:
        """Stops every process of the run."""
        async with AsyncExitStack() as stack:  # whatever fails, the rest is closed, and the directory is free
            stack.callback(attempts.unlock, self.run_dir)
            stack.callback(self.recorder.close)
            stack.push_async_callback(self.launcher.stop)
            stack.push_async_callback(self.checkpoints.finish_at_end)  # while the ranks that write it live
            if self.gateway is not None:
                stack.push_async_callback(self.gateway.close)
            stack.callback(self.generator.close)  # first: a call in flight would report its generator as lost

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

    async def train(self, *, until: int | None = None) -> dict[str, Evaluation]:
        """Warm start, preference phase, reinforcement, and one evaluation on the test split. Returns the evaluations by
        name. With `until` it raises Preempted, after a checkpoint, where so many steps of reinforcement are made."""
        self._until = until
        try:
            return await self._train()
        except Ended as end:
            attempts.end_for_good(self.run_dir, str(end))
            raise

    async def _train(self) -> dict[str, Evaluation]:
        config, state, has_warm_start = self.config.controller, self.state, self.config.supervised.num_steps > 0
        if state.phase in ("start-up", "supervised") and has_warm_start:
            await self.supervise()
            if self.config.preference is not None:
                state.phase, state.phase_step = "preference", 0
                await self._save_or_stop(due=False)
        if state.phase != "reinforcement":
            if self.config.preference is not None:
                await self.prefer()
            state.phase, state.phase_step = "reinforcement", 0
            await self._save_or_stop(due=config.checkpoint_every > 0)
        if reason := self._until_reason():  # of a run that is resumed there
            await self.checkpoints.require_written()
            raise Preempted(reason)
        if state.warm_start is None:
            warm_start = await self.evaluate("validation", pass_at_k=config.pass_at_k if has_warm_start else 0)
            await self.evaluate_sets()
            state.warm_start = warm_start.summary_data()
        if self.overlapped_evaluations is None:  # else the due ones begin with the first batch
            for name in config.evaluation_names:
                if name in state.evaluations_due:
                    await self._evaluation_now(name)
            state.evaluations_due = []
        if self.stop.requested_reason:  # the first batch may take longer than a scheduler waits
            await self._save_or_stop(due=False)
        try:
            end_early(config, state, self.recorder)  # a run that is resumed may have ended
            await self.reinforce()
        except EarlyEnd as end:
            self.ended_early = str(end)
        await self.checkpoints.save(last=True)
        report = {"warm start": Evaluation(**state.warm_start)}
        if state.before_preference is not None:
            report["before preference"] = Evaluation(**state.before_preference)
        for name in config.evaluation_names:
            report[name] = await self._evaluation_now(name)
        report["test"] = await self.evaluate("test")
        await self.checkpoints.require_written()
        finish_record(self.run_dir)
        return report

    async def supervise(self) -> None:
        """Runs the supervised phase, then gives its weights to the generators and to the roles that start from the
        policy."""
        await supervise(
            self.config,
            self.supervised_family,
            self.player,
            self.trainer,
            self.state,
            self.recorder,
            speed=self.speed,
            count_step=self._count_step,
            between_steps=self._between_steps,
        )
        await self._distribute_policy()

    async def prefer(self) -> None:
        """Runs the preference phase. If the policy trains, evaluates it before, and afterwards gives its weights to the
        generators and to the roles that start from the policy."""
        preference = self.config.preference
        assert preference is not None
        trains_policy = preference.role == "policy"
        if trains_policy and self.state.before_preference is None:
            self.state.before_preference = (await self.evaluate("validation")).summary_data()
        reference = self.role("reference") if trains_policy and not preference.reference_free else None
        await prefer(
            self.config,
            self.preference_family,
            self.player,
            PairTrainer(preference, self.role(preference.role), reference),
            self.state,
            self.recorder,
            speed=self.speed if trains_policy else None,
            count_step=self._count_step,
            between_steps=self._between_steps,
        )
        if trains_policy:
            await self._distribute_policy()

    async def _distribute_policy(self) -> None:
        """Gives the policy's weights to the generators and to the roles that start from the policy."""
        await self.publish()
        if self.weights.teacher_version is not None:  # reinforcement starts from the new weights
            await self.weights.set_teacher(self.policy_version)
        for name, role in self.config.roles.configured().items():
            if name in ("reference", "critic") and role.model is None:  # reference and critic start here too
                await self.weights.copy_to(name)

    # The reinforcement phase.

    async def reinforce(self) -> None:
        """The steps of the reinforcement phase that are left.

        Raises NothingToTrainOn, after a checkpoint, when the filters leave nothing; Diverged after several bad steps in
        a row; Preempted, after a checkpoint, when the run was asked to stop; EarlyEnd by `controller.stop`.
        """
        if self.lag_metrics is not None:
            self.lag_metrics.start()
        try:
            await running("run the loop", self._reinforce())
        except NothingToTrainOn as nothing:
            attempts.end_for_good(self.run_dir, str(nothing))
            self._record_batch(nothing.batch)
            await self.checkpoints.save(last=True)
            await self.checkpoints.require_written()
            raise
        except Ended as end:
            attempts.end_for_good(self.run_dir, str(end))
            raise
        finally:
            if self.lag_metrics is not None:
                self.lag_metrics.stop()
            await self.batches.cancel()
            if self.overlapped_evaluations is not None:
                await self.overlapped_evaluations.cancel()

    async def _reinforce(self) -> None:
        """Generates, trains, publishes, and evaluates every `eval_every` steps."""
        config, state, recorder = self.config, self.state, self.recorder
        num_steps, state.phase, state.phase_step = config.controller.num_steps, "reinforcement", state.step
        with recorder.span("reinforcement", total=num_steps, done=state.step) as phase:
            while state.step < num_steps:
                previous_step = state.step
                profile = nullcontext() if self.profiles is None else self.profiles.batch()
                with recorder.span("step") as step, profile:
                    if self.lag_metrics is not None:
                        self.lag_metrics.begin_step()
                    with recorder.span("generate") as generate:
                        if self.overlapped_evaluations is not None:
                            self.overlapped_evaluations.begin_due()
                        batch = await self.batches.next_batch()
                    line = await self.train_on(batch.groups, batch.sampled) | batch.metrics
                    with recorder.span("sync") as sync:
                        await self.publish()
                    if config.roles.refresh_reference_every or config.algorithm.refresh_teacher_every:
                        await self._refresh(previous_step)
                line |= step_metrics.time_metrics(
                    line, step.seconds, generate.seconds, sync.seconds, overlap=self.lag_metrics is not None
                )
                if self.lag_metrics is not None:
                    training_s, waited_s = sync.began - generate.ended, self.overlapped_evaluations.waited_s
                    line |= self.lag_metrics.metrics(line, training_s=training_s, evaluation_wait_s=waited_s)
                recorder.record(Metrics(line=line, text=step_line(line, num_steps)))
                if self.collapse is not None:
                    self.collapse.count(line)
                self._record_batch(batch)
                recorder.advance(phase, state.step - previous_step, text=f"reward {line['reward/mean']:.3f}")
                if state.step < num_steps:
                    if _passed(config.controller.eval_every, previous_step, state.step):
                        if self.stop.reason(step_goes_on=True):
                            state.evaluations_due = config.controller.evaluation_names  # the resumed run makes them
                        else:
                            await self.evaluate_all()
                    await self._between_steps(previous_step)

    async def train_on(self, groups: list[RolloutGroup], sampled: list[RolloutGroup] | None = None) -> dict:
        """All optimizer steps of one batch: `num_epochs` passes over its minibatches. Returns the batch's metrics.

        Metrics of rewards count `sampled`, which `groups` were chosen from; `policy/lag_*` count `groups`. Does not
        publish. `mismatch/*` are computed on the first minibatch, before its step.
        """
        config, metrics = self.config, StepMetrics()
        if self.adaptive_kl is not None:
            config = dataclasses.replace(config, algorithm=self.adaptive_kl.algorithm(config.algorithm))
        if self.adaptive_entropy is not None:
            config = dataclasses.replace(config, algorithm=self.adaptive_entropy.algorithm(config.algorithm))
        algorithm = config.algorithm
        self.state.phase = "reinforcement"  # a script may come here from its own warm start
        trained: list[Trained] = []
        explaining: AbstractAsyncContextManager[dict[str, float]] = nullcontext({})
        if self.explainer is not None:
            explaining = self.explainer.explain(groups)
        async with explaining as mismatch:
            with self.recorder.span("score") as score:
                data = await training_data(groups, self.roles, algorithm)
            metrics.add("time/score_s", score.seconds)
            with span("count metrics"):
                batch_metrics = step_metrics.batch_metrics(sampled or groups, self.generator.health())
                batch_metrics |= age_metrics(groups, self.versions.publications)
                if self.adaptive_kl is not None:
                    batch_metrics |= self.adaptive_kl.adapt(data)
            for epoch in range(algorithm.num_epochs):
                for minibatch in minibatches(data, algorithm, groups):
                    output = await take_step(minibatch, self.roles, config, self.state.step, metrics)
                    self.state.step = self.state.phase_step = self.state.step + 1
                    self._count_step(output.steps, minibatch)
                    if epoch == 0:
                        trained += zip(minibatch, output.policy_logprobs, strict=True)
            if self.adaptive_entropy is not None:
                batch_metrics |= self.adaptive_entropy.adapt(metrics.compute())
            if self.explainer is not None:
                self.explainer.note_trained(trained)
            if self.lag_metrics is not None:
                self.lag_metrics.note_trained(trained, groups)
            self.recorder.record(TrainedOn(sequences=trained))
        steps = {**metrics.compute(), **metrics.speed(self.speed)}
        return {**batch_metrics, "step": self.state.step, **steps, **mismatch}

    def _count_step(self, steps: dict[str, RoleStep], data: list[Datum]) -> None:
        """Counts a step of any phase, see `count_step`."""
        count_step(self.run_dir, self.state, steps, data, max_skipped=self.config.controller.max_skipped_steps)

    async def publish(self) -> int:
        """Sends the trainer's weights to every generator, after evaluations of the weights before. Returns the policy
        version that now serves unpinned requests."""
        if self.overlapped_evaluations is not None:
            await self.overlapped_evaluations.finish()
        began = time.perf_counter()
        version = await self.weights.publish()
        seconds = time.perf_counter() - began
        self.recorder.record(Published(step=self.state.step, version=version, seconds=seconds))
        return version

    @property
    def policy_version(self) -> int:
        """The version that serves unpinned requests. A version is a number of optimizer steps."""
        return self.generator.policy_version

    async def _refresh(self, since: int) -> None:
        """The policy's weights to the reference and to the snapshot, where that fell due after step `since`."""
        if _passed(self.config.roles.refresh_reference_every, since, self.state.step):
            await self.weights.copy_to("reference")
        if _passed(self.config.algorithm.refresh_teacher_every, since, self.state.step):
            await self.weights.set_teacher(self.policy_version)

    async def _between_steps(self, since: int) -> None:
        """Writes a checkpoint where one fell due after step `since` of the phase. Raises as `_save_or_stop` does."""
        await self._save_or_stop(due=_passed(self.config.controller.checkpoint_every, since, self.state.phase_step))

    async def _save_or_stop(self, *, due: bool) -> None:
        """Writes a checkpoint where one is due. Raises Preempted or the run's failure, after a checkpoint, where the
        run is to stop."""
        reason = self.stop.reason() or self._until_reason()
        if reason or due:
            await self.checkpoints.save()
        if reason:
            await self.checkpoints.require_written()
            raise self.stop.failure or Preempted(reason)

    def _until_reason(self) -> str:
        """Why the run stops at the step that `train` was asked for; empty before it."""
        reached = self.state.phase == "reinforcement" and self._until is not None and self.state.step >= self._until
        return f"it was to go on until step {self._until}" if reached else ""

    def _record_admitted(self, draws: list[Draw], step: int) -> None:
        self.recorder.record(DrawEvents(step=step, records=admissions(draws)))

    def _record_batch(self, batch: Batch) -> None:
        self.recorder.record(DrawEvents(step=self.state.step, records=outcomes(batch)))
        self.recorder.record(RolloutsEnded(step=self.state.step, groups=batch.groups + batch.left_out))

    # Parts of a step, for the notebook and for loops of your own.

    async def rollouts(self, draws: list[Draw]) -> list[RolloutGroup]:
        """`group_size` rollouts of each draw's task, with rewards, from the newest policy, grouped as the algorithm
        says.

        Draws come from `controller.draws.next(n)`; the same draw of the same policy gives the same rollouts.
        """
        return await self.player.play(draws, Counter())

    async def evaluate_all(self) -> None:
        """The evaluations between steps: on the validation split, and those of `controller.eval_sets`. With a lag they
        begin here, and end while later batches train. Raises EarlyEnd by `controller.stop`."""
        if self.overlapped_evaluations is not None:
            await self.overlapped_evaluations.begin()
            return
        began = time.monotonic()
        await self.evaluate("validation")
        await self.evaluate_sets()
        self.stop.evaluation_s = time.monotonic() - began
        end_early(self.config.controller, self.state, self.recorder)

    async def evaluate(self, split: Split, *, num_tasks: int | None = None, pass_at_k: int = 0) -> Evaluation:
        """Greedy accuracy on a split, and with `pass_at_k` the chance that one of k samples is correct. The result is
        recorded."""
        result = await self.evaluations.evaluate_split(split, self.state.step, num_tasks=num_tasks, pass_at_k=pass_at_k)
        self._note_evaluations({split: result})
        return result

    async def _evaluation_now(self, name: str) -> Evaluation:
        """The evaluation after the present step, on the validation split or of one of `controller.eval_sets`. It is
        made unless it has been: before the first step, or before a rule of `controller.stop` ended the phase."""
        if (result := self.state.evaluation_now(name)) is not None:
            return Evaluation(**result)
        evaluation = await self.evaluations.evaluate_named(name, self.state.step)
        self._note_evaluations({name: evaluation})
        return evaluation

    async def evaluate_sets(self) -> dict[str, Evaluation]:
        """The evaluations of `controller.eval_sets`, by name. The results are recorded."""
        results = await self.evaluations.evaluate_sets(self.state.step)
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


def _schedules(config: RunConfig, run_dir: RunDir, run_backend: Backend, recorded: RecordedAttempt | None) -> Schedules:
    """What the engines record of their schedules, and in a replay what they follow."""
    directory = schedule_of(run_dir.path, run_dir.attempt).absolute()
    if recorded is None:
        return Schedules(directory=str(directory))
    patience_s = None if run_backend.in_this_process else config.controller.call_timeout_s
    return recorded.schedules(directory, patience_s)


def _passed(every: int, since: int, step: int) -> bool:
    """Whether a multiple of `every` lies in (`since`, `step`]; False for `every` = 0."""
    return every > 0 and step // every > since // every

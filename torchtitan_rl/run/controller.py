"""One controller drives a run: it starts the meshes, owns every loop and cadence, and shuts down.

The same object is what a script, the command line and the notebook hold::

    async with await Controller.launch(config) as controller:
        await controller.train()
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtitan_rl import metrics
from torchtitan_rl.algorithm.datums import demonstration_datums, minibatches
from torchtitan_rl.algorithm.grouping import form_groups
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.algorithm.schedules import lr_factor
from torchtitan_rl.config.resolve import resolved
from torchtitan_rl.config.run import EvalSetConfig, RunConfig
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.hosts.attach import Hosts
from torchtitan_rl.launch.actors import Launcher
from torchtitan_rl.launch.stack import hosts_for, launcher_for, start_generators, start_stack
from torchtitan_rl.model.files import assets_dir, write_model_dir
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.observability.progress import Progress
from torchtitan_rl.observability.run_dir import RunDir
from torchtitan_rl.run.batch import Batch, fill_batch
from torchtitan_rl.run.evaluation import Evaluation, eval_families, evaluate
from torchtitan_rl.run.training import scored, step_on, timed
from torchtitan_rl.tasks.family import TaskFamily, source_of
from torchtitan_rl.types import Datum, OptimParams, OptimStepOutput, RolloutGroup, Task
from torchtitan_rl.validation.run import missing_weights, validate
from torchtitan_rl.weights import checkpoint
from torchtitan_rl.workflows.demonstrate import demonstrate
from torchtitan_rl.workflows.group import run_group, workflow_of
from torchtitan_rl.workflows.multi_turn import Limits
from torchtitan_rl.workflows.policy import Policy
from torchtitan_rl.workflows.self_distill import SelfDistill

if TYPE_CHECKING:
    from torchtitan_rl.launch.local import LocalLauncher

__all__ = ["Controller"]


class Controller:
    """A running policy: `trainer` and `generator` are its clients, `versions` its weights in the store.

    Made by `launch`. `step` counts optimizer steps of the reinforcement phase; `policy_version` those of all phases.
    `teacher_version` is the policy version that scores for self-distillation; None before anything asks for it.
    """

    def __init__(self, config: RunConfig, run_dir: RunDir, progress: Progress, launcher: Launcher | LocalLauncher):
        from transformers import AutoTokenizer

        self.config, self.run_dir, self.progress, self.launcher = config, run_dir, progress, launcher
        self.tokenizer = AutoTokenizer.from_pretrained(str(assets_dir(config.model)))
        self.family = config.task.build()
        self.source = source_of(self.family, "train", config.seed)
        for split in ("validation", "test"):
            source_of(self.family, split, config.seed)  # refuses an empty one now, not at the end of the run
        self.supervised_family = self.family if config.supervised.task is None else config.supervised.task.build()
        source_of(self.supervised_family, "train", config.seed)
        self.eval_families = eval_families(config, self.family)
        self.step = 0
        self.policy_version = 0
        self.teacher_version: int | None = None
        self.phase, self.phase_step = "start-up", 0
        self.started_at = time.perf_counter()
        self._skipped_in_a_row = {"policy": 0, "critic": 0}
        self.roles: dict[str, TrainingClient] = {}
        self.generator: SamplingClient
        self.versions: PolicyVersions | None = None
        self.placement: Placement

    # Starting and stopping.

    @classmethod
    async def launch(
        cls,
        config: RunConfig,
        *,
        progress: Progress | None = None,
        hf_weights: Path | None = None,
        hosts: Hosts | None = None,
        backend: Literal["actors", "local"] = "actors",
    ) -> Controller:
        """Starts trainer, generators and store, and gives the generators the trainer's weights.

        With `hf_weights` only generators start, holding the weights of that Hugging Face directory: enough to
        sample and evaluate. `hosts` are those `attach.attach` has connected to; without them, this machine alone.
        `backend="local"` starts nothing: everything is in this process, on one device, for a debugger.
        Raises ValueError for what `validate`, `check_fits` and `check_local` refuse, before anything starts.
        """
        validate(config)
        hosts = hosts_for(config, backend, hosts, generators_only=hf_weights is not None)
        if hf_weights is None and (missing := missing_weights(config)):
            raise ValueError(missing)
        path = Path(config.output_dir or _default_dir(config.name))
        attached = hosts is not None and hosts.attached
        # Processes on other hosts may have another working directory.
        run_dir = RunDir.create(path.absolute() if attached else path)
        run_dir.write_config(resolved(config))
        launcher = launcher_for(config, hosts, str(run_dir.path / "logs"))
        progress = progress or Progress(quiet=True)
        with progress.waiting("starting trainer, generators and store", expected_s=15):
            try:
                controller = cls(config, run_dir, progress, launcher)
                await controller._start(hf_weights)
            except asyncio.CancelledError:
                launcher.kill()  # an interrupt does not wait
                if attached:  # where kill has no say
                    await launcher.stop()
                raise
            except Exception:
                await launcher.stop()
                raise
        return controller

    async def _start(self, hf_weights: Path | None) -> None:
        config = self.config
        model_dir = self.run_dir.path / "model"
        write_model_dir(
            model_dir,
            resolve_shape(config.model),
            assets_dir(config.model),
            eos=self.tokenizer.eos_token_id,
            pad=self._pad_token_id,
        )
        if hf_weights is not None:
            self.generator = await start_generators(config, self.launcher, model_dir)
            await self.generator.load_hf(str(hf_weights))
            return
        stack = await start_stack(config, self.launcher, model_dir)
        self.roles, self.generator = stack.roles, stack.generator
        self.versions, self.placement = stack.versions, stack.placement
        if config.algorithm.distill is not None and config.algorithm.distill.divergence == "full":
            await self.versions.copy_head(self.role("teacher"), self.trainer)
        await self.publish()

    async def close(self) -> None:
        """Stops every process of the run."""
        self.generator.close()  # or calls in flight would take the end of their generators for a loss
        await self.launcher.stop()

    def role(self, name: str) -> TrainingClient:
        """The client of a role. Raises ValueError when the run has none."""
        if name not in self.roles:
            raise ValueError(
                f"role={name!r}: is not configured (this run has {', '.join(self.roles)}); set roles.{name}"
            )
        return self.roles[name]

    @property
    def trainer(self) -> TrainingClient:
        """The policy's client."""
        return self.role("policy")

    async def __aenter__(self) -> Controller:
        return self

    async def __aexit__(self, *exc_info) -> None:
        await self.close()

    # The run.

    async def train(self) -> dict[str, Evaluation]:
        """Warm start, reinforcement, and one look at the test split. Returns the evaluations by name."""
        config, report = self.config, {}
        warm = config.supervised.num_steps > 0
        if warm:
            await self.supervise()
        report["warm start"] = await self.evaluate("validation", pass_at_k=config.controller.pass_at_k if warm else 0)
        await self.evaluate_sets()
        await self.reinforce()
        await self.save_checkpoint()
        report["validation"] = await self.evaluate("validation")
        report |= await self.evaluate_sets()
        report["test"] = await self.evaluate("test")
        return report

    async def supervise(self) -> None:
        """The supervised phase: cross-entropy on the task's demonstrations, then weights to the generators."""
        config, self.phase, self.phase_step = self.config.supervised, "supervised", 0
        family, source = self.supervised_family, source_of(self.supervised_family, "train", self.config.seed)
        with self.progress.phase("supervised", total=config.num_steps) as bar:
            for step in range(config.num_steps):
                start = time.perf_counter()
                data = demonstration_datums(
                    await self.demonstrations(source.next(config.batch_size), family), self.config.algorithm
                )
                lr = config.lr * lr_factor(config.schedule, step, config.num_steps)
                forward_backward = self.trainer.forward_backward(data, cross_entropy, temperature=1.0)
                optim_step = self.trainer.optim_step(OptimParams(lr=lr, betas=config.betas))
                output, forward_backward_s = await timed(forward_backward, start)
                optim, step_s = await timed(optim_step, start)
                self._account(optim)
                self.phase_step = step + 1
                self.run_dir.log_metrics(
                    {
                        "step": step + 1,
                        "phase": "supervised",
                        "loss/mean": output.loss,
                        "optim/grad_norm": optim.grad_norm,
                        "optim/lr": optim.lr,
                        "tokens/trained_per_s": output.num_tokens / step_s,
                        "time/step_s": step_s,
                        "time/forward_backward_s": forward_backward_s,
                        "time/optim_s": step_s - forward_backward_s,
                    }
                )
                bar.advance(text=f"loss {output.loss:.3f}")
        await self.trainer.reset_optimizer()
        await self.publish()
        if self.teacher_version is not None:  # somebody has rolled out before: reinforcement starts here
            await self.set_teacher(self.policy_version)
        for name, role in self.config.roles.configured().items():
            if name in ("reference", "critic") and role.model is None:  # reinforcement starts here for them too
                await self.versions.copy(self.trainer, self.role(name))

    async def reinforce(self) -> None:
        """The reinforcement phase."""
        config, self.phase, self.phase_step = self.config, "reinforcement", self.step
        num_steps, every = config.controller.num_steps, config.controller.eval_every
        with self.progress.phase("reinforcement", total=num_steps) as bar:
            while self.step < num_steps:
                start, first = time.perf_counter(), self.step
                batch, generate_s = await timed(self.next_batch())
                line = metrics.of_batch(batch.sampled, self.policy_version, self.generator.health()) | batch.metrics
                line |= await self.train_on(batch.groups)
                _, sync_s = await timed(self.publish())
                if self._passed(config.roles.refresh_reference_every, first):
                    await self.refresh_reference()
                if self._passed(config.algorithm.refresh_teacher_every, first):
                    await self.set_teacher(self.policy_version)
                line |= {
                    "time/step_s": time.perf_counter() - start,
                    "time/generate_s": generate_s,
                    "time/sync_s": sync_s,
                }
                line["tokens/trained_per_s"] = line["tokens/trained"] / line["time/step_s"]
                line["tokens/generated_per_s"] = line["tokens/generated"] / generate_s
                self.run_dir.log_metrics(line)
                self.run_dir.log_rollouts(self.step, "reinforcement", batch.groups + batch.left_out)
                self.progress.line(metrics.summary(line, num_steps))
                bar.advance(self.step - first, text=f"reward {line['reward/mean']:.3f}")
                if self._passed(every, first) and self.step < num_steps:
                    await self.evaluate("validation")
                    await self.evaluate_sets()

    def _passed(self, every: int, before: int) -> bool:
        """Whether a cadence of `every` steps fell due since step `before`; 0 is never."""
        return every > 0 and self.step // every > before // every

    async def train_on(self, groups: list[RolloutGroup]) -> dict:
        """All optimizer steps of one batch: `num_epochs` passes over its minibatches. Returns its metrics.

        Weights are not published. `mismatch/*` are those of the batch's first minibatch, before its step.
        """
        config, line = self.config.algorithm, metrics.StepMetrics()
        data, score_s = await timed(self.scored(groups))
        line.mean("time/score_s", score_s)
        for _ in range(config.num_epochs):
            for minibatch in minibatches(data, config.tasks_per_minibatch, config.reduction):
                steps = await step_on(minibatch, self.roles, config, self.optim_params, line)
                for role, optim in steps.items():
                    self._account(optim, role)
                self.step += 1
                self.phase_step = self.step
        return {"step": self.step, **line.line()}

    async def scored(self, groups: list[RolloutGroup]) -> list[Datum]:
        """Training data of judged groups, with what the other roles say of them; see `training.scored`."""
        return await scored(groups, self.roles, self.config.algorithm, oldest_version=self.policy_version)

    async def refresh_reference(self) -> None:
        """The reference takes over the policy's weights, exactly as they are, through the store."""
        assert self.versions is not None
        await self.versions.copy(self.trainer, self.role("reference"))

    async def set_teacher(self, version: int) -> None:
        """This policy version scores for self-distillation from now on, and is kept for as long."""
        if self.versions is None:
            raise RuntimeError(
                "self-distillation: these generators hold one set of weights and no versions; launch without hf_weights"
            )
        self.versions.pin(version, "teacher")
        previous, self.teacher_version = self.teacher_version, version
        if previous is not None:
            await self.versions.release(previous, "teacher")

    async def next_batch(self) -> Batch:
        """Rollouts of the next tasks that pass `algorithm.filters`; when none does RuntimeError, after a checkpoint."""

        async def roll_out(num_tasks: int, first: int, counts: Counter) -> list[RolloutGroup]:
            return await self.rollouts(self.source.next(num_tasks), first=first, counts=counts)

        batch = await fill_batch(
            roll_out,
            self.config.algorithm,
            max_tokens=self.config.sampling.max_tokens,
            oldest_version=self.policy_version,
        )
        if batch.stalled:
            self.run_dir.log_rollouts(self.step, "reinforcement", batch.left_out)
            await self.save_checkpoint()
            raise RuntimeError(batch.stalled)
        return batch

    async def rollouts(self, tasks: list[Task], *, first: int = 0, counts: Counter | None = None) -> list[RolloutGroup]:
        """`group_size` rollouts of each task, with rewards, from the newest policy, grouped as the algorithm says.

        `first` numbers the tasks of one step from there on; `counts` is given what grouping leaves out.
        """
        config = self.config
        policy, workflow = self.policy(config.algorithm.temperature), self.workflow(self.family)
        if self.teacher_version is None and config.algorithm.asks_teacher:
            await self.set_teacher(self.policy_version)
        policy.for_training, policy.teacher_version = True, self.teacher_version
        play, learn = (workflow.workflow, workflow.learn) if isinstance(workflow, SelfDistill) else (workflow, None)
        played = await asyncio.gather(
            *(
                run_group(
                    play,
                    task,
                    policy,
                    config.algorithm.group_size,
                    group_id=f"{self.step}/{i}",
                    seed=config.seed,
                    reward=self.family,
                    reward_timeout_s=config.controller.reward_timeout_s,
                )
                for i, task in enumerate(tasks, start=first)
            )
        )
        if learn is not None:
            await asyncio.gather(*(learn(rollout, policy) for group in played for rollout in group.rollouts))
        if (after_rewards := config.algorithm.after_rewards) is not None:
            await asyncio.gather(*(after_rewards(group, policy) for group in played))
        return form_groups([rollout for group in played for rollout in group.rollouts], config.algorithm, counts)

    async def evaluate(
        self, split: Literal["train", "validation", "test"], *, num_tasks: int | None = None, pass_at_k: int = 0
    ) -> Evaluation:
        """Greedy accuracy on a split, and with `pass_at_k` the chance that one of k samples is right; logged."""
        config = self.config.controller
        if num_tasks is None:
            num_tasks = config.test_tasks if split == "test" else config.eval_tasks
        eval_set = EvalSetConfig(
            split=split,
            num_tasks=num_tasks,
            num_samples=pass_at_k,
            pass_at_k=pass_at_k,
            temperature=self.config.algorithm.temperature,
        )
        return await self._evaluate(self.family, self.family.name, eval_set, label=f"eval/{self.step}")

    async def evaluate_sets(self) -> dict[str, Evaluation]:
        """The evaluations of `controller.eval_sets`, by name; logged."""
        return {
            name: await self._evaluate(self.eval_families[name], name, eval_set, label=f"eval/{self.step}/{name}")
            for name, eval_set in self.config.controller.eval_sets.items()
        }

    async def _evaluate(self, family, name: str, eval_set: EvalSetConfig, *, label: str) -> Evaluation:
        start = time.perf_counter()
        shown = f"{name} " if name in self.eval_families else ""
        with self.progress.waiting(f"evaluating on {shown}{eval_set.split} tasks"):
            result = await evaluate(
                self.policy,
                family,
                eval_set,
                name=name,
                label=label,
                seed=self.config.seed,
                config=self.config.controller,
                workflow=self.workflow(family),
            )
        self.run_dir.log_metrics(
            {"step": self.step, "phase": "evaluation", **result.metrics(), "time/step_s": time.perf_counter() - start}
        )
        self.progress.line(f"step {self.step}: {shown}{result.summary()}")
        return result

    # Parts of a step, for the notebook and for loops of your own.

    async def publish(self) -> int:
        """Sends the trainer's weights to every generator. Returns the policy version they now sample from."""
        version = await self.versions.publish()
        await self.generator.pull(version)
        self.policy_version = version
        return version

    def policy(self, temperature: float) -> Policy:
        """The newest policy, with this run's tokenizer and limits."""
        sampling = self.config.sampling
        return Policy(
            sampler=self.generator,
            tokenizer=self.tokenizer,
            temperature=temperature,
            max_tokens=sampling.max_tokens,
            max_prompt_tokens=sampling.max_prompt_tokens,
            stop_token_ids=sampling.stop_token_ids,
            stop=sampling.stop,
        )

    def workflow(self, family: TaskFamily) -> Callable:
        """How a family's tasks are played in this run."""
        config, sampling = self.config, self.config.sampling
        return config.algorithm.workflow or workflow_of(
            family,
            Limits(
                max_turns=sampling.max_turns,
                timeout_s=sampling.rollout_timeout_s,
                max_tokens=sampling.max_rollout_tokens or sampling.max_prompt_tokens + sampling.max_tokens,
                step_timeout_s=config.controller.reward_timeout_s,
            ),
        )

    def optim_params(self, role: str = "policy") -> OptimParams:
        """Optimizer parameters of the current step: the role's peak learning rate times the schedule's factor."""
        factor = lr_factor(self.config.algorithm.schedule, self.step, self.config.controller.num_steps)
        trainer = self.config.trainer if role == "policy" else self.config.roles.configured()[role].trainer
        return OptimParams(lr=trainer.optimizer.lr * factor, betas=trainer.optimizer.betas)

    async def demonstrations(
        self, tasks: list[Task], family: TaskFamily | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """(prompt tokens, completion tokens) of every turn of the tasks' demonstrations. ValueError without one."""
        policy, workflow = self.policy(1.0), self.workflow(family or self.family)
        pairs = await asyncio.gather(*(demonstrate(workflow, task, policy) for task in tasks))
        return [pair for turns in pairs for pair in turns]

    async def save_checkpoint(self) -> Path:
        """Everything a later run needs, marker last. Returns its directory."""
        path = self.run_dir.checkpoint_path(self.step)
        checkpoint.begin(path)
        with self.progress.waiting(f"saving {path.name}"):
            await self.trainer.save_checkpoint(path)
            if "critic" in self.roles:
                await self.roles["critic"].save_checkpoint(path / "critic")
            await self.trainer.save_hf_model(
                checkpoint.hf_dir(path), eos=self.tokenizer.eos_token_id, pad=self._pad_token_id
            )
            if self.config.trainer.lora is not None:
                await self.trainer.save_adapter(checkpoint.adapter_dir(path))
            if self.teacher_version is not None:
                await self.versions.save(self.teacher_version, checkpoint.teacher_file(path))
            checkpoint.write_state(
                path,
                {
                    "step": self.step,
                    "phase": self.phase,
                    "policy_version": self.policy_version,
                    "teacher_version": self.teacher_version,
                    "source": self.source.state_dict(),
                    "seed": self.config.seed,
                },
            )
        return path

    @property
    def _pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    def _account(self, optim: OptimStepOutput, role: str = "policy") -> None:
        """Counts skipped steps in a row; too many mean that the run has diverged."""
        skipped = self._skipped_in_a_row[role] = self._skipped_in_a_row[role] + 1 if optim.skipped else 0
        if skipped >= self.config.controller.max_skipped_steps:
            raise RuntimeError(
                f"optim/grad_norm={optim.grad_norm}: {skipped} optimizer steps of the {role} in a row were skipped; "
                "lower the learning rate, or look at the rewards and log-probabilities of the last rollouts"
            )


def _default_dir(name: str) -> str:
    return f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}"

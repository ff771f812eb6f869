"""One controller drives a run: it starts the meshes, owns every loop and cadence, and shuts down.

The same object is what a script, the command line and the notebook hold::

    async with await Controller.launch(config) as controller:
        await controller.train()
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torchtitan_rl import metrics
from torchtitan_rl.algorithm.datums import demonstration_datums, minibatches, to_datums, with_gae, with_inputs
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.algorithm.schedules import lr_factor
from torchtitan_rl.hosts.attach import Hosts, this_host
from torchtitan_rl.config import RunConfig, resolved
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.evaluation import Evaluation, evaluate
from torchtitan_rl.hosts.inventory import Host, check_fits, local_host
from torchtitan_rl.launch import Launcher
from torchtitan_rl.model.config import assets_dir, missing_weights, resolve_shape, write_model_dir
from torchtitan_rl.observability.progress import Progress
from torchtitan_rl.observability.run_dir import RunDir
from torchtitan_rl.stack import start_generators, start_stack
from torchtitan_rl.tasks.family import TaskSource
from torchtitan_rl.types import Datum, OptimParams, OptimStepOutput, RolloutGroup, Task
from torchtitan_rl.validation import check_local, validate
from torchtitan_rl.weights import checkpoint
from torchtitan_rl.workflows.group import run_group
from torchtitan_rl.workflows.policy import Policy
from torchtitan_rl.workflows.single_turn import single_turn

if TYPE_CHECKING:
    from torchtitan_rl.local_launch import LocalLauncher

__all__ = ["Controller"]


class Controller:
    """A running policy: `trainer` and `generator` are its clients, `versions` its weights in the store.

    Made by `launch`. `step` counts optimizer steps of the reinforcement phase; `policy_version` those of all phases.
    """

    def __init__(self, config: RunConfig, run_dir: RunDir, progress: Progress, launcher: Launcher | LocalLauncher):
        from transformers import AutoTokenizer

        self.config, self.run_dir, self.progress, self.launcher = config, run_dir, progress, launcher
        self.tokenizer = AutoTokenizer.from_pretrained(str(assets_dir(config.model)))
        self.family = config.task.build()
        self.source = TaskSource(self.family, "train", config.seed)
        for split in ("validation", "test"):
            TaskSource(self.family, split, config.seed)  # refuses an empty one now, not at the end of the run
        self.step = 0
        self.policy_version = 0
        self.phase, self.phase_step = "start-up", 0
        self.started_at = time.perf_counter()
        self._skipped_in_a_row = 0
        self.roles: dict[str, TrainingClient] = {}
        self.generator: SamplingClient
        self.versions: PolicyVersions | None = None
        self.placement: Placement

    # Starting and stopping.

    @classmethod
    async def launch(
        cls, config: RunConfig, *, progress: Progress | None = None, hf_weights: Path | None = None,
        hosts: Hosts | None = None, backend: Literal["actors", "local"] = "actors",
    ) -> Controller:
        """Starts trainer, generators and store, and gives the generators the trainer's weights.

        With `hf_weights` only generators start, holding the weights of that Hugging Face directory: enough to
        sample and evaluate. `hosts` are those `attach.attach` has connected to; without them, this machine alone.
        `backend="local"` starts nothing: everything is in this process, on one device, for a debugger.
        Raises ValueError for what `validate`, `check_fits` and `check_local` refuse, before anything starts.
        """
        validate(config)
        hosts = _hosts_of(config, backend, hosts)
        if hf_weights is None and (missing := missing_weights(config.model)):
            raise ValueError(missing)
        path = Path(config.output_dir or _default_dir(config.name))
        attached = hosts is not None and hosts.attached
        # Processes on other hosts may have another working directory.
        run_dir = RunDir.create(path.absolute() if attached else path)
        run_dir.write_config(resolved(config))
        launcher = _launcher(config, hosts, str(run_dir.path / "logs"))
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
            model_dir, resolve_shape(config.model), assets_dir(config.model), eos=self.tokenizer.eos_token_id,
            pad=self._pad_token_id)
        if hf_weights is not None:
            self.generator = await start_generators(config, self.launcher, model_dir)
            await self.generator.load_hf(str(hf_weights))
            return
        stack = await start_stack(config, self.launcher, model_dir)
        self.roles, self.generator = stack.roles, stack.generator
        self.versions, self.placement = stack.versions, stack.placement
        await self.publish()

    async def close(self) -> None:
        """Stops every process of the run."""
        self.generator.close()  # or calls in flight would take the end of their generators for a loss
        await self.launcher.stop()

    def role(self, name: str) -> TrainingClient:
        """The client of a role. Raises ValueError when the run has none."""
        if name not in self.roles:
            raise ValueError(f"role={name!r}: is not configured (this run has {', '.join(self.roles)}); set roles.{name}")
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
        await self.reinforce()
        await self.save_checkpoint()
        report["validation"] = await self.evaluate("validation")
        report["test"] = await self.evaluate("test")
        return report

    async def supervise(self) -> None:
        """The supervised phase: cross-entropy on the task's demonstrations, then weights to the generators."""
        config, self.phase, self.phase_step = self.config.supervised, "supervised", 0
        source = TaskSource(self.family, "train", self.config.seed)
        with self.progress.phase("supervised", total=config.num_steps) as bar:
            for step in range(config.num_steps):
                start = time.perf_counter()
                data = demonstration_datums(
                    [self.demonstration_tokens(task) for task in source.next(config.batch_size)], self.config.algorithm)
                lr = config.lr * lr_factor(config.schedule, step, config.num_steps)
                forward_backward = self.trainer.forward_backward(data, cross_entropy, temperature=1.0)
                optim_step = self.trainer.optim_step(OptimParams(lr=lr, betas=config.betas))
                output, forward_backward_s = await _timed(forward_backward, start)
                optim, step_s = await _timed(optim_step, start)
                self._account(optim)
                self.phase_step = step + 1
                self.run_dir.log_metrics({
                    "step": step + 1, "phase": "supervised", "loss/mean": output.loss,
                    "optim/grad_norm": optim.grad_norm, "optim/lr": optim.lr,
                    "tokens/trained_per_s": output.num_tokens / step_s, "time/step_s": step_s,
                    "time/forward_backward_s": forward_backward_s, "time/optim_s": step_s - forward_backward_s})
                bar.advance(text=f"loss {output.loss:.3f}")
        await self.trainer.reset_optimizer()
        await self.publish()

    async def reinforce(self) -> None:
        """The reinforcement phase."""
        config, self.phase, self.phase_step = self.config, "reinforcement", self.step
        num_steps, every = config.controller.num_steps, config.controller.eval_every
        with self.progress.phase("reinforcement", total=num_steps) as bar:
            while self.step < num_steps:
                start, first = time.perf_counter(), self.step
                groups, generate_s = await _timed(self.rollouts(self.source.next(config.algorithm.tasks_per_step)))
                version = self.policy_version
                line = metrics.of_batch(groups, version, self.generator.health()) | await self.train_on(groups)
                _, sync_s = await _timed(self.publish())
                if self._passed(config.roles.refresh_reference_every, first):
                    await self.refresh_reference()
                line |= {"time/step_s": time.perf_counter() - start, "time/generate_s": generate_s, "time/sync_s": sync_s}
                line["tokens/trained_per_s"] = line["tokens/trained"] / line["time/step_s"]
                line["tokens/generated_per_s"] = line["tokens/generated"] / generate_s
                self.run_dir.log_metrics(line)
                self.run_dir.log_rollouts(self.step, "reinforcement", groups)
                self.progress.line(metrics.summary(line, num_steps))
                bar.advance(self.step - first, text=f"reward {line['reward/mean']:.3f}")
                if self._passed(every, first) and self.step < num_steps:
                    await self.evaluate("validation")

    def _passed(self, every: int, before: int) -> bool:
        """Whether a cadence of `every` steps fell due since step `before`; 0 is never."""
        return every > 0 and self.step // every > before // every

    async def train_on(self, groups: list[RolloutGroup]) -> dict:
        """All optimizer steps of one batch: `num_epochs` passes over its minibatches. Returns its metrics.

        Weights are not published. `mismatch/*` are those of the batch's first minibatch, before its step.
        """
        config, line = self.config.algorithm, metrics.StepMetrics()
        data, score_s = await _timed(self.scored(groups))
        line.mean("time/score_s", score_s)
        for _ in range(config.num_epochs):
            for minibatch in minibatches(data, config.tasks_per_minibatch, config.reduction):
                if config.recompute_logprobs_per_minibatch:
                    output = await self.trainer.forward(minibatch)
                    minibatch = with_inputs(minibatch, old_logprobs=output.policy_logprobs)
                critic = self._critic_step(minibatch, line) if "critic" in self.roles else None
                start = time.perf_counter()
                forward_backward = self.trainer.forward_backward(minibatch, config.loss_fn, loss_config=config.loss_config)
                optim_step = self.trainer.optim_step(self.optim_params())
                if critic is not None:
                    await critic
                output, forward_backward_s = await _timed(forward_backward, start)
                optim, step_s = await _timed(optim_step, start)
                line.add(output, optim)
                line.mean("time/forward_backward_s", forward_backward_s)
                line.mean("time/optim_s", step_s - forward_backward_s)
                self._account(optim)
                self.step += 1
                self.phase_step = self.step
        return {"step": self.step, **line.line()}

    def _critic_step(self, minibatch: list[Datum], line: metrics.StepMetrics) -> Awaitable[None]:
        """Submits the critic's step, before the policy's where they share devices; awaiting it gathers its metrics."""
        config, critic = self.config.algorithm, self.role("critic")
        forward_backward = critic.forward_backward(minibatch, config.critic_loss_fn, loss_config=config.critic_loss_config)
        optim_step = critic.optim_step(self.optim_params("critic"))

        async def gather() -> None:
            output, optim = await forward_backward, await optim_step
            line.add(output)
            line.mean("critic/loss", output.loss)
            line.mean("critic/grad_norm", optim.grad_norm)
            line.mean("critic/skipped", optim.skipped)

        return gather()

    async def scored(self, groups: list[RolloutGroup]) -> list[Datum]:
        """Training data of judged groups, with what reference and critic say of them. Their forwards overlap."""
        data = to_datums(groups, self.config.algorithm)
        waits = {role: self.roles[role].forward(data) for role in ("reference", "critic") if role in self.roles}
        outputs = dict(zip(waits, await asyncio.gather(*waits.values())))
        if "reference" in outputs:
            data = with_inputs(data, reference_logprobs=outputs["reference"].policy_logprobs)
        if "critic" in outputs:
            rewards = [rollout.reward for group in groups for rollout in group.rollouts for _ in rollout.turns]
            data = with_gae(data, rewards, outputs["critic"].values, self.config.algorithm)
        return data

    async def refresh_reference(self) -> None:
        """The reference takes over the policy's weights, exactly as they are, through the store."""
        assert self.versions is not None
        await self.versions.copy(self.trainer, self.role("reference"))

    async def rollouts(self, tasks: list[Task]) -> list[RolloutGroup]:
        """A group of rollouts of each task, with rewards, from the newest policy."""
        config = self.config
        policy = self.policy(config.algorithm.temperature)
        return list(await asyncio.gather(*(
            run_group(single_turn, task, policy, config.algorithm.group_size, group_id=f"{self.step}/{i}",
                      seed=config.seed, reward=self.family, reward_timeout_s=config.controller.reward_timeout_s)
            for i, task in enumerate(tasks))))

    async def evaluate(self, split: str, *, num_tasks: int | None = None, pass_at_k: int = 0) -> Evaluation:
        """Greedy accuracy on a split, and with `pass_at_k` the chance that one of k samples is right; logged."""
        config = self.config.controller
        if num_tasks is None:
            num_tasks = config.test_tasks if split == "test" else config.eval_tasks
        start = time.perf_counter()
        with self.progress.waiting(f"evaluating on {split} tasks"):
            result = await evaluate(
                self.policy, self.family, split, num_tasks, label=f"eval/{self.step}", seed=self.config.seed,
                pass_at_k=pass_at_k, temperature=self.config.algorithm.temperature, config=config)
        self.run_dir.log_metrics({
            "step": self.step, "phase": "evaluation", **result.metrics(), "time/step_s": time.perf_counter() - start})
        self.progress.line(f"step {self.step}: {result.summary()}")
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
            sampler=self.generator, tokenizer=self.tokenizer, temperature=temperature, max_tokens=sampling.max_tokens,
            max_prompt_tokens=sampling.max_prompt_tokens, stop_token_ids=sampling.stop_token_ids)

    def optim_params(self, role: str = "policy") -> OptimParams:
        """Optimizer parameters of the current step: the role's peak learning rate times the schedule's factor."""
        factor = lr_factor(self.config.algorithm.schedule, self.step, self.config.controller.num_steps)
        trainer = self.config.trainer if role == "policy" else self.config.roles.configured()[role].trainer
        return OptimParams(lr=trainer.optimizer.lr * factor, betas=trainer.optimizer.betas)

    def demonstration_tokens(self, task: Task) -> tuple[list[int], list[int]]:
        """(prompt tokens, completion tokens with the end-of-sequence token). Raises ValueError without one."""
        if task.demonstration is None:
            raise ValueError(f"task={task.id!r}: has no demonstration; set supervised.num_steps=0 or give the task one")
        completion = self.tokenizer.encode(task.demonstration, add_special_tokens=False)
        return self.policy(1.0).prompt_tokens(task), [*completion, self.tokenizer.eos_token_id]

    async def save_checkpoint(self) -> Path:
        """Everything a later run needs, marker last. Returns its directory."""
        path = self.run_dir.checkpoint_path(self.step)
        checkpoint.begin(path)
        with self.progress.waiting(f"saving {path.name}"):
            await self.trainer.save_checkpoint(path)
            if "critic" in self.roles:
                await self.roles["critic"].save_checkpoint(path / "critic")
            await self.trainer.save_hf_model(
                checkpoint.hf_dir(path), eos=self.tokenizer.eos_token_id, pad=self._pad_token_id)
            if self.config.trainer.lora is not None:
                await self.trainer.save_adapter(checkpoint.adapter_dir(path))
            checkpoint.write_state(path, {
                "step": self.step, "phase": self.phase, "policy_version": self.policy_version,
                "source": self.source.state_dict(), "seed": self.config.seed})
        return path

    @property
    def _pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        return self.tokenizer.eos_token_id if pad is None else pad

    def _account(self, optim: OptimStepOutput) -> None:
        """Counts skipped steps in a row; too many mean that the run has diverged."""
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if optim.skipped else 0
        if self._skipped_in_a_row >= self.config.controller.max_skipped_steps:
            raise RuntimeError(
                f"optim/grad_norm={optim.grad_norm}: {self._skipped_in_a_row} optimizer steps in a row were skipped; "
                "lower the learning rate, or look at the rewards and log-probabilities of the last rollouts")


def _hosts_of(config: RunConfig, backend: str, hosts: Hosts | None) -> Hosts | None:
    """Where the actors go; None for the local backend. Raises ValueError for a config that does not fit there."""
    if backend == "actors":
        hosts = hosts or this_host()
        check_fits(config, hosts.hosts)
        return hosts
    if backend != "local":
        raise ValueError(f"backend={backend!r}: is not known; use 'actors' or 'local'")
    if hosts is not None:
        raise ValueError(f"backend='local': is this process alone, and {len(hosts.hosts)} hosts are attached; leave one "
                         "of them out")
    check_local(config)
    here = local_host()
    check_fits(config, [Host(address=here.address, num_cores=here.num_cores, devices=here.devices[:1])])
    return None


def _launcher(config: RunConfig, hosts: Hosts | None, log_dir: str) -> Launcher | LocalLauncher:
    start_s, call_s = config.controller.start_timeout_s, config.controller.call_timeout_s
    if hosts is not None:
        return Launcher(log_dir=log_dir, start_timeout_s=start_s, call_timeout_s=call_s, hosts=hosts)
    from torchtitan_rl.local_launch import LocalLauncher  # imports torchstore, which otherwise only actors need at once

    return LocalLauncher(log_dir=log_dir, start_timeout_s=start_s, call_timeout_s=call_s)


def _default_dir(name: str) -> str:
    return f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}"


async def _timed(awaitable, start: float | None = None):
    """(result, seconds since `start`, or since now)."""
    start = time.perf_counter() if start is None else start
    result = await awaitable
    return result, time.perf_counter() - start

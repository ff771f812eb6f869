"""One controller drives a run: it starts the meshes, owns every loop and cadence, and shuts down.

The same object is what a script, the command line and the notebook hold::

    async with await Controller.launch(config) as controller:
        await controller.train()
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import mean

import torch

from torchtitan_rl import metrics
from torchtitan_rl.algorithm.datums import demonstration_datums, to_datums
from torchtitan_rl.algorithm.losses import cross_entropy
from torchtitan_rl.algorithm.schedules import lr_factor
from torchtitan_rl.attach import Hosts, this_host
from torchtitan_rl.config import RunConfig, resolved, validate
from torchtitan_rl.dispatch.sampling_client import SamplingClient
from torchtitan_rl.dispatch.training_client import TrainingClient
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.hosts import check_fits
from torchtitan_rl.launch import Launcher
from torchtitan_rl.model.config import assets_dir, missing_weights, resolve_shape, write_model_dir
from torchtitan_rl.observability.progress import Progress
from torchtitan_rl.observability.run_dir import RunDir
from torchtitan_rl.tasks.family import TaskSource
from torchtitan_rl.types import OptimParams, OptimStepOutput, RolloutGroup, Task
from torchtitan_rl.weights import checkpoint
from torchtitan_rl.workflows.group import run_group
from torchtitan_rl.workflows.policy import Policy
from torchtitan_rl.workflows.single_turn import single_turn

__all__ = ["Controller", "Evaluation"]


@dataclass(kw_only=True, slots=True)
class Evaluation:
    """What one evaluation measured."""

    split: str
    accuracy: float
    """Share of tasks whose greedy completion is correct."""
    pass_at_k: float | None = None
    """Chance that at least one of k samples is correct."""


class Controller:
    """A running policy: `trainer` and `generator` are its clients, `versions` its weights in the store.

    Made by `launch`. `step` counts optimizer steps of the reinforcement phase; `policy_version` those of all phases.
    """

    def __init__(self, config: RunConfig, run_dir: RunDir, progress: Progress, launcher: Launcher):
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
        self.trainer: TrainingClient
        self.generator: SamplingClient
        self.versions: PolicyVersions

    # Starting and stopping.

    @classmethod
    async def launch(
        cls, config: RunConfig, *, progress: Progress | None = None, hf_weights: Path | None = None,
        hosts: Hosts | None = None,
    ) -> Controller:
        """Starts trainer, generators and store, and gives the generators the trainer's weights.

        With `hf_weights` only generators start, holding the weights of that Hugging Face directory: enough to
        sample and evaluate. `hosts` are those `attach.attach` has connected to; without them, this machine alone.
        Raises ValueError for what `validate` and `check_fits` refuse, before anything starts.
        """
        validate(config)
        hosts = hosts or this_host()
        check_fits(config, hosts.hosts)
        if hf_weights is None and (missing := missing_weights(config.model)):
            raise ValueError(missing)
        path = Path(config.output_dir or _default_dir(config.name))
        # Processes on other hosts may have another working directory.
        run_dir = RunDir.create(path.absolute() if hosts.attached else path)
        run_dir.write_config(resolved(config))
        launcher = Launcher(
            log_dir=str(run_dir.path / "logs"), start_timeout_s=config.controller.start_timeout_s,
            call_timeout_s=config.controller.call_timeout_s, hosts=hosts)
        progress = progress or Progress(quiet=True)
        with progress.waiting("starting trainer, generators and store", expected_s=15):
            try:
                controller = cls(config, run_dir, progress, launcher)
                await controller._start(hf_weights)
            except asyncio.CancelledError:
                launcher.kill()  # an interrupt does not wait
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
        generators = [
            self.launcher.start_generator(config.generator, model_dir, role=f"generator-{i}", seed=config.seed)
            for i in range(config.generator.num_replicas)
        ]
        if hf_weights is not None:
            replicas = await asyncio.gather(*generators)
            self.generator = self._sampling_client(replicas, None)
            await self.generator.load_hf(str(hf_weights))
            return
        starts = [asyncio.ensure_future(start) for start in (
            self.launcher.start_trainer(config.trainer, config.model, role="policy", seed=config.seed),
            self.launcher.start_store(), *generators)]
        try:
            mesh, _, *replicas = await asyncio.gather(*starts)
        finally:
            for start in starts:  # one failed: the others must not go on starting
                start.cancel()
        self.trainer = TrainingClient(
            mesh, max_tokens_per_microbatch=config.trainer.max_tokens_per_microbatch,
            max_datum_tokens=config.trainer.training.seq_len, temperature=config.algorithm.temperature)
        self.versions = PolicyVersions(
            self.trainer, self.launcher.store, config.weight_sync, getattr(torch, config.generator.dtype),
            one_host=self.launcher.one_host)
        self.generator = self._sampling_client(replicas, self.versions)
        await self.publish()

    def _sampling_client(self, replicas, versions) -> SamplingClient:
        return SamplingClient(
            replicas, versions, max_model_len=self.config.generator.max_model_len,
            timeout_s=self.config.controller.sample_timeout_s, verify=self.config.weight_sync.verify)

    async def close(self) -> None:
        """Stops every process of the run."""
        await self.launcher.stop()

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
        with self.progress.phase("reinforcement", total=config.controller.num_steps) as bar:
            while self.step < config.controller.num_steps:
                start = time.perf_counter()
                groups = await self.rollouts(self.source.next(config.algorithm.tasks_per_step))
                data = to_datums(groups, config.algorithm)
                generated = time.perf_counter()
                forward_backward = self.trainer.forward_backward(
                    data, config.algorithm.loss_fn, loss_config=config.algorithm.loss_config)
                optim_step = self.trainer.optim_step(self.optim_params())
                output, forward_backward_s = await _timed(forward_backward, generated)
                optim, optim_s = await _timed(optim_step, generated + forward_backward_s)
                trained_version = self.policy_version
                self._account(optim)
                self.step += 1
                self.phase_step = self.step
                _, sync_s = await _timed(self.publish(), generated + forward_backward_s + optim_s)
                line = self._metrics(groups, trained_version, output, optim) | {
                    "time/step_s": time.perf_counter() - start, "time/generate_s": generated - start,
                    "time/forward_backward_s": forward_backward_s, "time/optim_s": optim_s, "time/sync_s": sync_s}
                line["tokens/trained_per_s"] = output.num_tokens / line["time/step_s"]
                line["tokens/generated_per_s"] = output.num_tokens / line["time/generate_s"]
                self.run_dir.log_metrics(line)
                self.run_dir.log_rollouts(self.step, "reinforcement", groups)
                self.progress.line(_summary(line, config.controller.num_steps))
                bar.advance(text=f"reward {line['reward/mean']:.3f}")
                every = config.controller.eval_every
                if every and self.step % every == 0 and self.step < config.controller.num_steps:
                    await self.evaluate("validation")

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
        size = self.family.num_tasks(split)
        tasks = [self.family.task(split, i) for i in range(min(num_tasks, size if size is not None else num_tasks))]
        start = time.perf_counter()
        with self.progress.waiting(f"evaluating on {len(tasks)} {split} tasks"):
            greedy = await self._attempts(tasks, 1, temperature=0.0)
            result = Evaluation(split=split, accuracy=mean(correct for (correct,) in greedy))
            if pass_at_k:
                sampled = await self._attempts(tasks, pass_at_k, temperature=self.config.algorithm.temperature)
                result.pass_at_k = mean(metrics.pass_at_k(pass_at_k, sum(c), pass_at_k) for c in sampled)
        line = {"step": self.step, "phase": "evaluation", "eval/name": self.family.name, "eval/split": split,
                "eval/accuracy": result.accuracy, "eval/num_tasks": len(tasks),
                "time/step_s": time.perf_counter() - start}
        if pass_at_k:
            line[f"eval/pass_at_{pass_at_k}"] = result.pass_at_k
        self.run_dir.log_metrics(line)
        text = f"step {self.step}: {split} accuracy {result.accuracy:.3f}"
        self.progress.line(text + (f", pass@{pass_at_k} {result.pass_at_k:.3f}" if pass_at_k else ""))
        return result

    async def _attempts(self, tasks: list[Task], n: int, *, temperature: float) -> list[list[bool]]:
        """Whether each of `n` completions of each task is correct."""
        policy = self.policy(temperature)
        groups = await asyncio.gather(*(
            run_group(single_turn, task, policy, n, group_id=f"eval/{self.step}/{task.id}", seed=self.config.seed,
                      reward=self.family, reward_timeout_s=self.config.controller.reward_timeout_s) for task in tasks))
        bar = self.config.controller.correct_reward
        return [[reward >= bar for reward in group.rewards] for group in groups]

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

    def optim_params(self) -> OptimParams:
        """The learning rate of the current step."""
        factor = lr_factor(self.config.algorithm.schedule, self.step, self.config.controller.num_steps)
        return OptimParams(lr=self.config.trainer.optimizer.lr * factor, betas=self.config.trainer.optimizer.betas)

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
            await self.trainer.save_hf_model(
                checkpoint.hf_dir(path), eos=self.tokenizer.eos_token_id, pad=self._pad_token_id)
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

    def _metrics(self, groups: list[RolloutGroup], version: int, output, optim: OptimStepOutput) -> dict:
        rewards = [reward for group in groups for reward in group.rewards]
        completions = [turn.completion for g in groups for rollout in g.rollouts for turn in rollout.turns]
        oldest = min(v for completion in completions for v in completion.policy_versions)
        reward_mean, reward_std = metrics.mean_std(rewards)
        return {
            "step": self.step, "phase": "reinforcement", "loss/mean": output.loss, "optim/grad_norm": optim.grad_norm,
            "optim/lr": optim.lr, "optim/skipped": int(optim.skipped), "reward/mean": reward_mean,
            "reward/std": reward_std,
            "reward/zero_std_frac": mean(len(set(group.rewards)) == 1 for group in groups),
            "policy/lag_max": version - oldest, "policy/clip_frac": 0.0, **output.metrics,
            "completion/length_mean": mean(len(c.tokens) for c in completions),
            "completion/truncated_frac": mean(c.truncated for c in completions),
            "tokens/trained": output.num_tokens,
        }


def _default_dir(name: str) -> str:
    return f"runs/{name}-{datetime.now():%Y%m%d-%H%M%S}"


async def _timed(awaitable, start: float):
    """(result, seconds since `start`)."""
    result = await awaitable
    return result, time.perf_counter() - start


def _summary(line: dict, num_steps: int) -> str:
    return (f"step {line['step']:>4}/{num_steps}  reward {line['reward/mean']:.3f}  "
            f"entropy {line['policy/entropy']:.3f}  length {line['completion/length_mean']:.1f}  "
            f"grad {line['optim/grad_norm']:.2f}  kl {line['mismatch/kl']:.1e}  {line['time/step_s']:.2f} s")



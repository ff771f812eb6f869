"""What can be known to be wrong with a config before a process starts, said with the field, its value and the mend."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path

from torchtitan_rl import platform
from torchtitan_rl.config.actors import TrainerConfig
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.model import ModelConfig, Qwen3Shape
from torchtitan_rl.config.resolve import function_name
from torchtitan_rl.config.run import EvalSetConfig, RolesConfig, RunConfig
from torchtitan_rl.model import files
from torchtitan_rl.model.converters import check_converters
from torchtitan_rl.model.files import assets_dir, has_weights
from torchtitan_rl.model.shape import resolve_shape
from torchtitan_rl.validation.algorithm import check_algorithm
from torchtitan_rl.validation.batches import check_batches
from torchtitan_rl.validation.distillation import check_distill

__all__ = ["validate", "check_local", "missing_weights"]


def validate(config: RunConfig) -> None:
    """Everything that can be known before a process starts. Raises ValueError; changes nothing."""
    for task in (config.task, config.supervised.task):
        if dataclasses.is_dataclass(task):
            # Overrides set fields one by one; the task's own checks look at all of them.
            dataclasses.replace(task)  # type: ignore[type-var]
    if config.trainer.lora is not None:
        dataclasses.replace(config.trainer.lora)
    shape = resolve_shape(config.model)
    tokenizer_vocab = _tokenizer_size(assets_dir(config.model))
    if tokenizer_vocab > shape.vocab_size:
        raise ValueError(
            f"model.shape.vocab_size={shape.vocab_size}: the tokenizer of model.assets={config.model.assets!r} has "
            f"{tokenizer_vocab} tokens; use the tokenizer the model was made for"
        )
    longest = config.sampling.max_prompt_tokens + config.sampling.max_tokens
    for role, (trainer, model) in config.trainers().items():
        _check_trainer("trainer" if role == "policy" else f"roles.{role}.trainer", trainer, model, longest)
    if shape.experts is not None:
        if config.generator.model_impl == "vllm":
            raise ValueError("generator.model_impl='vllm': is for dense models only; use 'torchtitan'")
        _check_experts_kernel("generator.dtype", config.generator.dtype, config.generator.tensor_parallel_degree, shape)
        if not config.generator.enforce_eager and platform.experts_ask_the_host(config.generator.dtype):
            raise ValueError(
                f"generator.enforce_eager=False: experts in {config.generator.dtype} are multiplied on this GPU with "
                "the host's help, which a CUDA graph cannot capture; use True"
            )
        for target in config.trainer.lora.target_modules if config.trainer.lora is not None else ():
            if target in ("gate_proj", "up_proj", "down_proj"):
                raise ValueError(
                    f"trainer.lora.target_modules={target!r}: experts of a mixture have no adapters; use "
                    "qkv_proj and o_proj"
                )
    _check_rollouts(config)
    _check_degree("generator.tensor_parallel_degree", config.generator.tensor_parallel_degree, shape)
    _check_context("generator.max_model_len", config.generator.max_model_len, shape, longest)
    _check_roles(config.roles, shape, config.trainer.training.dtype)
    for where, value in (
        ("algorithm.group_size", config.algorithm.group_size),
        ("algorithm.tasks_per_step", config.algorithm.tasks_per_step),
        ("sampling.max_tokens", config.sampling.max_tokens),
        ("sampling.max_prompt_tokens", config.sampling.max_prompt_tokens),
        ("sampling.max_turns", config.sampling.max_turns),
        ("algorithm.num_epochs", config.algorithm.num_epochs),
        ("generator.num_replicas", config.generator.num_replicas),
        ("generator.max_num_seqs", config.generator.max_num_seqs),
        ("controller.eval_tasks", config.controller.eval_tasks),
        ("controller.test_tasks", config.controller.test_tasks),
        ("supervised.batch_size", config.supervised.batch_size),
    ):
        _positive(where, value)
    for where, number in (
        ("controller.num_steps", config.controller.num_steps),
        ("supervised.num_steps", config.supervised.num_steps),
        ("supervised.lr", config.supervised.lr),
    ):
        if not 0 <= number < float("inf"):
            raise ValueError(f"{where}={number}: must not be negative; use 0 or more")
    _check_minibatches(config.algorithm, config.controller.num_steps)
    for name, eval_set in config.controller.eval_sets.items():
        _check_eval_set(name, eval_set)
    if config.supervised.task is not None and not config.supervised.num_steps:
        raise ValueError(
            "supervised.task: is not imitated with supervised.num_steps=0; set the steps, or leave it None"
        )
    if config.algorithm.refresh_teacher_every > config.controller.num_steps:
        raise ValueError(
            f"algorithm.refresh_teacher_every={config.algorithm.refresh_teacher_every}: never falls due within "
            f"controller.num_steps={config.controller.num_steps}; lower it, or use 0 for a frozen teacher"
        )
    if config.algorithm.asks_teacher and config.generator.max_model_len <= longest:
        raise ValueError(
            f"generator.max_model_len={config.generator.max_model_len}: sampling.max_prompt_tokens + max_tokens = "
            f"{longest} leave no room for the longer prompt of a self-distillation's teacher; raise it"
        )
    check_distill(config.algorithm, config.roles, vocab_size=shape.vocab_size)
    check_algorithm(config)
    check_batches(config)
    _check_workflow(config.algorithm.workflow)
    if not config.algorithm.temperature > 0:
        raise ValueError(f"algorithm.temperature={config.algorithm.temperature}: training samples need a positive one")
    if config.seed < 0:
        raise ValueError(f"seed={config.seed}: must not be negative; use 0 or more")


def check_local(config: RunConfig, *, generators_only: bool = False) -> None:
    """What one process on one device can run. Raises ValueError, with the numbers, for any other layout."""
    for role, (trainer, _) in ({} if generators_only else config.trainers()).items():
        if trainer.num_ranks != 1:
            where, parallel = "trainer" if role == "policy" else f"roles.{role}.trainer", trainer.parallelism
            raise ValueError(
                f"{where}.parallelism: replicate x shard x tensor = {parallel.data_parallel_replicate_degree} x "
                f"{parallel.data_parallel_shard_degree} x {parallel.tensor_parallel_degree} = {trainer.num_ranks} "
                "ranks; backend='local' has one; set every degree to 1 or use backend='actors'"
            )
    for name in ("tensor_parallel_degree", "num_replicas"):
        if (value := getattr(config.generator, name)) != 1:
            raise ValueError(
                f"generator.{name}={value}: backend='local' has one engine on one device; use 1 or backend='actors'"
            )


def missing_weights(config: RunConfig) -> str:
    """Why a run cannot start although its config is valid; empty when it can."""
    reasons = (
        files.missing_weights(model, "model" if role == "policy" else f"roles.{role}.model")
        for role, (_, model) in config.trainers().items()
    )
    return next(filter(None, reasons), "")


def _check_trainer(where: str, trainer: TrainerConfig, model: ModelConfig, longest: int) -> None:
    """The layout of one trainer mesh against its model and the longest sequence of the run."""
    check_converters(trainer.converters, f"{where}.converters")
    if not 0 <= trainer.optimizer.lr < float("inf"):
        raise ValueError(f"{where}.optimizer.lr={trainer.optimizer.lr}: must not be negative; use 0 or more")
    parallel, shape = trainer.parallelism, resolve_shape(model)
    _check_degree(f"{where}.parallelism.tensor_parallel_degree", parallel.tensor_parallel_degree, shape)
    tp = parallel.tensor_parallel_degree
    rows = -(-shape.vocab_size // tp)  # of the head, per rank; the last takes the rest
    if rows * (tp - 1) >= shape.vocab_size:
        raise ValueError(
            f"{where}.parallelism.tensor_parallel_degree={tp}: vocab_size={shape.vocab_size} in parts of {rows} "
            "leaves a rank without vocabulary; lower it"
        )
    for name in ("data_parallel_shard_degree", "data_parallel_replicate_degree"):
        _positive(f"{where}.parallelism.{name}", getattr(parallel, name))
    for name in ("pipeline_parallel_degree", "context_parallel_degree"):
        if getattr(parallel, name) != 1:
            raise ValueError(f"{where}.parallelism.{name}={getattr(parallel, name)}: is not supported; use 1")
    if parallel.spmd_backend != "partial_dtensor":
        raise ValueError(
            f"{where}.parallelism.spmd_backend={parallel.spmd_backend!r}: use 'partial_dtensor', "
            "the backend that runs on gloo as well as on NCCL"
        )
    _check_experts(where, trainer, model, shape)
    _check_context(f"{where}.training.seq_len", trainer.training.seq_len, shape, longest)
    _positive(f"{where}.max_tokens_per_microbatch", trainer.max_tokens_per_microbatch)
    if trainer.logprob_chunk_mib < 0:
        raise ValueError(
            f"{where}.logprob_chunk_mib={trainer.logprob_chunk_mib}: must not be negative; 0 is the device's own"
        )


def _check_degree(where: str, degree: int, shape) -> None:
    _positive(where, degree)
    for name, size in (("n_heads", shape.n_heads), ("n_kv_heads", shape.n_kv_heads), ("hidden_dim", shape.hidden_dim)):
        if size % degree:
            divisors = [
                d
                for d in range(1, shape.n_kv_heads + 1)
                if shape.n_kv_heads % d == shape.n_heads % d == shape.hidden_dim % d == 0
            ]
            raise ValueError(f"{where}={degree}: must divide the model's {name}={size}; use one of {divisors}")


def _check_context(where: str, limit: int, shape, longest: int) -> None:
    if limit > shape.max_seq_len:
        raise ValueError(f"{where}={limit}: exceeds the model's max_seq_len={shape.max_seq_len}; lower it")
    if longest > limit:
        raise ValueError(
            f"{where}={limit}: is shorter than sampling.max_prompt_tokens + max_tokens = {longest}; "
            "raise it or lower one of them"
        )


def _check_rollouts(config: RunConfig) -> None:
    sampling, limit = config.sampling, config.sampling.max_rollout_tokens
    if limit and limit <= sampling.max_prompt_tokens:
        raise ValueError(
            f"sampling.max_rollout_tokens={limit}: leaves nothing after a prompt of sampling.max_prompt_tokens="
            f"{sampling.max_prompt_tokens}; raise it, or use 0 for max_prompt_tokens + max_tokens"
        )
    contexts = {"generator.max_model_len": config.generator.max_model_len}
    for role, (trainer, _) in config.trainers().items():
        contexts[f"{'trainer' if role == 'policy' else f'roles.{role}.trainer'}.training.seq_len"] = (
            trainer.training.seq_len
        )
    for where, context in contexts.items():
        if limit > context:
            raise ValueError(
                f"sampling.max_rollout_tokens={limit}: exceeds {where}={context}; lower it or raise that one"
            )
    if not 0 < sampling.rollout_timeout_s < float("inf"):
        raise ValueError(f"sampling.rollout_timeout_s={sampling.rollout_timeout_s}: must be positive; use seconds")
    if "" in sampling.stop:
        raise ValueError(f"sampling.stop={sampling.stop}: an empty text ends every completion at once; leave it out")


def _check_roles(roles: RolesConfig, shape: Qwen3Shape, dtype: str) -> None:
    for name, role in roles.configured().items():
        if role.trainer.lora is not None:
            raise ValueError(
                f"roles.{name}.trainer.lora.rank={role.trainer.lora.rank}: adapters are the policy's (a critic's "
                "head must train, a reference or teacher does not train); use None"
            )
        if role.model is not None and (size := resolve_shape(role.model).vocab_size) != shape.vocab_size:
            raise ValueError(
                f"roles.{name}.model: has a vocabulary of {size} tokens, the policy has {shape.vocab_size}; "
                "use models with the same tokenizer"
            )
    critic = roles.critic
    if critic is not None and critic.model is None and critic.trainer.training.dtype != dtype:
        raise ValueError(
            f"roles.critic.trainer.training.dtype={critic.trainer.training.dtype!r}: the policy's, whose weights "
            f"it takes over after a warm start, is {dtype!r}; use the same"
        )
    reference, every = roles.reference, roles.refresh_reference_every
    if reference is not None and (every or reference.model is None):  # it takes over the policy's weights
        if reference.model is not None and resolve_shape(reference.model) != shape:
            raise ValueError(
                f"roles.refresh_reference_every={every}: the reference has another shape than the policy, whose "
                "weights it would take; use 0, or leave roles.reference.model unset"
            )
        if reference.trainer.training.dtype != dtype:
            raise ValueError(
                f"roles.reference.trainer.training.dtype={reference.trainer.training.dtype!r}: the policy's, whose "
                f"weights it takes over, is {dtype!r}; use the same"
            )
    if roles.teacher is not None and roles.teacher.model is None:
        raise ValueError("roles.teacher.model=None: a teacher is another model than the policy; name it")
    if roles.refresh_reference_every < 0:
        raise ValueError(
            f"roles.refresh_reference_every={roles.refresh_reference_every}: must not be negative; use 0 or more"
        )
    if roles.refresh_reference_every and roles.reference is None:
        raise ValueError(
            f"roles.refresh_reference_every={roles.refresh_reference_every}: there is no reference to refresh; "
            "set roles.reference or use 0"
        )
    if roles.colocation == "policy_reference" and roles.reference is None:
        raise ValueError(
            "roles.colocation='policy_reference': there is no reference; set roles.reference or use 'none'"
        )


def _check_minibatches(algorithm: AlgorithmConfig, num_steps: int) -> None:
    if not 0 <= algorithm.tasks_per_minibatch <= algorithm.tasks_per_step:
        raise ValueError(
            f"algorithm.tasks_per_minibatch={algorithm.tasks_per_minibatch}: must be between 0 (the whole batch) "
            f"and algorithm.tasks_per_step={algorithm.tasks_per_step}"
        )
    per_batch = algorithm.steps_per_batch
    if num_steps % per_batch:
        below = num_steps - num_steps % per_batch
        raise ValueError(
            f"controller.num_steps={num_steps}: a batch is {per_batch} optimizer steps (algorithm.num_epochs x its "
            f"minibatches); use a multiple, such as {below or per_batch} or {below + per_batch}"
        )


def _check_eval_set(name: str, eval_set: EvalSetConfig) -> None:
    where = f"controller.eval_sets.{name}"
    if name in ("validation", "test") or not name.isidentifier():
        raise ValueError(
            f"{where}: the run's own evaluations are validation and test, and overrides contain the name; "
            "use another Python identifier"
        )
    if dataclasses.is_dataclass(eval_set.task):
        dataclasses.replace(eval_set.task)  # type: ignore[type-var]  # its own checks
    _positive(f"{where}.num_tasks", eval_set.num_tasks)
    if eval_set.split not in ("train", "validation", "test"):
        raise ValueError(f"{where}.split={eval_set.split!r}: is not a split; use train, validation or test")
    if eval_set.num_samples < 0:
        raise ValueError(f"{where}.num_samples={eval_set.num_samples}: must not be negative; use 0 or more")
    if not 0 <= eval_set.pass_at_k <= eval_set.num_samples:
        raise ValueError(
            f"{where}.pass_at_k={eval_set.pass_at_k}: must be between 0 and num_samples={eval_set.num_samples}"
        )
    if eval_set.num_samples and not eval_set.temperature > 0:
        raise ValueError(
            f"{where}.temperature={eval_set.temperature}: samples of one task would all be the same; use a positive one"
        )


def _check_experts(where: str, trainer: TrainerConfig, model: ModelConfig, shape: Qwen3Shape) -> None:
    """What a mixture of experts needs of the layout, of its own sizes and of this machine's kernels."""
    parallel, experts = trainer.parallelism, shape.experts
    degree, field = parallel.expert_parallel_degree, f"{where}.parallelism.expert_parallel_degree"
    _positive(field, degree)
    if experts is None:
        if degree != 1:
            raise ValueError(f"{field}={degree}: the model has no experts; use 1")
        return
    if not 1 <= experts.top_k <= experts.num_experts:
        raise ValueError(
            f"model.shape.experts.top_k={experts.top_k}: must be from 1 to num_experts={experts.num_experts}"
        )
    ranks = parallel.data_parallel_shard_degree * parallel.tensor_parallel_degree
    fits = [d for d in range(1, ranks + 1) if ranks % d == experts.num_experts % d == 0]
    if degree not in fits:
        raise ValueError(
            f"{field}={degree}: must divide the model's num_experts={experts.num_experts} and "
            f"data_parallel_shard_degree x tensor_parallel_degree = {ranks}, whose ranks it uses; use one of {fits}"
        )
    if has_weights(model):  # torchtitan's adapter gives each rank its experts of the checkpoint, by equal parts
        replicas, dp = parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree
        shards = ranks if degree > 1 else dp
        if replicas > 1:
            raise ValueError(
                f"{where}.parallelism.data_parallel_replicate_degree={replicas}: a checkpoint's experts cannot be read "
                "into replicas; use 1, and a larger data_parallel_shard_degree"
            )
        if shards < experts.num_experts and experts.num_experts % shards:
            raise ValueError(
                f"{where}.parallelism.data_parallel_shard_degree={dp}: a checkpoint's "
                f"num_experts={experts.num_experts} cannot be read into {shards} equal parts; use a degree "
                "that divides them"
            )
    cuts = parallel.tensor_parallel_degree if degree == 1 else 1  # with expert parallelism TP ranks hold whole experts
    _check_experts_kernel(
        f"{where}.training.mixed_precision_param", trainer.training.mixed_precision_param, cuts, shape
    )


def _check_experts_kernel(field: str, dtype: str, cuts: int, shape: Qwen3Shape) -> None:
    multiple = platform.grouped_mm_multiple(dtype)
    for name, size in (("dim", shape.dim), ("hidden_dim", shape.hidden_dim // cuts)):
        if size % multiple:
            cut = f" on each of {cuts} tensor-parallel ranks" if name == "hidden_dim" and cuts > 1 else ""
            raise ValueError(
                f"model.shape.{name}: {size}{cut} is not a multiple of {multiple}, which the experts' "
                f"kernel needs with {field}={dtype!r}; use a multiple"
            )
    if missing := platform.missing_grouped_mm(dtype):
        raise ValueError(f"{field}={dtype!r}: {missing}; use a dense model or another device")


def _check_workflow(workflow: Callable | None) -> None:
    if workflow is None:
        return
    try:
        inspect.signature(workflow).bind(None, None, rollout_id="", seed=0)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"algorithm.workflow={function_name(workflow)}: cannot be called as (task, policy, rollout_id=, seed=) "
            f"({error}); give it that signature"
        ) from error


def _positive(where: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{where}={value}: must be at least 1")


def _tokenizer_size(directory: Path) -> int:
    """One more than the largest token id. Raises ValueError when there is no tokenizer."""
    file = directory / "tokenizer.json"
    if not file.exists():
        raise ValueError(f"model.assets={str(directory)!r}: has no tokenizer.json; give a directory with a tokenizer")
    content = json.loads(file.read_text())
    ids = list(content["model"].get("vocab", {}).values()) if isinstance(content["model"].get("vocab"), dict) else []
    ids += [token["id"] for token in content.get("added_tokens", [])]
    return max(ids, default=-1) + 1

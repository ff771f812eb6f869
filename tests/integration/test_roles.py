"""Policy, reference and critic side by side: in this process, and (slow) on meshes of their own and sharing devices.

The tests of both backends are the same. Only meshes have what is about several ranks: test_numerics.py has the gradient
and the optimizer of two ranks.
"""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.integration.conftest import small_config
from tests.integration.helpers import flat, random_datums, relative_l2
from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.losses import importance_sampling, masked_difference, ppo, reverse_kl, value_loss
from torchtitan_rl.config.meshes import AdamWConfig, TrainerConfig
from torchtitan_rl.config.run import RoleConfig
from torchtitan_rl.types import OptimParams

pytestmark = pytest.mark.whole


def role(**parallelism):
    trainer = TrainerConfig(optimizer=AdamWConfig(lr=1e-3))
    trainer.training.seq_len = 64
    for name, degree in parallelism.items():
        setattr(trainer.parallelism, name, degree)
    return RoleConfig(trainer=trainer)


def recorder(directory: str):
    """A hook that notes every optimizer step of its rank."""

    def register(optimizers, model_parts, parallel_dims):
        import torch.distributed as dist

        def note(*args, **kwargs):
            with open(f"{directory}/{dist.get_rank()}", "a") as f:
                f.write("step\n")

        optimizers.register_step_pre_hook(note)

    return register


def config(tmp_path: Path, colocation: str, backend: str = "actors"):
    """The policy on two ranks, a reference on one, a critic on two in another layout; locally each on one."""
    ranks = 2 if backend == "actors" else 1
    (tmp_path / "steps").mkdir()
    made = small_config(
        tmp_path / "run",
        trainer__parallelism__data_parallel_shard_degree=ranks,
        algorithm__tasks_per_minibatch=3,
        algorithm__recompute_logprobs_per_minibatch=True,
        controller__num_steps=4,
        trainer__post_optimizer_build_fn=recorder(str(tmp_path / "steps")),
    )
    made.roles.reference, made.roles.critic = role(), role(tensor_parallel_degree=ranks)
    made.roles.refresh_reference_every, made.roles.colocation = 4, colocation
    return made


async def run(controller):
    """A warm start, two batches of two minibatches (three groups and one), and what is left afterwards."""
    await controller.supervise()
    policy, reference, critic = await asyncio.gather(
        *(controller.role(name).parameters() for name in ("policy", "reference", "critic"))
    )
    assert torch.equal(flat(policy), flat(reference))  # reinforcement starts at the reference
    assert critic.pop("lm_head.weight").count_nonzero() == 0 < policy.pop("lm_head.weight").count_nonzero()
    assert torch.equal(flat(policy), flat(critic))
    await controller.reinforce()
    lines = [line for line in controller.run_dir.read_metrics() if line["phase"] == "reinforcement"]
    return lines, await controller.trainer.parameters(), await controller.role("critic").parameters()


ACTORS = pytest.param("actors", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["local", ACTORS])
def apart(loop, tmp_path_factory, request):
    """Roles that share nothing, as actors on devices of their own: the running controller, and what `run` gave."""
    from torchtitan_rl.train.controller import Controller

    made = config(tmp_path_factory.mktemp("apart"), "none", request.param)
    controller = loop.run_until_complete(Controller.launch(made, backend=request.param))
    yield controller, loop.run_until_complete(run(controller))
    loop.run_until_complete(controller.close())


@pytest.fixture(params=["shared_memory", "store"])
def transport(apart, request):
    """How weights travel from one role to another during a test."""
    versions = apart[0].versions
    versions._transport, usual = request.param, versions._transport
    yield
    versions._transport = usual


def _numbers(line: dict) -> dict:
    clocked = ("time/", "perf/")
    return {name: value for name, value in line.items() if not name.startswith(clocked) and not name.endswith("_per_s")}


def test_a_batch_is_whole_minibatches_and_one_line(apart):
    _, (lines, _, _) = apart
    assert [line["step"] for line in lines] == [2, 4] and {line["optim/num_steps"] for line in lines} == {2}
    assert all(line["tokens/trained"] == line["tokens/generated"] for line in lines)  # the ragged minibatch was kept
    assert all(line["policy/lag_max"] == 0 and line["mismatch/kl"] < 1e-6 for line in lines)
    assert lines[0]["policy/reference_kl"] > 0 and lines[0]["critic/grad_norm"] > 0


def test_the_post_optimizer_hook_ran_once_per_rank_and_step_and_not_for_a_skipped_one(loop, apart):
    controller, _ = apart
    directory = Path(controller.run_dir.path).parent / "steps"

    def counts():
        return {file.name: len(file.read_text().split()) for file in directory.iterdir()}

    before, ranks = counts(), controller.config.trainer.parallelism.data_parallel_shard_degree
    assert (
        before.keys() == {str(rank) for rank in range(ranks)}
        and len(set(before.values())) == 1
        and before["0"] >= 2 + 4
    )

    async def skip():
        data = random_datums(3)
        broken = lambda inputs: (inputs.policy_logprobs.sum() * float("nan"), {})  # noqa: E731
        await controller.trainer.forward_backward(data, broken)
        return await controller.trainer.optim_step(OptimParams(lr=0.0))

    assert loop.run_until_complete(skip()).skipped
    assert counts() == before


@pytest.mark.parametrize("apart", [ACTORS], indirect=True)
def test_forwards_of_policy_reference_and_critic_overlap_in_time(loop, apart):
    controller, _ = apart
    data = random_datums(400, max_len=60, min_len=40)

    async def score():
        clients = [controller.trainer, controller.role("reference"), controller.role("critic")]
        return await asyncio.gather(*(client.forward(data) for client in clients))

    outputs = loop.run_until_complete(score())
    starts, ends = zip(*(output.interval for output in outputs))
    assert max(starts) < min(ends), f"no moment at which all three were at work: {list(zip(starts, ends))}"


def test_a_reference_that_was_refreshed_says_what_the_policy_says(loop, apart, transport):
    controller, _ = apart
    data = random_datums(5)

    async def score():
        await controller.trainer.forward_backward(data, importance_sampling)
        await controller.trainer.optim_step(OptimParams(lr=1e-2))
        policy, before = await asyncio.gather(
            controller.trainer.forward(data), controller.role("reference").forward(data)
        )
        await controller.weights.copy_to("reference")
        return (
            policy,
            before,
            await controller.role("reference").forward(data),
            await controller.launcher.store.holds("copy"),
        )

    policy, before, after, is_left = loop.run_until_complete(score())
    policy, before, after = (torch.cat(output.policy_logprobs) for output in (policy, before, after))
    assert (policy - before).abs().max() > 1e-3
    assert (policy - after).abs().max() <= 1e-5  # another layout, other sums
    assert not is_left and list(controller.versions.holders()) == [controller.policy_version]


def _ratios(inputs):
    ratio_T = masked_difference(inputs, inputs.policy_logprobs, inputs.old_logprobs).exp()
    return ppo(inputs)[0], {"ratio/off_max": (ratio_T - 1).abs().max()}


def test_recomputed_log_probabilities_make_the_first_ratio_exactly_one(loop, apart):
    controller, _ = apart

    async def train():
        data = random_datums(9)
        old = (await controller.trainer.forward(data)).policy_logprobs
        output = await controller.trainer.forward_backward(with_inputs(data, old_logprobs=old), _ratios)
        await controller.trainer.optim_step(OptimParams(lr=0.0))
        return output.metrics["ratio/off_max"]

    assert loop.run_until_complete(train()) == 0.0


@pytest.mark.parametrize(
    ("per", "tasks_per_minibatch", "moves"), [("batch", 0, False), ("batch", 2, True), ("minibatch", 2, False)]
)
def test_ratios_are_against_the_policy_as_the_batch_or_the_minibatch_starts(
    loop, apart, per, tasks_per_minibatch, moves
):
    controller, _ = apart
    algorithm = controller.config.algorithm
    changes = {
        "recompute_logprobs_per_batch": per == "batch",
        "recompute_logprobs_per_minibatch": per == "minibatch",
        "tasks_per_minibatch": tasks_per_minibatch,
        "loss_fn": _ratios,
        "loss_config": {},
    }
    before = {name: getattr(algorithm, name) for name in changes}

    async def train():
        return await controller.train_on(await controller.rollouts(controller.draws.next(4)))

    try:
        for name, value in changes.items():
            setattr(algorithm, name, value)
        line = loop.run_until_complete(train())
    finally:
        for name, value in before.items():
            setattr(algorithm, name, value)
    assert (line["ratio/off_max"] > 1e-4) if moves else line["ratio/off_max"] == 0.0


def test_scoring_between_backward_and_step_leaves_the_gradient_whole(loop, apart):
    """FSDP keeps parameters gathered after a forward without a backward; they must not hide the optimizer's."""
    controller, _ = apart

    async def norm(score: bool):
        data = random_datums(5)
        await controller.trainer.forward_backward(data, importance_sampling)
        if score:
            await controller.trainer.forward(data)
        gradients = await controller.trainer.gradients()
        assert all(gradient is not None for gradient in gradients.values())
        return (await controller.trainer.optim_step(OptimParams(lr=0.0))).grad_norm

    assert loop.run_until_complete(norm(True)) == loop.run_until_complete(norm(False)) > 0


def test_the_kl_to_a_reference_on_another_mesh_is_that_of_both_distributions(loop, apart, transport):
    controller, _ = apart
    policy, reference, data = controller.trainer, controller.role("reference"), random_datums(5, seed=3)
    data = with_inputs(data, token_weights=[d.loss_inputs["loss_mask"] for d in data])

    async def logp_TV(client):
        said = await client.forward(data, top_k=64)
        return torch.cat(
            [
                torch.zeros(len(tokens), 64).scatter(1, tokens, logprobs).double()
                for tokens, logprobs in zip(said.top_tokens, said.top_logprobs)
            ]
        )

    async def run():
        await policy.forward_backward(data, importance_sampling)
        await policy.optim_step(OptimParams(lr=1e-2))
        await controller.versions.copy_head(reference, policy)
        logp, logq = await logp_TV(policy), await logp_TV(reference)
        states = (await reference.forward(data, hidden=True)).hidden
        output = await policy.forward_backward(with_inputs(data, teacher_hidden=states), reverse_kl)
        await policy.optim_step(OptimParams(lr=0.0))
        return output.loss, (logp.exp() * (logp - logq)).sum(-1)

    loss, expected_T = loop.run_until_complete(run())
    weights_T = torch.cat([datum.loss_inputs["token_weights"] for datum in data])
    assert loss == pytest.approx(float((weights_T * expected_T).sum()), rel=1e-4)
    assert expected_T.mean() > 1e-4


def test_a_critic_learns_the_returns_it_is_shown(loop, apart):
    controller, _ = apart
    critic, data = controller.role("critic"), random_datums(6)
    data = with_inputs(
        data,
        returns=[torch.full((len(d),), float(i % 2)) for i, d in enumerate(data)],
        values=[torch.zeros(len(d)) for d in data],
    )

    async def train():
        errors = []
        for _ in range(40):
            output = await critic.forward_backward(data, value_loss)
            await critic.optim_step(OptimParams(lr=1e-2))
            errors.append(output.metrics["critic/squared_error"])
        return errors, await critic.forward(data)

    errors, output = loop.run_until_complete(train())
    assert errors[-1] < 0.1 * errors[0]
    assert output.policy_logprobs == [] and [len(row) for row in output.values] == [len(d) for d in data]


def test_what_a_role_cannot_do_is_refused(loop, apart):
    controller, _ = apart

    async def refused():
        with pytest.raises(
            ValueError, match=r"role='teacher': is not configured \(this run has policy, reference, critic\)"
        ):
            controller.role("teacher")
        with pytest.raises(
            RuntimeError, match="role='reference': is only scored; forward_backward needs one of policy, critic"
        ):
            await controller.role("reference").forward_backward(random_datums(2), importance_sampling)
        with pytest.raises(ValueError, match="role='critic' has a value head, neither tokens nor states"):
            await controller.role("critic").forward(random_datums(2), top_k=2)

    loop.run_until_complete(refused())


def test_init_model_starts_from_a_checkpoint_with_a_fresh_optimizer(loop, apart):
    controller, _ = apart

    async def reload():
        path = await controller.save_checkpoint()
        saved = await controller.trainer.parameters()
        for _ in range(2):
            await controller.trainer.forward_backward(random_datums(4), importance_sampling)
            await controller.trainer.optim_step(OptimParams(lr=1e-2))
        moved = await controller.trainer.parameters()
        results = []
        for source in (path, path / "hf"):
            await controller.trainer.init_model(source)
            results.append(await controller.trainer.parameters())
        return saved, moved, results, await controller.trainer.residency()

    saved, moved, results, residency = loop.run_until_complete(reload())
    assert not torch.equal(flat(saved), flat(moved))
    assert all(torch.equal(flat(saved), flat(result)) for result in results)
    assert residency and all(rank["optimizer"] == 0 for rank in residency)


def test_saving_before_the_first_step_does_not_change_it(loop, apart, tmp_path):
    controller, _ = apart
    client = controller.trainer

    async def first_step(save: bool):
        await client.init_model(tmp_path / "start")
        if save:
            await client.save_checkpoint(tmp_path / "fresh")
        await client.forward_backward(random_datums(4), importance_sampling)
        await client.optim_step(OptimParams(lr=1e-2))
        return flat(await client.parameters())

    async def all_ways():
        await client.save_checkpoint(tmp_path / "start")
        plain, saved = await first_step(False), await first_step(True)
        await client.load_checkpoint(tmp_path / "fresh")
        await client.forward_backward(random_datums(4), importance_sampling)
        await client.optim_step(OptimParams(lr=1e-2))
        return plain, saved, flat(await client.parameters())

    plain, saved, resumed = loop.run_until_complete(all_ways())
    assert torch.equal(plain, saved) and torch.equal(plain, resumed)


@pytest.mark.parametrize("apart", [ACTORS], indirect=True)  # test_backends_agree.py has roles that share one device
def test_sharing_every_device_changes_no_number_and_loses_no_gradient(loop, apart, tmp_path):
    from torchtitan_rl.train.controller import Controller

    _, (lines, policy, critic) = apart

    async def together():
        async with await Controller.launch(config(tmp_path, "all")) as controller:
            result = await run(controller)
            await controller.versions.copy_head(controller.role("reference"), controller.trainer)
            await controller.trainer.parameters()
            assert await controller.role("reference").residency() == [{"model": 0, "gradients": 0, "optimizer": 0}]
            # Gradients survive an eviction between forward_backward and optim_step.
            data = random_datums(5)
            await controller.trainer.forward_backward(data, importance_sampling)
            before = await controller.trainer.gradients()
            (resident, _) = await controller.trainer.residency()
            await controller.role("reference").forward(data)
            (evicted, _) = await controller.trainer.residency()
            (reference,) = await controller.role("reference").residency()
            after = await controller.trainer.gradients()
            start = await controller.trainer.parameters()
            step = await controller.trainer.optim_step(OptimParams(lr=1e-2))
            moved = await controller.trainer.parameters()
            return result, before, after, (resident, evicted, reference), step, (start, moved), controller.placement

    result, before, after, bytes_held, step, (start, moved), placement = loop.run_until_complete(together())
    shared_lines, shared_policy, shared_critic = result
    assert [_numbers(line) for line in shared_lines] == [_numbers(line) for line in lines]
    assert torch.equal(flat(shared_policy), flat(policy)) and torch.equal(flat(shared_critic), flat(critic))
    resident, evicted, reference = bytes_held
    assert resident["model"] > 0 and resident["gradients"] > 0
    assert evicted == {"model": 0, "gradients": 0, "optimizer": 0} and reference["model"] > 0
    assert torch.equal(flat(before), flat(after)) and flat(after).norm() > 0
    assert not step.skipped and step.grad_norm == pytest.approx(float(flat(before).norm()), rel=1e-5)
    assert relative_l2(flat(moved), flat(start)) > 1e-4
    assert ("generator", "offload", "kv_cache") in placement.history


def _weighed(inputs):
    return importance_sampling(inputs)[0], {"weight/sum": inputs.token_weights.sum()}


def _rejects_what_is_less_likely(inputs):
    return (inputs.old_logprobs >= inputs.sampling_logprobs).float(), {}


@pytest.mark.parametrize("per", ["batch", "minibatch"])
def test_rejected_tokens_leave_the_denominator_where_that_is_asked_for(loop, apart, per):
    """Generator and trainer disagree, if only by rounding: tokens that the trainer finds less likely are rejected."""
    controller, _ = apart
    algorithm = controller.config.algorithm
    changes = {
        "recompute_logprobs_per_batch": per == "batch",
        "recompute_logprobs_per_minibatch": per == "minibatch",
        "tasks_per_minibatch": 0,
        "loss_fn": _weighed,
        "loss_config": {},
        "correction_fn": _rejects_what_is_less_likely,
        "correction_denominator": "all",
    }
    before = {name: getattr(algorithm, name) for name in changes}

    async def total_weight(denominator):
        algorithm.correction_denominator = denominator
        line = await controller.train_on(await controller.rollouts(controller.draws.next(4)))
        return line["weight/sum"] * line["tokens/trained"]

    try:
        for name, value in changes.items():
            setattr(algorithm, name, value)
        of_all = loop.run_until_complete(total_weight("all"))
        of_kept = loop.run_until_complete(total_weight("kept"))
    finally:
        for name, value in before.items():
            setattr(algorithm, name, value)
    assert 0.05 < of_all < 0.95 and of_kept == pytest.approx(1.0, abs=1e-5)

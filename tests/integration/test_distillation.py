"""A policy learns from a teacher of another size: the teacher's states and head through dispatch, in this process."""

import copy

import numpy as np
import pytest
import torch

from tests.integration.helpers import random_datums
from tests.integration.layouts import MODEL, trainer_config
from torchtitan_rl.actors.operations import TrainerOperations
from torchtitan_rl.algorithm.inputs import with_inputs
from torchtitan_rl.algorithm.losses import cross_entropy, reverse_kl
from torchtitan_rl.config.meshes import LoRAConfig, WeightSyncConfig
from torchtitan_rl.dispatch.mesh_training_client import MeshTrainingClient
from torchtitan_rl.dispatch.versions import PolicyVersions
from torchtitan_rl.types import Datum, OptimParams

pytestmark = pytest.mark.whole

VOCABULARY = MODEL.shape.vocab_size
TEMPERATURE = 0.8


def model(**changes):
    made = copy.deepcopy(MODEL)
    for name, value in changes.items():
        setattr(made.shape, name, value)
    return made


@pytest.fixture(scope="module")
def clients(loop, tmp_path_factory):
    """`tied`, `adapted` (LoRA, so its head is frozen), `halved` (it computes in bfloat16) and a wider `teacher`, and
    what copies heads between them."""
    from torchtitan_rl.launch.local import LocalLauncher

    launcher = LocalLauncher(log_dir=str(tmp_path_factory.mktemp("logs")), start_timeout_s=60, call_timeout_s=60)
    wanted = {
        "tied": (trainer_config(), model(tie_embeddings=True)),
        "adapted": (trainer_config(lora=LoRAConfig(rank=4, alpha=8)), MODEL),
        "halved": (trainer_config(training__mixed_precision_param="bfloat16"), MODEL),
        "teacher": (trainer_config(), model(dim=96, n_layers=1)),
        "critic": (trainer_config(), MODEL),
    }

    async def start():
        made = {}
        for seed, (name, (config, of)) in enumerate(wanted.items()):
            role = name if name in ("teacher", "critic") else "policy"
            mesh = await launcher.start_trainer(config, of, role=role, seed=seed)
            made[name] = MeshTrainingClient(
                mesh, max_tokens_per_microbatch=30, max_datum_tokens=64, temperature=TEMPERATURE, vocab_size=VOCABULARY
            )
        return made

    made = loop.run_until_complete(start())
    yield made, PolicyVersions(made["tied"], launcher.store, WeightSyncConfig(), torch.float32, one_host=True)
    loop.run_until_complete(launcher.stop())


async def distributions(client, data):
    """Log-probabilities of the whole vocabulary, (T, V) in double precision, of all datums end to end."""
    output = await client.forward(data, top_k=VOCABULARY)
    return (
        torch.cat(
            [
                torch.zeros(len(datum), VOCABULARY).scatter(1, tokens_TK, logprobs_TK)
                for datum, tokens_TK, logprobs_TK in zip(data, output.top_tokens, output.top_logprobs)
            ]
        )
        .double()
        .numpy()
    )


async def taught(teacher, data):
    return with_inputs(data, teacher_hidden=(await teacher.forward(data, hidden=True)).hidden)


async def gradient(client):
    gradients = await client.gradients()
    assert (await client.optim_step(OptimParams(lr=0.0))).skipped is False
    return {name: grad for name, grad in gradients.items() if grad is not None}


@pytest.mark.parametrize(
    ("policy", "teacher", "tolerance"),
    [("tied", "teacher", 1e-4), ("adapted", "tied", 1e-4), ("halved", "teacher", 1e-2)],
)
def test_the_kl_is_that_of_the_two_models_distributions_and_training_lowers_it(
    loop, clients, policy, teacher, tolerance
):
    (made, versions), data = clients, random_datums(6, seed=1)
    client, teacher = made[policy], made[teacher]
    mask_T = torch.cat([datum.loss_inputs["loss_mask"] for datum in data]).numpy()

    async def run():
        await versions.copy_head(teacher, client)
        before = await client.parameters()
        logp_TV, logq_TV = await distributions(client, data), await distributions(teacher, data)
        outputs = []
        for _ in range(20):
            outputs.append(await client.forward_backward(await taught(teacher, data), reverse_kl))
            await client.optim_step(OptimParams(lr=1e-2))
        return logp_TV, logq_TV, outputs, before, await client.parameters(), await versions._store.versions()

    logp_TV, logq_TV, outputs, before, after, stored = loop.run_until_complete(run())
    expected_T = (np.exp(logp_TV) * (logp_TV - logq_TV)).sum(-1)
    assert outputs[0].metrics["distill/kl"] == pytest.approx((mask_T * expected_T).sum() / mask_T.sum(), rel=tolerance)
    assert outputs[0].loss == pytest.approx((mask_T * expected_T).sum() / mask_T.sum(), rel=tolerance)
    assert outputs[-1].metrics["distill/kl"] < 0.7 * outputs[0].metrics["distill/kl"]
    assert before.keys() == after.keys() and not any("teacher" in name for name in after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if policy == "adapted":
        assert changed and all("lora" in name for name in changed)
    elif policy == "tied":
        assert torch.equal(after["lm_head.weight"], after["tok_embeddings.weight"]) and "lm_head.weight" in changed
    assert stored == []


def test_the_entropy_is_that_of_the_whole_distribution(loop, clients):
    (made, _), data = clients, random_datums(5, seed=4)
    client = made["tied"]

    async def scored():
        return await client.forward(data), await client.forward(data, entropy=True), await distributions(client, data)

    plain, output, logp_TV = loop.run_until_complete(scored())
    assert plain.entropy == []
    assert [row.shape for row in output.entropy] == [(len(datum),) for datum in data]
    assert torch.cat(output.entropy).numpy() == pytest.approx(-(np.exp(logp_TV) * logp_TV).sum(1), rel=1e-5)


def test_top_k_distillation_is_the_cross_entropy_with_the_teachers_likeliest_tokens(loop, clients):
    """Over the whole vocabulary that is KL(q || p) up to a constant; with K = 8 it is what is left of it."""
    (made, _), data = clients, random_datums(5, seed=2)

    async def run(top_k):
        said = await made["teacher"].forward(data, top_k=top_k)
        targets = [
            Datum(
                tokens=datum.tokens,
                target_tokens=tokens_TK,
                loss_inputs={
                    "loss_mask": datum.loss_inputs["loss_mask"],
                    "token_weights": logprobs_TK.exp() * datum.loss_inputs["token_weights"][:, None],
                },
            )
            for datum, tokens_TK, logprobs_TK in zip(data, said.top_tokens, said.top_logprobs)
        ]
        output = await made["tied"].forward_backward(targets, cross_entropy)
        assert [row.shape for row in output.policy_logprobs] == [tokens.shape for tokens in said.top_tokens]
        assert output.num_tokens == sum(int(d.loss_inputs["loss_mask"].sum()) for d in data)
        await gradient(made["tied"])
        logp_TV, logq_TV = await distributions(made["tied"], data), await distributions(made["teacher"], data)
        return output.loss, logp_TV, logq_TV

    weights_T = torch.cat([d.loss_inputs["token_weights"] for d in data]).numpy()
    for top_k in (VOCABULARY, 8):
        loss, logp_TV, logq_TV = loop.run_until_complete(run(top_k))
        best_TK = np.argsort(-logq_TV, 1, kind="stable")[:, :top_k]
        terms_TK = np.take_along_axis(np.exp(logq_TV) * logp_TV, best_TK, 1)
        assert loss == pytest.approx(-(weights_T[:, None] * terms_TK).sum(), rel=1e-5)


def test_a_teachers_head_is_not_in_checkpoints_and_leaves_the_device_with_the_model(loop, clients, tmp_path):
    (made, versions), data = clients, random_datums(3, seed=4)
    client = made["tied"]

    async def run():
        (alone,) = await client.residency()
        await client.save_checkpoint(tmp_path / "without")
        await versions.copy_head(made["teacher"], client)
        (held,) = await client.residency()
        inputs = await taught(made["teacher"], data)
        first = await client.forward_backward(inputs, reverse_kl)
        await gradient(client)
        await client.save_checkpoint(tmp_path / "with")
        await client._call(TrainerOperations.offload, ["model", "gradients"])
        (gone,) = await client.residency()
        await client._call(TrainerOperations.onload, ["model", "gradients"])
        again = await client.forward_backward(inputs, reverse_kl)
        await gradient(client)
        await client.load_checkpoint(tmp_path / "with")
        return alone["model"], held["model"], gone["model"], first.loss, again.loss

    from torch.distributed.checkpoint import FileSystemReader

    client._mesh._worker.model.lm_head.teacher_weight_VD = None  # as it started
    alone, held, gone, first, again = loop.run_until_complete(run())
    assert held - alone == 4 * VOCABULARY * 96 and gone == 0 and first == again != 0
    saved = [
        FileSystemReader(str(tmp_path / name / "model")).read_metadata().state_dict_metadata.keys()
        for name in ("without", "with")
    ]
    assert saved[0] == saved[1]


def test_what_cannot_be_is_refused(loop, clients):
    (made, versions), data = clients, random_datums(2, seed=5)

    async def run():
        made["tied"]._mesh._worker.model.lm_head.teacher_weight_VD = None
        with pytest.raises(
            RuntimeError,
            match="policy-0.forward_backward: RuntimeError: teacher_hidden: 96 numbers "
            "per token, but no teacher's head is held; copy the head",
        ):
            await made["tied"].forward_backward(await taught(made["teacher"], data), reverse_kl)
        with pytest.raises(RuntimeError, match="ValueError: teacher_kl=None: the data carry no teacher_hidden"):
            await made["tied"].forward_backward(data, reverse_kl)
        with pytest.raises(RuntimeError, match="critic-0.push_head: ValueError: role='critic': has a value head"):
            await versions.copy_head(made["critic"], made["tied"])
        with pytest.raises(RuntimeError, match="critic-0.pull_head: ValueError: role='critic': has no vocabulary"):
            await versions.copy_head(made["teacher"], made["critic"])
        with pytest.raises(ValueError, match=f"forward.top_k={VOCABULARY + 1}: must be between 1 and the vocabulary's"):
            await made["tied"].forward(data, top_k=VOCABULARY + 1)
        with pytest.raises(ValueError, match="forward.top_k=-1: must be between 1 and"):
            await made["tied"].forward(data, top_k=-1)
        for asked in ({"top_k": 1}, {"hidden": True}):
            with pytest.raises(ValueError, match="forward: role='critic' has a value head"):
                await made["critic"].forward(data, **asked)
        output = await made["critic"].forward(data)
        return output, await made["tied"].forward(data)

    critic, policy = loop.run_until_complete(run())
    assert critic.policy_logprobs == [] and len(critic.values) == 2
    assert len(policy.policy_logprobs) == 2
    assert policy.values == policy.top_tokens == policy.top_logprobs == policy.hidden == []

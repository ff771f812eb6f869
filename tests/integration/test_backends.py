"""What any backend must do, asked of each: actors in processes of their own, everything in this process, and a remote
service, which is a server of this package.

`docs/dev/backend_protocol.md` describes the contract; a new backend gets a line in `BACKENDS`.
"""

import asyncio
import subprocess
import sys

import pytest
import torch

from tests.integration.conftest import small_config
from tests.integration.helpers import flat, random_datums, relative_l2
from tests.integration.tinker_server import tinker_server
from torchtitan_rl.algorithm.losses import cross_entropy, importance_sampling
from torchtitan_rl.dispatch.tinker.remote_trainer import RemoteTrainingClient
from torchtitan_rl.train.controller import Controller
from torchtitan_rl.types import Datum, OptimParams, SamplingParams

pytestmark = pytest.mark.usefixtures("forked")

BACKENDS = ["actors", "local", "tinker"]
PROMPT = [20, 31, 27, 44, 14]
SEQUENCE = PROMPT + [20, 27, 31, 44, 1]


@pytest.fixture(scope="module")
def local(loop, tmp_path_factory):
    config = small_config(tmp_path_factory.mktemp("local") / "run")
    controller = loop.run_until_complete(Controller.launch(config, backend="local"))
    yield controller
    loop.run_until_complete(controller.close())


@pytest.fixture(scope="module")
def remote(loop, tmp_path_factory):
    pytest.importorskip("tinker")
    directory = tmp_path_factory.mktemp("remote")
    with tinker_server(directory, "--lora-rank", "0") as (url, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_BASE_URL", url)
        patch.setenv("TINKER_API_KEY", "tml-any")
        controller = loop.run_until_complete(Controller.launch(small_config(directory / "run"), backend="tinker"))
        yield controller
        loop.run_until_complete(controller.close())


@pytest.fixture(params=BACKENDS)
def running(request):
    return request.getfixturevalue({"actors": "controller", "local": "local", "tinker": "remote"}[request.param])


def _is_remote(controller):
    return isinstance(controller.trainer, RemoteTrainingClient)


async def _weights(controller):
    """The weights; a remote service keeps them to itself, and their log-probabilities of fixed data stand for them."""
    if not _is_remote(controller):
        return await controller.trainer.parameters()
    output = await controller.trainer.forward(random_datums(8, seed=99))
    return {str(index): row for index, row in enumerate(output.policy_logprobs)}


async def _whole_distribution(controller, sequence):
    """Tokens and log-probabilities (T, 64) at each position but the last, best first, by the trainer."""
    if not _is_remote(controller):
        datum = Datum(tokens=sequence[:-1], target_tokens=sequence[1:], loss_inputs={})
        output = await controller.trainer.forward([datum], temperature=1.0, top_k=64)
        return output.top_tokens[0], output.top_logprobs[0]
    every = torch.arange(64).expand(len(sequence) - 1, 64)
    datum = Datum(tokens=sequence[:-1], target_tokens=every, loss_inputs={})
    (logprobs_TV,) = (await controller.trainer.forward([datum], temperature=1.0)).policy_logprobs
    logprobs, tokens = logprobs_TV.sort(dim=1, descending=True, stable=True)
    return tokens, logprobs


async def _step(controller, *, seed=0, lr=1e-2):
    await controller.trainer.forward_backward(random_datums(6, seed=seed), cross_entropy)
    return await controller.trainer.optim_step(OptimParams(lr=lr))


def test_outputs_come_back_in_input_order_whatever_the_microbatches(loop, running):
    data = random_datums(9)

    async def run():
        whole = await running.trainer.forward(data)
        alone = [(await running.trainer.forward([datum])).policy_logprobs[0] for datum in data]
        return whole, alone

    whole, alone = loop.run_until_complete(run())
    assert [len(row) for row in whole.policy_logprobs] == [len(datum) for datum in data]
    for row, expected in zip(whole.policy_logprobs, alone, strict=True):
        assert torch.allclose(row, expected, atol=1e-5)


def test_gradients_accumulate_over_calls_and_a_step_takes_them(loop, running):
    data = random_datums(8)

    async def gradient(calls):
        for part in calls:
            await running.trainer.forward_backward(part, importance_sampling)
        gradients = None if _is_remote(running) else flat(await running.trainer.gradients())
        return gradients, await running.trainer.optim_step(OptimParams(lr=0.0))

    async def run():
        whole, parts = await gradient([data]), await gradient([data[:3], data[3:]])
        return whole, parts, await running.trainer.optim_step(OptimParams(lr=0.0))

    (whole, first), (parts, second), empty = loop.run_until_complete(run())
    if not _is_remote(running):
        assert relative_l2(parts, whole) <= 1e-5
        assert first.grad_norm == pytest.approx(float(whole.norm()), rel=1e-4)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5) and first.grad_norm > 0
    assert empty.grad_norm == 0.0
    assert second.policy_version == first.policy_version + 1


def test_a_loss_has_the_same_gradient_under_another_name(loop, running):
    def unknown(inputs):
        return importance_sampling(inputs)

    async def gradient(loss_fn):
        output = await running.trainer.forward_backward(random_datums(8), loss_fn, loss_weight=0.5)
        return output, await running.trainer.optim_step(OptimParams(lr=0.0))

    async def run():
        return await gradient(importance_sampling), await gradient(unknown)

    (known, first), (other, second) = loop.run_until_complete(run())
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-4) and first.grad_norm > 0
    assert other.loss == pytest.approx(known.loss, rel=1e-5) and other.metrics == pytest.approx(known.metrics, abs=1e-5)
    for row, expected in zip(other.policy_logprobs, known.policy_logprobs, strict=True):
        assert torch.allclose(row, expected, atol=1e-5)


def test_an_answer_does_not_change_afterwards(loop, running):
    async def run():
        before = await _weights(running)
        kept = {name: tensor.clone() for name, tensor in before.items()}
        await _step(running)
        return before, kept, await _weights(running)

    before, kept, after = loop.run_until_complete(run())
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    assert any(not torch.equal(before[name], after[name]) for name in kept)


def test_both_may_be_submitted_before_either_is_awaited(loop, running):
    async def run():
        trained = running.trainer.forward_backward(random_datums(4), cross_entropy)
        stepped = running.trainer.optim_step(OptimParams(lr=0.0))
        again = running.trainer.optim_step(OptimParams(lr=0.0))
        return (await again).grad_norm, (await stepped).grad_norm, (await trained).loss

    empty, full, loss = loop.run_until_complete(run())
    assert empty == 0.0 and full > 0 and loss > 0


def test_generators_sample_from_what_was_published_and_from_nothing_else(loop, running):
    async def run():
        version = await running.publish()
        before = await running.generator.score(SEQUENCE)
        stepped = await _step(running)
        still = await running.generator.score(SEQUENCE)
        assert await running.publish() == stepped.policy_version == version + 1
        after = await running.generator.score(SEQUENCE)
        sequence = torch.tensor(SEQUENCE)
        datum = Datum(tokens=sequence[:-1], target_tokens=sequence[1:], loss_inputs={})
        return before, still, after, (await running.trainer.forward([datum], temperature=1.0)).policy_logprobs[0]

    before, still, after, trained = loop.run_until_complete(run())
    assert before == still and max(abs(a - b) for a, b in zip(before, after)) > 1e-2
    assert torch.allclose(torch.tensor(after), trained, atol=1e-5)


def test_the_likeliest_tokens_are_the_trainers_and_the_prompts_own_is_left_out(loop, running):
    sequence = torch.tensor(SEQUENCE)
    refusal = "prompt of 10 tokens: " + ("topk_prompt_logprobs=65" if _is_remote(running) else "Requested prompt logp")

    async def run():
        await running.publish()
        asked = [running.generator.score_top(SEQUENCE, top_k) for top_k in (1, 4, 64)]
        with pytest.raises(ValueError, match=refusal):
            await running.generator.score_top(SEQUENCE, 65)
        with pytest.raises(ValueError, match="top_k=0: must be at least 1; use score for the tokens that are there"):
            await running.generator.score_top(SEQUENCE, 0)
        return (
            await asyncio.gather(*asked, running.generator.score(SEQUENCE)),
            await _whole_distribution(running, sequence),
        )

    (*tops, own), (tokens_TK, logprobs_TK) = loop.run_until_complete(run())
    for top_k, (tokens, logprobs) in zip((1, 4, 64), tops):
        assert tokens.shape == logprobs.shape == (9, top_k)
        assert torch.allclose(logprobs, logprobs_TK[:, :top_k], atol=1e-5)
        assert torch.equal(tokens, tokens_TK[:, :top_k])
    assert (tops[0][0][:, 0] != sequence[1:]).any(), "else nothing was left out"
    everything, logprobs = tops[2]
    assert logprobs[everything == sequence[1:, None]].tolist() == pytest.approx(own, abs=1e-7)


def test_a_pinned_version_can_be_sampled_and_scored_until_it_is_released(loop, running):
    async def run():
        old = await running.publish()
        running.versions.pin(old, "teacher")
        as_old = await running.generator.score(SEQUENCE)
        await _step(running, seed=3)
        new = await running.publish()
        as_new = await running.generator.score(SEQUENCE)
        scores = await asyncio.gather(
            *(running.generator.score(SEQUENCE, policy_version=version) for version in (old, None, new))
        )
        sampled = await running.generator.sample(PROMPT, SamplingParams(max_tokens=4, seed=0), policy_version=old)
        await running.generator.score(SEQUENCE)  # back to the newest
        published = list(running.versions.holders())
        await running.versions.release(old, "teacher")
        with pytest.raises(ValueError, match=f"policy_version={old}: is not published"):
            await running.generator.score(SEQUENCE, policy_version=old)
        return old, new, as_old, as_new, scores, sampled, published, list(running.versions.holders())

    old, new, as_old, as_new, scores, sampled, published, left = loop.run_until_complete(run())
    assert scores[0] == pytest.approx(as_old, abs=1e-5) and scores[0] != pytest.approx(as_new, abs=1e-2)
    for scored in scores[1:]:  # scored in company: docs/numerics.md
        assert scored == pytest.approx(as_new, abs=1e-5)
    assert set(sampled.policy_versions) == {old} and published == [old, new] and left == [new]


def test_tokens_sampled_across_a_pull_carry_both_versions(loop, running):
    async def run():
        params = SamplingParams(max_tokens=50, ignore_eos=True, seed=0)
        old = await running.publish()
        flying = [asyncio.ensure_future(running.generator.sample(PROMPT, params)) for _ in range(32)]
        await _step(running, seed=4, lr=1e-3)
        return old, await running.publish(), await asyncio.gather(*flying)

    old, new, completions = loop.run_until_complete(run())
    for completion in completions:
        assert len(completion.policy_versions) == len(completion.tokens) == 50
        assert completion.policy_versions == sorted(completion.policy_versions)
        assert completion.policy_versions[0] == old and set(completion.policy_versions) <= {old, new}


def test_the_same_requests_give_the_same_tokens_and_bits(loop, running):
    async def sample():
        return await asyncio.gather(
            *(running.generator.sample(PROMPT[: 2 + i % 4], SamplingParams(max_tokens=8, seed=i)) for i in range(24))
        )

    first, second = loop.run_until_complete(sample()), loop.run_until_complete(sample())
    assert [c.tokens for c in first] == [c.tokens for c in second]
    if _is_remote(running):  # what is computed together is the service's matter, and changes the last bits
        for one, other in zip(first, second):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    else:
        assert [c.logprobs for c in first] == [c.logprobs for c in second]


def test_a_checkpoint_continues_bit_for_bit(loop, running, tmp_path):
    async def run():
        await _step(running, seed=6, lr=1e-3)
        await running.trainer.save_checkpoint(tmp_path)
        version = (await _step(running, seed=6, lr=1e-3)).policy_version
        expected = await _weights(running)
        await _step(running, seed=7)  # somewhere else entirely
        await running.trainer.load_checkpoint(tmp_path, policy_version=version - 1)
        again = await _step(running, seed=6, lr=1e-3)
        return version, again.policy_version, expected, await _weights(running)

    version, again, expected, reached = loop.run_until_complete(run())
    assert again == version
    assert all(torch.equal(expected[name], reached[name]) for name in expected)
    loop.run_until_complete(running.publish())


def test_a_gradient_that_is_not_finite_is_dropped_and_says_so(loop, running):
    async def run():
        before = await _weights(running)
        await running.trainer.forward_backward(random_datums(3), cross_entropy, loss_weight=float("nan"))
        return before, await running.trainer.optim_step(OptimParams(lr=1.0)), await _weights(running)

    before, output, after = loop.run_until_complete(run())
    assert output.skipped and all(torch.equal(before[name], after[name]) for name in before)


def test_bad_input_is_refused_alike(loop, running, tmp_path):
    def broken(inputs):
        raise KeyError("no such thing")

    async def run():
        with pytest.raises(RuntimeError, match=r"^policy-0\.forward_backward: KeyError: 'no such thing'$"):
            await running.trainer.forward_backward(random_datums(2), broken)
        await running.trainer.optim_step(OptimParams(lr=0.0))
        reason = "a remote service keeps weights" if _is_remote(running) else r"trainer\.lora=None"
        with pytest.raises(RuntimeError, match=rf"^policy-0\.save_adapter: ValueError: {reason}"):
            await running.trainer.save_adapter(tmp_path / "adapter")
        with pytest.raises(ValueError, match="prompt of 5 tokens"):  # the engine's own refusal
            await running.generator.sample(PROMPT, SamplingParams(max_tokens=4, top_p=2.0))
        return await running.generator.sample(PROMPT, SamplingParams(max_tokens=4, seed=0))

    assert len(loop.run_until_complete(run()).tokens) <= 4
    with pytest.raises(ValueError, match=r"forward_backward\.data=\[\]: no datums"):
        running.trainer.forward_backward([], cross_entropy)
    with pytest.raises(ValueError, match="policy_version=99: is not published"):
        loop.run_until_complete(running.generator.score(PROMPT, policy_version=99))


def test_a_second_local_run_in_the_process_is_refused_while_the_first_is_open(loop, local, tmp_path):
    with pytest.raises(RuntimeError, match="backend='local': this process has a torch.distributed process group"):
        loop.run_until_complete(Controller.launch(small_config(tmp_path / "second"), backend="local"))
    assert len(loop.run_until_complete(local.generator.score(PROMPT))) == 4, "the first goes on"


WITHOUT_ACTORS = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("monarch", "torchstore"):
            raise ModuleNotFoundError(f"{name}: is not installed")

sys.meta_path.insert(0, Refusal())
from torchtitan_rl.cli.main import main
sys.exit(main())
"""


def test_a_run_in_one_process_needs_neither_monarch_nor_torchstore(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WITHOUT_ACTORS)
    arguments = "train configs/quickstart.py --backend local --controller.num_steps 1 --supervised.num_steps 1"
    command = [sys.executable, program, *arguments.split(), "--output_dir", tmp_path / "run"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "reinforcement: 1/1 done" in done.stdout + done.stderr

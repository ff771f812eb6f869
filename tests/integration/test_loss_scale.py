"""`loss_weight` scales before the backward pass, `grad_scale` what has accumulated: the same, up to the edges."""

import pytest
import torch

from tests.integration.helpers import flat, random_datums, relative_l2
from tests.integration.layouts import client, local_trainers, trainer_config
from torchtitan_rl.algorithm.losses import importance_sampling
from torchtitan_rl.types import OptimParams

# A factor that is no power of two changes every rounding of the backward pass. Float32: a few units of 2^-24. Bfloat16:
# a gradient is within about 1% of the float32 one (unit roundoff 2^-8 = 0.4%, one rounding per operation), and two that
# were rounded independently differ by no more than twice that.
BOUND = {"float32": 1e-6, "bfloat16": 2**-6}
EDGE = 2.0**126  # float32 and bfloat16 end at 2^128
DATA = random_datums(9, max_len=20)
NO_CLIP = OptimParams(lr=1e-3, max_grad_norm=float("inf"))


@pytest.fixture(scope="module", params=BOUND)
def scaled(loop, request, tmp_path_factory):
    """(compute dtype, a one-rank trainer in it, a checkpoint of its initial weights)."""
    with local_trainers(loop, tmp_path_factory.mktemp("logs")) as start:
        mesh = start(trainer_config(training__mixed_precision_param=request.param))
        trainer, path = client(mesh, 40), tmp_path_factory.mktemp("initial")
        loop.run_until_complete(trainer.save_checkpoint(path))
        yield request.param, trainer, path


async def gradient(trainer, loss_weight=1.0):
    await trainer.forward_backward(DATA, importance_sampling, loss_weight=loss_weight)
    gradients = flat(await trainer.gradients())
    await trainer.optim_step(OptimParams(lr=0.0))
    return gradients


async def step(trainer, params, loss_weight=1.0, grad_scale=1.0):
    await trainer.forward_backward(DATA, importance_sampling, loss_weight=loss_weight)
    return await trainer.optim_step(params, grad_scale=grad_scale)


async def update(trainer, path, **scale):
    """The change of the parameters over a step, a scaled one and another: AdamW mixes them by their sizes."""
    await trainer.reset_optimizer()
    before = flat(await trainer.parameters())
    for kwargs in ({}, scale, {}):
        assert not (await step(trainer, NO_CLIP, **kwargs)).skipped
    change = flat(await trainer.parameters()) - before
    await trainer.load_checkpoint(path, optimizer=False)
    return change


def test_both_scale_the_gradient_alike(loop, scaled):
    dtype, trainer, _ = scaled
    plain = loop.run_until_complete(gradient(trainer))
    for factor in (0.25, 2.0**-60, 8.0):
        assert torch.equal(loop.run_until_complete(gradient(trainer, factor)), plain * factor)
    for factor in (0.3, 1 / 7, 100.7):
        assert relative_l2(loop.run_until_complete(gradient(trainer, factor)), plain * factor) <= BOUND[dtype]
        weighted = loop.run_until_complete(step(trainer, OptimParams(lr=0.0), loss_weight=factor)).grad_norm
        scaled_norm = loop.run_until_complete(step(trainer, OptimParams(lr=0.0), grad_scale=factor)).grad_norm
        assert scaled_norm == pytest.approx(factor * float(plain.norm()), rel=1e-6)
        assert weighted == pytest.approx(scaled_norm, rel=BOUND[dtype])


def test_both_change_the_parameters_alike(loop, scaled):
    dtype, trainer, path = scaled
    plain = loop.run_until_complete(update(trainer, path))
    for factor, bound in ((0.25, 0.0), (0.3, 1e-4)):
        if bound and dtype == "bfloat16":
            continue  # AdamW divides by the size of each gradient, so 1% of small ones is much of an update
        by_weight = loop.run_until_complete(update(trainer, path, loss_weight=factor))
        by_scale = loop.run_until_complete(update(trainer, path, grad_scale=factor))
        assert relative_l2(by_weight, by_scale) <= bound
        assert relative_l2(by_scale, plain) > 0.01  # the factor did something


@pytest.mark.parametrize("factor", [1e20, EDGE])
@pytest.mark.parametrize("how", ["loss_weight", "grad_scale"])
def test_an_overflow_by_either_is_skipped(loop, scaled, how, factor):
    """From a norm of 2^64 on, its square overflows float32; the gradient itself overflows 19 digits later."""
    _, trainer, _ = scaled

    async def run():
        version, before = (await step(trainer, OptimParams(lr=0.0))).policy_version, await trainer.parameters()
        output = await step(trainer, OptimParams(lr=1e-3), **{how: factor})
        after = await trainer.parameters()
        return version, before, output, after, await step(trainer, OptimParams(lr=0.0))

    version, before, output, after, next_one = loop.run_until_complete(run())
    assert output.skipped and output.policy_version == version
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not next_one.skipped and next_one.policy_version == version + 1


def test_what_a_loss_weight_overflows_no_grad_scale_brings_back(loop, scaled):
    dtype, trainer, _ = scaled
    plain = float(loop.run_until_complete(gradient(trainer)).norm())
    restored = loop.run_until_complete(step(trainer, OptimParams(lr=0.0), loss_weight=1e30, grad_scale=1e-30))
    assert not restored.skipped and restored.grad_norm == pytest.approx(plain, rel=BOUND[dtype])
    assert loop.run_until_complete(step(trainer, OptimParams(lr=0.0), loss_weight=EDGE, grad_scale=1 / EDGE)).skipped
    # On its way the gradient was larger than at the parameters, where it would have fitted.
    gradients = loop.run_until_complete(gradient(trainer, EDGE))
    assert not torch.isfinite(gradients).all() and plain * EDGE < torch.finfo(torch.float32).max


def test_a_tiny_loss_weight_underflows_in_bfloat16_first(loop, scaled):
    """Below 2^-126 numbers lose bits: bfloat16 has 7 of them left there, float32 has 23. A matrix product by a
    processor's own bfloat16 instructions (AVX512-BF16, AMX) takes such numbers for zero: 72% is lost and not 1%."""
    dtype, trainer, _ = scaled
    plain = loop.run_until_complete(gradient(trainer))
    tiny = loop.run_until_complete(gradient(trainer, 2.0**-115)) * 2.0**115
    lost = relative_l2(tiny, plain)
    assert lost <= 1e-5 if dtype == "float32" else 0.005 < lost < 1

"""The generator's experts in the trainer's forward: values and gradients against the formula, and what agrees."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchtitan.models.common.linear import Linear

from tests.unit.model.test_moe import CPU, for_training, tiny, with_random_weights
from torchtitan_rl.model import routing_replay
from torchtitan_rl.model.experts import ExpertRouter
from torchtitan_rl.model.train_step import accumulate_gradients, head_outputs
from torchtitan_rl.types import LossInputs, Microbatch, Routing

LENGTHS = [5, 2, 4]


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def any_experts(tokens, *, layers=2, num_experts=6, top_k=2, seed=0):
    """Different experts for each token and layer."""
    draw = torch.rand(tokens, layers, num_experts, generator=torch.Generator().manual_seed(seed))
    return draw.argsort(-1)[..., :top_k].to(torch.uint8)


def router(**changes):
    gate = Linear.Config(in_features=4, out_features=6, bias=False)
    made = ExpertRouter.Config(num_experts=6, gate=gate, top_k=3, **changes).build().double()
    with torch.no_grad():
        made.gate.weight.copy_(drawn(6, 4, seed=1))
    return made


def weights_by_definition(x_D, weight_ED, experts, *, softmax, norm, scale):
    """The weights of one token's experts as a sum over all of them, without torchtitan's order of operations."""
    scores_E = weight_ED @ x_D
    if softmax and norm:  # arXiv:2510.11370, equation 7: a softmax over the replayed experts alone
        exps = [math.exp(scores_E[e]) for e in experts]
        return [scale * value / sum(exps) for value in exps]
    total = sum(math.exp(value) for value in scores_E)
    chosen = [math.exp(scores_E[e]) / total if softmax else 1 / (1 + math.exp(-scores_E[e])) for e in experts]
    return [scale * value / (sum(chosen) if norm else 1.0) for value in chosen]


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_replayed_experts_have_this_routers_weights(softmax, norm):
    made = router(score_func="softmax" if softmax else "sigmoid", route_norm=norm, route_scale=1.5)
    x_BLD, experts_BLK = drawn(1, 5, 4), any_experts(5, layers=1, top_k=3).long().transpose(0, 1)
    made.expect(experts_BLK, replays=True)
    scores_BLK, ids_BLK, _ = made(x_BLD)
    assert torch.equal(ids_BLK, experts_BLK)
    for t in range(5):
        expected = weights_by_definition(
            x_BLD[0, t], made.gate.weight.detach(), experts_BLK[0, t].tolist(), softmax=softmax, norm=norm, scale=1.5
        )
        assert scores_BLK[0, t].tolist() == pytest.approx(expected, rel=1e-10)


def test_gradients_reach_the_router_and_its_input():
    made = router(score_func="softmax", route_norm=True)
    made.expect(any_experts(3, layers=1, top_k=3).long().transpose(0, 1), replays=True)
    x_BLD, weight = drawn(1, 3, 4).requires_grad_(), made.gate.weight

    def weights(x, matrix):
        return torch.func.functional_call(made, {"gate.weight": matrix}, (x,))[0]

    assert torch.autograd.gradcheck(weights, (x_BLD, weight.detach().clone().requires_grad_()))
    (weights(x_BLD, weight) * drawn(1, 3, 3, seed=2)).sum().backward()
    assert weight.grad.abs().sum() > 0 and x_BLD.grad.abs().sum() > 0


@pytest.mark.parametrize("replays", [True, False])
def test_agreement_is_of_sets_and_own_choices_replayed_change_nothing(replays):
    made = router(score_func="softmax", route_norm=True)
    x_BLD = drawn(1, 4, 4)
    plain = made(x_BLD)
    assert made.agreement == {}
    shuffled = plain[1].flip(-1).clone()
    made.expect(shuffled, replays=replays)
    scores_BLK, ids_BLK, _ = made(x_BLD)
    assert torch.equal(ids_BLK, shuffled if replays else plain[1])
    torch.testing.assert_close(scores_BLK, plain[0].flip(-1) if replays else plain[0], rtol=1e-12, atol=0)
    assert made.agreement["experts"].all() and made.agreement["choice"].all()
    shuffled[0, 2] = (shuffled[0, 2] + 1) % 6  # three of six experts: another set
    made(x_BLD)
    assert made.agreement["choice"].tolist() == [[True, True, False, True]]
    assert made.agreement["experts"].all() == replays
    made.expect(None)
    assert torch.equal(made(x_BLD)[0], plain[0]) and made.agreement == {}


def test_a_bias_of_the_choice_does_not_weigh_replayed_experts():
    made = router(score_func="sigmoid", route_norm=False)
    x_BLD, experts_BLK = drawn(1, 2, 4), torch.tensor([[[0, 1, 2], [3, 4, 5]]])
    made.expect(experts_BLK, replays=True)
    assert torch.equal(made(x_BLD, torch.tensor([9.0, -9, 9, -9, 9, -9]))[0], made(x_BLD)[0])


# The model.


def batch(lengths=LENGTHS, *, replayed=True, experts=None, seed=3):
    num_tokens = sum(lengths)
    tokens = torch.randint(11, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(num_tokens) % 3 > 0).float()
    return Microbatch(
        tokens_T=tokens,
        target_tokens_T=tokens.roll(-1),
        lengths=list(lengths),
        loss_inputs={"loss_mask": mask, "token_weights": mask, "sampling_logprobs": -mask},
        routing=None if experts is None else Routing(experts=experts, replayed=replayed),
    )


def part(whole, first, end):
    """The documents `first` to `end` of a microbatch."""
    start, stop = sum(whole.lengths[:first]), sum(whole.lengths[:end])
    return Microbatch(
        tokens_T=whole.tokens_T[start:stop],
        target_tokens_T=whole.target_tokens_T[start:stop],
        lengths=whole.lengths[first:end],
        loss_inputs={name: rows[start:stop] for name, rows in whole.loss_inputs.items()},
        routing=Routing(experts=whole.routing.experts[start:stop], replayed=whole.routing.replayed),
    )


def loss(inputs: LossInputs):
    return -(inputs.token_weights * inputs.policy_logprobs).sum(), {}


def test_the_model_sends_tokens_to_the_replayed_experts_and_padding_changes_nothing():
    model, experts = with_random_weights(for_training(tiny())), any_experts(sum(LENGTHS))
    sent = []
    for layer in model.layers.values():
        layer.moe.routed_experts.register_forward_pre_hook(lambda _, inputs: sent.append(inputs[2]))
    own = head_outputs(model, batch(), CPU, temperature=1.0)["policy_logprobs"]
    own_experts = torch.stack([ids[0] for ids in sent], 1).to(torch.uint8)
    del sent[:]
    with_own = head_outputs(model, batch(experts=own_experts), CPU, temperature=1.0)["policy_logprobs"]
    torch.testing.assert_close(with_own, own, rtol=1e-5, atol=1e-6)
    del sent[:]
    replayed = head_outputs(model, batch(experts=experts), CPU, temperature=1.0)["policy_logprobs"]
    assert torch.equal(torch.stack([ids[0] for ids in sent], 1), experts.long())
    assert (replayed - own).abs().max() > 1e-2
    padded = head_outputs(model, batch(experts=experts), CPU, temperature=1.0, multiple_of=4)["policy_logprobs"]
    torch.testing.assert_close(padded, replayed, rtol=1e-5, atol=1e-6)
    compared = head_outputs(model, batch(experts=experts, replayed=False), CPU, temperature=1.0)["policy_logprobs"]
    after = head_outputs(model, batch(), CPU, temperature=1.0)["policy_logprobs"]
    assert torch.equal(compared, own) and torch.equal(after, own)


def test_gradients_reach_every_router_and_do_not_depend_on_microbatches():
    model, whole = with_random_weights(for_training(tiny())), batch(experts=any_experts(sum(LENGTHS)))
    results = []
    for batches in ([whole], [part(whole, 0, 1), part(whole, 1, 3)]):
        model.zero_grad()
        result = accumulate_gradients(model, batches, loss, CPU)
        results.append((result, {name: p.grad.clone() for name, p in model.named_parameters()}))
    (one, gradients), (other, split) = results
    for name, gradient in gradients.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-4, atol=1e-5)
    assert all(gradients[f"layers.{i}.moe.router.gate.weight"].any() for i in range(2))
    assert one.sums == pytest.approx(other.sums, rel=1e-5)
    assert one.sums["mismatch/expert_agreement_frac"] == pytest.approx(float(whole.loss_inputs["loss_mask"].sum()))
    assert one.sums["mismatch/expert_choice_frac"] < one.sums["mismatch/expert_agreement_frac"]


def test_the_gradient_of_a_mixture_is_that_of_the_formula():
    """The mixture's output by definition, as a weighted sum over the replayed experts, in float64."""
    layer = with_random_weights(for_training(tiny())).layers["0"].moe
    experts_TK = any_experts(7, layers=1)[:, 0].long()
    x_TD, out_TD = drawn(7, 16, seed=4, dtype=torch.float32).requires_grad_(), drawn(7, 16, seed=5)
    layer.router.expect(experts_TK[None], replays=True)
    (layer(x_TD[None])[0].double() * out_TD).sum().backward()

    inner = layer.routed_experts.inner_experts
    parameters = [layer.router.gate.weight, inner.w1_EFD, inner.w2_EDF, inner.w3_EFD, x_TD]
    gate, w1, w2, w3, x = (tensor.detach().double().requires_grad_() for tensor in parameters)
    outputs = []
    for x_D, experts in zip(x, experts_TK):
        shares = (gate @ x_D)[experts].softmax(0)
        of_experts = [w2[e] @ (F.silu(w1[e] @ x_D) * (w3[e] @ x_D)) for e in experts.tolist()]
        outputs.append(sum(share * of_expert for share, of_expert in zip(shares, of_experts)))
    (torch.stack(outputs) * out_TD).sum().backward()
    for tensor, exact in zip(parameters, (gate, w1, w2, w3, x)):
        torch.testing.assert_close(tensor.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("experts", [any_experts(11, layers=3), any_experts(11, top_k=3)])
def test_experts_of_another_model_are_refused(experts):
    model = for_training(tiny()).model.build()
    layers, top_k = experts.shape[1:]
    with pytest.raises(
        RuntimeError, match=f"has {top_k} experts in each of {layers} layers, and this model has .2, 2."
    ):
        routing_replay.expect(model, Routing(experts=experts, replayed=True), padding=0, device=CPU)

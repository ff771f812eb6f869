"""Siblings that share their prompt in a forward, against the same datums computed whole."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.view import VIEW
from tests.unit.families.shapes import SHAPES
from tests.unit.model.test_attention import NAMES, naive_attention, output_and_gradients, random_inputs
from torchtitan_rl.algorithm.corrections import truncated_sequence
from torchtitan_rl.algorithm.losses import gspo, reverse_kl, value_loss
from torchtitan_rl.algorithm.objective import policy_objective
from torchtitan_rl.config.algorithm import AlgorithmConfig
from torchtitan_rl.config.model import ModelConfig
from torchtitan_rl.dispatch.microbatches import pack
from torchtitan_rl.dispatch.shared_plan import PrefixCost, plan_siblings
from torchtitan_rl.families import Qwen3Shape
from torchtitan_rl.model import attention, shared_prefix
from torchtitan_rl.model.attention import PackedDocuments, PackedSDPA
from torchtitan_rl.model.scoring import score
from torchtitan_rl.model.shared_prefix import SharedPrefix
from torchtitan_rl.model.spec import build_spec, critic_spec, training_spec
from torchtitan_rl.model.train_step import accumulate_gradients, head_outputs
from torchtitan_rl.types import Datum

CPU = torch.device("cpu")
ALWAYS = PrefixCost(pair=0.0, group=0.0)
VOCABULARY = 11
SHAPE = Qwen3Shape(
    vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, hidden_dim=24, max_seq_len=64
)


def built(shape, *, critic=False):
    spec = build_spec(ModelConfig(shape=shape))
    spec = training_spec(critic_spec(spec) if critic else spec, VIEW, attention="sdpa", chunk_bytes=4 * 4 * VOCABULARY)
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_weights()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def group(prompt, completions, draw, num_targets=1, hidden=0):
    """Datums of one prompt, with completions of these lengths; some sampled tokens do not train."""
    prompt_T = torch.randint(VOCABULARY, (prompt,), generator=draw)
    data = []
    for length in completions:
        tokens = torch.cat([prompt_T, torch.randint(VOCABULARY, (length,), generator=draw)])
        mask = (torch.arange(len(tokens) - 1) >= prompt - 1) & (torch.rand(len(tokens) - 1, generator=draw) < 0.8)
        mask_T, targets = mask.float(), tokens[1:]

        def column(like=mask_T):
            return torch.rand(like.shape, generator=draw)

        inputs = {
            "token_weights": mask_T * column() / 30,
            "loss_mask": mask_T,
            "advantages": mask_T * (column() - 0.5),
            **{f"{name}_logprobs": mask_T * (column() - 3) for name in ("old", "sampling", "reference")},
            **{name: column() for name in ("values", "returns")},
        }
        if num_targets > 1:
            soft = torch.randint(VOCABULARY, (len(mask_T), num_targets - 1), generator=draw)
            soft[: prompt - 1] = 0
            targets = torch.cat([targets[:, None], soft], 1)
            inputs["soft_weights"] = mask_T[:, None] * torch.rand(soft.shape, generator=draw) / 30
        if hidden:
            states = torch.randn(len(mask_T), hidden, generator=draw)
            inputs["teacher_hidden"] = torch.cat([prompt_T[:-1, None].expand(-1, hidden), states[prompt - 1 :]])
        turns = [(0, prompt - 1, length)]
        data.append(Datum(tokens=tokens[:-1], target_tokens=targets, loss_inputs=inputs, turns=turns))
    return data


def three_groups(seed, **columns):
    """Two groups of siblings, in turn, and a datum alone."""
    draw = torch.Generator().manual_seed(seed)
    first, second = group(9, [1, 7, 4, 12], draw, **columns), group(14, [3, 3, 8], draw, **columns)
    return [first[0], second[0], first[1], *group(5, [6], draw, **columns), second[1], *first[2:], second[2]]


def microbatches(data, *, shared, max_tokens=10**6, num_ranks=1):
    """(microbatches, index of the datum of each row)."""
    cost = ALWAYS if shared else PrefixCost(pair=0.0, group=float("inf"))
    plan = plan_siblings(data, num_ranks, max_tokens, cost)
    assert bool(plan.shared) == shared
    members = [members for of_rank in plan.ranks for members in of_rank if members]
    return [pack([data[i] for i in m], plan.of(m)) for m in members], [i for m in members for i in m]


def trained(model, data, loss_fn, **how):
    """(loss and metric sums, rows in the data's order, gradients) of the whole data."""
    batches, order = microbatches(data, **how)
    model.zero_grad()
    result = accumulate_gradients(model, batches, loss_fn, CPU)
    (rows,) = result.rows.values()
    in_order = [row for _, row in sorted(zip(order, rows, strict=True), key=lambda pair: pair[0])]
    return result.sums | {"loss": result.loss}, in_order, [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(model, data, loss_fn, **how):
    """To a millionth: of a log-probability, and of the largest entry of each gradient if that is above 1."""
    whole, shared = trained(model, data, loss_fn, shared=False), trained(model, data, loss_fn, shared=True, **how)
    assert shared[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    for got, expected in zip([*shared[1], *shared[2]], [*whole[1], *whole[2]], strict=True):
        largest = expected.abs().max().item()
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6 * max(1.0, largest))
    assert all(gradient.abs().max() > 0 for gradient in whole[2])


def every_term():
    """A loss whose terms read what there is to read: log-probabilities, entropy, sums over a datum."""
    return policy_objective(
        AlgorithmConfig(
            loss_fn=gspo,
            loss_config={"clip_low": 5.0, "clip_high": 5.0},
            correction_fn=truncated_sequence,
            kl_coef=0.3,
            entropy_coef=0.2,
        )
    )


# The indices.


def test_what_is_computed_and_where_a_tokens_numbers_are():
    # Documents 0 and 1 begin with the same 2 tokens; document 2 stands alone; documents 3 and 4 share 1 token.
    prefix = SharedPrefix.build([4, 3, 2, 3, 3], [0, 2, 0, 0, 1])
    assert prefix.computed_U.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 13, 14]
    assert prefix.row_T.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 8, 9, 7, 10, 11]
    assert prefix.lengths == [4, 1, 2, 3, 2]


def test_keys_have_the_prompt_in_front():
    # Computed: document 0 is tokens 0 to 3, document 1 token 4, document 2 tokens 5 and 6; both share tokens 0 and 1.
    layout = PackedDocuments.build([4, 1, 2], shared=[0, 2, 2])
    assert layout.buckets == ((1, 4), (2, 2)) and layout.shared.prompts == ((0, 0), (0, 2))
    assert layout.to_dense_P.tolist() == [0, 1, 2, 3, 4, 0, 5, 6]
    assert layout.shared.to_dense_K.tolist() == [0, 1, 2, 3, 0, 1, 4, 0, 0, 1, 5, 6]
    assert layout.shared.to_packed_T.tolist() == [0, 1, 2, 3, 6, 10, 11]


# Attention.


@pytest.mark.parametrize("limit", [256, 3], ids=["one block", "blocks of three queries"])
@settings(deadline=None, derandomize=True, max_examples=25)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    seed=st.integers(0, 2**32),
)
def test_attention_is_that_of_whole_documents(limit, groups, seed):
    """Values and gradients of the computed tokens, against every document written out, in double precision."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MASKED_QUERIES", limit)
        lengths = [prompt + own for prompt, owns in groups for own in owns]
        shared = [0 if index == 0 else prompt for prompt, owns in groups for index in range(len(owns))]
        prefix = SharedPrefix.build(lengths, shared)
        inputs = random_inputs(prefix.lengths, seed)

        def in_shared_layout(q, k, v, lengths):
            layout, sdpa = PackedDocuments.build(lengths, shared=shared), PackedSDPA(PackedSDPA.Config())
            return sdpa(q[None], k[None], v[None], attention_masks=layout, enable_gqa=True)[0][prefix.row_T]

        def written_out(q, k, v, _):
            return naive_attention(q[prefix.row_T], k[prefix.row_T], v[prefix.row_T], lengths)

        ours = output_and_gradients(in_shared_layout, inputs, prefix.lengths)
        reference = output_and_gradients(written_out, inputs, prefix.lengths)
        for name, got, expected in zip(NAMES, ours, reference, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: name + text)


# The model.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_tokens", [10**6, 40, 23], ids=["one microbatch", "several", "groups cut in parts"])
def test_gradients_and_log_probabilities_are_those_of_whole_datums(seed, max_tokens):
    assert_same(built(SHAPE), three_groups(seed), every_term(), max_tokens=max_tokens)


def test_over_several_ranks_every_datum_trains_once():
    assert_same(built(SHAPE), three_groups(4), every_term(), num_ranks=3)


@pytest.mark.parametrize("name", [name for name in SHAPES if not SHAPES[name].state_sizes])
def test_every_family_with_attention_alone(name):
    """Multi-head latent attention, sliding windows, sinks, experts, biases, scaled rotations."""
    draw = torch.Generator().manual_seed(5)
    data = [*group(21, [20, 3, 9], draw), *group(30, [2, 18], draw)]
    assert_same(built(SHAPES[name]), data, every_term())


def test_several_targets_of_a_position():
    objective = policy_objective(AlgorithmConfig(), {"soft_weights"})
    assert_same(built(SHAPE), three_groups(6, num_targets=4), objective)


def test_a_divergence_from_a_teachers_whole_distribution():
    model = built(SHAPE)
    model.lm_head.hold_teacher(torch.randn(VOCABULARY, 5, generator=torch.Generator().manual_seed(1)), 0, 1)
    assert_same(model, three_groups(7, hidden=5), reverse_kl)


def test_a_critic():
    assert_same(built(SHAPE, critic=True), three_groups(8), partial(value_loss, clip=0.3))


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_scores_are_those_of_whole_datums(multiple_of):
    model, data = built(SHAPE), three_groups(9)
    scored = []
    for shared in (False, True):
        batches, order = microbatches(data, shared=shared)
        rows = score(model, batches, CPU, top_k=3, hidden=True, multiple_of=multiple_of, temperature=0.7).rows
        scored.append({name: dict(zip(order, of_data, strict=True)) for name, of_data in rows.items()})
    whole, shared = scored
    assert whole.keys() == {"policy_logprobs", "top_tokens", "top_logprobs", "hidden"}
    for name in whole:
        for index in range(len(data)):
            torch.testing.assert_close(shared[name][index], whole[name][index], rtol=1e-5, atol=1e-6)


def test_attention_of_variable_lengths_refuses_siblings():
    (batch,), _ = microbatches(three_groups(0), shared=True)
    model = SimpleNamespace(config=SimpleNamespace(first_attention=SimpleNamespace(inner_attention=None)))
    with pytest.raises(RuntimeError) as caught:
        head_outputs(model, batch, CPU, temperature=1.0)
    assert str(caught.value) == (
        "trainer.shared_prefix='auto': attention of variable lengths computes each document by itself; use 'off', or "
        "trainer.attention='sdpa'"
    )


def test_the_estimate_counts_the_queries_that_a_call_of_attention_takes():
    assert attention.MASKED_QUERIES == shared_prefix.MASKED_QUERIES

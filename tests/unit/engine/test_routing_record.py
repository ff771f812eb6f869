"""The record of experts beside the cache: by slots, in any order of blocks, and what the plan makes of routers."""

from types import SimpleNamespace

import pytest
import torch
from vllm.forward_context import override_forward_context

from tests.unit.model.test_moe import tiny
from torchtitan_rl.config.model import ExpertsShape, ModelConfig
from torchtitan_rl.engine.plan import generator_spec
from torchtitan_rl.engine.routing_record import RecordingRouter, RoutingRecord
from torchtitan_rl.families import GptOssShape
from torchtitan_rl.model.spec import build_spec

LAYER = "layers.0.attention"


def record(shape=None, **cache):
    made = RoutingRecord(tiny() if shape is None else shape)
    made.attention_layer = LAYER
    if cache:
        made.allocate(**cache, device=torch.device("cpu"))
    return made


def forward(made, slots, experts_TLK):
    """One forward of tokens at these slots."""
    with override_forward_context(SimpleNamespace(slot_mapping={LAYER: torch.tensor(slots)})):
        for layer, experts_TK in enumerate(experts_TLK.unbind(1)):
            made.write(layer, experts_TK)


def experts(first, count):
    """Recognisable experts of `count` tokens, in 2 layers."""
    return torch.arange(first * 4, (first + count) * 4).reshape(count, 2, 2) % 250


def test_a_request_reads_the_experts_of_its_tokens_whatever_blocks_it_has():
    made = record(num_blocks=4, block_size=4)
    # A prompt of six tokens in two parts, in blocks 2 and 0, beside another request's tokens; the last row is padding.
    forward(made, [8, 9, 10, 11, 4], torch.cat([experts(0, 4), experts(40, 1)]))
    forward(made, [0, 1, 5, -1], torch.cat([experts(4, 2), experts(41, 1), experts(60, 1)]))
    assert torch.equal(made.read([2, 0], 6), experts(0, 6).to(torch.uint8))
    assert torch.equal(made.read([1], 2), experts(40, 2).to(torch.uint8))
    # Another request with the first block of the prompt from the prefix cache.
    forward(made, [12], experts(20, 1))
    assert torch.equal(made.read([2, 3], 5), torch.cat([experts(0, 4), experts(20, 1)]).to(torch.uint8))
    with pytest.raises(AssertionError, match="fewer blocks than tokens"):
        made.read([2], 5)


def test_nothing_is_recorded_before_there_is_a_cache():
    with override_forward_context(SimpleNamespace(slot_mapping={})):  # as vLLM measures the model
        record().write(0, experts(0, 3)[:, 0])


def test_beyond_256_experts_a_number_takes_two_bytes():
    made = record(tiny(experts=ExpertsShape(num_experts=300, top_k=2)), num_blocks=1, block_size=4)
    forward(made, [0], torch.tensor([[[299, 0], [1, 256]]]))
    assert made.read([0], 1).tolist() == [[[299, 0], [1, 256]]]


@pytest.mark.parametrize("degree", [1, 2])
def test_the_plan_makes_routers_record_and_others_stay(degree):
    whole, made = build_spec(ModelConfig(shape=tiny())), record()
    spec = generator_spec(whole, degree, made)
    routers = [layer.moe.router for layer in spec.model.layers]
    assert [(type(router), router.layer) for router in routers] == [(RecordingRouter.Config, i) for i in range(2)]
    assert all(router.record is made and router.top_k == 2 for router in routers)
    assert made.attention_layer == LAYER
    plain = generator_spec(whole, degree).model.layers[0].moe.router
    assert not isinstance(plain, RecordingRouter.Config)


def test_slots_are_of_a_layer_without_a_window():
    sizes = dict(vocab_size=16, dim=64, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=32, hidden_dim=32)
    shape = GptOssShape.debug(**sizes)
    made = RoutingRecord(shape)
    generator_spec(build_spec(ModelConfig(shape=shape)), 1, made)
    assert made.attention_layer == "layers.1.attention"

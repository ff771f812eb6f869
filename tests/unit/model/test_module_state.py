"""A model's state as the model holds it: fused, under the names of a state dict, in the memory of the parameters."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.unit.model.test_spec import for_training, tiny
from torchtitan_rl.model.module_state import fused_state, places


def a_model(**changes):
    model = for_training(tiny(**changes)).model.build()
    model.init_weights()
    return model


def test_fused_weights_stay_fused_and_nothing_is_copied():
    model = a_model()
    held, split = fused_state(model), model.state_dict()
    fused = {f"layers.{i}.attention.qkv_linear.wqkv.weight" for i in range(2)}
    parts = {f"layers.{i}.attention.qkv_linear.{part}.weight" for i in range(2) for part in ("wq", "wk", "wv")}
    assert held.keys() - split.keys() == fused and split.keys() - held.keys() == parts
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert all(held[name].data_ptr() == parameters[name].data_ptr() for name in held)
    assert all(torch.equal(held[name], split[name]) for name in held.keys() & split.keys())


def test_a_model_loads_its_fused_state():
    model, other = a_model(), a_model()
    other.load_state_dict(fused_state(model))
    state, loaded = model.state_dict(), other.state_dict()
    assert state.keys() == loaded.keys() and all(torch.equal(state[name], loaded[name]) for name in state)


def test_activation_checkpointing_does_not_show_in_names():
    model = a_model()
    names = list(fused_state(model))
    for key, layer in model.layers.items():
        model.layers[key] = checkpoint_wrapper(layer)
    assert list(fused_state(model)) == names


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_written_to_places_is_the_models_state(tied):
    model, other = a_model(tie_embeddings=tied), a_model(tie_embeddings=tied)
    state, memory = other.state_dict(), places(model)
    before = model.state_dict()
    assert memory.keys() == state.keys() and not torch.equal(before["lm_head.weight"], state["lm_head.weight"])
    for name, place in memory.items():
        place.copy_(state[name].reshape(place.shape))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert (memory["lm_head.weight"] is memory["tok_embeddings.weight"]) == tied

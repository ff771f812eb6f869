"""Calls that the protocol does not have."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from torchtitan_rl.dispatch.tinker.remote_trainer import RemoteTrainingClient
from torchtitan_rl.dispatch.tinker.session import Samplers

ADAPTER = {"lora_rank": 4, "seed": 1, "parts": ("mlp",), "policy_version": 0}
REFUSED = {
    "begin_model": lambda client: client.begin_model(0),
    "add_adapter": lambda client: client.add_adapter("one", **ADAPTER),
    "use_adapter": lambda client: client.use_adapter("one"),
    "drop_adapter": lambda client: client.drop_adapter("one"),
    "freeze_untrained": lambda client: client.freeze_untrained(),
    "push_copy": lambda client: client.push_copy("store"),
    "pull_copy": lambda client: client.pull_copy(),
    "push_head": lambda client: client.push_head("store"),
    "pull_head": lambda client: client.pull_head(),
    "save_hf_model": lambda client: client.save_hf_model(Path("model"), eos=1, pad=0),
    "save_adapter": lambda client: client.save_adapter(Path("adapter")),
    "parameters": lambda client: client.parameters(),
    "gradients": lambda client: client.gradients(),
    "moments": lambda client: client.moments(),
    "residency": lambda client: client.residency(),
    "profile": lambda client: client.profile("policy", 0, ""),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_call_that_the_protocol_does_not_have_is_refused_by_its_name(name):
    config = SimpleNamespace(
        controller=SimpleNamespace(call_timeout_s=1.0),
        trainer=SimpleNamespace(training=SimpleNamespace(seq_len=8)),
        algorithm=SimpleNamespace(temperature=1.0),
    )
    client = RemoteTrainingClient(None, None, Samplers(), config)
    with pytest.raises(RuntimeError) as error:
        await REFUSED[name](client)
    assert str(error.value) == (
        f"policy-0.{name}: ValueError: a remote service keeps weights and gradients to itself, and the protocol has no "
        "such call; use backend='actors' or 'local'"
    )

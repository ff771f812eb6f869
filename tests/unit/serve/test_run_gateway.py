"""What a run offers to clients without a session: whether the base of its adapters is there."""

from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

from tests.kit.sampler import CHARS, ScriptedSampler
from tests.unit.serve.opened import client, user
from torchtitan_rl.config.derive import settled
from torchtitan_rl.config.load import load_config
from torchtitan_rl.config.meshes import LoRAConfig
from torchtitan_rl.serve.run_gateway import Address, serving
from torchtitan_rl.types import WITHOUT_ADAPTERS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("lora", "slots", "refusal"),
    [
        (LoRAConfig(rank=4), 2, None),
        (LoRAConfig(rank=4), 0, r"adapters are merged .*\(generator.max_adapters=0\); use policy, or start a run with"),
        (None, 0, "this run trains all weights, and none of a base are there; use policy, or serve"),
    ],
)
async def test_the_base_has_a_name_where_adapters_are_side_by_side(capsys, lora, slots, refusal):
    config = load_config(str(ROOT / "configs" / "quickstart.py"))
    config.trainer.lora, config.generator.max_adapters = lora, slots
    sampler = ScriptedSampler("ab")
    controller = SimpleNamespace(config=settled(config), versions=None, generator=sampler, tokenizer=CHARS)
    async with serving(controller, Address(port=0), quiet=False) as gateway:
        said = capsys.readouterr().err
        async with client(f"{gateway.url}/v1") as sdk:
            names = [model.id for model in (await sdk.models.list()).data]
            if refusal is None:
                assert names == ["policy", "base"] and "base, and policy@VERSION" in said
                await sdk.chat.completions.create(model="base", messages=[user("a")], max_tokens=4)
                assert sampler.versions == [WITHOUT_ADAPTERS]
            else:
                assert names == ["policy"] and "base" not in said
                with pytest.raises(openai.NotFoundError, match=f"model='base': {refusal}"):
                    await sdk.chat.completions.create(model="base", messages=[user("a")], max_tokens=4)

"""Whose experts a mixture trains with: what a run that cannot have the generator's is refused with."""

import pytest

from tests.kit.refusal import refusal
from tests.unit.model.test_moe import run_config
from torchtitan_rl import platform
from torchtitan_rl.config.derive import settled
from torchtitan_rl.validation.run import validate


@pytest.mark.parametrize("routing", ["own", "compare", "replay"])
def test_the_generator_records_where_the_algorithm_needs_it(routing):
    config = run_config()
    config.algorithm.expert_routing = routing
    validate(config)
    assert settled(config).generator.record_routing == (routing != "own")
    assert config.generator.record_routing is None
    config.generator.record_routing = True
    validate(config)


def invalid(**changes):
    config = run_config(**({"experts": None, "hidden_dim": 24} if changes.pop("dense", False) else {}))
    config.trainer.compile.enable = changes.pop("compiled", False)
    config.trainer.shared_prefix = changes.pop("shared_prefix", "off")
    config.algorithm.expert_routing = changes.pop("routing", "replay")
    for name, value in changes.items():
        setattr(config.generator, name, value)
    return refusal(validate, config)


def test_settings_that_cannot_have_the_generators_experts():
    assert invalid(dense=True) == "algorithm.expert_routing='replay': the model has no experts; use 'own'"
    assert invalid(dense=True, routing="own", record_routing=True) == (
        "generator.record_routing=True: the model has no experts; leave it out"
    )
    assert invalid(record_routing=False).startswith("generator.record_routing=False: algorithm.expert_routing='replay'")
    assert invalid(model_runner="v2").startswith("generator.model_runner='v2': is vLLM's second model runner")
    assert invalid(enforce_eager=False).startswith("generator.enforce_eager=False: routers that record in a CUDA graph")
    assert invalid(shared_prefix="auto").startswith("trainer.shared_prefix='auto': computes a prompt once for all")
    assert invalid(compiled=True).startswith("trainer.compile.enable=True: compiled routers")


def test_a_gpus_own_choice_of_model_runner_is_refused(monkeypatch):
    from torchtitan_rl.model.shape import resolve_shape
    from torchtitan_rl.validation.routing import check_expert_routing

    config = run_config()
    config.algorithm.expert_routing = "compare"
    config, shape = settled(config), resolve_shape(config.model)
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    assert refusal(check_expert_routing, config, shape).startswith("generator.model_runner='auto': is vLLM's second")
    config.generator.model_runner = "v1"
    check_expert_routing(config, shape)

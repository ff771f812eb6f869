"""What a config asks for and a remote service cannot give is refused before anything starts."""

import sys

import pytest

import torchtitan_rl.config as rl
from tests.integration.conftest import ROOT
from torchtitan_rl.algorithm.minibatch_statistics import top_entropy
from torchtitan_rl.config.load import load_config
from torchtitan_rl.launch.choice import BACKENDS, backend_of
from torchtitan_rl.validation.remote import adapted_parts, check_remote


@pytest.fixture
def config():
    return load_config(str(ROOT / "configs" / "quickstart.py"))


def test_the_quickstart_is_offered_and_exports_nothing(config):
    check_remote(config)
    assert config.controller.checkpoint_export == "last"
    assert BACKENDS["tinker"].settle(config).controller.checkpoint_export == "none"
    assert BACKENDS["actors"].settle(config).controller.checkpoint_export == "last"


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("roles.reference", rl.RoleConfig(), r"roles\.reference: backend='tinker' trains the policy alone"),
        ("roles.critic", rl.RoleConfig(), r"roles\.critic: backend='tinker' trains the policy alone"),
        ("roles.colocation", "all", r"roles\.colocation='all': backend='tinker' has no devices"),
        ("generator.max_adapters", 2, r"generator\.max_adapters=2: backend='tinker' has no engines here"),
        ("model.float32_head", True, r"model\.float32_head=True: backend='tinker' computes logits as its service does"),
        ("algorithm.temperature", 0.7, r"algorithm\.temperature=0\.7: backend='tinker' computes"),
        ("algorithm.entropy_coef", 0.01, r"algorithm\.entropy_coef=0\.01: backend='tinker' answers no entropy"),
        (
            "algorithm.entropy_control",
            rl.EntropyControlConfig(),
            r"algorithm\.entropy_control: backend='tinker' answers no entropy to follow",
        ),
        (
            "algorithm.minibatch_fn",
            top_entropy,
            r"algorithm\.minibatch_fn: backend='tinker' answers no entropy, which it",
        ),
        ("algorithm.expert_routing", "replay", r"algorithm\.expert_routing='replay': Tinker's protocol carries no"),
        ("sampling.stop", ["."], r"sampling\.stop=\['\.'\]: in Tinker's protocol texts"),
        ("controller.eval_sampling.min_p", 0.1, r"controller\.eval_sampling\.min_p=0\.1: backend='tinker' has no such"),
        ("controller.checkpoint_export", "all", r"controller\.checkpoint_export='all': backend='tinker' keeps weights"),
        ("record.explain_mismatch_every", 5, r"record\.explain_mismatch_every=5: backend='tinker' has no generators"),
        ("trainer.converters", [object()], r"trainer\.converters: backend='tinker' builds no model here"),
    ],
)
def test_what_a_service_cannot_give_is_refused_with_its_field(config, path, value, message):
    *parents, last = path.split(".")
    target = config
    for name in parents:
        target = getattr(target, name)
    setattr(target, last, value)
    with pytest.raises(ValueError, match=message + r".* or use backend='actors'"):
        BACKENDS["tinker"].hosts_for(config, None, generators_only=False)


def test_generators_alone_and_hosts_are_refused(config):
    with pytest.raises(ValueError, match="backend='tinker': a remote service loads no directory of weights"):
        BACKENDS["tinker"].hosts_for(config, None, generators_only=True)
    with pytest.raises(ValueError, match="backend='nowhere': is not known; use 'actors', 'local' or 'tinker'"):
        backend_of("nowhere")


def test_adapters_are_on_attention_or_mlp_as_a_whole():
    assert adapted_parts(rl.LoRAConfig()) == ("attention", "mlp")
    assert adapted_parts(rl.LoRAConfig(target_modules=["o_proj", "qkv_proj"])) == ("attention",)
    with pytest.raises(ValueError, match=r"backend='tinker' adapts mlp as a whole; add down_proj, or leave out gate"):
        adapted_parts(rl.LoRAConfig(target_modules=["gate_proj", "up_proj"]))


def test_a_missing_sdk_is_named_with_what_to_install(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(ValueError, match="backend='tinker': the service's SDK is missing .*scripts/setup.sh tinker"):
        BACKENDS["tinker"].hosts_for(config, None, generators_only=False)

"""Every module can be the first that a process imports, and what torchtitan then has is adapted to this machine."""

import pkgutil
import subprocess
import sys

import pytest

import torchtitan_rl

MODULES = sorted(module.name for module in pkgutil.walk_packages(torchtitan_rl.__path__, "torchtitan_rl."))
QUICK = [module for module in MODULES if ".vllm" not in module]  # importing vLLM takes 15 s
SAMPLED = QUICK[:: -(-len(QUICK) // 6)]  # at most six
NEEDS_AN_EXTRA = {"torchtitan_rl.tasks.verifiers_harness": "verifiers", "torchtitan_rl.tools.bench.trl_floor": "trl"}
ALONE = """
import sys, {module}
utils = sys.modules.get("torchtitan.tools.utils")
assert utils is None or hasattr(utils.get_cuda_flash_attention_impl, "__wrapped__"), "torchtitan is not adapted"
store = sys.modules.get("torchstore.controller")
assert store is None or store.Controller.keys._method._made_async, "torchstore is not adapted"
"""


def import_alone(module):
    if module in NEEDS_AN_EXTRA:
        pytest.importorskip(NEEDS_AN_EXTRA[module])
    ran = subprocess.run([sys.executable, "-c", ALONE.format(module=module)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.parametrize("module", SAMPLED)
def test_a_module_can_be_imported_alone(module):
    import_alone(module)


@pytest.mark.slow
@pytest.mark.parametrize("module", [module for module in MODULES if module not in SAMPLED])
def test_so_can_every_other(module):
    import_alone(module)

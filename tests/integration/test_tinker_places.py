"""Scripts that end without `close()`, with the unmodified SDK: their models make place for those of others."""

import subprocess
import sys
import time

import pytest

from tests.integration.test_tinker import logprobs
from tests.integration.tinker_server import tinker_server

pytestmark = pytest.mark.whole

tinker = pytest.importorskip("tinker")

SCRIPT = """
import os, sys, tinker
service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-x")
for number in range(2):
    service.create_lora_training_client(sys.argv[2], rank=4).result()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_places_of_a_script_that_ended_are_given_to_the_next(tmp_path):
    with tinker_server(tmp_path, "--max-models", "2", "--lora-rank", "4") as (url, _):
        rest = tinker.RestClient(base_url=url, api_key="tml-x")
        base_model = rest.get_server_capabilities().result(30).supported_models[0].model_name
        subprocess.run([sys.executable, "-c", SCRIPT, url, base_model], check=True, timeout=120)
        began = time.monotonic()
        with tinker.ServiceClient(base_url=url, api_key="tml-x") as service:
            models = [service.create_lora_training_client(base_model, rank=4, seed=1).result() for _ in range(2)]
            waited_s = time.monotonic() - began
            print(f"waited {waited_s:.1f} s for two places")
            assert 30 < waited_s < 90
            assert logprobs(models[0]).equal(logprobs(models[1]))

"""Weights out of a Tinker server, by links and by the SDK's own command: PEFT and transformers compute the same."""

import io
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.integration.test_tinker import SEQUENCE, logprobs, step
from tests.integration.tinker_server import tinker_server

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("forked")]

tinker = pytest.importorskip("tinker")

KEY = "tml-x"


def archive(url, path, directory):
    """The archive of a `tinker://` path, as an older SDK gets it: a redirect that is followed without a key."""
    model_id, _, checkpoint = path.removeprefix("tinker://").partition("/")
    answer = httpx.get(f"{url}/api/v1/training_runs/{model_id}/checkpoints/{checkpoint}/archive", timeout=60)
    assert answer.status_code == 302, answer.text
    with urllib.request.urlopen(answer.headers["Location"], timeout=60) as response:
        tar = tarfile.open(fileobj=io.BytesIO(response.read()))
    tar.extractall(directory, filter="data")
    return directory


def loaded(directory):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def scored(model):
    """The log-probability of each token of SEQUENCE after the first."""
    tokens = torch.tensor([SEQUENCE])
    with torch.no_grad():
        table = model(tokens).logits[0, :-1].log_softmax(-1)
    return table.gather(1, tokens[0, 1:, None])[:, 0]


def command(url, *arguments):
    """The command line of the installed SDK."""
    environment = {"TINKER_BASE_URL": url, "TINKER_API_KEY": KEY, "PATH": "", "HOME": "/nonexistent"}
    program = [sys.executable, "-m", "tinker.cli", *map(str, arguments)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def only_file(directory, name):
    files = list(Path(directory).rglob(name))
    assert len(files) == 1, [str(file) for file in Path(directory).rglob("*")]
    return files[0].parent


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The base model of the config, whose weights are drawn from its seed, as a Hugging Face directory."""
    return tmp_path_factory.mktemp("full") / "run" / "base"


def begun(url, rank):
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    base_model = service.get_server_capabilities().supported_models[0].model_name
    client = service.create_lora_training_client(base_model, rank=rank, seed=3).result()
    step(client, lr=2e-2)
    return service, client


def test_a_model_that_trains_all_parameters_is_loaded_by_transformers(base, tmp_path):
    with tinker_server(base.parents[1], "--lora-rank", "0", start_s=200) as (url, _):
        service, client = begun(url, 32)
        with service:
            expected = logprobs(client)
            assert (scored(loaded(base)) - expected).abs().max() > 1e-2, "it has learned something"
            path = client.save_weights_for_sampler("out").result(60).path
            torch.testing.assert_close(
                scored(loaded(archive(url, path, tmp_path / "sampler"))), expected, rtol=0, atol=1e-4
            )
            external = client.save_weights_external("out").result(60).path
            command(url, "checkpoint", "download", external, "--output", tmp_path / "external")
            model = loaded(only_file(tmp_path / "external", "model.safetensors"))
            torch.testing.assert_close(scored(model), expected, rtol=0, atol=1e-4)
            state = client.save_state("state").result(60).path
            with pytest.raises(AssertionError, match="save_weights_for_sampler or save_weights_external"):
                archive(url, state, tmp_path / "state")
            assert logprobs(client).equal(expected), "saving changes nothing"


def test_an_adapter_is_loaded_by_peft_onto_the_base(base, tmp_path):
    """Of a smaller rank than the server's largest; from all three kinds of checkpoints."""
    with tinker_server(tmp_path / "lora", "--lora-rank", "16", start_s=200) as (url, _):
        service, client = begun(url, 8)
        with service:
            second = service.create_lora_training_client(client.get_info().model_name, rank=4, seed=4).result()
            step(second)
            expected = logprobs(client)
            assert (scored(loaded(base)) - expected).abs().max() > 1e-2
            paths = [client.save_state("out").result(60).path, client.save_weights_for_sampler("out").result(60).path]
            paths.append(client.save_weights_external("out").result(60).path)
            for number, path in enumerate(paths):
                directory = archive(url, path, tmp_path / str(number))
                adapted = PeftModel.from_pretrained(loaded(base), directory)
                torch.testing.assert_close(scored(adapted), expected, rtol=0, atol=1e-4)
                assert adapted.peft_config["default"].r == 8 and (directory / "checkpoint_complete").exists()
            # The SDK's command loads a state into a model of its own, and exports that.
            for name, path in (("state", paths[0]), ("external", paths[2])):
                command(url, "checkpoint", "download", path, "--output", tmp_path / name)
                adapted = PeftModel.from_pretrained(loaded(base), only_file(tmp_path / name, "adapter_config.json"))
                torch.testing.assert_close(scored(adapted), expected, rtol=0, atol=1e-4)
            listed = tinker.RestClient(base_url=url, api_key=KEY).list_checkpoints(client.model_id).result(30)
            assert sorted(c.checkpoint_type for c in listed.checkpoints) == ["external", "sampler", "training"]
            with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients: is not offered"):
                client.save_weights_external("secret", age_encryption_recipients=["age1x"]).result(60)
            run = f"{url}/api/v1/training_runs/{client.model_id}/checkpoints/weights/out"
            assert "use save_weights_external" in httpx.get(f"{run}/external_weights_urls").json()["error"]
            assert logprobs(client).equal(expected)

"""What dies under a Tinker server: a generator, the trainer, the server."""

import json
import os
import signal
import time

import psutil
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.integration.test_tinker import SEQUENCE, datum, logprobs, step
from tests.integration.tinker_server import tinker_server, wait_for_url
from torchtitan_rl.weights.checkpoint import checksums

pytestmark = pytest.mark.whole

tinker = pytest.importorskip("tinker")
types = tinker.types
ANSWERED_WITHIN_S = 15


def role_of(process):
    """The role of a process of the server, by the log that it writes."""
    try:
        names = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{process.pid}/fd")]
    except OSError:
        return ""
    logs = [os.path.basename(name) for name in names if name.endswith(".log")]
    return next((log.split("-")[0] for log in logs if log.startswith(("policy", "generator"))), "")


def kill(server, role):
    found = [p for p in psutil.Process(server.pid).children(recursive=True) if role_of(p) == role]
    assert found, [(p.pid, role_of(p)) for p in psutil.Process(server.pid).children(recursive=True)]
    os.kill(found[0].pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_deaths_under_the_server(tmp_path):
    options = ("--port", "18733", "--max-restarts", "2", "--lora-rank", "8")
    with tinker_server(tmp_path, *options) as (url, process):
        service = tinker.ServiceClient(base_url=url, api_key="tml-x")
        base = tinker.RestClient(base_url=url, api_key="tml-x").get_server_capabilities().result(30)
        base_model = base.supported_models[0].model_name
        client = service.create_lora_training_client(base_model, rank=8, seed=1).result()
        step(client)
        saved, expected = client.save_state("kept").result(60).path, logprobs(client)
        sampler_path = client.save_weights_for_sampler("kept").result(60).path

        # A generator: what it was asked is asked again, or fails as the server's, and the server lives on.
        sampler = service.create_sampling_client(model_path=sampler_path).result()
        params = types.SamplingParams(max_tokens=50, stop=[])
        asked = [sampler.sample(types.ModelInput.from_ints(SEQUENCE), 8, params) for _ in range(64)]
        time.sleep(0.1)
        kill(process, "generator")
        began, failed = time.monotonic(), 0
        for future in asked:
            try:
                assert len(future.result(60).sequences) == 8
            except tinker.RequestFailedError as error:
                failed += 1
                assert error.category is types.RequestErrorCategory.Server
        answered_s = time.monotonic() - began
        assert logprobs(client).equal(expected)
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(SEQUENCE)).result(120)
        torch.testing.assert_close(torch.tensor(scored[1:]), expected, rtol=0, atol=1e-4)
        print(f"generator killed: {failed} of 64 requests failed, all ended in {answered_s:.1f} s")
        assert answered_s < ANSWERED_WITHIN_S or failed == 0

        # The trainer: its futures fail within 15 s, the supervisor starts the server again.
        flying = [client.forward_backward([datum(weights=1.0)] * 64, "cross_entropy") for _ in range(8)]
        kill(process, "policy")
        began = time.monotonic()
        with pytest.raises(tinker.RequestFailedError) as error:
            for future in flying:
                future.result(60)
        print(f"trainer killed: its futures ended in {time.monotonic() - began:.1f} s")
        assert error.value.category is types.RequestErrorCategory.Server
        assert time.monotonic() - began < ANSWERED_WITHIN_S
        wait_for_url(process, tmp_path / "server.log", number=2)

        # What was not saved answers with a sentence; what was saved is there.
        with pytest.raises(tinker.RequestFailedError, match="is not in this server.*its last saved state is tinker://"):
            client.forward([datum(weights=1.0)], "cross_entropy").result(120)
        service = tinker.ServiceClient(base_url=url, api_key="tml-x")
        again = service.create_training_client_from_state_with_optimizer(saved).result()
        assert logprobs(again).equal(expected)
        sampler = service.create_sampling_client(model_path=sampler_path).result()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(SEQUENCE)).result(60)
        torch.testing.assert_close(torch.tensor(scored[1:]), expected, rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options, damaged, message",
    [
        (["--merged"], "lm_head.weight", "differs from the tensor that it is tied to"),
        ([], "layers.0.attention.wo.lora_a.weight", "does not fit this generator's adapters"),
    ],
)
def test_a_sampler_file_with_right_checksums_and_wrong_weights_fails_its_own_requests_alone(
    tmp_path, options, damaged, message
):
    params, prompt = types.SamplingParams(max_tokens=8, temperature=0.0), types.ModelInput.from_ints(SEQUENCE)
    with tinker_server(tmp_path, "--lora-rank", "8", *options) as (url, _):
        service = tinker.ServiceClient(base_url=url, api_key="tml-x")
        rest = tinker.RestClient(base_url=url, api_key="tml-x")
        base_model = rest.get_server_capabilities().result(30).supported_models[0].model_name
        client = service.create_lora_training_client(base_model, rank=8, seed=1).result()
        good, bad = [client.save_weights_for_sampler(name).result(60).path for name in ("good", "bad")]
        (file,) = tmp_path.glob("run/**/bad/weights.safetensors")
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        tensors[damaged] = tensors[damaged] + 1 if options else tensors[damaged][1:]
        save_file(tensors, file, metadata)
        records = json.loads((file.parent / "files.json").read_text())
        records |= checksums(file.parent, [file])
        (file.parent / "files.json").write_text(json.dumps(records))

        sampler = service.create_sampling_client(model_path=good).result()
        before = sampler.sample(prompt, 1, params).result(60).sequences[0].tokens
        for _ in range(2):
            with pytest.raises(tinker.RequestFailedError, match=message) as error:
                service.create_sampling_client(model_path=bad).result().sample(prompt, 1, params).result(60)
            assert error.value.category is types.RequestErrorCategory.User
        assert sampler.sample(prompt, 1, params).result(60).sequences[0].tokens == before
        assert "is lost" not in (tmp_path / "server.log").read_text(errors="replace")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "before, after, message", [("--merged", "", "serve-tinker --merged"), ("", "--merged", "without --merged")]
)
def test_a_server_of_another_kind_says_how_a_sampler_is_sampled_from(tmp_path, before, after, message):
    params, prompt = types.SamplingParams(max_tokens=8, temperature=0.0), types.ModelInput.from_ints(SEQUENCE)
    options = ("--lora-rank", "8", "--port", "18734")  # one address: the SDK keeps its first client of a process
    with tinker_server(tmp_path, *options, *filter(None, [before])) as (url, _):
        service = tinker.ServiceClient(base_url=url, api_key="tml-x")
        rest = tinker.RestClient(base_url=url, api_key="tml-x")
        base_model = rest.get_server_capabilities().result(30).supported_models[0].model_name
        client = service.create_lora_training_client(base_model, rank=8, seed=1).result()
        path = client.save_weights_for_sampler("saved").result(60).path
    with tinker_server(tmp_path, *options, *filter(None, [after])) as (url, _):
        service = tinker.ServiceClient(base_url=url, api_key="tml-x")
        with pytest.raises(tinker.RequestFailedError, match=message) as error:
            service.create_sampling_client(model_path=path).result().sample(prompt, 1, params).result(60)
        assert error.value.category is types.RequestErrorCategory.User

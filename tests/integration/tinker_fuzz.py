"""Random bodies to every route of a Tinker server: python -m tests.integration.tinker_fuzz --seconds 300"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import httpx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.integration.tinker_server import tinker_server

_TOKENS = st.lists(st.integers(-1, 70), max_size=8)
_TENSOR = st.fixed_dictionaries(
    {
        "data": st.lists(st.floats(width=32) | st.integers(-5, 70), max_size=8),
        "dtype": st.sampled_from(["int64", "float32", "x"]),
    },
    optional={
        "shape": st.lists(st.integers(-1, 2**40), max_size=3),
        "sparse_crow_indices": st.lists(st.integers(-2, 2**62), max_size=5),
        "sparse_col_indices": st.lists(st.integers(-2, 2**62), max_size=5),
    },
)
_INPUT = st.fixed_dictionaries({"chunks": st.lists(st.fixed_dictionaries({"tokens": _TOKENS}), max_size=2)})
_DATUM = st.fixed_dictionaries(
    {
        "model_input": _INPUT,
        "loss_fn_inputs": st.dictionaries(st.sampled_from(["target_tokens", "weights", "x"]), _TENSOR),
    }
)
_MODELS = st.sampled_from(["MODEL", "a:train:0", "../x", ""])
_BODY = st.one_of(
    st.fixed_dictionaries(
        {"model_id": _MODELS},
        optional={
            "seq_id": st.none(),
            "forward_backward_input": st.fixed_dictionaries(
                {"data": st.lists(_DATUM, max_size=2), "loss_fn": st.sampled_from(["cross_entropy", "ppo", "x"])}
            ),
            "adam_params": st.dictionaries(
                st.sampled_from(["learning_rate", "beta1", "eps", "grad_clip_norm"]), st.floats() | st.text(max_size=2)
            ),
            "path": st.text(max_size=5),
            "optimizer": st.booleans(),
            "session_id": st.text(max_size=3),
            "model_seq_id": st.integers(),
        },
    ),
    st.fixed_dictionaries(
        {
            "prompt": _INPUT,
            "sampling_params": st.dictionaries(
                st.sampled_from(["max_tokens", "seed", "temperature", "top_p", "top_k", "stop"]),
                st.integers()
                | st.floats()
                | st.lists(st.text(max_size=2) | st.integers(-1, 70), max_size=2)
                | st.none(),
            ),
        },
        optional={
            "num_samples": st.integers(-1, 3),
            "prompt_logprobs": st.booleans(),
            "base_model": st.just("BASE"),
            "topk_prompt_logprobs": st.integers(-1, 100),
            "prompt_logprobs_last_n": st.integers(-1, 9),
        },
    ),
    st.recursive(st.none() | st.text(max_size=3) | st.floats(), lambda inner: st.lists(inner, max_size=2)),
)
_PATHS = st.sampled_from(
    [
        "forward_backward",
        "forward",
        "optim_step",
        "save_weights",
        "save_weights_for_sampler",
        "load_weights",
        "asample",
        "create_model",
        "create_sampling_session",
        "get_info",
        "weights_info",
        "create_session",
        "telemetry",
        "nothing",
    ]
)


def fuzz(server, key, model_id, base_model, *, max_examples=10**9, seconds=1e9):
    """Random bodies to every route: no answer of a route or of a future is a fault of the server. Returns counts."""
    end, counts = time.monotonic() + seconds, {}
    with httpx.Client(base_url=f"{server}/api/v1", headers={"X-API-Key": key}, timeout=60) as http:

        @settings(
            max_examples=min(max_examples, 500), deadline=None, database=None, derandomize=seconds > 1e8,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(_BODY, _PATHS)
        def one(body, path):
            if time.monotonic() > end:
                return
            content = json.dumps(body).replace("MODEL", model_id).replace("BASE", base_model)
            answer = http.post(f"/{path}", content=content.encode(), headers={"Content-Type": "application/json"})
            assert answer.status_code < 500, (path, content, answer.text)
            counts[answer.status_code] = counts.get(answer.status_code, 0) + 1
            if answer.status_code == 200 and (request_id := answer.json().get("request_id")):
                while (ended := http.post("/retrieve_future", json={"request_id": request_id})).status_code == 408:
                    pass
                kind = ended.headers["content-type"]
                category = ended.json().get("category") if "json" in kind else None
                assert category != "server", (path, content, ended.text)
                counts[category] = counts.get(category, 0) + 1

        while (
            sum(n for status, n in counts.items() if isinstance(status, int)) < max_examples and time.monotonic() < end
        ):
            one()
    return counts


def main():
    import tinker

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    with tempfile.TemporaryDirectory() as directory, tinker_server(Path(directory)) as (url, _):
        base_model = tinker.RestClient(base_url=url, api_key="tml-x").get_server_capabilities().result()
        base_model = base_model.supported_models[0].model_name
        service = tinker.ServiceClient(base_url=url, api_key="tml-x")
        client = service.create_lora_training_client(base_model).result()
        print(fuzz(url, "tml-x", client.model_id, base_model, seconds=parser.parse_args().seconds))
        after = service.create_lora_training_client(base_model).result()  # the server goes on
        after.optim_step(tinker.types.AdamParams()).result(30)


if __name__ == "__main__":
    main()

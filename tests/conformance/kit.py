"""What the tests share: data, waiting with a limit, and observing a model through its log-probabilities."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from tinker import types

Array = np.ndarray
CALM = 1e3  # an epsilon next to which gradients are small: Adam's first step is then lr / CALM times the gradient
RETRIED = (408, 409, 429)  # statuses on which the SDK sends the request again, up to minutes: no answer to a mistake


@dataclass
class Kit:
    """Where the server is and what of its model is known."""

    url: str
    key: str
    base_model: str
    vocabulary: int
    vocabulary_known: bool
    patience: float
    weights: Path | None = None
    keyed: bool = False

    @contextmanager
    def session(self) -> Iterator[tinker.ServiceClient]:
        """A session that is closed afterwards, so that the server can let go of its models: it may hold but a few."""
        service = tinker.ServiceClient(base_url=self.url, api_key=self.key)
        try:
            yield service
        finally:
            self.wait(service.close("success"))

    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.url, api_key=self.key)

    def wait(self, future: Any) -> Any:
        """The future's result; AssertionError where none comes within `patience` seconds."""
        try:
            return future.result(timeout=self.patience)
        except TimeoutError as error:
            raise AssertionError(f"no answer within {self.patience:g} s (--patience)") from error

    def fresh(self, service: tinker.ServiceClient, seed: int = 11, rank: int = 8) -> tinker.TrainingClient:
        return self.wait(service.create_lora_training_client(self.base_model, rank=rank, seed=seed))

    def load(self, service: tinker.ServiceClient, path: str, optimizer: bool = False) -> tinker.TrainingClient:
        create = service.create_training_client_from_state
        if optimizer:
            create = service.create_training_client_from_state_with_optimizer
        return self.wait(create(path))

    def sequence(self, length: int, seed: int) -> Array:
        """`length` token ids, the same for the same seed."""
        return np.random.default_rng([seed, length]).integers(0, self.vocabulary, length)

    def step(self, client: tinker.TrainingClient, data: Sequence[types.Datum], lr: float, **params: Any) -> Any:
        """One cross-entropy step, sent without waiting in between; the result of forward_backward."""
        output = client.forward_backward(list(data), "cross_entropy")
        moved = client.optim_step(types.AdamParams(learning_rate=lr, **params))
        output = self.wait(output)
        self.wait(moved)
        return output

    def probes(self) -> list[types.Datum]:
        """Four fixed sequences, by which models are compared."""
        return [weighted(self.sequence(length, 90 + length)) for length in (5, 9, 14, 20)]

    def probe(self, client: tinker.TrainingClient) -> Array:
        """Log-probabilities of the four sequences under the client's model, one after the other: [tokens]."""
        return np.concatenate(logprobs(self.wait(client.forward(self.probes(), "cross_entropy"))))


def given(**inputs: Any) -> dict[str, types.TensorData]:
    """loss_fn_inputs of arrays: integers as int64, everything else as float32."""
    arrays = {name: np.asarray(values) for name, values in inputs.items()}
    kinds = {name: np.int64 if array.dtype.kind in "iu" else np.float32 for name, array in arrays.items()}
    return {name: types.TensorData.from_numpy(array.astype(kinds[name])) for name, array in arrays.items()}


def datum(tokens: Iterable[int], **inputs: Any) -> types.Datum:
    """The tokens but the last as model input; the tokens but the first as targets unless `target_tokens` is given."""
    tokens = [int(token) for token in tokens]
    inputs.setdefault("target_tokens", np.asarray(tokens[1:]))
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given(**inputs))


def weighted(tokens: Array, weights: Any = None) -> types.Datum:
    """A cross-entropy datum; every weight is 1 where none are given."""
    return datum(tokens, weights=np.ones(len(tokens) - 1) if weights is None else weights)


def prompt(tokens: Iterable[int]) -> types.ModelInput:
    return types.ModelInput.from_ints([int(token) for token in tokens])


def logprobs(output: types.ForwardBackwardOutput) -> list[Array]:
    """Per datum, float64 in the shape of the datum's targets."""
    return [np.asarray(one["logprobs"].to_numpy(), dtype=np.float64) for one in output.loss_fn_outputs]


def loss_sum(output: types.ForwardBackwardOutput) -> float:
    assert "loss:sum" in output.metrics, f"metrics={sorted(output.metrics)}: loss:sum is missing"
    return output.metrics["loss:sum"]


def near(found: Any, expected: Any, tolerance: float) -> None:
    """Every entry within `tolerance`, relative to the expected one where that is larger than 1."""
    found, expected = np.asarray(found, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    assert found.shape == expected.shape, f"shape {found.shape}, expected {expected.shape}"
    gap = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
    assert np.all(gap <= tolerance), f"differs by up to {np.max(gap):.3g}, allowed {tolerance:g}"


def moved(found: Array, start: Array, least: float = 1e-3) -> None:
    """A comparison of two steps says something only where the steps moved the model."""
    gap = np.max(np.abs(found - start))
    assert gap >= least, f"the step moved the model's log-probabilities by {gap:.3g} only, expected at least {least:g}"


def refused(kit: Kit, act: Callable[[], Any], categories: tuple[str, ...] = ("user",)) -> Exception:
    """Runs `act`, which returns a future or raises, and returns the error it has to end in.

    An error is RequestFailedError of one of these categories, or APIStatusError with a 4xx status that the SDK does not
    retry. Everything else fails: success, silence, a 5xx status, another exception.
    """
    try:
        outcome = act()
        if hasattr(outcome, "result"):
            outcome = kit.wait(outcome)
    except tinker.RequestFailedError as error:
        assert str(error.category) in categories, f"category={error.category}: expected {categories}: {error}"
        return error
    except tinker.APIStatusError as error:
        status = error.status_code
        assert 400 <= status < 500 and status not in RETRIED, f"status={status}: expected 4xx that is final: {error}"
        return error
    raise AssertionError(f"was accepted, expected an error: {outcome!r:.300}")

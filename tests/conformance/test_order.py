"""Requests run in the order of their sequence numbers, whenever they arrive, and answers come back in input order."""

import threading

import numpy as np
import pytest
import tinker
from kit import CALM, Kit, logprobs, loss_sum, moved, near, weighted
from raw import Raw, message, read_logprobs
from tinker import types


def lesson(kit: Kit, count: int) -> list[types.Datum]:
    return [weighted(kit.sequence(16, 100 + count))]


def test_requests_sent_without_waiting_run_in_order(kit: Kit, service, state) -> None:
    """Three steps with a look before each: the same numbers whether the client waits in between or not."""

    def look(client: tinker.TrainingClient, patient: bool) -> list[np.ndarray]:
        pending = []
        for count in range(3):
            pending.append(client.forward(lesson(kit, 9), "cross_entropy"))
            pending.append(client.forward_backward(lesson(kit, count), "cross_entropy"))
            pending.append(client.optim_step(types.AdamParams(learning_rate=5e-3, eps=1e-6)))
            if patient:
                [kit.wait(one) for one in pending]
        outputs = [kit.wait(one) for one in pending]
        return [np.concatenate(logprobs(output)) for output in outputs if hasattr(output, "loss_fn_outputs")]

    slow, fast = look(kit.load(service, state), True), look(kit.load(service, state), False)
    moved(slow[4], slow[0])
    for one, other in zip(slow, fast, strict=True):
        near(other, one, 1e-6)


def test_1500_datums_come_back_in_order(kit: Kit, service, state) -> None:
    """Several requests of the SDK. Lengths say which datum is which; a sample of them is computed again alone."""
    client = kit.load(service, state)
    lengths = np.random.default_rng(4).integers(2, 9, 1500)
    data = [weighted(kit.sequence(int(length), 1000 + count)) for count, length in enumerate(lengths)]
    output = kit.wait(client.forward_backward(data, "cross_entropy"))
    found = logprobs(output)
    assert [len(logp) for logp in found] == [length - 1 for length in lengths]
    near(loss_sum(output), -sum(logp.sum() for logp in found), 1e-5)
    picked = [0, 1, 511, 512, 1022, 1023, 1024, 1025, 1498, 1499]
    alone = logprobs(kit.wait(client.forward([data[index] for index in picked], "cross_entropy")))
    for index, logp in zip(picked, alone, strict=True):
        near(found[index], logp, 1e-5)


def test_two_models_do_not_disturb_each_other(kit: Kit, service, state) -> None:
    """Steps of one between the calls of another change nothing for the other, and a new model is the base model."""
    before = kit.probe(kit.fresh(service))
    still, busy = kit.load(service, state), kit.load(service, state)
    start = kit.probe(still)
    kit.wait(still.forward_backward(lesson(kit, 0), "cross_entropy"))
    for count in range(2):
        kit.step(busy, lesson(kit, count), lr=1e-2, eps=1e-6)
    moved(kit.probe(busy), start)
    assert np.array_equal(kit.probe(still), start)
    kit.wait(still.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-6)))
    alone = kit.load(service, state)
    kit.step(alone, lesson(kit, 0), lr=1e-2, eps=1e-6)
    near(kit.probe(still), kit.probe(alone), 1e-6)
    near(kit.probe(kit.fresh(service)), before, 1e-6)


def test_two_models_at_the_same_time(kit: Kit, service, state) -> None:
    """Calls of two models from two threads: each gets its own answers."""
    alone = []
    for count in range(2):
        client = kit.load(service, state)
        kit.step(client, lesson(kit, count), lr=5e-3, eps=1e-6)
        alone.append(kit.probe(client))
    clients, together = [kit.load(service, state) for _ in range(2)], [None, None]

    def work(count: int) -> None:
        kit.step(clients[count], lesson(kit, count), lr=5e-3, eps=1e-6)
        together[count] = kit.probe(clients[count])

    threads = [threading.Thread(target=work, args=(count,)) for count in range(2)]
    [thread.start() for thread in threads]
    [thread.join(2 * kit.patience) for thread in threads]
    moved(alone[0], alone[1])
    for one, other in zip(alone, together, strict=True):
        assert other is not None, "no answer"
        near(other, one, 1e-5)


def test_custom_loss_keeps_its_place(kit: Kit, service, state, stride) -> None:
    """An optimizer step sent right after forward_backward_custom waits for both of its passes."""

    def loss(data, scores):
        return sum((logp**2).sum() for logp in scores), {}

    reached = []
    for patient in (True, False):
        client = kit.load(service, state)
        backward = client.forward_backward_custom(lesson(kit, 3), loss)
        if patient:
            kit.wait(backward)
        step = client.optim_step(types.AdamParams(learning_rate=stride * CALM, eps=CALM))
        [kit.wait(one) for one in (backward, step)]
        reached.append(kit.probe(client))
    moved(reached[0], kit.probe(kit.load(service, state)))
    near(reached[1], reached[0], 1e-6)


@pytest.mark.raw
def test_sequence_numbers_decide_not_arrival(kit: Kit, raw: Raw, state) -> None:
    """Look (4), step (3), look (2), gradient (1), sent in this order, run as 1, 2, 3, 4."""
    session = raw.session()
    model, straight = raw.loaded(session, state, 0), raw.loaded(session, state, 1)

    def requests(of: str) -> dict:
        seen = [message(of, seq, lesson(kit, 9), forward_only=True) for seq in (2, 4)]
        return {
            1: lambda: raw.forward_backward(message(of, 1, lesson(kit, 0))),
            2: lambda: raw.forward_backward(seen[0]),
            3: lambda: raw.post("optim_step", raw.optim_body(of, 3, 1e-2, 1e-6)),
            4: lambda: raw.forward_backward(seen[1]),
        }

    ordered = {seq: raw.settle(send()) for seq, send in requests(straight).items()}
    backward = requests(model)
    ids = {seq: raw.accepted(backward[seq]())["request_id"] for seq in (4, 3, 2, 1)}
    found = {seq: raw.retrieve(ids[seq]) for seq in (1, 2, 3, 4)}
    assert found[3].error is None, found[3].error
    moved(read_logprobs(ordered[4]), read_logprobs(ordered[2]))
    for seq in (1, 2, 4):
        near(read_logprobs(found[seq]), read_logprobs(ordered[seq]), 1e-6)


@pytest.mark.raw
def test_nothing_runs_before_its_predecessor(kit: Kit, raw: Raw, state) -> None:
    """With 1 missing, 2 stays pending: retrieve_future says try_again (or HTTP 408) and no result."""
    model = raw.loaded(raw.session(), state)
    later = raw.accepted(raw.forward_backward(message(model, 2, lesson(kit, 1))))["request_id"]
    early = raw.http.post("/api/v1/retrieve_future", json={"request_id": later, "allow_metadata_only": False},
                          timeout=max(60.0, kit.patience))  # fmt: skip
    assert early.status_code == 408 or early.json().get("type") == "try_again", early.text[:300]
    first = raw.settle(raw.forward_backward(message(model, 1, lesson(kit, 0))))
    assert first.error is None, first.error
    assert len(read_logprobs(raw.retrieve(later))) == 15

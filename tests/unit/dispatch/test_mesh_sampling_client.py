"""What the client does when replicas are lost. They are in this process; test_replicas.py has real ones."""

import asyncio

import pytest

from tests.kit.mesh import Mesh as Recording
from tests.kit.replicas import Config, Mesh, Weights, client_of, died, sample_all, settle
from torchtitan_rl.actors.operations import TrainerOperations
from torchtitan_rl.dispatch.mesh_sampling_client import MeshSamplingClient
from torchtitan_rl.dispatch.placement import Placement
from torchtitan_rl.dispatch.repair import Repair
from torchtitan_rl.dispatch.replica import ReplicaLost
from torchtitan_rl.dispatch.versions import OneVersion, PolicyVersions
from torchtitan_rl.types import WITHOUT_ADAPTERS, Completion, SamplingParams

LIMITS = {"max_restarts": 4, "window_s": 100.0, "probe_every_s": 60.0, "hang_timeout_s": 60.0}


async def test_requests_of_a_lost_replica_are_sent_to_the_others_once_and_its_versions_are_released(caplog):
    meshes, versions, client = client_of(3)
    await client.pull(await versions.publish())
    meshes[1].broken["sample"] = died("generator-1", "sample")
    prompts = [[1], [2], [3], [4], [5], [6]]
    answers = await sample_all(client, prompts)
    assert [answer.tokens for answer in answers] == prompts
    assert sorted(meshes[0].sampled + meshes[2].sampled) == prompts
    await settle()
    assert client.health() == {
        "generator-0": "healthy",
        "generator-1": "generator-1-0.sample: its process died (killed); see its log",
        "generator-2": "healthy",
    }
    assert versions.holders() == {1: ["generator-0", "generator-2", "newest"]}
    await client.pull(await versions.publish())
    assert versions.holders() == {2: ["generator-0", "generator-2", "newest"]}
    assert [mesh.loaded for mesh in meshes] == [[1, 2], [1], [1, 2]]
    assert [mesh.aborted for mesh in meshes] == [[], [0, 1], []]
    assert client._router.loads == client.in_flight() == [0, 0, 0] and not client._tasks
    assert [r.message for r in caplog.records if r.levelname == "WARNING"] == [
        "a generator replica is lost, 2 left: generator-1-0.sample: its process died (killed); see its log"
    ]


async def test_the_served_version_is_kept_until_the_next_one_serves():
    """The replica holds another version, which a request has named, when the next one is published."""
    _, versions, client = client_of(1)
    await client.pull(await versions.publish())
    versions.pin(1, "an evaluation")
    await client.pull(await versions.publish())
    (named,) = await sample_all(client, [[1]], policy_version=1)
    await versions.publish()
    (unpinned,) = await sample_all(client, [[2]])
    assert (named.policy_versions, unpinned.policy_versions) == ([1], [2])
    await client.pull(3)
    await settle()
    assert versions.holders() == {1: ["an evaluation"], 3: ["generator-0", "newest"]}


@pytest.mark.parametrize("named", [{}, {"policy_version": 1}])
async def test_in_a_replay_a_request_overtakes_a_load_that_waits_for_it_in_the_engine(named):
    """Of a rollout of several turns: its next turn comes before the load in the record, and after it here."""
    (mesh,), versions, client = client_of(1, follows=True)
    await client.pull(await versions.publish())
    mesh.loading = asyncio.Event()
    pull = asyncio.ensure_future(client.pull(await versions.publish()))
    await settle()
    (answer,) = await sample_all(client, [[7]], **named)
    assert answer.policy_versions == [1] and not pull.done()
    mesh.loading.set()
    await asyncio.wait_for(pull, 5)
    assert mesh.loaded == [1, 2]


async def test_a_recorded_answer_is_given_once_and_no_engine_is_asked():
    class Answers:
        """Knows an answer to one prompt, once."""

        def __init__(self):
            self.prompts = [[5]]

        def take(self, request):
            if request.tokens in self.prompts:
                self.prompts.remove(request.tokens)
                return Completion(tokens=[9], logprobs=[-0.5], policy_versions=[0], finish_reason="stop")
            return None

    (mesh,), versions, client = client_of(1)
    client.answer_from(Answers())
    await client.pull(await versions.publish())
    params = SamplingParams(max_tokens=4, seed=3)
    answers = [await asyncio.wait_for(client.sample([5], params), 5) for _ in range(2)]
    assert [(answer.tokens, answer.seed) for answer in answers] == [([9], 3), ([5], 3)]
    assert mesh.sampled == [[5]]


async def test_a_pull_does_not_wait_for_the_version_before_to_be_deleted_and_the_next_pull_does(monkeypatch):
    deleting, deleted = [], asyncio.Event()

    async def discard(weights, version):
        deleting.append(version)
        await deleted.wait()

    monkeypatch.setattr(Weights, "discard", discard)
    meshes, versions, client = client_of(1)
    for _ in range(2):
        await asyncio.wait_for(client.pull(await versions.publish()), 5)
    await settle()
    assert deleting == [1] and meshes[0].loaded == [1, 2]
    third = asyncio.ensure_future(client.pull(await versions.publish()))
    await settle()
    assert meshes[0].loaded == [1, 2]
    deleted.set()
    await asyncio.wait_for(third, 5)
    assert meshes[0].loaded == [1, 2, 3]


async def test_an_error_of_the_deletion_is_raised_by_the_next_pull(monkeypatch):
    async def discard(weights, version):
        raise RuntimeError(f"store: did not discard version {version} within 600 s")

    monkeypatch.setattr(Weights, "discard", discard)
    _, versions, client = client_of(1)
    for _ in range(2):
        await client.pull(await versions.publish())
    with pytest.raises(RuntimeError, match="did not discard version 1"):
        await client.pull(await versions.publish())


async def test_a_client_that_is_closed_gives_up_the_deletion(monkeypatch):
    async def discard(weights, version):
        await asyncio.Event().wait()

    monkeypatch.setattr(Weights, "discard", discard)
    _, versions, client = client_of(1)
    for _ in range(2):
        await client.pull(await versions.publish())
    await settle()
    releasing = client._replicas[0]._releasing
    client.close()
    await settle()
    assert releasing.cancelled()


async def test_when_the_last_replica_is_lost_every_caller_hears_of_all_of_them():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    for mesh in meshes:
        mesh.broken["sample"] = died(mesh.role, "sample")
    answers = await sample_all(client, [[1], [2], [3]])
    for answer in answers:
        assert isinstance(answer, RuntimeError)
        assert "generator-0: generator-0-0.sample: its process died" in str(answer)
        assert "generator-1: generator-1-0.sample: its process died" in str(answer)
    with pytest.raises(RuntimeError, match="no generator replica is left"):
        await client.pull(await versions.publish())
    await settle()
    assert versions.holders() == {2: ["newest"]}


@pytest.mark.parametrize(
    "endpoint, error",
    [
        ("fetch", died("generator-0", "fetch")),
        ("load", died("generator-0", "load")),
        ("load", RuntimeError("generator-0-0.load: RuntimeError: the engine has stopped: KeyError(7)")),
    ],
)
async def test_a_replica_that_is_lost_in_a_pull_does_not_stop_the_others(endpoint, error):
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    meshes[0].broken[endpoint] = error
    await client.pull(await versions.publish())
    await settle()
    assert client.health() == {"generator-0": str(error), "generator-1": "healthy"}
    assert versions.holders() == {2: ["generator-1", "newest"]}
    assert client.policy_version == 2
    assert [answer.policy_versions for answer in await sample_all(client, [[1], [2]])] == [[2], [2]]


async def test_weights_that_do_not_fit_are_an_error_of_the_pull_not_of_the_replicas_health():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    meshes[0].broken["fetch"] = RuntimeError("generator-0.fetch: RuntimeError: does not fit this generator")
    with pytest.raises(RuntimeError, match="does not fit this generator"):
        await client.pull(await versions.publish())
    assert set(client.health().values()) == {"healthy"}
    assert versions.holders() == {1: ["generator-0"], 2: ["generator-1", "newest"]}


@pytest.mark.parametrize("endpoint, text", [("fetch", "does not fit"), ("load", "cannot be loaded")])
async def test_a_version_that_every_replica_refuses_is_an_error_of_the_pull_and_the_one_before_serves(endpoint, text):
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    for mesh in meshes:
        mesh.refused[endpoint].append(2)
    with pytest.raises(RuntimeError, match=f"policy_version=2: {text}"):
        await client.pull(await versions.publish())
    assert set(client.health().values()) == {"healthy"} and client.policy_version == 1
    assert versions.holders() == {1: ["generator-0", "generator-1"], 2: ["newest"]}
    assert [mesh.loaded for mesh in meshes] == [[1, 1] if endpoint == "load" else [1]] * 2
    assert [answer.policy_versions for answer in await sample_all(client, [[1], [2]])] == [[1], [1]]
    (refusal,) = await sample_all(client, [[1]], policy_version=2)
    assert isinstance(refusal, ValueError) and text in str(refusal)
    assert set(client.health().values()) == {"healthy"}


async def test_a_replica_that_refuses_what_another_one_has_loaded_is_lost():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    meshes[0].refused["load"].append(2)
    await client.pull(await versions.publish())
    await settle()
    assert client.health() == {"generator-0": "policy_version=2: cannot be loaded", "generator-1": "healthy"}
    assert client.policy_version == 2 and versions.holders() == {2: ["generator-1", "newest"]}


async def test_a_replica_that_cannot_go_back_is_lost():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    await versions.publish()
    for mesh in meshes:
        mesh.refused["load"] += [1, 2]
    (refusal,) = await sample_all(client, [[1]], policy_version=2)
    assert "no generator replica is left" in str(refusal) and "version 1 did not come back" in str(refusal)


async def test_a_requests_own_mistake_is_its_own():
    meshes, versions, client = client_of(1)
    await client.pull(await versions.publish())
    mistake, fine = await sample_all(client, [[13], [1]])
    assert isinstance(mistake, ValueError) and fine.tokens == [1]
    (unpublished,) = await sample_all(client, [[1]], policy_version=99)
    assert isinstance(unpublished, ValueError) and "policy_version=99: is not published" in str(unpublished)
    assert client.health() == {"generator-0": "healthy"}


async def test_whoever_waits_for_a_version_of_a_replica_that_is_lost_is_served_by_another():
    meshes, versions, client = client_of(2)
    old = await versions.publish()
    versions.pin(old, "teacher")
    await client.pull(old)
    await client.pull(await versions.publish())
    meshes[0].held_up = asyncio.Event()
    # 0 serves the newest, and would have to drain before it serves the old version.
    free = asyncio.ensure_future(sample_all(client, [[1]]))
    await settle()
    meshes[1].held_up = asyncio.Event()
    busy = asyncio.ensure_future(sample_all(client, [[2], [3], [4]]))
    await settle()
    named = asyncio.ensure_future(sample_all(client, [[5]], policy_version=old))
    await settle()
    assert client._router.loads == [3, 2] and [5] not in meshes[0].sampled + meshes[1].sampled
    meshes[0].broken["sample"] = died("generator-0", "sample")
    meshes[0].held_up.set(), meshes[1].held_up.set()
    assert [answer.tokens for answer in await free + await busy] == [[1], [2], [3], [4]]
    assert [(answer.tokens, answer.policy_versions) for answer in await named] == [([5], [old])]
    await settle()
    assert client._router.loads == [0, 0] and "generator-0" not in versions.holders()[2]


async def test_while_new_weights_are_fetched_the_version_before_serves_and_no_older_one():
    (mesh,), versions, client = client_of(1)
    old = await versions.publish()
    versions.pin(old, "teacher")
    await client.pull(old)
    await client.pull(await versions.publish())
    for named in (None, old):  # in the second round a pinned request has loaded the old version before the pull
        await sample_all(client, [[1]], policy_version=named)
        mesh.fetching = asyncio.Event()
        pull = asyncio.ensure_future(client.pull(await versions.publish()))
        await settle()
        free = asyncio.ensure_future(sample_all(client, [[2]]))
        await settle()
        mesh.fetching.set()
        await pull
        assert [answer.policy_versions for answer in await free] == [[2] if named is None else [4]]


async def test_a_request_that_comes_between_the_name_of_a_new_version_and_its_pull_has_the_version_before():
    """Its own load of the new version would be a second one, and everybody would wait for its fetch."""
    (mesh,), versions, client = client_of(1)
    await client.pull(await versions.publish())
    newest, (replica,) = await versions.publish(), client._replicas
    versions.served = newest  # what a pull does first
    (early,) = await sample_all(client, [[1]])
    await replica.pull(newest)
    (late,) = await sample_all(client, [[2]])
    assert (early.policy_versions, late.policy_versions) == ([1], [2]) and mesh.loaded == [1, 2]


async def test_a_pull_of_the_version_that_a_pinned_request_is_loading_fetches_after_that_load():
    """Otherwise the request's load takes what the pull has fetched, and the pull's load finds nothing."""
    (mesh,), versions, client = client_of(1)
    await client.pull(await versions.publish())
    newest = await versions.publish()
    mesh.loading = asyncio.Event()
    named = asyncio.ensure_future(sample_all(client, [[1]], policy_version=newest))
    await settle()
    pull = asyncio.ensure_future(client.pull(newest))
    await settle()
    mesh.loading.set()
    await pull
    assert [answer.policy_versions for answer in await named] == [[newest]]
    assert mesh.loaded == [1, newest, newest] and client.health() == {"generator-0": "healthy"}


async def test_a_request_for_the_version_that_a_pull_fetches_waits_for_the_pull():
    (mesh,), versions, client = client_of(1)
    await client.pull(await versions.publish())
    mesh.fetching = asyncio.Event()
    pull = asyncio.ensure_future(client.pull(await versions.publish()))
    await settle()
    named = asyncio.ensure_future(sample_all(client, [[1]], policy_version=2))
    await settle()
    mesh.fetching.set()
    await pull
    assert [answer.policy_versions for answer in await named] == [[2]]
    assert mesh.loaded == [1, 2] and client.health() == {"generator-0": "healthy"}

    mesh.fetching = asyncio.Event()  # a pull that fails lets the request try for itself
    pull = asyncio.ensure_future(client.pull(await versions.publish()))
    await settle()
    named = asyncio.ensure_future(sample_all(client, [[1]], policy_version=3))
    await settle()
    pull.cancel()
    await settle()
    mesh.fetching.set()
    assert [answer.policy_versions for answer in await named] == [[3]]


async def test_each_request_is_answered_when_it_is_done_and_frees_its_place_in_the_load():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    for mesh in meshes:
        mesh.slow = [[1], [2]]
    slow = asyncio.ensure_future(sample_all(client, [[1], [2]]))
    quick = await sample_all(client, [[3], [4], [5]])
    assert [answer.tokens for answer in quick] == [[3], [4], [5]] and not slow.done()
    assert client._router.loads == [1, 1]
    for mesh in meshes:
        mesh.released.set()
    assert [answer.tokens for answer in await slow] == [[1], [2]]
    await settle()
    assert client._router.loads == [0, 0]


async def test_a_replica_lost_after_some_answers_hands_over_the_other_requests_only():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    meshes[0].slow = [[1]]
    batch = asyncio.ensure_future(sample_all(client, [[1], [2], [3], [4]]))
    await settle()
    assert meshes[0].sampled == [[1], [3]] and client._router.loads == [1, 0]
    meshes[0].broken["sample"] = died("generator-0", "sample")
    meshes[0].released.set()
    assert [answer.tokens for answer in await batch] == [[1], [2], [3], [4]]
    assert meshes[1].sampled == [[2], [4], [1]] and client._router.loads == [0, 0]


async def test_a_caller_that_gives_up_takes_nobody_with_it():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    meshes[0].held_up = asyncio.Event()
    impatient = asyncio.ensure_future(client.sample([1], SamplingParams(max_tokens=4)))
    patient = asyncio.ensure_future(client.sample([1], SamplingParams(max_tokens=4)))
    await settle()
    impatient.cancel()
    meshes[0].broken["sample"] = died("generator-0", "sample")
    meshes[0].held_up.set()
    assert (await asyncio.wait_for(patient, 5)).tokens == [1]
    assert meshes[1].sampled == [[1]]


@pytest.mark.parametrize("follows, cancelled", [(False, [[2, 3]]), (True, [])])
async def test_a_replica_hears_of_requests_whose_callers_have_gone_but_in_a_replay(follows, cancelled):
    (mesh,), versions, client = client_of(1, follows=follows)
    await client.pull(await versions.publish())
    mesh.slow = [[1], [2], [3]]
    stays, *gone = [asyncio.ensure_future(client.sample([i], SamplingParams(max_tokens=4))) for i in (1, 2, 3)]
    await settle()
    for request in gone:
        request.cancel()
    await settle()
    assert mesh.cancelled == cancelled  # numbers of requests, which are 1, 2 and 3
    mesh.released.set()
    assert (await asyncio.wait_for(stays, 5)).tokens == [1] and client.in_flight() == [0] and not client._sent
    answered = asyncio.ensure_future(client.sample([4], SamplingParams(max_tokens=4)))
    await asyncio.wait([answered], timeout=5)
    answered.cancel()
    await settle()
    assert mesh.cancelled == cancelled


async def test_a_request_that_the_record_has_cancelled_waits_for_its_caller_to_go_and_not_forever():
    (mesh,), versions, client = client_of(1, follows=True)
    await client.pull(await versions.publish())
    client._timeout_s = 0.1
    goes, stays = [asyncio.ensure_future(client.sample([14], SamplingParams(max_tokens=4))) for _ in range(2)]
    await settle()
    assert mesh.sampled == [[14], [14]] and not goes.done()
    goes.cancel()
    with pytest.raises(RuntimeError, match="in the record this request's caller had gone; the replay has parted"):
        await asyncio.wait_for(stays, 5)


@pytest.mark.parametrize("follows, sent", [(False, []), (True, [[7]])])
async def test_a_request_whose_caller_has_gone_before_it_was_sent_is_sent_in_a_replay_alone(follows, sent):
    (mesh,), versions, client = client_of(1, follows=follows)
    await client.pull(await versions.publish())
    request = asyncio.ensure_future(client.sample([7], SamplingParams(max_tokens=4)))
    await asyncio.sleep(0)
    request.cancel()
    await settle()
    assert mesh.sampled == sent and client.in_flight() == [0]


async def test_requests_whose_callers_have_gone_while_a_replacement_starts_are_not_sent():
    starts, replacement = asyncio.Event(), Mesh("generator-0")

    async def start(role):
        await starts.wait()
        return replacement

    (mesh,), versions, client = client_of(1, Repair(start, **LIMITS))
    await client.pull(await versions.publish())
    mesh.broken["sample"] = died("generator-0", "sample")
    *gone, patient = [asyncio.ensure_future(client.sample([i], SamplingParams(max_tokens=4))) for i in range(20, 25)]
    await settle()
    for request in gone:
        request.cancel()
    await settle()
    starts.set()
    assert (await asyncio.wait_for(patient, 5)).tokens == [24] and replacement.sampled == [[24]]
    client.close()


async def test_of_several_reasons_for_a_loss_the_first_is_kept():
    meshes, versions, client = client_of(3)
    await client.pull(await versions.publish())
    for reason in ("its process died", "something later"):
        client._lose(client._replicas[1], ReplicaLost(reason))
    assert client._require_serving() == [0, 2] and client.health()["generator-1"] == "its process died"


async def test_one_replica_gets_every_request_and_none_is_left_once_it_is_lost():
    meshes, versions, client = client_of(1)
    assert client.policy_version is None
    await client.pull(await versions.publish())
    assert client.request_times() == {} and client.policy_version == versions.served == 1
    assert [answer.tokens for answer in await sample_all(client, [[2], [1]])] == [[2], [1]]
    meshes[0].broken["sample"] = died("generator-0", "sample")
    (answer,) = await sample_all(client, [[1]])
    assert str(answer) == (
        "no generator replica is left (generator-0: generator-0-0.sample: its process died (killed); see its log); "
        "look at their logs and start the run again"
    )


async def test_weights_of_a_directory_are_one_version_and_another_is_refused():
    meshes = [Mesh("generator-0"), Mesh("generator-1")]
    client = MeshSamplingClient(meshes, OneVersion(), max_model_len=64, timeout_s=5)
    (early,) = await sample_all(client, [[1]])
    assert str(early) == "policy_version=None: the generators hold no weights yet; publish and pull first"
    await client.load_hf("somewhere", version=4)
    assert client.policy_version == 4 and [mesh.loaded for mesh in meshes] == [[4], [4]]
    named = await sample_all(client, [[1], [2]], policy_version=4)
    assert [answer.policy_versions for answer in named] == [[4], [4]]
    (other,) = await sample_all(client, [[1]], policy_version=3)
    assert isinstance(other, ValueError)
    assert str(other).startswith("policy_version=3: is not published; these generators hold the weights of a directory")
    (base,) = await sample_all(client, [[1]], policy_version=WITHOUT_ADAPTERS)
    assert isinstance(base, ValueError) and "hold no adapters beside one; set generator.max_adapters" in str(base)
    meshes[0].broken["sample"] = died("generator-0", "sample")
    assert [answer.tokens for answer in await sample_all(client, [[1], [2]])] == [[1], [2]]
    await settle()
    assert meshes[0].aborted == [0, 1] and client.health()["generator-1"] == "healthy"


async def test_closing_answers_whoever_still_waits():
    meshes, versions, client = client_of(1)
    await client.pull(await versions.publish())
    meshes[0].held_up = asyncio.Event()
    waiting = asyncio.ensure_future(client.sample([1], SamplingParams(max_tokens=4)))
    await settle()
    client.close()
    with pytest.raises(RuntimeError, match="the client was closed before the generators answered"):
        await asyncio.wait_for(waiting, 5)
    assert client.health() == {"generator-0": "healthy"} and not client._tasks


@pytest.mark.parametrize("iterations", range(6))
async def test_closing_answers_a_request_wherever_it_is_on_its_way(iterations):
    meshes, versions, client = client_of(1)
    await client.pull(await versions.publish())
    meshes[0].held_up = asyncio.Event()
    waiting = asyncio.ensure_future(client.sample([1], SamplingParams(max_tokens=4)))
    for _ in range(iterations):
        await asyncio.sleep(0)
    client.close()
    with pytest.raises(RuntimeError, match="the client was closed before the generators answered"):
        await asyncio.wait_for(waiting, 5)


async def test_a_client_that_is_closed_takes_no_request_sends_none_and_replaces_nothing(caplog):
    starts = []

    async def start(role):
        starts.append(role)
        await asyncio.sleep(60)

    (mesh,), versions, client = client_of(1, Repair(start, **LIMITS))
    await client.pull(await versions.publish())
    pending = asyncio.ensure_future(client.sample([1], SamplingParams(max_tokens=4)))
    await asyncio.sleep(0)  # it is noted, and not sent yet
    client.close()
    for late in (pending, client.sample([2], SamplingParams(max_tokens=4))):
        with pytest.raises(RuntimeError, match="the client was closed before the generators answered"):
            await asyncio.wait_for(late, 5)
    client._lose(client._replicas[0], ReplicaLost("its process died"))
    await settle()
    assert not mesh.sampled and not starts and not client._tasks and not caplog.records


async def test_a_replacement_that_fails_in_an_unforeseen_way_counts_and_is_logged(caplog):
    outcomes = [KeyError("no such host"), Mesh("generator-0")]

    async def start(role):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    meshes, versions, client = client_of(2, Repair(start, **LIMITS))
    await client.pull(await versions.publish())
    meshes[0].broken["sample"] = died("generator-0", "sample")
    await sample_all(client, [[1], [2]])
    await settle()
    assert client.health() == {"generator-0": "healthy", "generator-1": "healthy"} and client.num_restarts == 2
    assert "its replacement did not start: KeyError: 'no such host'" in caplog.text and "Traceback" in caplog.text
    client.close()


async def test_a_place_that_cannot_be_asked_about_is_a_reason_to_end_and_is_logged(caplog):
    async def gone(role):
        raise KeyError(role)

    meshes, versions, client = client_of(2, Repair(None, gone=gone, **LIMITS))
    await client.pull(await versions.publish())
    meshes[0].broken["sample"] = died("generator-0", "sample")
    await sample_all(client, [[1], [2]])
    await settle()
    (answer,) = await sample_all(client, [[3]])
    assert isinstance(answer, RuntimeError) and "generator-0 was not replaced: KeyError: 'generator-0'" in str(answer)
    assert "generator-0: is not replaced" in caplog.text and "Traceback" in caplog.text
    client.close()


async def test_processes_of_a_lost_replica_end_though_its_versions_cannot_be_given_up(caplog, monkeypatch):
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())

    async def fails():
        raise KeyError("store")

    monkeypatch.setattr(client._replicas[0], "release", fails)
    meshes[0].broken["sample"] = died("generator-0", "sample")
    await sample_all(client, [[1], [2]])
    await settle()
    assert meshes[0].aborted == [0, 1] and "the versions that it held are not given up" in caplog.text


async def test_a_replica_that_hangs_in_a_load_is_replaced_before_the_call_of_the_load_ends():
    async def start(role):  # ends what is left of the replica, as every start does
        meshes[1].broken["load"] = died(role, "load")
        meshes[1].loading.set()
        replacements.append(Mesh(role))
        return replacements[-1]

    replacements = []
    meshes, versions, client = client_of(2, Repair(start, **LIMITS | {"probe_every_s": 0.01}))
    await client.pull(await versions.publish())
    meshes[1].loading, meshes[1].broken["probe"] = asyncio.Event(), RuntimeError("no sign of life")
    await asyncio.wait_for(client.pull(await versions.publish()), 5)
    await settle()
    assert [mesh.loaded for mesh in replacements] == [[2]] and set(client.health().values()) == {"healthy"}
    assert versions.holders() == {2: ["generator-0", "generator-1", "newest"]}
    client.close()


async def test_processes_of_a_replica_that_hangs_in_a_load_end_where_none_takes_its_place():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    meshes[1].loading = asyncio.Event()
    pull = asyncio.ensure_future(client.pull(await versions.publish()))
    await settle()
    client._lose(client._replicas[1], ReplicaLost("it hangs"))
    await settle()
    assert meshes[1].aborted == [0, 1] and not pull.done()
    meshes[1].broken["load"] = died("generator-1", "load")
    meshes[1].loading.set()
    await asyncio.wait_for(pull, 5)
    await settle()
    assert versions.holders() == {2: ["generator-0", "newest"]}


async def test_weights_are_read_in_the_generators_turn_on_shared_devices():
    log = []
    placement = Placement("all")
    placement.add("policy", [Recording("policy", log)]), placement.add("generator", [Recording("generator-0", log)])
    weights, mesh = Weights(), Mesh("generator-0")
    versions = PolicyVersions(weights, weights, Config, None, one_host=True)
    client = MeshSamplingClient([mesh], versions, max_model_len=64, timeout_s=5, placement=placement)
    await client.pull(await versions.publish())
    async with placement.turn("policy", TrainerOperations.forward_backward):
        assert not placement.on_device["generator"]
    assert await client.weights() == {"version": 1}
    assert placement.on_device["generator"] == {"weights"} and log[-1] == ("generator-0", "wake", "weights")


async def test_a_completion_says_what_altered_its_distribution():
    _, versions, client = client_of(1)
    await client.pull(await versions.publish())
    plain = SamplingParams(max_tokens=4, temperature=0.5, top_k=-1, stop=["x"])
    altered = SamplingParams(max_tokens=4, top_p=0.9, repetition_penalty=1.1)

    assert ([(await client.sample([1], params)).filtered for params in (plain, altered)]) == [
        "",
        "top_p=0.9, repetition_penalty=1.1",
    ]

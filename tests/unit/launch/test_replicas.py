"""Replicas that join and leave while requests are answered, in this process; tests/integration has real ones."""

import asyncio
import json

import pytest

from tests.kit.replicas import Mesh, client_of, died, sample_all, settle
from torchtitan_rl.dispatch.repair import Repair
from torchtitan_rl.launch.on_request import scaled_on_request
from torchtitan_rl.launch.replicas import Replicas
from torchtitan_rl.record import replica_request


def replicas_of(client, *, fail=(), meshes=None):
    """(replicas of the client, every mesh that was started, the roles that were stopped). Roles in `fail` do not start;
    `meshes` are those of some roles."""
    started, stopped = [], []

    async def start(role, host):
        if role in fail:
            raise RuntimeError(f"{role}: its process did not start")
        started.append((meshes or {}).get(role) or Mesh(role))
        return started[-1]

    async def stop(role):
        stopped.append(role)

    return Replicas(client, start=start, stop=stop), started, stopped


async def test_a_replica_that_joins_holds_the_served_version_before_it_gets_a_request():
    meshes, versions, client = client_of(1)
    await client.pull(await versions.publish())
    await client.pull(await versions.publish())
    replicas, started, _ = replicas_of(client)
    await replicas.scale(3)
    assert [mesh.role for mesh in started] == ["generator-1", "generator-2"]
    assert [mesh.loaded for mesh in started] == [[2], [2]]
    prompts = [[1], [2], [3], [4], [5], [6]]
    assert [answer.tokens for answer in await sample_all(client, prompts)] == prompts
    assert [len(mesh.sampled) for mesh in (*meshes, *started)] == [2, 2, 2]
    await client.pull(await versions.publish())
    await settle()
    assert versions.holders() == {3: ["generator-0", "generator-1", "generator-2", "newest"]}


@pytest.mark.parametrize("starts", [True, False])
async def test_where_no_replica_is_left_requests_wait_for_one_that_starts(starts):
    meshes, versions, client = client_of(1)
    await client.pull(await versions.publish())
    started = asyncio.Event()

    async def start(role, host):
        await started.wait()
        if not starts:
            raise RuntimeError(f"{role}: its process did not start")
        return Mesh(role)

    async def stop(role):
        pass

    scaling = asyncio.ensure_future(Replicas(client, start=start, stop=stop).scale(2))
    await settle()
    meshes[0].broken["sample"] = died("generator-0", "sample")
    answers = asyncio.ensure_future(sample_all(client, [[1], [2]]))
    await settle()
    pull = asyncio.ensure_future(client.pull(await versions.publish()))
    await settle()
    assert client.serving() == [] and not answers.done() and not pull.done()
    started.set()
    if starts:
        assert [answer.policy_versions for answer in await answers] == [[2], [2]]
        await pull
        await scaling
    else:
        assert [str(answer)[:29] for answer in await answers] == ["no generator replica is left "] * 2
        with pytest.raises(RuntimeError, match="no generator replica is left"):
            await pull
        with pytest.raises(RuntimeError, match="generator-1: its process did not start"):
            await scaling


async def test_a_version_that_is_published_while_a_replica_joins_is_the_one_it_holds():
    _, versions, client = client_of(1)
    await client.pull(await versions.publish())
    joining = Mesh("generator-1")
    joining.fetching = asyncio.Event()
    join = asyncio.ensure_future(client.join(joining))
    await settle()
    await client.pull(await versions.publish())
    joining.fetching.set()
    await join
    assert joining.loaded[-1] == 2 and client.loaded_version() == 2


async def test_a_replica_that_leaves_answers_its_requests_first_with_the_weights_that_are_published_meanwhile():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    replicas, _, stopped = replicas_of(client)
    meshes[1].slow = [[2]]
    answers = asyncio.ensure_future(sample_all(client, [[1], [2]]))
    await settle()
    assert meshes[1].sampled == [[2]]
    leaving = asyncio.ensure_future(replicas.scale(1))
    await settle()
    assert [answer.tokens for answer in await sample_all(client, [[3], [4]])] == [[3], [4]]
    await client.pull(await versions.publish())
    assert meshes[1].sampled == [[2]] and meshes[1].loaded == [1, 2] and not leaving.done() and not stopped
    meshes[1].released.set()
    assert [answer.policy_versions for answer in await answers] == [[1], [2]]
    await leaving
    assert stopped == ["generator-1"] and client.health() == {"generator-0": "healthy"}
    await settle()
    assert versions.holders() == {2: ["generator-0", "newest"]}


async def test_a_replica_without_time_left_has_left_and_others_answer_what_it_had():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    replicas, _, stopped = replicas_of(client)
    meshes[1].held_up, hurry = asyncio.Event(), asyncio.Event()
    answers = asyncio.ensure_future(sample_all(client, [[1], [2]]))
    await settle()
    leaving = asyncio.ensure_future(replicas.end("generator-1", hurry))
    await settle()
    assert not leaving.done() and client.working() == client.serving() == ["generator-0"]
    hurry.set()
    await leaving
    assert stopped == ["generator-1"] and not answers.done() and client.health() == {"generator-0": "healthy"}
    meshes[1].broken["sample"] = died("generator-1", "sample")  # its process has been ended
    meshes[1].held_up.set()
    assert [answer.tokens for answer in await answers] == [[1], [2]]
    assert meshes[0].sampled == [[1], [2]] and meshes[1].aborted == [0, 1]
    await settle()
    assert versions.holders() == {1: ["generator-0", "newest"]}


async def test_a_lost_replica_whose_host_is_gone_has_left_and_the_run_goes_on():
    async def gone(role):
        return "host 10.0.0.5:1 is gone" if role == "generator-1" else ""

    async def never(role):
        await asyncio.Event().wait()

    limits = {"max_restarts": 1, "window_s": 100.0, "probe_every_s": 100.0, "hang_timeout_s": 100.0}
    meshes, versions, client = client_of(2, Repair(never, gone=gone, **limits))
    await client.pull(await versions.publish())
    replicas, _, _ = replicas_of(client)
    meshes[1].held_up = asyncio.Event()
    answers = asyncio.ensure_future(sample_all(client, [[1], [2]]))
    await settle()
    meshes[1].broken["sample"] = died("generator-1", "sample")
    meshes[1].held_up.set()
    assert [answer.tokens for answer in await answers] == [[1], [2]]
    await settle()
    assert client.health() == {"generator-0": "healthy"} and client.num_restarts == 0 and replicas.number == 1
    assert versions.holders() == {1: ["generator-0", "newest"]}
    client.close()


async def test_a_replica_that_is_lost_while_it_leaves_hands_its_requests_over_and_has_left():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    replicas, _, stopped = replicas_of(client)
    meshes[1].held_up = asyncio.Event()
    answers = asyncio.ensure_future(sample_all(client, [[1], [2]]))
    await settle()
    leaving = asyncio.ensure_future(replicas.scale(1))
    await settle()
    meshes[1].broken["sample"] = died("generator-1", "sample")
    meshes[1].held_up.set()
    assert [answer.tokens for answer in await answers] == [[1], [2]]
    await leaving
    await settle()
    assert stopped == ["generator-1"] and client.health() == {"generator-0": "healthy"}
    assert versions.holders() == {1: ["generator-0", "newest"]}


async def test_a_replica_that_leaves_stays_where_the_others_are_lost_before_it_has_left():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    replicas, _, stopped = replicas_of(client)
    meshes[0].held_up, meshes[1].slow = asyncio.Event(), [[2]]
    answers = asyncio.ensure_future(sample_all(client, [[1], [2]]))
    await settle()
    leaving = asyncio.ensure_future(replicas.scale(1))
    await settle()
    assert client.serving() == ["generator-0"]
    meshes[0].broken["sample"] = died("generator-0", "sample")
    meshes[0].held_up.set()
    with pytest.raises(RuntimeError, match="generator-1: is the only healthy replica by now; it stays"):
        await leaving
    meshes[1].released.set()
    assert [answer.tokens for answer in await answers] == [[1], [2]]
    assert stopped == [] and client.serving() == ["generator-1"]


async def test_an_error_of_one_that_has_left_is_not_that_of_the_next_in_its_place():
    meshes, versions, client = client_of(2)
    await client.pull(await versions.publish())
    replicas, _, _ = replicas_of(client)
    meshes[1].fetching = asyncio.Event()
    pull = asyncio.ensure_future(client.pull(await versions.publish()))
    await settle()
    await replicas.scale(1)
    await replicas.scale(2)
    meshes[1].broken["load"] = died("generator-1", "load")  # its process has been ended
    meshes[1].fetching.set()
    await pull
    assert client.health() == {"generator-0": "healthy", "generator-1": "healthy"}
    await settle()
    assert versions.holders() == {2: ["generator-0", "generator-1", "newest"]}


async def test_the_place_of_one_that_has_left_is_taken_by_the_next_that_joins():
    _, versions, client = client_of(3)
    await client.pull(await versions.publish())
    replicas, started, stopped = replicas_of(client)
    await replicas.scale(1)
    assert stopped == ["generator-2", "generator-1"] and replicas.number == 1
    await replicas.scale(4)
    assert [mesh.role for mesh in started] == ["generator-1", "generator-2", "generator-3"]
    assert list(client.health()) == ["generator-0", "generator-1", "generator-2", "generator-3"]
    prompts = [[number] for number in range(20, 28)]
    assert [answer.tokens for answer in await sample_all(client, prompts)] == prompts
    assert [len(mesh.sampled) for mesh in started] == [2, 2, 2]


async def test_where_one_does_not_start_none_joins_and_one_that_does_not_load_is_stopped():
    _, versions, client = client_of(1)
    await client.pull(await versions.publish())
    replicas, started, stopped = replicas_of(client, fail=["generator-2"])
    with pytest.raises(RuntimeError, match="generator-2: its process did not start"):
        await replicas.scale(3)
    assert stopped == ["generator-1", "generator-2"] and list(client.health()) == ["generator-0"]
    refusing = Mesh("generator-1")
    refusing.broken["fetch"] = died("generator-1", "fetch")
    replicas, _, stopped = replicas_of(client, meshes={"generator-1": refusing})
    with pytest.raises(RuntimeError, match="generator-1: did not load the weights: generator-1-0.fetch: its process"):
        await replicas.scale(3)
    assert stopped == ["generator-1", "generator-2"] and list(client.health()) == ["generator-0"]
    await settle()
    assert versions.holders() == {1: ["generator-0", "newest"]}


async def test_a_run_keeps_a_healthy_replica():
    async def never(role):
        await asyncio.Event().wait()

    limits = {"max_restarts": 2, "window_s": 100.0, "probe_every_s": 100.0, "hang_timeout_s": 100.0}
    _, versions, client = client_of(2, Repair(never, **limits))
    await client.pull(await versions.publish())
    replicas, _, stopped = replicas_of(client)
    with pytest.raises(ValueError, match="replicas=0: a run needs a generator; use at least 1"):
        await replicas.scale(0)
    client._lose(client._replicas[0], died("generator-0", "sample"))
    with pytest.raises(ValueError, match="replicas=1: 1 would leave, and of 2 replicas 1 are healthy; ask again once"):
        await replicas.scale(1)
    assert stopped == []
    client.close()


async def test_a_lost_replica_that_nothing_replaces_does_not_count():
    _, versions, client = client_of(3)
    await client.pull(await versions.publish())
    replicas, started, stopped = replicas_of(client)
    client._lose(client._replicas[2], died("generator-2", "sample"))
    assert replicas.number == 2
    await replicas.scale(2)  # the two that serve
    assert stopped == [] and client.working() == ["generator-0", "generator-1"]
    await replicas.scale(3)
    assert [mesh.role for mesh in started] == ["generator-3"]  # the lost one has its name, and no devices any more
    await replicas.scale(1)
    assert stopped == ["generator-2", "generator-3", "generator-1"] and client.working() == ["generator-0"]


async def test_requests_in_the_run_directory_are_done_once_and_answered(tmp_path):
    _, versions, client = client_of(1)
    await client.pull(await versions.publish())
    replicas, started, _ = replicas_of(client)
    replica_request.open_for(tmp_path, [])
    replica_request.ask(tmp_path, replicas=7)  # of an earlier attempt
    async with scaled_on_request(replicas, None, tmp_path):
        assert replica_request.hosts_of(tmp_path) == []
        requests = (replica_request.ask(tmp_path, replicas=number) for number in (2, 0))
        done, refused = [await answer_to(tmp_path, request) for request in requests]
        assert (done.replicas, done.problem) == (2, "")
        assert (refused.replicas, refused.problem) == (2, "replicas=0: a run needs a generator; use at least 1")
        joining = await answer_to(tmp_path, replica_request.ask(tmp_path, join=("tcp://10.0.0.5:1",)))
        assert joining.problem.startswith(
            "hosts=tcp://10.0.0.5:1: the run's processes listen on this machine alone, or "
        )
        assert [file.name for file in (tmp_path / "scale").iterdir()] == ["open.json"]
    assert [mesh.role for mesh in started] == ["generator-1"] and list(tmp_path.iterdir()) == []
    assert replica_request.hosts_of(tmp_path) is None
    with pytest.raises(ValueError, match="reads no requests; it still starts, or evaluates after its last step"):
        replica_request.ask(tmp_path, replicas=2)


async def test_a_run_whose_replicas_are_fixed_says_so_and_a_broken_file_does_no_harm(tmp_path, caplog):
    async with scaled_on_request(None, None, tmp_path):
        (tmp_path / "scale" / "mine.json").write_text(json.dumps({"replicas": "many"}))
        await asyncio.sleep(1.0)
        assert caplog.text.count("is no request; ask with `torchtitan-rl scale`") == 1
        (tmp_path / "scale" / "mine.json").write_text("{")
        answer = await answer_to(tmp_path, replica_request.ask(tmp_path, replicas=2))
        assert answer.problem.startswith("replicas=2: the number of replicas is fixed in this run")
    assert "is no JSON" in caplog.text


async def test_a_request_whose_work_breaks_is_answered(tmp_path, monkeypatch):
    _, versions, client = client_of(1)
    await client.pull(await versions.publish())
    replicas, *_ = replicas_of(client)

    async def breaks(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(replicas, "scale", breaks)
    async with scaled_on_request(replicas, None, tmp_path):
        answer = await answer_to(tmp_path, replica_request.ask(tmp_path, replicas=2))
    assert (answer.replicas, answer.problem) == (1, "replicas=2: OSError: [Errno 28] No space left on device")


async def answer_to(run, request):
    async def wait():
        while (answer := replica_request.answer_to(run, request)) is None:
            await asyncio.sleep(0.05)
        return answer

    return await asyncio.wait_for(wait(), 10)

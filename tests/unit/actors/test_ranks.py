"""What ranks answer has left the device: another process has none, or another one."""

import os
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from torchtitan_rl import adapters, platform

adapters.prepare_vllm(eager=True)

from torchtitan_rl.actors.generator_rank import GeneratorRank, _cast  # noqa: E402
from torchtitan_rl.actors.trainer_files import TrainerFiles  # noqa: E402
from torchtitan_rl.config.meshes import LoRAConfig, TrainerConfig  # noqa: E402
from torchtitan_rl.weights import layout  # noqa: E402
from torchtitan_rl.weights.exchange import WeightExchange  # noqa: E402
from torchtitan_rl.weights.finite import NotFinite  # noqa: E402


class OnDevice:
    """A tensor on a device that does not exist here: all that can be done with it is to fetch it."""

    def __init__(self, values):
        self.values = values

    def to(self, device, *, copy=False):
        assert device == "cpu" and copy, "the engine writes into the original at the next load"
        return torch.tensor(self.values)

    def cpu(self):
        return torch.tensor(self.values)


async def test_a_generators_weights_are_copied_to_host_memory():
    model = SimpleNamespace(canonical_state=lambda: {"norm.weight": OnDevice([1.0, 2.0])})
    answer = await GeneratorRank.weights(SimpleNamespace(engine=SimpleNamespace(model=model)))
    assert answer["norm.weight"].tolist() == [1.0, 2.0] and answer["norm.weight"].device.type == "cpu"


@pytest.mark.parametrize("kept", [5, -100])
async def test_a_truncated_file_of_weights_is_named(tmp_path, kept):
    file = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.zeros(100, 100)}, file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(RuntimeError, match=r"checkpoint='.*': model.safetensors cannot be read \(.*\); copy it again"):
        await GeneratorRank.fetch_hf(SimpleNamespace(), str(tmp_path), 0)


def test_so_are_a_trainers_gradients_and_none_stays_none():
    parameters = {"a": SimpleNamespace(grad=OnDevice([3.0])), "b": SimpleNamespace(grad=None)}
    model = SimpleNamespace(named_parameters=parameters.items)
    answer = TrainerFiles(SimpleNamespace(model=model)).gradients()
    assert answer["a"].tolist() == [3.0] and answer["b"] is None


def test_ranks_that_do_not_write_an_export_drop_each_whole_tensor_before_the_next(monkeypatch, tmp_path):
    gathered = []

    class Sharded:
        """A tensor of which every rank makes a whole copy; asserts that none of the copies before is left."""

        def detach(self):
            assert not any(copy() is not None for copy in gathered)
            whole = torch.zeros(2)
            gathered.append(weakref.ref(whole))
            return whole

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    exchange = SimpleNamespace(base_and_adapters=lambda: ({name: Sharded() for name in "abc"}, {}))
    TrainerFiles(SimpleNamespace(role="policy", exchange=exchange)).save_hf_model(str(tmp_path / "export"), 1, 0)
    assert len(gathered) == 3 and not (tmp_path / "export").exists()


class Store:
    """Notes (version, tensors, whether they are verified) of what is kept, and the versions that are announced."""

    def __init__(self, kept, *, error=None):
        """`error` is raised by the first `keep`."""
        self.kept, self.announced, self.error = kept, [], error

    async def announce(self, manifest):
        self.announced.append(manifest.version)

    async def keep(self, manifest, payload, *, handle):
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        tensors = {name: tensor.tolist() for name, tensor in layout.read(payload, manifest).items()}
        self.kept.append((manifest.version, tensors, bool(manifest.blocks)))


def model_of(**parameters):
    return torch.nn.ParameterDict({name: torch.nn.Parameter(tensor) for name, tensor in parameters.items()})


async def test_a_push_from_a_gpu_waits_for_the_device_before_anyone_hears_of_it(monkeypatch):
    happened = []
    exchange = WeightExchange(
        model_of(w=torch.tensor([1.0, 2.0])),
        n_kv_heads=1,
        config=TrainerConfig(),
        device=SimpleNamespace(type="cuda"),
        store=Store(happened),
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    stream = SimpleNamespace(synchronize=lambda: happened.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    await exchange.push(3, torch.bfloat16, "shared_memory", True)
    assert happened == ["waited", (3, {"w": [1.0, 2.0]}, True)]
    exchange.close()


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["shared_memory", "store"])
async def test_two_versions_are_written_to_memory_that_was_made_before(process_group, monkeypatch, transport):
    exchange = WeightExchange(
        model_of(a=torch.ones(300), b=torch.ones(7, 5)),
        n_kv_heads=1,
        config=TrainerConfig(),
        device=SimpleNamespace(type="cpu"),
        store=Store([]),
    )
    exchange.reserve(torch.bfloat16, transport)
    with monkeypatch.context() as context:
        context.setattr(exchange.buffers, "_new", lambda nbytes: pytest.fail(f"{nbytes} bytes were not reserved"))
        for version in (1, 2):
            assert (await exchange.push(version, torch.bfloat16, transport, True)).version == version
        exchange.discard_weights(1)
        assert (await exchange.push(3, torch.bfloat16, transport, True)).version == 3
    exchange.close()


async def test_weights_that_are_not_finite_are_named_and_never_kept(monkeypatch):
    """Finite in the trainer's float32, infinite in the generators' bfloat16."""
    kept = []
    exchange = WeightExchange(
        model_of(a=torch.ones(2), b=torch.tensor([1.0, 3.4e38])),
        n_kv_heads=1,
        config=TrainerConfig(),
        device=SimpleNamespace(type="cpu"),
        store=Store(kept),
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    manifest = await exchange.push(3, torch.float32, "shared_memory", True)
    assert manifest.version == 3 and list(manifest.entries) == ["a", "b"]
    assert await exchange.push(4, torch.bfloat16, "shared_memory", True) == NotFinite(version=4, tensor="b")
    assert [version for version, _, _ in kept] == [3]
    exchange.close()


async def test_a_base_that_was_not_published_is_published_before_the_next_adapters(monkeypatch):
    model, kept = torch.nn.Module(), []
    store = Store(kept, error=RuntimeError("no answer within 600 s"))
    model.w = torch.nn.Linear(2, 2, bias=False)
    model.w.lora_a, model.w.lora_b = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 2, bias=False)
    exchange = WeightExchange(
        model,
        n_kv_heads=1,
        config=TrainerConfig(lora=LoRAConfig(rank=1, alpha=1.0)),
        device=SimpleNamespace(type="cpu"),
        store=store,
    )
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    with pytest.raises(RuntimeError, match="no answer"):
        await exchange.push_adapters(3, torch.float32, "shared_memory", True)
    with torch.no_grad():
        model.w.weight[0, 0] = float("nan")
    not_finite = NotFinite(version=3, tensor="w.weight")
    assert await exchange.push_adapters(3, torch.float32, "shared_memory", True) == not_finite
    with torch.no_grad():
        model.w.weight[0, 0] = 0.0
    for version in (3, 4):
        manifest = await exchange.push_adapters(version, torch.float32, "shared_memory", True)
        assert (manifest.version, manifest.base) == (version, kept[0][0])
    (base, tensors, _), *versions = kept
    assert base.startswith("base-") and list(tensors) == ["w.weight"]
    assert store.announced == [base], "generators look the base up; a version's manifest is the trainer's answer"
    assert [(version, sorted(adapters)) for version, adapters, _ in versions] == [
        (version, ["w.lora_a.weight", "w.lora_b.weight"]) for version in (3, 4)
    ]
    fingerprint = exchange.base_fingerprint()
    with torch.no_grad():
        model.w.weight[0, 0] = 1.0
    assert exchange.base_fingerprint() == fingerprint, "the base is frozen: it is hashed once"
    exchange.base_has_changed()
    assert exchange.base_fingerprint() != fingerprint
    exchange.close()


def test_a_cast_starts_no_threads_of_operators_in_the_thread_that_asks():
    """They would stay, and libgomp lets the threads of a process with more of them than cores spin for less long."""
    tensors = {"a": torch.randn(1000, 1000), "b": torch.randn(7)}
    num_threads = []
    thread = threading.Thread(
        target=lambda: num_threads.extend(_threads_around(lambda: casts.append(_cast(tensors, dtypes))))
    )
    dtypes, casts = {"a": torch.bfloat16, "b": torch.float32}, []
    _cast(tensors, dtypes)  # the workers, which stay
    thread.start()
    thread.join()
    assert num_threads[1] <= num_threads[0]  # one of a test before may have ended
    assert casts[0]["a"].equal(tensors["a"].bfloat16()) and casts[0]["b"].equal(tensors["b"])
    assert list(casts[0]) == ["a", "b"]


def _threads_around(call):
    """How many threads this process has before and after a call."""
    before = len(os.listdir("/proc/self/task"))
    call()
    return before, len(os.listdir("/proc/self/task"))

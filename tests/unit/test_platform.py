"""What depends on the device, with the device faked: a Hopper's capability, a module that is missing, another torch."""

import logging
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import _registry, current_flash_attention_impl, restore_flash_attention_impl

from torchtitan_rl import adapters, platform

adapters.adapt_torchtitan()

from torchtitan.models.common.attention import VarlenAttention  # noqa: E402

from torchtitan_rl.model.attention import PackedSDPA  # noqa: E402

GPUS = [((9, 0), "FA3", "flash_attn_interface"), ((10, 0), "FA4", "flash_attn.cute.interface")]


def said(caplog):
    """Log messages. Where Monarch is imported, it writes the actor's name before each."""
    return [record.message.rpartition("[actor=<root>] ")[2] for record in caplog.records]


@pytest.fixture
def gpu(monkeypatch):
    """Looks like a GPU of a compute capability. Nothing can be computed on it."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)

    adapters._log_once.cache_clear()
    yield pretend
    restore_flash_attention_impl(_raise_warn=False)
    for name in ("flash_attn", "flash_attn.cute"):
        sys.modules.pop(name, None)


def put_module(directory, name):
    """An importable module of this dotted name."""
    *packages, module = name.split(".")
    for package in packages:
        directory = directory / package
        directory.mkdir()
        (directory / "__init__.py").touch()
    (directory / f"{module}.py").touch()


class Handle:
    def remove(self):
        pass


@pytest.mark.parametrize("attention", [VarlenAttention, PackedSDPA])
@pytest.mark.parametrize("capability, impl, module", GPUS)
def test_without_the_module_torchs_own_attention_serves(gpu, caplog, attention, capability, impl, module):
    gpu(capability)
    with caplog.at_level(logging.INFO, logger=adapters.__name__):
        for _ in range(2):  # torch's real registration would raise ModuleNotFoundError
            attention(attention.Config())
    assert current_flash_attention_impl() is None
    assert said(caplog) == [
        f"variable-length attention: torch's own FlashAttention 2 ({impl} needs the module {module})"
    ]


@pytest.mark.parametrize("capability, impl, module", GPUS)
def test_with_the_module_torch_is_asked_for_it(gpu, monkeypatch, tmp_path, caplog, capability, impl, module):
    gpu(capability)
    monkeypatch.syspath_prepend(tmp_path)
    put_module(tmp_path, module)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, impl, Handle)
    with caplog.at_level(logging.INFO, logger=adapters.__name__):
        VarlenAttention(VarlenAttention.Config())
    assert current_flash_attention_impl() == impl
    assert said(caplog) == [f"variable-length attention: {impl} of {module}"]


def test_a_package_that_cannot_be_imported_counts_as_missing(gpu, monkeypatch, tmp_path):
    gpu((10, 0))
    monkeypatch.syspath_prepend(tmp_path)
    put_module(tmp_path, "flash_attn.cute.interface")
    (tmp_path / "flash_attn" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    VarlenAttention(VarlenAttention.Config())
    assert current_flash_attention_impl() is None


def test_an_older_gpu_and_a_cpu_are_asked_nothing(gpu, caplog):
    VarlenAttention(VarlenAttention.Config())
    gpu((8, 0))
    VarlenAttention(VarlenAttention.Config())
    assert current_flash_attention_impl() is None and not caplog.records


def test_time_limits_of_process_groups_have_torchtitans_name(monkeypatch):
    monkeypatch.delattr(dist, "set_timeout")
    adapters.adapt_torchtitan()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.set_timeout(timedelta(seconds=7), None)  # None is the default group, as torchtitan says it
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=7)
    finally:
        dist.destroy_process_group()


def test_a_torch_that_has_the_name_is_left_alone(monkeypatch):
    theirs = object()
    monkeypatch.setattr(dist, "set_timeout", theirs)
    adapters.adapt_torchtitan()
    assert dist.set_timeout is theirs


@pytest.mark.parametrize(
    "capability, dtype, asks",
    [((9, 0), "bfloat16", False), ((10, 0), "bfloat16", False), ((9, 0), "float32", True), ((8, 0), "bfloat16", True)],
)
def test_experts_that_ask_the_host_cannot_be_captured(gpu, capability, dtype, asks):
    assert not platform.experts_ask_the_host(dtype)  # a CPU captures nothing
    gpu(capability)
    assert platform.experts_ask_the_host(dtype) is asks


def test_chunks_of_logits_are_larger_on_a_gpu_unless_their_size_is_given(gpu):
    assert (platform.logprob_chunk_bytes(0), platform.logprob_chunk_bytes(3)) == (128 * 2**20, 3 * 2**20)
    gpu((9, 0))
    assert (platform.logprob_chunk_bytes(0), platform.logprob_chunk_bytes(3)) == (2048 * 2**20, 3 * 2**20)


def test_microbatches_are_larger_on_a_gpu_unless_their_size_is_given(gpu):
    assert [platform.microbatch_tokens(tokens) for tokens in (0, 100)] == [4096, 100]
    assert platform.microbatch_tokens(0, "cuda") == 8192  # of a rehearsal's hosts, which this machine is not
    gpu((9, 0))
    assert [platform.microbatch_tokens(tokens) for tokens in (0, 100)] == [8192, 100]


def test_items_are_worked_on_in_threads_and_their_results_are_in_order():
    before = torch.get_num_threads()

    def work(item):
        return item, threading.current_thread().name, torch.get_num_threads(), torch.is_inference_mode_enabled()

    with torch.inference_mode():
        results = platform.in_threads(work, range(50))
    assert [item for item, *_ in results] == list(range(50))
    assert {(threads, inference) for *_, threads, inference in results} == {(1, True)}
    assert threading.current_thread().name not in {name for _, name, *_ in results}
    assert platform.in_threads(work, range(1))[0][3] is False
    assert platform.in_threads(work, []) == []
    new = threading.Thread(target=lambda: results.append(torch.get_num_threads()))
    new.start()
    new.join()
    assert before == torch.get_num_threads() == results[-1]  # of this thread, and of those that begin later


def test_an_error_of_a_thread_is_raised_and_the_threads_go_on():
    with pytest.raises(ZeroDivisionError):
        platform.in_threads(lambda item: 1 / item, [1, 0, 2])
    assert platform.in_threads(lambda item: 1 / item, [1, 2]) == [1, 0.5]


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="one thread has nobody to wait for")
def test_an_error_is_raised_once_no_thread_works_any_more():
    working, finished = threading.Event(), []

    def work(item):
        if item == "fails":
            assert working.wait(10)
            raise ValueError(item)
        working.set()
        time.sleep(0.2)
        finished.append(item)

    with pytest.raises(ValueError, match="fails"):
        platform.in_threads(work, ["fails", "goes on"])
    assert finished == ["goes on"]


def test_new_memory_is_touched_before_cuda_pins_it(monkeypatch):
    pinned, buffer = [], torch.full((8,), 7, dtype=torch.uint8)
    monkeypatch.setattr(platform, "pin", lambda one: pinned.append(one.tolist()))
    platform.pin_new(buffer)
    assert not pinned and buffer.tolist() == [7] * 8  # a CPU has no use for pages that nobody writes
    monkeypatch.setattr(platform, "device_type", lambda: "cuda")
    platform.pin_new(buffer)
    assert pinned == [[0] * 8]

"""A copy of a state stays as it was while the state changes, and its memory serves the next copy."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtitan_rl.actors import host_copy
from torchtitan_rl.actors.host_copy import HostCopy


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_copy_does_not_change_with_its_original():
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "step": torch.tensor(4), "betas": [0.9, 0.5]}
    copied = HostCopy().take(state)
    state["model"]["w"].zero_()
    state["step"].add_(1)
    state["betas"].append(0.1)
    assert copied["model"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copied["step"].item() == 4 and copied["step"].shape == () and copied["betas"] == [0.9, 0.5]


def test_the_next_copy_uses_the_same_memory():
    taker, w = HostCopy(), torch.ones(3)
    first = taker.take({"w": w})["w"]
    address = first.data_ptr()
    second = taker.take({"w": w + 1})["w"]  # another tensor by the same name
    assert second.tolist() == [2, 2, 2] and second.data_ptr() == address


def test_a_tensor_of_two_names_is_copied_once_until_the_names_part():
    taker, w = HostCopy(), torch.ones(3)
    tied = taker.take({"embedding": w, "head": w})
    assert tied["embedding"] is tied["head"]
    apart = taker.take({"embedding": w, "head": w + 1})
    assert (apart["embedding"].tolist(), apart["head"].tolist()) == ([1, 1, 1], [2, 2, 2])


def test_views_of_one_storage_are_tensors_of_their_own():
    rows = torch.arange(6.0).view(3, 2)
    copied = HostCopy().take({"top": rows[:1], "rest": rows[1:], "columns": rows.t(), "last": rows[:, 1]})
    assert copied["top"].tolist() == [[0, 1]] and copied["rest"].tolist() == [[2, 3], [4, 5]]
    assert copied["columns"].tolist() == [[0, 2, 4], [1, 3, 5]] and copied["last"].tolist() == [1, 3, 5]


def test_shapes_dtypes_and_names_may_change_and_nothing_old_is_kept():
    taker = HostCopy()
    taker.take({"w": torch.ones(3), "gone": torch.ones(5)})
    copied = taker.take({"w": torch.ones(2, 4, dtype=torch.bfloat16), "new": torch.zeros(0, 3)})
    assert copied["w"].dtype == torch.bfloat16 and copied["w"].tolist() == [[1] * 4] * 2
    assert copied["new"].shape == (0, 3) and copied.keys() == {"w", "new"}
    assert sum(held.nbytes for held in taker._copies.values()) == 16


def test_a_tensor_of_several_pieces_is_copied_whole(monkeypatch):
    monkeypatch.setattr(host_copy, "_PIECE", 8)
    values = torch.randn(7, 5, dtype=torch.bfloat16)
    assert torch.equal(HostCopy().take({"w": values})["w"], values)


def test_a_copied_tensor_may_still_leave_its_device():
    values = torch.randn(9)
    HostCopy().take({"w": values})
    values.untyped_storage().resize_(0)  # as an offload does
    assert values.untyped_storage().nbytes() == 0


def test_a_sharded_tensor_stays_one(mesh):
    taker, w = HostCopy(), distribute_tensor(torch.arange(6.0).view(3, 2), mesh, [Shard(0)])
    copied = taker.take({"w": w, "same": w.detach()})["w"]
    w.mul_(2)
    assert isinstance(copied, DTensor) and (copied.placements, copied.shape) == ((Shard(0),), (3, 2))
    assert copied.to_local().tolist() == [[0, 1], [2, 3], [4, 5]] and len(taker._copies) == 1
    again = taker.take({"w": w})["w"]
    assert again is copied and again.to_local().tolist() == [[0, 2], [4, 6], [8, 10]]
    assert taker.take({"w": torch.ones(3, 2)})["w"].tolist() == [[1, 1]] * 3

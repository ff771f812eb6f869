"""Operators of a step, and reads that the host waits for: none may grow unnoticed."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from scripts import operator_counts
from scripts.gpu_checks.logprob_chunk import microbatch
from scripts.operator_counts import Counts, HostReads, OperatorCount
from torchtitan_rl import platform
from torchtitan_rl.algorithm import losses
from torchtitan_rl.model.attention import varlen_metadata

pytestmark = pytest.mark.skipif(platform.device_type() != "cpu", reason="operators are counted on a CPU")


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_computes_is_counted_and_views_and_allocations_are_not():
    rows = torch.ones(4, 6)
    with OperatorCount() as count:
        rows.t()[:2].reshape(-1, 2).contiguous()  # rows of a transposed matrix are copied
        torch.empty(3)
        (rows + 1).sum().item()
    assert count.calls == {"aten.clone": 1, "aten.add": 1, "aten.sum": 1}
    assert count.moved == {"aten.clone": 2 * 4 * 8, "aten.add": 2 * 4 * 24, "aten.sum": 4 * 25}
    assert count.reads == {"aten._local_scalar_dense": 1}


def test_a_decode_step_as_cuda_runs_it():
    assert operator_counts.decode_counts() == Counts(layer=13, rest=3)
    assert not operator_counts.decode_operators(1).reads


@pytest.mark.skipif(not platform.packs_matrices(torch.bfloat16), reason="no packed bfloat16 on this processor")
def test_a_decode_step_by_packed_matrices_copies_no_heads_apart():
    # Neither the copies of query, key and value, nor a product for `w3`; two copies are for the norms of heads.
    assert operator_counts.decode_counts(packed=True) == Counts(layer=21, rest=3)


@pytest.mark.parametrize("checkpoint, layer", [("none", 132), ("selective", 163), ("full", 167)])
def test_a_training_step(process_group, checkpoint, layer):
    counts = operator_counts.training_counts(checkpoint)
    assert counts["forward"].layer == 57 and counts["forward"].rest <= 50
    assert counts["microbatch"].layer == layer and counts["microbatch"].rest <= 151
    assert counts["step"].layer == 0 and counts["step"].rest <= 17  # one operator for all parameters


@pytest.mark.parametrize("loss", [losses.importance_sampling, losses.ppo, losses.cispo, losses.gspo, losses.sapo])
@pytest.mark.parametrize("attention", ["varlen", "sdpa"])
def test_the_host_waits_after_the_last_microbatch_alone(loss, attention):
    host = operator_counts.training_reads([microbatch(2, 32, 128)] * 3, loss, attention)
    numbers, *rows = host.reads
    assert numbers == "tolist at model/train_step.py:accumulate_gradients"
    assert rows == ["cpu at model/train_step.py:add_rows"] * 3
    assert host.uploads == []


def test_a_read_is_listed():
    numbers = torch.ones(3, device="meta")
    with HostReads() as host:
        assert float(numbers.sum()) == 0.0 and numbers.tolist() == [0.0] * 3
        numbers[numbers > 0].cpu()
        torch.ones(2).to("meta")
        torch.ones(2).to("meta", non_blocking=True)
    kinds = [read.partition(" ")[0] for read in host.reads]
    assert kinds == ["__float__", "tolist", "mask", "cpu"] and len(host.uploads) == 1


def test_where_documents_end_is_what_torchtitan_reads_from_positions():
    from torchtitan.models.common.attention import create_varlen_metadata_for_document

    lengths = [3, 1, 7]
    expected = create_varlen_metadata_for_document(torch.cat([torch.arange(n) for n in lengths])[None])
    actual = varlen_metadata(lengths, "cpu")
    for one, other in ((actual.cu_seq_q, expected.cu_seq_q), (actual.cu_seq_k, expected.cu_seq_k)):
        assert one.dtype == other.dtype and torch.equal(one, other)
    assert actual[2:] == expected[2:]

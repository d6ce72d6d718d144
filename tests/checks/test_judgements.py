"""Judgements of measurements that this machine cannot make: many nodes, GPUs, a faulty network."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch

from pipeline.checks.checklist import refuse_faults
from pipeline.checks.preflight.all_reduce import Link, judge_all_reduce
from pipeline.checks.preflight.findings import Fault, Finding
from pipeline.checks.preflight.matrix_products import Product, judge_products, measure_product
from pipeline.checks.preflight.memory import AvailableMemory, judge_memory
from pipeline.errors import PreflightError
from pipeline.files.hashes import SAMPLE_BYTES, sampled_hash
from pipeline.parallel.topology import Layout
from pipeline.sizing.cluster import GIB
from pipeline.sizing.host_memory import available_memory, machine_memory

EIGHT = ["a"] * 4 + ["b"] * 4
SOUND = Product(None, 0.010)


def faults_of(finding: Finding) -> list[str]:
    return [fault.text for fault in finding.faults]


def judged(
    products: list[Product], slow_factor: float | None, nodes: Sequence[str] = EIGHT
) -> Finding:
    return judge_products(products, nodes, "cuda", slow_factor)


def test_a_slow_node_is_compared_with_the_others_and_refused_on_request():
    products = [SOUND] * 4 + [Product(None, 0.020)] * 4
    (fault,) = judged(products, 1.5).faults
    assert fault.node == "b"
    assert "2.0 times as long as elsewhere, expected at most 1.5" in fault.text
    assert not judged(products, 2.5).faults
    named = judged(products, None)
    assert not named.faults and re.search(
        r"the slowest, rank \d on b: .* 2.00 times the others' time", named.measured
    )
    assert not judged([SOUND], 1.01, ["a"]).faults


def test_one_option_excludes_two_broken_nodes():
    finding = judged(
        [
            Product("has 3 wrong elements of 9", 0.01),
            *[SOUND] * 6,
            Product("failed: ECC error", 0.0),
        ],
        1.5,
    )
    assert [fault.node for fault in finding.faults] == ["a", "b"]
    with pytest.raises(PreflightError, match=r"^preflight: 2 fault\(s\): .* --exclude=a,b$"):
        refuse_faults([finding])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_exact_in_every_dtype(dtype):
    assert measure_product(dtype, torch.device("cpu")).wrong is None


def test_a_group_with_a_wrong_or_slow_sum_is_named():
    groups = Layout(8, 4).dp_groups()
    links = [Link(None, 20.0)] * 8
    links[5] = Link("a wrong sum", 20.0)
    links[2] = Link(None, 0.1)
    wrong, slow = faults_of(judge_all_reduce("data-parallel", links, groups, EIGHT, 0.5))
    assert wrong.startswith(
        "all-reduce over the data-parallel group of ranks 1, 5 (a, b): a wrong sum on rank(s) 5 (b)"
    )
    assert slow.startswith(
        "all-reduce over the data-parallel group of ranks 2, 6 (a, b): 0.1 GB/s, "
        "expected at least 0.5"
    )


def test_the_smallest_and_the_fullest_gpu_count():
    assert 0 < available_memory() <= machine_memory() < 2**50
    memory = AvailableMemory(free=70 * GIB, usable=72 * GIB, host=100 * GIB)
    assert not judge_memory(60 * GIB, 0, [memory] * 8, EIGHT).faults
    (small,) = faults_of(
        judge_memory(60 * GIB, 0, [*[memory] * 7, memory._replace(usable=36 * GIB)], EIGHT)
    )
    assert small.startswith("a rank needs 60.00 of the 36.00 GiB that are usable on a GPU of b")
    (full,) = judge_memory(
        60 * GIB, 0, [memory, memory._replace(free=GIB), *[memory] * 6], EIGHT
    ).faults
    assert full == Fault(
        "rank 1 on a: 1.00 GiB of its GPU are free, expected 60.00: another process holds the rest",
        "a",
        transient=True,
    )
    (host,) = faults_of(judge_memory(GIB, 200 * GIB, [memory] * 8, EIGHT))
    assert "needs 200.00 GiB of host memory, found 100.00" in host


def test_the_sampled_hash_covers_size_ends_and_blocks(tmp_path):
    file, content = tmp_path / "weights", bytearray(100 * SAMPLE_BYTES)
    file.write_bytes(content)
    whole = sampled_hash(file, 8)
    for at in (0, len(content) - 1, 14 * SAMPLE_BYTES + 600):
        changed = content.copy()
        changed[at] = 1
        file.write_bytes(changed)
        assert sampled_hash(file, 8) != whole
    file.write_bytes(content[:-1])
    assert sampled_hash(file, 8) != whole
    file.write_bytes(content)
    assert sampled_hash(file, 8) == whole

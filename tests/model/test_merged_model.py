"""Widths of ordinary models that servers can split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pipeline.model.from_hf import read_spec
from pipeline.model.merged_model import (
    describe_serving,
    describe_splitting,
    padded_widths,
    split_unsupported_reason,
)
from pipeline.scale.plan import Widths

ROOT = Path(__file__).parents[2]


@given(
    kv_heads=st.integers(1, 40),
    group=st.sampled_from([1, 2, 4, 7]),
    head_dim=st.sampled_from([8, 64, 80, 128]),
    hidden_size=st.integers(1, 6000),
    intermediate_size=st.integers(1, 20000),
    tp=st.sampled_from([1, 2, 3, 8]),
    gguf=st.booleans(),
    derives_head_dim=st.booleans(),
)
def test_padded_widths_fit(
    kv_heads, group, head_dim, hidden_size, intermediate_size, tp, gguf, derives_head_dim
):
    given_widths = Widths(hidden_size, intermediate_size, group * kv_heads, kv_heads)
    needed = tp, 256 if gguf else 1
    found = padded_widths(given_widths, head_dim, *needed, derives_head_dim=derives_head_dim)
    heads, kv = found.num_attention_heads, found.num_key_value_heads
    assert heads == group * kv and kv >= kv_heads
    assert found.hidden_size >= hidden_size and found.intermediate_size >= intermediate_size
    assert found.hidden_size % heads == 0 and found.intermediate_size % tp == 0
    assert heads % tp == 0 and (kv % tp == 0 or tp % kv == 0)
    if gguf:
        assert all(
            row % 256 == 0 for row in (found.hidden_size, found.intermediate_size, heads * head_dim)
        )
    if derives_head_dim:
        assert found.hidden_size == heads * head_dim
    # Widths that fit are left as they are.
    assert padded_widths(found, head_dim, *needed, derives_head_dim=derives_head_dim) == found


def test_widths_that_two_gpus_cannot_split_are_told_with_the_remedy():
    spec = read_spec(ROOT / "configs" / "bases" / "llama-3.2-1b.json")
    assert describe_splitting(None, spec, 2) == "a merged export splits by tp 2, as its base"
    assert describe_splitting(Widths(512, 1024, 32, 8), spec, 2).startswith(
        "a merged export: split by tp 1, 2, 4, 8;"
    )
    assert describe_splitting(Widths(256, 1025, 4, 1), spec, 2) == (
        "CANNOT BE SERVED AT TP 2 as it is: 9 key/value heads, 9217 channels of the FFN do not "
        "divide; choose now hidden_size 272, intermediate_size 1026, num_attention_heads 8 in "
        "method.expansion, or pad with zeros later (scale-cpt convert --tensor-parallel-size 2)"
    )
    odd = replace(spec, widths=Widths(64, 9, 3, 3))
    assert describe_splitting(None, odd, 2) == (
        "CANNOT BE SERVED AT TP 2, nor can the base: 3 query heads, 3 key/value heads, "
        "9 channels of the FFN do not divide"
    )


@given(
    kv_heads=st.integers(1, 20),
    group=st.sampled_from([1, 2, 7]),
    intermediate_size=st.integers(1, 2000),
    tp=st.sampled_from([2, 4, 8]),
)
def test_padded_widths_are_those_that_servers_split(kv_heads, group, intermediate_size, tp):
    widths = Widths(64, intermediate_size, group * kv_heads, kv_heads)
    padded = padded_widths(widths, 8, tp, 1, derives_head_dim=False)
    assert split_unsupported_reason(padded, tp) is None
    unpadded = padded_widths(widths, 8, 1, 1, derives_head_dim=False)
    assert (padded == unpadded) == (split_unsupported_reason(unpadded, tp) is None)


def test_what_servers_make_of_widths_is_told():
    spec = read_spec(ROOT / "configs" / "bases" / "llama-3.2-1b.json")
    assert describe_serving(Widths(256, 1024, 4, 1), spec) == (
        "split by tp 1; GGUF's K-quants: whole; for both up to tp 8 add hidden_size 256, intermediate_size 1024, "
        "num_attention_heads 32"
    )
    assert (
        describe_serving(Widths(512, 1024, 32, 8), spec)
        == "split by tp 1, 2, 4, 8; GGUF's K-quants: whole"
    )

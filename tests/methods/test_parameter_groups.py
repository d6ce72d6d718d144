"""Groups of parameters: which factor each gets, and what is refused."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipeline.config.schedule import Schedule
from pipeline.errors import ConfigError
from pipeline.methods.parameter_groups import (
    KINDS,
    GroupRow,
    block_kind,
    factors_by_name,
    group_lines,
    group_rows,
    trained_groups,
)
from pipeline.model.decoder import is_layer_matrix

NAMES = {
    "embedding.expansion.weight": "embedding",
    "embedding.new_rows.weight": "new_tokens",
    "layers.0.attention_norm.expansion.weight": "norm",
    "layers.1.attention.query_norm.expansion.weight": "norm",
    "layers.0.attention.query.base_to_expansion.weight": "base_to_expansion",
    "layers.1.attention.query.expansion_to_base.weight": "expansion_to_base",
    "layers.1.attention.output.expansion_to_base.weight": "expansion_to_base",
    "layers.1.attention.output.base.weight": "base",
    "layers.1.ffn.down.expansion_to_expansion.weight": "expansion_to_expansion",
    "layers.1.ffn.down.base.weight": "base",
    "layers.1.ffn.base.router.weight": "router",
    "layers.1.attention.value.adapter.a": "adapter",
    "final_norm.base.weight": "norm",
    "output.expansion": "output",
    "output.new_rows": "new_tokens",
    "own_input.rows.weight": "open_rows",
    "output.own_rows": "open_rows",
    "layers.1.ffn_norm.own.weight": "open_gains",
    "final_norm.own.bias": "open_gains",
}
PATTERNS = ("layers.*", "layers.1.*", "*.weight", "output.*", "embedding.expansion.weight")


def schedule(**settings: object) -> Schedule:
    return Schedule.model_validate(
        {"steps": 1, "global_batch_size": 1, "micro_batch_size": 1, "learning_rate": 1.0} | settings
    )


def test_the_kinds_of_all_names():
    assert {name: block_kind(name) for name in NAMES} == NAMES
    assert set(NAMES.values()) == set(KINDS)


@given(
    st.dictionaries(
        st.sampled_from((*KINDS, *PATTERNS)), st.floats(0.01, 10, allow_nan=False), max_size=5
    )
)
def test_the_last_key_that_matches_counts(factors: dict[str, float]):
    found = factors_by_name(NAMES, factors, setting="learning_rate_factors")
    for name, factor in found.items():
        expected = 1.0
        for key, own in factors.items():
            if key == NAMES[name] or fnmatchcase(name, key):
                expected = own
        assert factor == expected


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("layers.7.*", "a pattern of names such as 'embedding.expansion.*'"),
        ("expansion_to_bas", "did you mean expansion_to_base?"),
    ],
)
def test_a_key_that_matches_nothing_is_refused_by_name(key: str, hint: str):
    with pytest.raises(
        ConfigError, match=rf"schedule\.weight_decay_factors: '{re.escape(key)}'.*{re.escape(hint)}"
    ):
        factors_by_name(NAMES, {key: 2.0}, setting="weight_decay_factors")


def test_every_parameter_is_in_one_group_and_vectors_do_not_decay():
    model = nn.Module()
    for name in NAMES:
        *path, last = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        shape = (2,) if name == "final_norm.base.weight" else (2, 2)
        module.register_parameter(last, nn.Parameter(torch.zeros(shape)))
    groups = trained_groups(
        model,
        schedule(
            optimizer="muon",
            weight_decay=0.1,
            learning_rate_factors={"base": 0.5},
            weight_decay_factors={"*": 2.0, "output": 0.0},
        ),
    )
    assert sorted(name for group in groups for name in group.names) == sorted(NAMES)
    by_name = {name: group for group in groups for name in group.names}
    of_muon = {name for name, group in by_name.items() if group.optimizer == "muon"}
    assert of_muon == {name for name in NAMES if is_layer_matrix(name, torch.zeros(2, 2))}
    assert [group.optimizer for group in groups] == sorted(
        (group.optimizer for group in groups), reverse=True
    )
    base = by_name["layers.1.ffn.down.base.weight"]
    assert base.optimizer == "muon"
    assert base.learning_rate_factor == 0.5 and base.weight_decay == 0.2
    decay = {name: group.weight_decay for group in groups for name in group.names}
    assert decay["final_norm.base.weight"] == 0.0 and decay["output.expansion"] == 0.0
    assert decay["embedding.expansion.weight"] == 0.2


def test_the_table_counts_what_each_key_decides():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])
    model.output = nn.Linear(2, 5, bias=False)
    model.embedding = nn.Embedding(5, 2).requires_grad_(False)
    rows = group_rows(
        model,
        schedule(
            learning_rate=0.5,
            weight_decay=0.1,
            optimizer="muon",
            learning_rate_factors={"base": 0.5, "layers.1.*": 2.0},
            weight_decay_factors={"output": 0.0},
        ),
    )
    assert rows == [
        GroupRow(None, "base", 1, 12, 0.25, 0.1, "muon"),
        GroupRow(None, "layers.1.*", 1, 12, 1.0, 0.1, "muon"),
        GroupRow(None, "base", 1, 3, 0.25, 0.0, "adamw"),
        GroupRow(None, "layers.1.*", 1, 3, 1.0, 0.0, "adamw"),
        GroupRow(None, "output", 1, 10, 0.5, 0.0, "adamw"),
    ]
    head, first, *_ = group_lines(rows)
    assert head.split() == ["group", "tensors", "parameters", "peak", "rate", "decay", "optimizer"]
    assert first.split() == ["base", "1", "12", "0.25", "0.1", "muon"]

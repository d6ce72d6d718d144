"""Mistakes in a configuration's YAML that a lenient reader would pass over."""

from __future__ import annotations

import os

import pytest
import yaml

from pipeline.config.reading import read_yaml
from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from tests.training.runs import write_config


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"schedule__steps": True}, "schedule: steps: expected neither true nor false"),
        ({"schedule__betas": [0.9, True]}, "schedule: betas: expected neither true nor false"),
        ({"data__replay_fraction": True}, "data: replay_fraction: expected neither true nor false"),
        ({"method__expansion__hidden_size": True}, "hidden_size: expected neither true nor false"),
        ({"data__replay_fraction": 1.0}, "leave no sample of the role new"),
    ],
)
def test_a_value_of_another_kind_is_a_fault(tmp_path, changes, fault):
    with pytest.raises(ConfigError, match=fault):
        load_config(write_config(tmp_path, tmp_path, **changes))


def test_a_flag_is_still_true_or_false(tmp_path):
    config = load_config(write_config(tmp_path, tmp_path, data__document_mask=False, preflight__enabled=True))
    assert not config.data.document_mask
    assert config.preflight.enabled


def test_a_key_that_is_given_twice_is_a_fault(tmp_path):
    path = write_config(tmp_path, tmp_path)
    path.write_text(path.read_text() + "\nseed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match="the key seed is given twice in one section"):
        load_config(path)


def test_anchors_and_merged_keys_are_read(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  y: 3\n")
    assert read_yaml(path) == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}}


@pytest.mark.timeout(30)
def test_what_is_no_regular_file_ends_in_one_line(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "deep.yaml").write_text("[" * 100_000)
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff\n")
    (tmp_path / "list.yaml").write_text(yaml.safe_dump([1]))
    for name in ("fifo", "deep.yaml", "bytes.yaml", "list.yaml", "none.yaml", "."):
        with pytest.raises(ConfigError) as error:
            load_config(tmp_path / name)
        assert "\n" not in str(error.value)

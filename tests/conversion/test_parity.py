"""The base is compared with what transformers makes of it, before anything is made of it."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace

import pytest

from pipeline.conversion.parity import check_against_transformers
from pipeline.errors import BaseModelError
from pipeline.model.from_hf import open_base
from tests.bases import STORIES, save_base

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def mixed(tmp_path):
    """A base whose layers are of two kinds, with stories260K's tokenizer."""
    path = save_base("exaone4", tmp_path / "base", vocab_size=512, num_hidden_layers=4, layer_types=None)
    shutil.copy(STORIES / "tokenizer.json", path)
    shutil.copy(STORIES / "tokenizer_config.json", path)
    return path


@pytest.mark.parametrize(("largest_bytes", "compared"), [(2**30, "4 of 4"), (250_000, "2 of 4")])
def test_a_base_that_is_read_rightly_passes(mixed, largest_bytes, compared, caplog):
    with caplog.at_level(logging.INFO):
        check_against_transformers(open_base(mixed), largest_bytes)
    assert f"({compared} layers)" in caplog.text


def test_a_base_of_which_no_layer_fits_is_not_compared(mixed, caplog):
    with caplog.at_level(logging.INFO):
        check_against_transformers(open_base(mixed), 100_000)
    assert "not compared with transformers" in caplog.text


def test_a_base_that_is_read_otherwise_is_refused(mixed):
    base = open_base(mixed)
    rotary = next(kind.rotary for kind in base.spec.layers if kind.rotary)
    layers = tuple(replace(kind, rotary=rotary) for kind in base.spec.layers)  # the global ones have none
    with pytest.raises(BaseModelError, match=r"differ from those of transformers by .* 'exaone4' is not read rightly"):
        check_against_transformers(replace(base, spec=replace(base.spec, layers=layers)))


def test_weights_that_do_not_fit_are_refused_in_one_line(mixed):
    file = mixed / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 40}))
    with pytest.raises(BaseModelError, match=r"config.json implies"):
        check_against_transformers(open_base(mixed))

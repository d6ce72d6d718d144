"""Whether a run fits its base is found before a rank allocates memory."""

from __future__ import annotations

import pytest

from pipeline.checks.model_fit import check_fits
from pipeline.config.run import load_config
from pipeline.errors import ConfigError
from pipeline.model.from_hf import open_base
from tests.bases import STORIES
from tests.training.runs import write_config

STORIES_SPEC = open_base(STORIES).spec


@pytest.mark.parametrize("changes", [{"method": {"name": "fft"}}, {}], ids=["fft", "scale"])
def test_a_gate_beyond_the_last_layer_is_refused_before_training(changes, tmp_path):
    last = STORIES_SPEC.num_layers
    changes = {"zero": 1, **changes}
    fits = write_config(tmp_path, tmp_path, gate={"layer": last}, **changes)
    check_fits(load_config(fits), STORIES_SPEC)
    beyond = write_config(tmp_path, tmp_path, gate={"layer": last + 1}, **changes)
    with pytest.raises(ConfigError, match=rf"gate\.layer: {last + 1} is beyond {last}"):
        check_fits(load_config(beyond), STORIES_SPEC)

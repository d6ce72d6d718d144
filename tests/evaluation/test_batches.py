"""A text is scored and answered beside others as alone, also where a model's rotary frequencies
change with length."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from pipeline.evaluation.batches import frequencies_of, frequency_context
from pipeline.evaluation.perplexity import _token_nll, _Window, score_folder
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.configuration_difference import DifferenceConfig
from pipeline.hf.remote_code.configuration_scale_hosted import HostedScaleConfig
from tests.bases import CONFIGS
from tests.evaluation.longrope import CONTEXT, text_of, write_longrope
from tests.tolerances import PARITY, assert_near
from tests.widened import some_tokens


@pytest.fixture(scope="module")
def longrope(tmp_path_factory) -> Path:
    return write_longrope(tmp_path_factory.mktemp("longrope") / "base")


def test_where_frequencies_change():
    assert frequency_context(CONFIGS["phi3"]) == CONTEXT
    assert frequency_context(CONFIGS["llama yarn"]) is None is frequency_context(CONFIGS["olmo3"])
    assert frequencies_of(5, 10, None) == frequencies_of(900, 10, None)
    assert (
        frequencies_of(20, 12, CONTEXT)
        == frequencies_of(3, 29, CONTEXT)
        != frequencies_of(21, 12, CONTEXT)
    )
    assert (
        frequencies_of(33, 12, CONTEXT)
        == frequencies_of(90, 0, CONTEXT)
        != frequencies_of(32, 1, CONTEXT)
    )
    assert frequencies_of(31, 9, CONTEXT) != frequencies_of(30, 9, CONTEXT)


def test_where_they_change_is_read_in_the_part_of_a_config_that_describes_text():
    values = CONFIGS["phi3"].to_dict()
    multimodal = CONFIG_MAPPING["llava"](text_config=CONFIGS["phi3"])
    configs = {
        "multimodal": multimodal,
        "difference": DifferenceConfig(text_config=values),
        "hosted": HostedScaleConfig(base_config=values),
        "hosted multimodal": HostedScaleConfig(base_config=multimodal.to_dict()),
    }
    assert {frequency_context(config) for config in configs.values()} == {CONTEXT}
    assert values == CONFIGS["phi3"].to_dict()
    unchanging = CONFIGS["llama"].to_dict()
    assert frequency_context(DifferenceConfig(text_config=unchanging)) is None
    assert frequency_context(HostedScaleConfig(base_config=unchanging)) is None


def test_perplexity_of_a_short_text_beside_a_long_one(longrope):
    short, long = [text_of(8)], [text_of(60)]
    both = score_folder(longrope, {"a": [*short, *long]})["a"]
    apart = [score_folder(longrope, {"a": text})["a"] for text in (short, long)]
    total = sum(score.nll_per_token * score.tokens for score in apart)
    assert both.nll_per_token * both.tokens == pytest.approx(total, rel=1e-6)


def test_windows_of_a_model_in_the_scale_format(exports):
    model = load_hf_model(exports("phi3", "adapt")[0])
    assert frequency_context(model.config) == CONTEXT
    windows = []
    for length in (9, 60, 33, 32):
        windows.append(_Window(some_tokens(model.config, 1, length)[0], length - 1))
    alone = [_token_nll(model, [window], "alone")[0] for window in windows]
    for found, expected in zip(_token_nll(model, windows, "together"), alone, strict=True):
        assert_near(found, expected, PARITY)

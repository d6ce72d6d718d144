"""What a validation decides: a run whose new text gains no more cools down and ends."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.position import CoolDown, Position
from pipeline.checks.inputs import RunInputs
from pipeline.config.run import RunConfig, load_config
from pipeline.errors import RESUME_LATER, ConfigError
from pipeline.observers.early_stop import after_validation
from pipeline.run_folder.status import read_status
from pipeline.training.learning_rate import cooled_rate, learning_rate
from tests.distributed import run_ranks
from tests.training.runs import (
    in_turn,
    make_run,
    metrics,
    train,
    write_config,
)

# Far too high a rate: nothing is learned.
LEARNS_NOTHING: dict[str, Any] = {
    "validation__every_steps": 1,
    "validation__stop_after": 2,
    "validation__cool_down_steps": 4,
    "schedule__steps": 20,
    "schedule__learning_rate": 0.3,
    "schedule__warmup_fraction": 0.0,
    "schedule__decay": "wsd",
    "schedule__final_learning_rate_fraction": 0.1,
    "schedule__gradient_clipping": 1e9,
}


def test_a_run_that_gains_nothing_cools_down_and_ends_also_when_it_is_interrupted(tokens, tmp_path):
    whole = make_run(tmp_path / "whole", tokens, zero=1, **LEARNS_NOTHING)
    parts = make_run(tmp_path / "parts", tokens, zero=1, **LEARNS_NOTHING)
    # A signal comes in the first step of every attempt: each takes one step, those of the cool-down
    # too.
    attempts = [partial(train, parts, stop=True) for _ in range(9)]
    codes, _ = run_ranks(in_turn, 2, [partial(train, whole), partial(train, whole), *attempts])
    lines = metrics(tmp_path / "whole")
    counts = [line["validations_without_gain"] for line in lines[1:]]
    began = counts.index(2) + 1
    last = began + 4
    assert len(counts) == last <= 9, "the second call finds it trained"
    assert codes == [0, 0, *[RESUME_LATER] * (last - 1), *[0] * (10 - last)]
    rates = [line["learning_rate"] for line in lines[1:]]
    final, peak = 0.03, 0.3
    falling = [final + (peak - final) * (1 - done / 4) for done in range(4)]
    assert rates == pytest.approx([*[peak] * began, *falling])

    done = json.loads((tmp_path / "whole" / "training.json").read_text())
    assert done["steps"] == last and done["validation"]["korean"]["perplexity"] > 0
    status = read_status(tmp_path / "whole")
    assert (status.state, status.step) == ("done", last)
    assert status.why.startswith("stopped early: the new text gained no more")
    assert metrics(tmp_path / "parts") == lines
    # Without the setting, the run goes on from there.
    without = ["validation.stop_after=null", "validation.cool_down_steps=0"]
    assert RunInputs(load_config(whole), 2).finished
    assert not RunInputs(load_config(whole, without), 2).finished


def config_with(folder: Path, **changes: Any) -> RunConfig:
    return load_config(write_config(folder, folder, **changes))


def test_what_counts_as_a_gain(tmp_path):
    config = config_with(tmp_path, validation__stop_after=2, validation__cool_down_steps=3)
    position = Position(step=1)
    for step, (score, count) in enumerate(
        [(5.0, 0), (5.0, 1), (4.0, 0), (float("nan"), 1), (4.5, 2)], start=1
    ):
        position = after_validation(position.changed(step=step), [score, score], config)
        assert position.validations_without_gain == count
    assert position.lowest_nll_per_token == 4.0
    rate = learning_rate(5, config.schedule)
    # The schedule ends after 6 steps, before a whole cool-down would.
    assert position.cool_down == CoolDown(5, 6, rate)
    assert position.last_step(config) == 6
    later = after_validation(position.changed(step=6), [9.0], config)
    assert later.cool_down == position.cool_down, "it is decided once"
    assert cooled_rate(rate, position, config) == rate
    without = config_with(tmp_path / "without")
    assert cooled_rate(rate, position, without) == rate and position.last_step(without) == 6


def test_without_a_cool_down_it_ends_at_once(tmp_path):
    config = config_with(tmp_path, validation__stop_after=1)
    position = Position(step=3, lowest_nll_per_token=1.0)
    assert after_validation(position, [1.0], config).last_step(config) == 3


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"validation__cool_down_steps": 5}, "cool_down_steps: belongs to stop_after"),
        ({"validation__tasks_folder": "tasks"}, "tasks_folder: belongs to tasks"),
        ({"validation__prompts": ["a", " "]}, "prompts: expected texts, found an empty one"),
        ({"validation__probe": "french"}, "validation.probe: french is no corpus with"),
        (
            {"validation__probe": "korean", "method": {"name": "fft"}},
            "validation.probe: method fft keeps no base",
        ),
        (
            {
                "validation__stop_after": 2,
                "stages": [{"name": "one", "steps": 2}, {"name": "two", "steps": 4}],
            },
            "validation.stop_after: not possible with `stages`",
        ),
        (
            {
                "validation__stop_after": 2,
                "data__corpora__korean": {"input": ["a.jsonl"]},
            },
            "validation.stop_after: needs a corpus of role new with a held-out part",
        ),
    ],
)
def test_settings_without_effect_are_refused(changes, fault, tmp_path):
    with pytest.raises(ConfigError, match=fault.replace(".", r"\.")):
        config_with(tmp_path, **changes)

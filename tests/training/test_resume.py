"""A run that is stopped or killed goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import json

import pytest

from pipeline.errors import RESUME_LATER
from pipeline.run_folder import attempts
from pipeline.run_folder.attempts import read_attempts
from tests.distributed import RankError, run_ranks
from tests.training.runs import KILL_POINTS, STEPS, losses, make_run, metrics, train


@pytest.fixture(scope="module")
def undisturbed(tokens, tmp_path_factory):
    """The figures of a run that nothing befell, by ZeRO stage."""
    made = {}

    def run(zero: int) -> list[dict[str, float]]:
        if zero not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            assert run_ranks(train, 2, make_run(folder, tokens, zero=zero)) == [0, 0]
            made[zero] = metrics(folder)
        return made[zero]

    return run


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_signal_saves_and_the_same_command_goes_on(tokens, tmp_path, undisturbed, zero):
    config = make_run(tmp_path, tokens, zero=zero)
    assert run_ranks(_stopped_in_the_first_step, 2, config) == [RESUME_LATER] * 2
    assert len(losses(tmp_path)) == 1
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step_00000001"
    assert not (tmp_path / "training.json").exists()

    assert run_ranks(train, 2, config) == [0, 0]
    assert metrics(tmp_path) == undisturbed(zero)


def _stopped_in_the_first_step(config):
    return train(config, stop=True)


@pytest.mark.parametrize("point", KILL_POINTS)
def test_a_kill_during_a_save_loses_nothing_that_was_saved(tokens, tmp_path, undisturbed, point):
    config = make_run(tmp_path, tokens, zero=1, checkpoints={"every_steps": 2, "keep_last": 1})
    with pytest.raises(RankError, match="died without a word"):
        run_ranks(_killed, 2, config, point)
    saved = (tmp_path / "checkpoints" / "latest").read_text().strip()
    assert saved == ("step_00000004" if point == "before the old one is removed" else "step_00000002")

    assert run_ranks(train, 2, config) == [0, 0]
    assert metrics(tmp_path) == undisturbed(1)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["latest", f"step_{STEPS:08d}"], "stale folders are left"


def _killed(config, point):
    return train(config, kill_at=point)


def test_a_finished_run_is_left_alone(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, schedule__steps=1)
    assert run_ranks(train, 1, config) == [0]
    before = _written(tmp_path)
    summary = json.loads((tmp_path / "training.json").read_text())
    assert summary["steps"] == 1
    assert summary["step0_max_abs_logit_difference"] == 0.0
    assert summary["optimizer_state_elements"] == 2 * summary["trainable_parameters"]

    assert run_ranks(train, 1, config) == [0]
    assert before == _written(tmp_path)
    ends = [one.ended for one in read_attempts(tmp_path)]
    assert [end.exit_code for end in ends if end] == [0, 0], "the attempt that found nothing to do is on record"


def _written(folder):
    """When each file of a run was last written, but for the record of the attempts."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != attempts.NAME)
    return {path: path.stat().st_mtime_ns for path in files}


def test_training_longer_goes_on_from_the_end(tokens, tmp_path):
    config = make_run(tmp_path, tokens, zero=1, schedule__steps=1)
    assert run_ranks(train, 1, config) == [0]
    longer = make_run(tmp_path, tokens, zero=1, schedule__steps=3, upscaled=str(tmp_path / "upscaled"))
    assert run_ranks(train, 1, longer) == [0]
    assert len(losses(tmp_path)) == 3
    assert json.loads((tmp_path / "training.json").read_text())["steps"] == 3

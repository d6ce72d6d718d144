"""A run in stages: boundaries, what is frozen in one, and that it resumes to the bit anywhere."""

from __future__ import annotations

import gc
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipeline.checkpoint.rank_files import CheckpointReader
from pipeline.checkpoint.trained_model import open_trained
from pipeline.checks.checklist import check_stage
from pipeline.checks.dry_run.make_plan import make_plan
from pipeline.config.run import load_config
from pipeline.config.sources import read_settings
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.extension.vocabulary import learn_extension, write_extension
from pipeline.errors import RESUME_LATER, CheckpointError
from pipeline.expansion_folder import open_expansion
from pipeline.run_folder.status import as_text, read_status
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from pipeline.sizing.report import report
from pipeline.training.launch import StopSignals
from tests.bases import STORIES
from tests.distributed import RankError, run_ranks
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.faults import Planned, train_with, train_without
from tests.training.journeys import METHODS, OWN_WEIGHTS
from tests.training.runs import (
    in_turn,
    losses,
    make_run,
    metrics,
    prepared,
    tokenize_corpora,
    train,
    trained,
    write_config,
)

ROUNDING = 2**7 * 2**-24
WEIGHT_TOLERANCE = 0.005
"""As in tests/training/test_journeys.py: a share of the way that a parameter goes."""
# The output rows train, rest, and train again; all else begins in the last stage.
STAGES = [
    {"name": "rows", "steps": 2, "trains": ["output"], "decay": "cosine", "replay_fraction": 0.0},
    {
        "name": "maps",
        "steps": 2,
        "trains": ["expansion_to_base", "norm"],
        "sequence_length": 16,
        "global_batch_size": 4,
        "learning_rate": 1e-3,
    },
    {"name": "all", "steps": 3, "weights": {"english": 2.0}, "passage_steps": 2},
]
STEPS = 7
SETTINGS: dict[str, Any] = {
    "stages": STAGES,
    "schedule__steps": STEPS,
    "checkpoints": {"every_steps": 1, "keep_last": STEPS},
}


def cut_back(run: Path, to: Path, step: int) -> None:
    """A copy of a finished run, as it was when `step` steps were saved."""
    shutil.copytree(run, to)
    checkpoints = to / "checkpoints"
    for later in range(step + 1, STEPS + 1):
        shutil.rmtree(checkpoints / f"step_{later:08d}")
    (checkpoints / "latest").write_text(f"step_{step:08d}\n")
    (to / "training.json").unlink()


def rank_files(run: Path, step: int = STEPS) -> dict[str, bytes]:
    folder = run / "checkpoints" / f"step_{step:08d}"
    return {path.name: path.read_bytes() for path in folder.glob("rank_*")}


@pytest.mark.parametrize(
    ("ranks", "zero", "optimizer"),
    [(1, 1, "adamw"), (2, 2, "muon"), (2, 3, "adamw")],
)
def test_a_run_in_stages_resumes_to_the_bit_at_every_step(tokens, tmp_path, ranks, zero, optimizer):
    settings = {**SETTINGS, "zero": zero, "schedule__optimizer": optimizer}
    config = make_run(tmp_path / "run", tokens, **settings)
    assert run_ranks(train, ranks, config) == [0] * ranks
    unbroken = rank_files(tmp_path / "run")
    lines = metrics(tmp_path / "run")
    assert [line["stage"] for line in lines[1:]] == [1, 1, 2, 2, 3, 3, 3]

    jobs = []
    for step in range(1, STEPS):
        folder = tmp_path / f"from {step}"
        cut_back(tmp_path / "run", folder, step)
        jobs.append(partial(train, config, changes=[f"folder={folder}"]))
    results = run_ranks(in_turn, ranks, jobs)
    assert results == [[0] * len(jobs)] * ranks
    for step in range(1, STEPS):
        assert rank_files(tmp_path / f"from {step}") == unbroken, step
        assert metrics(tmp_path / f"from {step}") == lines, step


def go_back_over_a_border_and_finish(config: Path) -> str:
    """Trains to the end, goes back to the state after step 1, and trains to the end again."""
    trainer = prepared(config)
    trainer.train(StopSignals())
    names = [trainer.stage.name]
    position = trainer.checkpoints.resume(trainer._engine_after, before=2)
    assert position is not None and position.step == 1
    names.append(trainer.stage.name)
    trainer.position = position
    trained(trainer)
    names.append(trainer.stage.name)
    return " ".join(names)


def test_a_rollback_may_cross_a_stage_boundary(tokens, tmp_path):
    settings = {**SETTINGS, "zero": 3}
    config = make_run(tmp_path / "run", tokens, **settings)
    again = make_run(tmp_path / "again", tokens, **settings)
    jobs = [partial(train, config), partial(go_back_over_a_border_and_finish, again)]
    assert run_ranks(in_turn, 2, jobs) == [[0, "all rows all"]] * 2
    assert rank_files(tmp_path / "again") == rank_files(tmp_path / "run")


SPIKES = [
    {"name": "rows", "steps": 3, "trains": ["output"]},
    {"name": "all", "steps": 6, "weights": {"english": 2.0}},
]


def test_a_spike_rolls_back_to_the_stage_boundary_and_a_kill_does_not_forget_it(tokens, tmp_path):
    settings = {
        "zero": 1,
        "stages": SPIKES,
        "schedule__steps": 9,
        "checkpoints__every_steps": 100,
        "stability": {"window": 2, "spike_steps": 2, "loss_increase": 1.0},
    }
    killed, without = (
        make_run(tmp_path / name, tokens, **settings) for name in ("killed", "without")
    )
    # Batches count from the beginning of their stage: these are steps 7, 8 and 9.
    planned = [Planned("bad batch", step, times=9) for step in (4, 5)]
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(train_with, 1, killed, *planned, Planned("death", 6, times=9))
    latest = (tmp_path / "killed" / "checkpoints" / "latest").read_text().strip()
    assert latest == "step_00000003", "the only save is the border's"
    jobs = [partial(train, killed), partial(train_without, without, 6, 7, 8)]
    assert run_ranks(in_turn, 1, jobs) == [[0, None]]
    found = metrics(tmp_path / "killed")
    assert {line.pop("rollbacks", 0) for line in found} == {0, 1}
    assert found == metrics(tmp_path / "without")


def train_with_a_damaged_border(config: Path) -> None:
    """Trains a run whose checkpoint at the first border is damaged as soon as it is saved."""
    trainer = prepared(config)
    save = trainer.checkpoints.save
    damaged = []

    def save_and_damage(engine, position, *, required):
        save(engine, position, required=required)
        if position.step == 2 and not damaged:
            folder = trainer.checkpoints.folder / "step_00000002"
            os.truncate(folder / "rank_00000.safetensors", 100)
            damaged.append(folder)

    with patch.object(trainer.checkpoints, "save", save_and_damage):
        trained(trainer)


def test_a_damaged_stage_boundary_repeats_its_steps_and_reports_each_once(tokens, tmp_path):
    whole = make_run(tmp_path / "whole", tokens, zero=1, **SETTINGS)
    broken = make_run(tmp_path / "broken", tokens, zero=1, **SETTINGS)
    jobs = [partial(train, whole), partial(train_with_a_damaged_border, broken)]
    assert run_ranks(in_turn, 1, jobs) == [[0, None]]
    assert (tmp_path / "broken" / "checkpoints" / "step_00000002.damaged").exists()
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")
    assert rank_files(tmp_path / "broken") == rank_files(tmp_path / "whole")


def test_a_kill_while_a_stage_boundary_is_saved_changes_nothing(tokens, tmp_path):
    settings = {**SETTINGS, "zero": 2, "checkpoints": {"every_steps": 100}}
    undisturbed = make_run(tmp_path / "undisturbed", tokens, **settings)
    killed = make_run(tmp_path / "killed", tokens, **settings)
    kill = partial(train, kill_at="before the folder is renamed")
    with pytest.raises(RankError, match="died without a result"):
        run_ranks(kill, 2, killed)
    latest = (tmp_path / "killed" / "checkpoints" / "latest").read_text().strip()
    assert latest == "step_00000002", "the border before the one that was being saved"
    jobs = [partial(train, undisturbed), partial(train, killed)]
    assert run_ranks(in_turn, 2, jobs) == [[0, 0]] * 2
    assert rank_files(tmp_path / "killed") == rank_files(tmp_path / "undisturbed")
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "undisturbed")


def reader_of(config: Path, step: int) -> CheckpointReader:
    folder = load_config(config).checkpoint_folder / f"step_{step:08d}"
    return open_trained(folder, STORIES).reader


def test_what_is_frozen_in_a_stage_keeps_its_weights_moments_and_count(tokens, tmp_path):
    config = make_run(tmp_path / "run", tokens, zero=1, **SETTINGS)
    assert run_ranks(train, 1, config) == [0]
    readers = {step: reader_of(config, step) for step in (1, 2, 4, 5, STEPS)}
    kinds = ("fp32", "exp_avg", "exp_avg_sq")
    frozen_in_2, begins_in_2, begins_in_3 = (
        "output.expansion",
        "layers.3.attention.output.expansion_to_base.weight",
        "layers.0.attention.output.expansion_to_expansion.weight",
    )
    for kind in kinds:
        kept = [readers[step].read(frozen_in_2, kind) for step in (2, 4)]
        assert torch.equal(*kept), "it is frozen from step 2 to step 4"
        assert not torch.equal(readers[5].read(frozen_in_2, kind), kept[0])
    initial = open_expansion(load_config(config).initial_expansion_folder)
    for name in (begins_in_2, begins_in_3):
        written = torch.equal(readers[1].read(name), readers[2].read(name))
        assert written, "a checkpoint holds what has not trained yet"
    found = readers[2].read(begins_in_3)
    assert torch.equal(found, initial.read(begins_in_3, tuple(found.shape)).float())
    counts = {}
    for name in (frozen_in_2, begins_in_2, begins_in_3):
        counts[name] = [int(reader.adam_step(name)) for reader in readers.values()]
    assert counts[frozen_in_2] == [1, 2, 2, 3, 5]
    assert counts[begins_in_2] == [0, 0, 2, 3, 5]
    assert counts[begins_in_3] == [0, 0, 0, 1, 3]
    # Bias correction of its own: Adam's first step moves by the rate, whatever the gradient.
    rate = metrics(tmp_path / "run")[5]["learning_rate"]
    moved = readers[5].read(begins_in_3) - readers[4].read(begins_in_3)
    assert moved.abs().max() == pytest.approx(rate, rel=1e-3)


CONSTANT: dict[str, Any] = {
    "schedule__decay": "wsd",
    "schedule__decay_fraction": 0.0,
    "schedule__warmup_fraction": 0.0,
    "schedule__steps": 4,
    "checkpoints": {"every_steps": 100},
}


def test_stages_that_change_nothing_change_nothing(tokens, tmp_path):
    """Two stages with equal settings are one: in weights, moments, data and figures."""
    stages = [{"name": "first", "steps": 2}, {"name": "second", "steps": 2}]
    one = make_run(tmp_path / "one", tokens, zero=2, **CONSTANT)
    two = make_run(tmp_path / "two", tokens, zero=2, **CONSTANT, stages=stages)
    assert run_ranks(in_turn, 2, [partial(train, one), partial(train, two)]) == [[0, 0]] * 2
    expected, found = reader_of(one, 4), reader_of(two, 4)
    for name in expected.names:
        assert int(found.adam_step(name)) == 4
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            assert torch.equal(found.read(name, kind), expected.read(name, kind)), name
    lines = metrics(tmp_path / "two")
    for line in lines:
        line.pop("stage", None)
        if line["step"] == 2:  # a stage ends with a validation
            for key in [key for key in line if "/" in key]:
                del line[key]
    assert lines == metrics(tmp_path / "one")


def test_at_another_layout_it_trains_the_same(tokens, tmp_path):
    """From one rank under ZeRO-1 to two times two, two of them tensor-parallel, under ZeRO-3."""
    config = make_run(tmp_path / "run", tokens, zero=1, **SETTINGS)
    assert run_ranks(train, 1, config) == [0]
    expected = losses(tmp_path / "run")
    for step in (2, 3):  # at a boundary, and within a stage
        folder = tmp_path / f"from {step}"
        cut_back(tmp_path / "run", folder, step)
        moved = {"parallel": {"tp_size": 2}, "zero": 3, "schedule__micro_batch_size": 1}
        write_config(folder, tokens, name="moved.yaml", **SETTINGS, **moved)
        assert run_ranks(train, 4, folder / "moved.yaml", timeout_s=600) == [0] * 4
        assert losses(folder) == pytest.approx(expected, rel=ROUNDING)
        found, wanted = reader_of(folder / "moved.yaml", STEPS), reader_of(config, STEPS)
        start = reader_of(config, step)
        for name in wanted.names:
            assert int(found.adam_step(name)) == int(wanted.adam_step(name))
            way = torch.linalg.vector_norm(wanted.read(name) - start.read(name))
            difference = torch.linalg.vector_norm(found.read(name) - wanted.read(name))
            assert way > 0 and difference <= WEIGHT_TOLERANCE * way, name


def test_the_run_says_where_it_is(tokens, tmp_path):
    config = make_run(tmp_path / "run", tokens, zero=1, **SETTINGS)
    assert run_ranks(partial(train, stop=True), 1, config) == [RESUME_LATER]
    status = read_status(tmp_path / "run")
    assert (status.step, status.stage, status.tokens_seen) == (1, "1 of 3, rows", 256)
    assert "stage       1 of 3, rows" in as_text(status)
    assert run_ranks(train, 1, config) == [0]
    status = read_status(tmp_path / "run")
    assert (status.stage, status.tokens_seen) == ("3 of 3, all", 2 * 256 + 2 * 64 + 3 * 256)

    [board] = (tmp_path / "run" / "tensorboard").iterdir()
    events = EventAccumulator(str(board))
    events.Reload()
    assert [int(event.value) for event in events.Scalars("stage")] == [1, 1, 2, 2, 3, 3, 3]
    texts = events.Tensors("stage/text_summary")
    assert [(event.step, event.tensor_proto.string_val[0].decode()) for event in texts] == [
        (1, "stage 1 of 3: rows (steps 1 to 2)"),
        (3, "stage 2 of 3: maps (steps 3 to 4)"),
        (5, "stage 3 of 3: all (steps 5 to 7)"),
    ]
    summary = json.loads((tmp_path / "run" / "training.json").read_text())
    whole = open_trained(tmp_path / "run" / "checkpoints" / "step_00000007", STORIES).counts
    assert (summary["trainable_parameters"], summary["total_parameters"]) == whole


def resumed_with(config: Path, folder: Path, number: int, **settings: Any) -> None:
    """Checks that a run resumes, with other settings of one of its stages."""
    stages = [dict(stage) for stage in STAGES]
    stages[number] |= settings
    steps = sum(stage["steps"] for stage in stages)
    changes = [f"folder={folder}", f"stages={json.dumps(stages)}", f"schedule.steps={steps}"]
    check_stage(load_config(config, changes), 1, "train")


def test_what_ended_stays_and_what_is_to_come_may_change(tokens, tmp_path):
    config = make_run(tmp_path / "run", tokens, zero=1, **SETTINGS)
    assert run_ranks(train, 1, config) == [0]
    folder = tmp_path / "within maps"
    cut_back(tmp_path / "run", folder, 3)
    for number, settings in (
        (0, {"learning_rate": 1.0}),
        (1, {"steps": 1}),
        (1, {"steps": 5, "decay": "wsd"}),
        (2, {"trains": "output", "steps": 9, "global_batch_size": 16}),
    ):
        resumed_with(config, folder, number, **settings)
    for number, settings, fault in (
        (0, {"steps": 1}, r"another stages\.rows\.steps \(expected 2, found 1\)"),
        (0, {"steps": 3}, "step 3 was in stage 2 of the run, and would now be in stage 1"),
        (0, {"trains": []}, r"another stages\.rows\.trains"),
        (1, {"sequence_length": 8}, r"another stages\.maps\.sequence_length"),
        (1, {"weights": {"english": 3.0}}, r"another stages\.maps\.weights"),
    ):
        with pytest.raises(CheckpointError, match=fault):
            resumed_with(config, folder, number, **settings)
    changes = [f"folder={folder}", "stages=[]"]
    with pytest.raises(CheckpointError, match="was trained in stages"):
        check_stage(load_config(config, changes), 1, "train")


def test_the_dry_run_lists_the_stages_and_the_estimate_takes_the_largest(tokens, tmp_path):
    config = load_config(make_run(tmp_path / "run", tokens, zero=1, **SETTINGS))
    plan = str(make_plan(config, Cluster(1, on_cpu=True)))
    rows, maps, everything = [line for line in plan.splitlines() if "learning rate 0.00" in line]
    assert "1 rows: 2 steps of 256 tokens; learning rate 0.002 (cosine); trains output: " in rows
    assert "2 maps: 2 steps of 64 tokens; learning rate 0.001 (linear)" in maps
    assert "3 all: 3 steps of 256 tokens" in everything and "after a passage of 2 steps" in plan
    assert "trains everything: " in everything and "replay 25.0% of the samples" in everything
    assert "7, 1,408 tokens in all" in plan

    estimator = open_estimator(config, Cluster(2))
    assert estimator.stage.name == "all"
    text, _ = report(estimator)
    assert "stage       of 3, all (steps 5 to 7), takes the most memory" in text
    memories = [one.memory(one.own_choice)[0] for one in estimator.stages]
    assert max(memory.total for memory in memories) == memories[2].total
    assert memories[0].optimizer < memories[1].optimizer < memories[2].optimizer
    seconds = [one.stage.steps * one.estimate(one.own_choice).step_s for one in estimator.stages]
    assert estimator.run_seconds(estimator.own_choice) == pytest.approx(sum(seconds))


@pytest.mark.parametrize("name", ["demo_stages", "demo_rows_first"])
def test_the_shipped_stages_train_a_vocabulary(tmp_path, name):
    """EEVE's order, and rows first: a step each, with a vocabulary of a few tokens."""
    vocabulary = tmp_path / "vocabulary"
    new = list(texts([str(REVIEWS_HELDOUT)]))
    old = list(texts([str(STORIES_HELDOUT)]))
    learned = learn_extension(STORIES, new[:20], old, add=11, min_uses=5)
    write_extension(learned, vocabulary, lambda _: None)
    shipped = read_settings(Path(__file__).parents[2] / "configs" / f"{name}.yaml", ())["stages"]
    stages = [stage | {"steps": 1} for stage in shipped]
    settings: dict[str, Any] = {
        "vocabulary": {"folder": str(vocabulary)},
        "stages": stages,
        "schedule__steps": len(stages),
        "checkpoints": {"every_steps": 100, "keep_last": 9},
        "zero": 3,
    }
    tokenize_corpora(load_config(write_config(tmp_path / "run", tmp_path / "tokens", **settings)))
    config = make_run(tmp_path / "run", tmp_path / "tokens", **settings)
    assert run_ranks(train, 2, config) == [0, 0]
    readers = [reader_of(config, step) for step in range(1, len(stages) + 1)]
    rows = {"embedding.new_rows.weight", "output.new_rows"}
    # What has trained by the end of each of the first stages; by the end of the last, all has.
    expected = {
        "demo_stages": [{"embedding.new_rows.weight"}, rows, rows],
        "demo_rows_first": [rows],
    }
    for reader, begun in zip(readers, expected[name], strict=False):
        assert {key for key in reader.names if reader.adam_step(key) > 0} == begun
    for key in readers[-1].names:
        assert readers[-1].adam_step(key) > 0, key
    assert json.loads((tmp_path / "run" / "training.json").read_text())["validation"]


def live_bytes() -> int:
    """The bytes of all tensors that Python can reach, each storage once."""
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter) and not found.is_meta:
            for tensor in (found, found.grad, getattr(found, "ds_tensor", None)):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_around_a_border(config: Path) -> tuple[int, int]:
    """The live bytes in the first stage, and after its engine is closed."""
    trainer = prepared(config)
    trainer.take_step(StopSignals())
    before = live_bytes()
    trainer.batches.close()
    trainer.engine.close()
    del trainer.engine
    after = live_bytes()
    return before, after


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_stage_leaves_nothing_in_memory(tokens, tmp_path, zero):
    config = make_run(tmp_path / "run", tokens, **SETTINGS, zero=zero)
    for before, after in run_ranks(bytes_around_a_border, 2, config):
        model = 4 * 260_032 // (2 if zero == 3 else 1)
        assert before > model
        # Batches, probes, tables of rotary angles, and the text of validations.
        assert after < before - 0.9 * model, (before, after)
        assert after < 0.2 * before


OTHER_METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fft, its base's frozen copy beside it": (
        "norm",
        {"method": METHODS["fft"], "zero": 3, "data__replay_loss": "kl"},
    ),
    "lora on four bits": (
        "layers.0.*",
        {"method": METHODS["lora"], "zero": 1, "base_precision": "nf4"},
    ),
    "llama_pro": ("layers.*.ffn.*", {"method": METHODS["llama_pro"], "zero": 2}),
    "route": ("norm", {"method": METHODS["route"], "zero": 3, "data__replay_loss": "kl"}),
    "weights of open tokens": (
        "open_rows",
        {"method": METHODS["adapt"] | OWN_WEIGHTS, "zero": 2, "gate": {}},
    ),
}


@pytest.mark.full
def test_every_method_trains_in_stages_and_resumes_to_the_bit(tokens, tmp_path):
    first: list[partial[int]] = []
    then: list[partial[int]] = []
    for name, (trains, changes) in OTHER_METHODS.items():
        stages = [
            {"name": "some", "steps": 1, "trains": trains},
            {"name": "all", "steps": STEPS - 1},
        ]
        config = make_run(tmp_path / name, tokens, **SETTINGS | {"stages": stages} | changes)
        first.append(partial(train, config))
        then.append(partial(train, config, changes=[f"folder={tmp_path / 'from' / name}"]))
    assert run_ranks(in_turn, 2, first) == [[0] * len(first)] * 2
    for number, name in enumerate(OTHER_METHODS):
        cut_back(tmp_path / name, tmp_path / "from" / name, 1 + number % 2)
    assert run_ranks(in_turn, 2, then) == [[0] * len(then)] * 2
    for name in OTHER_METHODS:
        assert rank_files(tmp_path / "from" / name) == rank_files(tmp_path / name), name

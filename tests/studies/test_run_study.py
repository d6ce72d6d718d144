"""A small study from its YAML file to its summary, run by real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from pipeline.errors import StudyError
from studies.harness.run_study import open_study, run_study
from studies.harness.summary import summarise
from studies.report.groups import group
from studies.report.page import page
from studies.report.results import read_runs
from tests.studies.studies import BEYOND, STEPS, let_diverge, study_values, write_study
from tests.training.runs import metrics

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]


def start(*command: str, **environment: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment = {**clean, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def finished(tokens, tmp_path_factory) -> tuple[Path, str]:
    """The study's folder, and what it printed.

    It was interrupted during its first run, and run again.
    """
    folder = tmp_path_factory.mktemp("study")
    values = study_values(folder, tokens)
    let_diverge(values)
    values["methods"]["adapt"]["method"]["variant"] = "route"
    values["methods"]["adapt"]["settings"] = {
        "gate": {"tokens": 400, "max_open_fraction": 0.05, "negatives_file": None}
    }
    values["methods"]["lora"]["learning_rates"] = [2e-3, BEYOND]
    values["methods"]["fft"] = {
        "label": "Full",
        "method": {"name": "fft"},
        "learning_rates": [1e-2],
        "averages": [0.5],
        "chosen_by": "adapt",
    }
    path = write_study(folder, {**values, "seeds": [1]})
    interrupted = start(sys.executable, "-m", "studies", "run", str(path), "--jobs", "2")
    log = folder / "study" / "adapt.lr_0.002.seed_1" / "log.txt"
    while not log.exists():
        assert interrupted.poll() is None, interrupted.communicate()
        time.sleep(0.05)
    interrupted.send_signal(signal.SIGINT)
    _, errors = interrupted.communicate()
    assert interrupted.returncode == 130, errors
    assert "which save first" in errors and errors.splitlines()[-1] == "interrupted"

    process = start("bash", "studies/run_study.sh", STUDY=str(path))
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    return folder / "study", printed


def test_a_row_has_the_figures_that_its_run_recorded(finished):
    study, _ = finished
    rows = json.loads((study / "summary.json").read_text())
    assert [(row["label"], row["method"], row["learning_rate"], row["chosen"]) for row in rows] == [
        ("SCALE-Adapt", "route", 2e-3, True),
        ("SCALE-Adapt + gate", "route", 2e-3, True),
        ("LoRA", "lora", 2e-3, True),
        ("LoRA", "lora", BEYOND, False),
        ("Full", "fft", 1e-2, True),
        ("Full, averaged: 0.5", "fft", 1e-2, True),
        ("Full, by document", "fft", 1e-2, True),
    ]
    route, gated, lora, diverged, full, average, chosen = rows
    for row in (route, lora):
        lines = metrics(study / row["folder"])
        training = json.loads((study / row["folder"] / "training.json").read_text())
        figures = {
            0: row["before"],
            STEPS: row["after"],
            **{each["step"]: each["figures"] for each in row["during"]},
        }
        assert sorted(figures) == list(range(STEPS + 1))
        for line in lines:
            for corpus in ("korean", "english"):
                for figure in ("perplexity", "bits_per_byte"):
                    assert figures[line["step"]][corpus][figure] == line[f"{figure}/{corpus}"]
        assert row["roles"] == {"korean": "new", "english": "replay"}
        assert row["peak_memory_gib"] > 0
        for key in ("trainable_parameters", "total_parameters", "steps", "tokens_seen", "seconds"):
            assert row[key] == training[key]
        assert row["after"]["korean"]["perplexity"] < row["before"]["korean"]["perplexity"]
    assert route["before"]["korean"] == lora["before"]["korean"]  # the same base
    record = json.loads((study / route["folder"] / "gate" / "gate.json").read_text())["heldout"]
    assert gated["after"]["english"]["perplexity"] == record["english"]["gated_perplexity"]
    assert (
        route["inference_cost"]
        == gated["inference_cost"]
        > lora["inference_cost"]
        > full["inference_cost"]
        == 1.0
    )
    before, *ends = (
        own["korean"]["perplexity"] for own in (full["before"], full["after"], average["after"])
    )
    assert ends[0] != ends[1] and max(ends) < before and average["inference_cost"] == 1.0
    assert chosen["total_parameters"] == 2 * full["total_parameters"]
    assert ends[0] <= chosen["after"]["korean"]["perplexity"] <= before
    assert (diverged["after"], (study / diverged["folder"] / "divergence.json").exists()) == (
        {},
        True,
    )


def test_the_tables_mark_the_rate_that_diverged_and_the_report_has_the_gated_model(finished):
    study, printed = finished
    (line,) = (line for line in printed.splitlines() if f" {BEYOND:g} " in line)
    assert line.endswith("diverged") and "chosen, at the edge" in printed
    runs = read_runs([study])
    more = ["Full, averaged: 0.5", "Full, by document"]
    assert [own.label for own in group(runs)] == [
        "SCALE-Adapt",
        "SCALE-Adapt + gate",
        "LoRA",
        "Full",
        *more,
    ]
    assert "SCALE-Adapt + gate: " in page(runs, "Study")


def test_the_report_reads_the_folder_of_a_run(finished):
    study, _ = finished
    row, gated_row, *_ = json.loads((study / "summary.json").read_text())
    gated, run = read_runs([study / row["folder"]])
    assert run.source == gated.source == "adapt.lr_0.002.seed_1"
    assert (gated.label, run.label) == (f"{run.source} + gate", f"{run.source} without its gate")
    assert gated_row["label"].endswith(" + gate") and gated.after == gated_row["after"]
    assert run.roles == {"english": "replay", "korean": "new"}
    same = (
        "before",
        "during",
        "after",
        "peak_memory_gib",
        "trainable_parameters",
        "total_parameters",
        "steps",
    )
    read = json.loads(run.model_dump_json())
    assert {key: read[key] for key in same} == {key: row[key] for key in same}
    assert read["learning_rate"] == pytest.approx(2e-3) and run.tokens_seen == row["tokens_seen"]


def test_finished_runs_are_skipped(finished):
    study, printed = finished
    path = study.parent / "study.yaml"
    before = {file: file.stat().st_mtime_ns for file in study.rglob("metrics.jsonl")}
    runs = open_study(path, study)
    assert runs.pending_tasks() == [] and runs.progress() == "4 of 4 runs are done"
    run_study(runs, jobs=2)
    assert summarise(runs) == printed.rstrip("\n")
    assert before == {file: file.stat().st_mtime_ns for file in study.rglob("metrics.jsonl")}

    # Other seeds are run at the chosen rate only.
    values = yaml.safe_load(path.read_text())
    write_study(study.parent, {**values, "seeds": [1, 2]})
    tasks = open_study(path, study).pending_tasks()
    assert [(task.run.config.folder.name, task.stages) for task in tasks] == [
        ("adapt.lr_0.002.seed_2", ("upscale", "train", "gate")),
        ("lora.lr_0.002.seed_2", ("train",)),
        ("fft.lr_0.01.seed_2", ("train",)),
    ]


def test_a_failing_run_is_named_and_the_others_go_on(tokens, tmp_path):
    values = study_values(tmp_path, tokens)
    broken = {**values["methods"]["lora"], "label": "Broken", "learning_rates": [1e-3]}
    broken["settings"] = {"deepspeed": "nowhere.json"}
    values["methods"] = {"broken": broken, "adapt": values["methods"]["adapt"]}
    runs = open_study(write_study(tmp_path, {**values, "seeds": [1]}), tmp_path)
    said = (
        r"^broken.lr_0.001.seed_1 ended with exit code 2: .*nowhere.json.* "
        r"\(all output: .*/log.txt\)"
    )
    with pytest.raises(StudyError, match=said) as raised:
        run_study(runs, jobs=1)
    assert raised.value.exit_code == 2
    assert [task.name for task in runs.pending_tasks()] == ["broken.lr_0.001.seed_1"]

"""Rows of summary.json and of run folders, those of strangers too; groups and printed tables."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from statistics import fmean, geometric_mean, stdev

import pytest

from pipeline.errors import RunFolderError
from pipeline.extensions.report.formats import NOTHING
from pipeline.files.json_files import write_json, write_record
from pipeline.gating.folder import HeldoutText, KindFigures
from studies.harness.summary import as_text, rates_table
from studies.report import tables
from studies.report.groups import group, parts, value_of
from studies.report.page import page
from studies.report.results import Row, read_rows, read_runs
from tests.extensions.gate.gates import gate_record
from tests.studies.report.studies import METHODS, answers, at_rates, row, rows, write_study

SHIPPED = Path(__file__).parents[2] / "docs" / "results" / "paper-korean"


def test_rows_are_read_as_written_and_null_is_infinite(tmp_path):
    own = [*map(Row.model_validate, rows()), *read_rows(SHIPPED)]
    own[0].after["korean"]["perplexity"] = math.inf
    write_json(tmp_path / "summary.json", [row.model_dump() for row in own])
    assert read_rows(tmp_path) == own
    again = read_runs([tmp_path, tmp_path])
    assert [run.model_copy(update={"source": ""}) for run in again] == own and again[
        0
    ].source == tmp_path.name


def test_rows_from_elsewhere_may_have_more_and_less(tmp_path):
    content = rows((1,))[:1]
    content[0] |= {"mood": "good", "peak_memory_gib": None}
    content[0]["after"]["korean"] |= {"verdict": "fine", "right": True, "mauve": 0.5}
    del content[0]["learning_rate"], content[0]["during"]
    (run,) = read_runs([write_study(tmp_path, content)])
    assert run.after["korean"].keys() == {"perplexity", "bits_per_byte", "mauve"}
    assert [validation.step for validation in run.validations] == [0, 1000]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("other.json", "[]", "no such file; expected a study.s folder"),
        ("summary.json", "[]", "the file: List should have at least 1 item"),
        ("summary.json", "[{", "the file: Invalid JSON"),
        ("summary.json", "{}", "the file: Input should be a valid array"),
        ("summary.json", '[{"label": "LoRA"}]', r"0\.steps: Field required"),
        (
            "metrics.jsonl",
            '{"step": 0, "perplexity/korean": 9.5}\n\ufffd\n[1]',
            "no validation after the first",
        ),
    ],
)
def test_another_file_is_refused(name, content, said, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(RunFolderError, match=said) as raised:
        read_runs([tmp_path])
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


def test_folders_of_the_same_name_are_distinguished(tmp_path):
    content = rows((1,))[:1]
    folders = [write_study(tmp_path / name, content) for name in ("a/korean", "b/korean", "other")]
    runs = read_runs(folders)
    assert [run.source for run in runs] == [str(folders[0]), str(folders[1]), "other"]
    label = content[0]["label"]
    assert [own.label for own in group(runs)] == [
        f"{label} ({run.source})" for run in runs
    ]  # no seeds of one method


def test_runs_of_different_bases_share_no_report(tmp_path):
    content = rows((1,))[:2]
    ours = write_study(tmp_path / "ours", content)
    for own in content:
        own["before"]["korean"]["perplexity"] *= 1.01  # another dtype
    assert len(read_runs([ours, write_study(tmp_path / "rounded", content)])) == 4
    for own in content:
        own["before"]["english"]["perplexity"] *= 1.5
    with pytest.raises(RunFolderError, match=r"ours and other: .* on english"):
        read_runs([ours, write_study(tmp_path / "other", content)])


def test_a_method_has_the_same_colour_in_every_report_and_each_group_its_own_mark():
    def styles(methods: list[tuple[str, str | None]]) -> dict[str, int]:
        made = []
        for label, method in methods:
            values = row(label, str(method), 1, 0.5, 0.1, 1)
            values["method"] = method
            made.append(Row.model_validate(values))
        return {own.label: own.style for own in group(made)}

    every = [(label, method) for label, method, *_ in METHODS]
    whole = styles(every)
    assert sorted(whole.values()) == list(range(len(METHODS)))
    assert styles(every[::-2]).items() <= whole.items()
    several = styles(
        [("Adapt", "adapt"), ("Adapt + gate", "adapt"), ("whose", None), ("LoRA", "lora")]
    )
    assert several["Adapt"] == whole["SCALE-Adapt"] == several["Adapt + gate"] - len(METHODS)
    assert len(set(several.values())) == 4


def test_many_corpora_of_a_role_are_shown_together():
    content = answers()
    for own in content:
        all_figures = [own["before"], own["after"]]
        all_figures += [validation["figures"] for validation in own["during"]]
        for task in ("task 0", "task 1"):
            role = own["roles"].pop(task)
            for part in range(5):
                own["roles"][f"{task}_{part}"] = role
            for figures in all_figures:
                split_in_parts(figures, task, 5)
    runs = [Row.model_validate(own) for own in content]
    shown = parts(group(runs))
    assert shown.keys() == {"task 1 (new)", "task 0 (replay)"}
    assert all(len(names) == 5 for names in shown.values())

    # Shares are averaged; perplexities are exponentials of losses, which are averaged.
    task1 = shown["task 1 (new)"]
    by_part = [runs[0].after[part] for part in task1]
    accuracy = fmean(figures["first_token_accuracy"] for figures in by_part)
    perplexity = geometric_mean(figures["perplexity"] for figures in by_part)
    assert value_of(runs[0].after, task1, "first_token_accuracy") == pytest.approx(accuracy)
    assert value_of(runs[0].after, task1, "perplexity") == pytest.approx(perplexity)


def split_in_parts(figures: dict[str, dict[str, float]], task: str, count: int) -> None:
    """Replaces a task's figures by those of `count` corpora, which differ."""
    whole = figures.pop(task)
    for part in range(count):
        factor = 0.8 + part / 10
        figures[f"{task}_{part}"] = {name: value * factor for name, value in whole.items()}


def test_the_table_of_rates_has_the_first_seed_and_those_that_diverged():
    """The first method has one rate, the second three: the best at the edge, one diverged."""
    two_seeds = rows((1, 2))
    single = [row for row in two_seeds if row["method"] == "fft"]
    several = [row for row in two_seeds if row["method"] == "lora"]
    tried = [*single, *at_rates(several, (1.0, 0.5, 0.1))]
    tried[3] |= {"before": {}, "after": {}}
    groups = group([Row.model_validate(row) for row in tried])
    lines = rates_table(groups).splitlines()[2:]
    names_and_rates = [line.split()[:2] for line in lines]
    assert names_and_rates == [["LoRA", "0.0001"], ["LoRA", "0.0005"], ["LoRA", "0.001"]]
    assert lines[0][-1].isdigit()
    assert lines[1].endswith("diverged")
    assert lines[2].endswith("chosen, at the edge")
    assert rates_table(groups[:1]) == "", "of one rate there is nothing to compare"
    header, _, base, first, *_ = as_text(tables.results(groups, parts(groups))).splitlines()
    assert header.endswith("english: bits per byte") and base.startswith("base")
    perplexities = [row["after"]["korean"]["perplexity"] for row in single]
    assert re.split("  +", first)[1].startswith(
        f"{fmean(perplexities):.2f} ± {stdev(perplexities):.2f} ("
    )


KINDS = {
    "fr": KindFigures(tokens=812, open_tokens=0, cost=0.0),
    "el": KindFigures(tokens=188, open_tokens=0, cost=0.0),
    "ja": KindFigures(tokens=400, open_tokens=10, cost=0.0123),
    "ko": KindFigures(tokens=300, open_tokens=297, left_out=True),
}
CHANGES = {"new text after other text": KindFigures(tokens=50, open_tokens=50, is_new=True)}


def gated_run(folder: Path, *, is_fitted: bool = True, impossible_fraction: float = 0.0) -> Path:
    """A run's folder whose gate restores the base on the old text, which the run has forgotten."""
    figures = {0: {"new": 200.0, "old": 145.0}, 6: {"new": 20.0, "old": 23441.0}}
    folder.mkdir()
    with (folder / "metrics.jsonl").open("w") as file:
        for step, perplexities in figures.items():
            line = {"step": step, "forgetting/old": 160.0}
            for name, perplexity in perplexities.items():
                line[f"perplexity/{name}"] = perplexity
                line[f"bits_per_byte/{name}"] = math.log2(perplexity)
            file.write(json.dumps(line) + "\n")
    (folder / "run.yaml").write_text(f"folder: {folder}\ngate: {{}}\n")
    shared = {"sequences": 8, "tokens": 256, "open_fraction": 0.5, "closed_sequences": 4}
    new = {"base_perplexity": 200.0, "ungated_perplexity": 20.0, "gated_perplexity": 21.0}
    old = {"base_perplexity": 145.0, "ungated_perplexity": 23441.0, "gated_perplexity": 145.0}
    heldout = {
        "new": HeldoutText(role="new", impossible_fraction=impossible_fraction, **shared, **new),
        "old": HeldoutText(role="replay", **shared, **old),
    }
    if is_fitted:
        (folder / "gate").mkdir()
        record = gate_record(heldout=heldout, kinds=KINDS, changes=CHANGES)
        write_record(folder / "gate" / "gate.json", record)
    return folder


def test_a_gated_run_has_the_model_with_its_gate_beside_that_without_it(tmp_path):
    score = {"chats": 3, "exact_match": 1.0, "ended": 1.0, "answer_tokens": 5.0}
    folder = gated_run(tmp_path / "demo")
    write_json(
        folder / "summary.json", {"chats": {"before": {"mine": score}, "after": {"mine": score}}}
    )
    gated, ungated = read_runs([folder])
    assert (gated.label, ungated.label) == ("demo + gate", "demo without its gate")
    assert {
        name: figures["perplexity"] for name, figures in gated.after.items() if name != "mine"
    } == {
        "new": 21.0,
        "old": 145.0,
    }
    assert gated.after["old"]["bits_per_byte"] == pytest.approx(
        gated.before["old"]["bits_per_byte"]
    )
    assert ungated.after["old"]["perplexity"] == 23441.0
    assert "mine" in gated.after and "mine" not in ungated.after, (
        "the exported model answered the chats"
    )
    shown = page([gated, ungated], "A run")
    assert "demo + gate" in shown and "demo without its gate" in shown and "145.00" in shown
    assert gated.gate_texts == KINDS | CHANGES and not ungated.gate_texts
    table = tables.gate_texts(group([gated, ungated]))
    assert table is not None
    found = {row.label.partition(": ")[2]: [cell.text for cell in row.cells] for row in table.rows}
    assert found == {
        "2 other kinds": ["1,000", "0", "0"],
        "ja": ["400", "2.50 %", "0.0123"],
        "ko (left out)": ["300", "99.00 %", NOTHING],
        "new text after other text": ["50", "100.00 %", NOTHING],
    }
    assert "On what the gate opens" in shown and "ko (left out)" in shown
    assert tables.gate_texts(group([ungated])) is None


def test_a_run_whose_gate_is_not_fitted_yet_is_shown_as_without_it(tmp_path):
    (row,) = read_runs([gated_run(tmp_path / "demo", is_fitted=False)])
    assert row.label == "demo without its gate"


def test_a_perplexity_without_impossible_tokens_is_left_out(tmp_path):
    gated, _ = read_runs([gated_run(tmp_path / "demo", impossible_fraction=0.1)])
    assert gated.after.keys() == {"old"}

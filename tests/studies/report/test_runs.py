"""The runs of a report: summaries of studies and folders of runs, and how they are grouped."""

from __future__ import annotations

import math
from statistics import fmean, geometric_mean

import pytest

from pipeline.errors import RunFolderError
from pipeline.studies.report.runs import group, parts, read_runs, value_of
from tests.studies.report.studies import METHODS, answers, row, rows, write_study


def test_a_study_is_its_rows(tmp_path):
    content = rows()
    runs = read_runs([write_study(tmp_path / "korean", content)])
    assert [run.model_dump(exclude_none=True, exclude={"chosen"}) for run in runs] == content
    assert {run.source for run in runs} == {"korean"}
    assert read_runs([tmp_path / "korean", tmp_path / "korean"]) == runs


def test_unknown_keys_are_ignored(tmp_path):
    content = rows((1,))[:1]
    content[0] |= {"mood": "good", "peak_memory_gib": None}
    content[0]["after"]["korean"] |= {"verdict": "fine", "right": True, "mauve": 0.5, "perplexity": None}
    del content[0]["learning_rate"], content[0]["during"]
    (run,) = read_runs([write_study(tmp_path, content)])
    assert run.after["korean"].keys() == {"perplexity", "bits_per_byte", "mauve"}
    assert run.after["korean"]["perplexity"] == math.inf  # as orjson writes it
    assert [validation.step for validation in run.validations] == [0, 1000]


NOTHING = '{"step": 0, "perplexity/korean": 9.5}\n'


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "expected a study's folder"),
        ({"metrics.jsonl": '{"step": 1, "loss": 2.0}\n'}, "no validation after the first"),
        ({"metrics.jsonl": NOTHING + "\ufffd\n[1]"}, "no validation after the first"),
    ],
)
def test_folders_without_results_are_refused(files, said, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(RunFolderError, match=said) as caught:
        read_runs([tmp_path])
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_folders_of_the_same_name_are_distinguished(tmp_path):
    content = rows((1,))[:1]
    folders = [write_study(tmp_path / name, content) for name in ("a/korean", "b/korean", "other")]
    runs = read_runs(folders)
    assert [run.source for run in runs] == [str(folders[0]), str(folders[1]), "other"]
    label = content[0]["label"]
    assert [own.label for own in group(runs)] == [f"{label} ({run.source})" for run in runs]  # no seeds of one method


def test_runs_of_different_bases_share_no_report(tmp_path):
    ours = write_study(tmp_path / "ours", rows((1,))[:2])
    content = rows((1,))[:2]
    for own in content:
        own["before"]["korean"]["perplexity"] *= 1.01  # another dtype
    assert len(read_runs([ours, write_study(tmp_path / "rounded", content)])) == 4
    for own in content:
        own["before"]["english"]["perplexity"] *= 1.5
    other = write_study(tmp_path / "other", content)
    assert len(read_runs([other])) == 2
    with pytest.raises(RunFolderError, match=r"ours and other: .* on english"):
        read_runs([ours, other])


def test_a_method_has_the_same_colour_in_every_report_and_each_group_its_own_mark(tmp_path):
    def styles(name: str, methods: list[tuple[str, str | None]]) -> dict[str, int]:
        content = [{**row(label, str(method), 1, 0.5, 0.1, 1), "method": method} for label, method in methods]
        return {own.label: own.style for own in group(read_runs([write_study(tmp_path / name, content)]))}

    every = [(label, method) for label, method, *_ in METHODS]
    whole = styles("whole", every)
    assert sorted(whole.values()) == list(range(len(METHODS)))
    assert styles("some", every[::-2]).items() <= whole.items()
    several = styles("several", [("Adapt", "adapt"), ("Adapt + gate", "adapt"), ("whose", None), ("LoRA", "lora")])
    assert several["Adapt"] == whole["SCALE-Adapt"] == several["Adapt + gate"] - len(METHODS)
    assert len(set(several.values())) == 4


def test_many_corpora_of_a_role_are_shown_together(tmp_path):
    content = answers()
    for own in content:
        for task in ("task 0", "task 1"):
            role = own["roles"].pop(task)
            own["roles"] |= {f"{task}_{part}": role for part in range(5)}
            for figures in (own["before"], own["after"], *(validation["figures"] for validation in own["during"])):
                found = figures.pop(task)
                for part in range(5):
                    figures[f"{task}_{part}"] = {name: value * (0.8 + part / 10) for name, value in found.items()}
    runs = read_runs([write_study(tmp_path, content)])
    shown = parts(group(runs))
    assert {name: len(names) for name, names in shown.items()} == {"task 1 (new)": 5, "task 0 (replay)": 5}
    figures, task1 = runs[0].after, [f"task 1_{part}" for part in range(5)]
    for name, expected in {"first_token_accuracy": fmean, "perplexity": geometric_mean}.items():
        whole = value_of(figures, shown["task 1 (new)"], name)
        assert whole == pytest.approx(expected(figures[part][name] for part in task1))

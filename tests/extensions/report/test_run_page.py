"""The page of a run: finished with a gate, in stages, just begun, damaged, and long."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.evaluation.perplexity import Score
from pipeline.extensions.chats.score import ChatScore
from pipeline.extensions.gate.fit_run import fit_gate
from pipeline.extensions.report.formats import number
from pipeline.extensions.report.recorded_run import read_run
from pipeline.extensions.report.run_page import run_page
from pipeline.files.json_files import read_object, with_checksum
from pipeline.observers.event_file import first_events, step_events
from pipeline.run_folder.attempts import record_start
from tests.distributed import run_ranks
from tests.extensions.report.pages import STRANGE, Parsed, check
from tests.programs import scale_cpt
from tests.training.runs import in_turn, make_run, train

PROMPTS = [f"Once {STRANGE[0]}", "옛날에"]
STAGES = [
    {"name": "rows", "steps": 2, "trains": ["output"]},
    {"name": "all", "steps": 2, "learning_rate": 1e-3},
]


@pytest.fixture(scope="module")
def runs(tokens, tmp_path_factory) -> dict[str, Path]:
    """The folders of two runs that DeepSpeed has trained: with a gate, and in stages."""
    folder = tmp_path_factory.mktemp("reported")
    gated = make_run(
        folder / "gated",
        tokens,
        zero=1,
        schedule__steps=4,
        validation__every_steps=2,
        validation__prompts=PROMPTS,
        validation__prompt_tokens=4,
        data__sequence_length=64,
        gate={"tokens": 3000, "max_open_fraction": 0.01},
    )
    staged = make_run(folder / "staged", tokens, zero=1, schedule__steps=4, stages=STAGES)
    jobs = [partial(train, gated), partial(train, staged)]
    assert run_ranks(in_turn, 1, jobs) == [[0, 0]]
    fit_gate(load_config(gated))
    return {"gated": folder / "gated", "staged": folder / "staged"}


@pytest.fixture
def run(runs, tmp_path) -> Path:
    """A copy of the run with a gate, to change."""
    return shutil.copytree(runs["gated"], tmp_path / "run")


def page_of(folder: Path) -> tuple[Parsed, str]:
    """The page of a run, and all its texts."""
    parsed = check(run_page(read_run(folder)))
    return parsed, "\n".join(parsed.texts)


def test_a_finished_run_has_its_curves_gate_texts_and_costs(run):
    done = scale_cpt("report", run, "--svg", run / "figures")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(run / "report.html")
    assert {path.name for path in (run / "figures").iterdir()} == {
        "perplexity.svg",
        "course.svg",
    }
    parsed = check((run / "report.html").read_text(encoding="utf-8"))
    texts = "\n".join(parsed.texts)

    training = read_object(run / "training.json", ValueError)
    gate = read_object(run / "gate" / "gate.json", ValueError)
    for corpus in ("korean", "english"):
        assert number(training["validation"][corpus]["perplexity"]) in texts
        assert number(gate["heldout"][corpus]["gated_perplexity"]) in parsed.texts
        assert f"{100 * gate['heldout'][corpus]['open_fraction']:.2f}" in texts
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert number(last["loss"]) in texts
    for heading in (
        "Held-out perplexity",
        "The gate, by corpus",
        "What the model wrote",
        "training loss, nats a token",
        "learning rate",
        "gradient norm, before clipping",
        "throughput, tokens a second and rank",
        "Costs",
        "Stored in the run's folder",
    ):
        assert heading in parsed.texts
    assert f"{training['tokens_seen']:,}" in parsed.texts
    assert "checkpoints" in parsed.texts and "Scores of the base and of the export" not in texts
    for prompt in PROMPTS:
        assert prompt in parsed.texts, "it is escaped, and shown"
    assert texts.count("after step 4") == 2 and texts.count("step 2") >= 2


def test_a_run_in_stages_has_them_as_a_table_and_in_its_figures(runs):
    parsed, texts = page_of(runs["staged"])
    assert "1, rows" in parsed.texts and "3 to 4" in parsed.texts
    assert "Dotted lines are the ends of stages." in texts
    assert "gate" not in texts.lower().replace(str(runs["staged"]).lower(), "")


def test_a_run_that_has_just_begun_has_a_page(tmp_path):
    record_start(tmp_path / "begun", "tokenize")
    done = scale_cpt("report", tmp_path / "begun", "--output", tmp_path / "new" / "page.html")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "No step is recorded yet" in text and "<svg" not in text
    assert not (tmp_path / "begun" / "report.html").exists()


def test_a_yaml_file_leads_to_the_folder_of_its_run(run, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"folder: {run}\n")
    assert scale_cpt("report", path).stdout == f"{run / 'report.html'}\n"
    path.write_text("name: nothing\n")
    assert "expected the run's `folder`" in scale_cpt("report", path).stderr


def test_scores_of_evaluate_are_on_the_page(run):
    score = Score(
        documents=12, tokens=345, bytes=999, whole=False, nll_per_token=1, perplexity=7.25,
        bits_per_byte=1.5,
    )  # fmt: skip
    chats = ChatScore(chats=17, exact_match=0.5, ended=1.0, answer_tokens=33.3)
    worse = asdict(score) | {"perplexity": 14.5}
    summary = {
        "scores": {"before": {STRANGE[1]: worse}, "after": {STRANGE[1]: asdict(score)}},
        "chats": {"before": {}, "after": {"questions": asdict(chats)}},
    }
    (run / "summary.json").write_text(json.dumps(summary))
    parsed, texts = page_of(run)
    for shown in (STRANGE[1], "7.25", "14.50", "1.5000", "questions", "33.3"):
        assert shown in parsed.texts
    assert "−50" in texts and "Only a part of the text was scored." in parsed.texts


def test_the_gate_has_a_row_for_each_kind_that_opens_and_names_those_that_stay_closed(run):
    record = read_object(run / "gate" / "gate.json", ValueError)
    del record["checksum"]
    record["kinds"] = {
        "fr <b>": {"tokens": 1000, "open_tokens": 0, "cost": 0.0},
        "code: python": {"tokens": 200, "open_tokens": 30, "cost": 0.0123},
        "ja": {"tokens": 50, "open_tokens": 50, "left_out": True},
    }
    record["changes"] = {"korean after english": {"tokens": 10, "open_tokens": 9, "is_new": True}}
    record["threshold_rule"] = "max_cost"
    rule = {"threshold": 8.0, "cost": 0.01, "closed_fraction_of_new": 0.02}
    record["thresholds"] = {"max_cost": rule | {"open_fraction_of_negatives": 0.0}}
    (run / "gate" / "gate.json").write_text(json.dumps(with_checksum(record)))
    parsed, texts = page_of(run)
    for shown in ("code: python", "ja (left out of fitting)", "korean after english", "+0.0123"):
        assert shown in parsed.texts
    assert parsed.texts.index("ja (left out of fitting)") < parsed.texts.index("code: python")
    assert "Closed on all 1,000 tokens of 1 kinds: fr <b>." in parsed.texts
    assert "max cost (taken)" in parsed.texts
    assert "The gate opens on more than 1" in texts and "of code: python (15" in texts


def test_damaged_lines_of_the_metrics_are_left_out_and_numbered(run):
    path = run / "metrics.jsonl"
    whole = path.read_bytes().splitlines(keepends=True)
    damaged = [b"\xff\x00 {\n", b'{"step": "x", "loss": 1}\n', b"[]\n", b'{"step": null}\n']
    odd = b'{"step": 5, "loss": "high", "perplexity/korean": [1], "gradient_norm": null}\n'
    path.write_bytes(b"".join([*damaged, *whole, odd, b'{"step": 6, "lo']))
    parsed, texts = page_of(run)
    assert "Damaged lines of metrics.jsonl are left out: 1, 2, 3, 4." in parsed.texts
    assert number(json.loads(whole[-1])["loss"]) in texts
    assert scale_cpt("status", run).returncode == 0


def broken(name: str):
    def change(run: Path) -> None:
        (run / name).write_text('{"scores": 3')

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shutil.rmtree, "no such run folder"),
        (lambda run: [shutil.rmtree(run), run.mkdir()], "not a run's folder; expected metrics"),
        (broken("summary.json"), "summary.json: not JSON"),
        (lambda run: (run / "summary.json").write_text("{}"), "summary.json: scores: Field req"),
        (broken("training.json"), "training.json: not JSON"),
        (broken("gate/gate.json"), "gate.json: not JSON"),
        (lambda run: [shutil.rmtree(run), record_start(run / "a", "train")], "holds 1 runs, and"),
        (lambda run: (run / "report.html").mkdir(), "report.html: expected a file, found a folder"),
    ],
)
def test_what_cannot_be_read_is_an_error_of_one_line(change, said, run):
    change(run)
    done = scale_cpt("report", run)
    assert done.returncode != 0 and said in done.stderr and done.stdout == ""
    errors = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(errors) == 1 and "Traceback" not in done.stderr
    assert not (run / "report.html").is_file()


def test_a_changed_figure_of_a_gate_is_refused(run):
    path = run / "gate" / "gate.json"
    record = json.loads(path.read_text())
    record["auc"] = 1.0 - record["auc"] / 2
    path.write_text(json.dumps(record))
    assert "does not match its checksum" in scale_cpt("report", run).stderr


def test_the_missing_package_is_named(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = scale_cpt("report", run)
    assert done.returncode != 0
    assert "matplotlib is not installed; pip install 'scale-cpt[report]'" in done.stderr


def test_a_long_run_has_a_small_page_that_shows_its_spikes(tmp_path):
    folder = tmp_path / "long"
    folder.mkdir()
    lines = []
    for step in range(20_001):
        loss = 99.0 if step == 12_345 else 3.0 - step / 20_000
        lines.append(json.dumps({"step": step, "loss": loss, "seconds/forward": 0.5}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    found = read_run(folder)
    text = run_page(found)
    check(text)
    assert len(text) < 200_000
    from pipeline.extensions.report.run_figures import plots_of_run

    (series,) = plots_of_run(found)[0].panels[0].series
    assert (12_345.0, 99.0) in series.lines[0] and len(series.smoothed) <= 100


def test_texts_of_steps_that_were_computed_again_are_the_later_ones(tmp_path):
    from pipeline.extensions.report.written_texts import read_written_texts

    board = tmp_path / "tensorboard"
    board.mkdir()

    def events(step: int, text: str) -> bytes:
        return step_events(step, {"loss": 1.0}, {"prompt/1": f"**Once** {text}"})

    first = first_events(0) + events(0, "a") + events(2, "b") + events(4, "lost") + events(6, "x")
    # A kill has cut the last record short.
    (board / "events.1").write_bytes(first[:-5])
    (board / "events.2").write_bytes(first_events(3) + events(5, "c ** d"))
    (prompt,) = read_written_texts(tmp_path)
    assert prompt.prompt == "Once" and prompt.texts == {0: "a", 2: "b", 5: "c ** d"}

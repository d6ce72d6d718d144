"""The report of a run that is not finished, of its prompts, and against an earlier run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pipeline.config.run import load_config
from pipeline.errors import RunFolderError
from pipeline.run_folder.attempts import record_start
from pipeline.run_folder.lock import RunLock
from tests.studies.report.test_page import NARROW_SPACE, check
from tests.studies.studies import call_tool
from tests.training.runs import write_config


def line(step: int, korean: float, english: float, **more: object) -> dict[str, object]:
    return {"step": step, "perplexity/korean": korean, "perplexity/english": english, "forgetting/english": 0.1, **more}


def write_run(folder: Path, lines: list[dict[str, object]], *, finished: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(own) + "\n" for own in lines))
    if finished:
        (folder / "training.json").write_text(json.dumps({"steps": lines[-1]["step"]}))
    return folder


@pytest.fixture
def running(tmp_path, monkeypatch) -> Path:
    """A run of 8 steps that has validated once, and holds its lock."""
    monkeypatch.setenv("ATTEMPT", "1.0")
    config = load_config(write_config(tmp_path / "mine", tmp_path / "tokens", schedule__steps=8))
    write_run(config.folder, [line(0, 100, 10)], finished=False)
    record_start(config, 2, 0)
    with RunLock(config.folder):
        yield config.folder


def test_a_run_is_watched_from_its_first_step_to_its_end(running, tmp_path, monkeypatch, capsys):
    pages = []
    output = tmp_path / "report.html"

    def later(seconds: float) -> None:
        assert seconds == 7
        pages.append(output.read_text() if output.exists() else None)
        speed = {"tokens_per_second_per_gpu": 64.0}  # of two ranks; a step has 256 tokens
        lines = [line(0, 100, 10), {"step": 2, "loss": 3.5, **speed}, line(4, 50, 12, loss=3.0, **speed)]
        write_run(running, lines, finished=len(pages) == 2)

    monkeypatch.setattr(time, "sleep", later)
    call_tool(monkeypatch, "report", running, "--watch", 7, "--output", output)
    nothing, during = pages
    assert nothing is None
    parsed = check(during)
    assert {"http-equiv": "refresh", "content": "7"} in parsed.of("meta")
    at = parsed.texts.index("mine", parsed.texts.index("Not finished yet"))
    assert parsed.texts[at + 1 : at + 5] == ["running", "4", "of 8", "3.00"]
    assert "8 s" in " ".join(parsed.texts[at : at + 8]).replace(NARROW_SPACE, " ")
    finished = check(output.read_text())
    assert "Not finished yet" not in finished.texts
    assert not any(meta.get("http-equiv") == "refresh" for meta in finished.of("meta"))
    assert "no validation after the first" in capsys.readouterr().out


def test_without_watching_a_run_without_results_is_an_error(running, tmp_path, monkeypatch):
    with pytest.raises(RunFolderError, match="no validation after the first"):
        call_tool(monkeypatch, "report", running, "--output", tmp_path / "report.html")


def test_an_earlier_run_is_found_by_its_name(tmp_path, monkeypatch):
    new = write_run(tmp_path / "new", [line(0, 100, 10), line(4, 40, 12)])
    write_run(tmp_path / "old", [line(0, 100, 10), line(4, 50, 11)])
    call_tool(monkeypatch, "report", new, "--compare", "old", "--output", tmp_path / "report.html")
    texts = check((tmp_path / "report.html").read_text()).texts
    texts = texts[texts.index("Against an earlier run") :]
    at = texts.index("perplexity, korean")
    assert texts[at + 1 : at + 4] == ["50.00", "40.00", f"−20{NARROW_SPACE}%"]
    with pytest.raises(RunFolderError, match="new: expected another run than those of the report"):
        call_tool(monkeypatch, "report", new, "--compare", "new", "--output", tmp_path / "report.html")
    with pytest.raises(RunFolderError, match="none: expected a study"):
        call_tool(monkeypatch, "report", new, "--compare", "none", "--output", tmp_path / "report.html")


def test_what_the_model_writes_is_shown_as_text(tmp_path, monkeypatch):
    steps = range(0, 21, 2)
    told = {"<b>Once</b>": "upon <script>alert(1)</script>\na time"}
    lines = [line(step, 100 - step, 10, prompts={**told, "Who?": f"Tom {step}"}) for step in steps]
    run = write_run(tmp_path / "run", lines)
    call_tool(monkeypatch, "report", run, "--output", tmp_path / "report.html")
    parsed = check((tmp_path / "report.html").read_text())
    assert "<b>Once</b>" in parsed.texts
    assert "upon <script>alert(1)</script>\na time" in parsed.texts
    at = parsed.texts.index("Who?")
    assert parsed.texts[at + 2 : at + 6] == ["base", "Tom 0", "step 4", "Tom 4"]
    assert parsed.texts[at + 10 : at + 12] == ["step 20", "Tom 20"]

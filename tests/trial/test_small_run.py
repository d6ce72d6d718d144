"""scale-cpt try: a run's whole job with few steps and little text, in a folder of its own."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from pipeline.config.data import Corpus
from pipeline.config.run import RunConfig, load_config
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.trial.small_run import small_run
from pipeline.trial.texts import beginnings
from tests.programs import scale_cpt
from tests.training.runs import write_config

TEXTS = [f"document {number} of many" for number in range(2000)]
LINES = b"".join(orjson.dumps({"text": text}) + b"\n" for text in TEXTS)


def write_csv(path: Path) -> None:
    path.write_text("\n".join(["text", *TEXTS]) + "\n")


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"text": TEXTS, "other": TEXTS}), path, row_group_size=500)


FORMATS: dict[str, Any] = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(LINES)),
    "a.txt": lambda path: path.write_text("\n".join(TEXTS)),
    "a.csv": write_csv,
    "a.parquet": write_parquet,
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_beginning_of_a_file_is_its_first_documents(tmp_path: Path, name: str):
    FORMATS[name](tmp_path / name)
    inputs = [str(tmp_path / name)]
    most = min(5_000, (tmp_path / name).stat().st_size - 1)
    written = beginnings(inputs, Corpus(input=inputs), tmp_path / "texts", most)
    assert written is not None
    found = [document.text for document in good_documents(written, Keys("text"))]
    assert 1 < len(found) < len(TEXTS) and found == TEXTS[: len(found)]


def test_a_table_is_cut_behind_a_row_not_within_quotation_marks(tmp_path: Path):
    texts = [f'"{number}": line one\nline two\n\nline four' for number in range(200)]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["text"], *([text] for text in texts)])
    inputs = [str(tmp_path / "a.csv")]
    # Some of these end within a cell.
    for most in range(500, 540):
        folder = tmp_path / f"texts-{most}"
        written = beginnings(inputs, Corpus(input=inputs), folder, most)
        assert written is not None
        found = [document.text for document in good_documents(written, Keys("text"))]
        assert 1 < len(found) < len(texts) and found == texts[: len(found)]
        lines = Path(written[0]).read_text().count("\n")
        assert lines == 1 + 4 * len(found), "no part of a row follows"


@pytest.mark.parametrize("is_array", [True, False])
def test_json_of_several_lines_is_taken_whole(tmp_path: Path, is_array: bool):
    records = [{"text": text} for text in TEXTS]
    whole = b"\n".join(orjson.dumps(one, option=orjson.OPT_INDENT_2) for one in records)
    if is_array:
        whole = b"[" + b",\n".join(map(orjson.dumps, records)) + b"]\n"
    (tmp_path / "a.json").write_bytes(whole)
    inputs = [str(tmp_path / "a.json")]
    assert beginnings(inputs, Corpus(input=inputs), tmp_path / "texts", 1000) == inputs


@pytest.mark.parametrize("corpus", [{}, {"document": "file"}, {"encoding": "cp949"}])
def test_what_is_small_or_cannot_be_cut_stays_as_it_is(tmp_path: Path, corpus: dict[str, Any]):
    inputs = [str(tmp_path / "a.txt")]
    FORMATS["a.txt"](tmp_path / "a.txt")
    described = Corpus(input=inputs, **corpus)
    assert beginnings(inputs, described, tmp_path / "no", 10**6) is None
    if corpus:
        assert beginnings(inputs, described, tmp_path / "some", 1000) == inputs


def large_run(folder: Path, **changes: Any) -> RunConfig:
    """A run on much text, with settings that a small one cannot keep."""
    (folder / "new.jsonl").write_bytes(LINES)
    settings: dict[str, Any] = {
        "data__corpora__korean": {
            "input": [str(folder / "new.jsonl")],
            "heldout_fraction": 0.005,
            "epochs": 2,
        },
        "schedule__steps": 1000,
        "schedule__global_batch_size": 512,
        "checkpoints": {"every_steps": 100, "keep_every_steps": 500},
        "validation": {"every_steps": 100, "stop_after": 3, "cool_down_steps": 50},
        "observers": {"wandb": {"project": "x"}},
        "method__open_rows": {"min_count": 50},
        "gate": {"max_open_fraction": 1e-5},
    }
    return load_config(write_config(folder / "run", folder / "tokens", **settings | changes))


def small(config: RunConfig, folder: Path, steps: int = 20) -> RunConfig:
    return small_run(
        config, folder / "try", folder / "texts", steps=steps, ranks=4, text_bytes=20_000
    )


def test_a_small_run_keeps_what_it_is_and_shrinks_what_takes_long(tmp_path: Path):
    config = large_run(tmp_path)
    found = small(config, tmp_path)
    assert (found.base, found.parallel) == (config.base, config.parallel)
    assert found.method.model_dump(exclude={"open_rows"}) == config.method.model_dump(
        exclude={"open_rows"}
    )
    assert found.schedule == config.schedule.model_copy(
        update={"steps": 20, "global_batch_size": 8}  # four micro-batches of two
    )
    assert (found.validation.every_steps, found.checkpoints.every_steps) == (10, 10)
    assert found.observers.wandb is None and found.validation.stop_after is None
    korean = found.data.corpora["korean"]
    assert (korean.heldout_fraction, korean.epochs) == (0.05, None)
    assert Path(korean.input[0]).parent == tmp_path / "texts" / "korean" / "input"
    english = found.data.corpora["english"]
    assert (english.role, english.heldout_fraction) == ("replay", 0)
    assert Path(english.heldout_input[0]).parent == tmp_path / "texts" / "english" / "heldout_input"
    for folder in (found.folder, found.data.folder):
        assert folder.is_relative_to(tmp_path / "try")


def test_every_stage_of_training_has_a_step(tmp_path: Path):
    stages = [{"name": "rows", "steps": 10, "trains": "output"}, {"name": "all", "steps": 990}]
    config = large_run(tmp_path, stages=stages, validation={})
    assert [stage.steps for stage in small(config, tmp_path).stages] == [1, 19]


def test_the_folder_of_someone_elses_work_is_not_replaced(tmp_path: Path):
    config = write_config(tmp_path / "run", tmp_path / "tokens")
    made = scale_cpt("try", config, "--prepare", "--ranks", 2)
    assert made.returncode == 0, made.stderr
    assert "next: sbatch slurm/cpt_korean.sh" in made.stdout
    assert scale_cpt("try", config, "--prepare", "--ranks", 2).returncode == 0, "made anew"
    small = load_config(tmp_path / "run.try")
    assert small.folder == tmp_path / "run.try" and small.schedule.steps == 20
    (tmp_path / "run.try" / "try.json").unlink()
    refused = scale_cpt("try", config, "--prepare", "--ranks", 2)
    assert refused.returncode != 0 and str(tmp_path / "run.try") in refused.stderr


def test_texts_move_with_a_folder_of_a_long_name_with_blanks(tmp_path: Path):
    """YAML breaks long lines at blanks."""
    config = write_config(tmp_path / ("a long name " * 12).strip(), tmp_path / "tokens")
    made = scale_cpt("try", config, "--prepare", "--text-mib", "0.01")
    assert made.returncode == 0, made.stderr
    small = load_config(config.parent.with_name(f"{config.parent.name}.try"))
    files = [Path(file) for corpus in small.data.corpora.values() for file in corpus.input]
    assert len(files) == 2 and all(file.is_relative_to(small.folder) for file in files)
    assert all(file.exists() for file in files)


@pytest.mark.full
def test_a_run_goes_through_every_stage_of_its_job(tmp_path: Path):
    config = write_config(tmp_path / "run", tmp_path / "tokens", zero=1)
    command = [sys.executable, "-m", "pipeline", "try", str(config), "--steps", "2", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stages = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" s")]
    assert stages == ["tokenize", "upscale", "train", "convert", "evaluate"]
    assert (tmp_path / "run.try" / "summary.json").exists()
    assert not (tmp_path / "run" / "checkpoints").exists() and not (tmp_path / "tokens").exists()


@pytest.mark.full
def test_a_stage_that_fails_ends_it_with_its_code_and_its_error(tmp_path: Path):
    config = write_config(tmp_path / "run", tmp_path / "tokens", zero=1, parallel__tp_size=3)
    command = [sys.executable, "-m", "pipeline", "try", str(config), "--steps", "2", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode not in (0, 70)
    assert "the stage tokenize ended with exit code" in done.stderr

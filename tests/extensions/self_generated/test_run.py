"""Self-generated corpora in a run: the stage that makes them, and what every other stage does about
them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.checkpoint.manifest import PATHS
from pipeline.checks.checklist import check_stage
from pipeline.checks.dry_run.make_plan import make_plan
from pipeline.checks.inputs import RunInputs
from pipeline.config.run import load_config
from pipeline.conversion.convert import run_sources
from pipeline.conversion.probe_texts import probe_maker
from pipeline.data.corpus.manifest import load_manifest
from pipeline.data.dataset.samples import TrainingSamples
from pipeline.errors import ConfigError, DataError
from pipeline.model.from_hf import open_base
from pipeline.run_folder.attempts import read_attempts
from pipeline.sizing.cluster import Cluster
from tests.bases import STORIES
from tests.data.helpers import PROJECT, contents
from tests.programs import scale_cpt
from tests.training.runs import write_config


def run_with_self_generated(folder: Path, tokens: Path, **sample: Any) -> Path:
    """The configuration of a run with a self-generated corpus `own`."""
    own = {"role": "self_generated", "sample": {"tokens": 300, **sample}}
    return write_config(folder, tokens, data__corpora__own=own)


@pytest.fixture
def copied_tokens(tokens: Path, tmp_path: Path) -> Path:
    """The tokenized corpora of small runs, in a folder to add to."""
    return shutil.copytree(tokens, tmp_path / "tokens")


def test_the_stage_makes_what_the_run_then_reads(
    copied_tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = run_with_self_generated(tmp_path / "run", copied_tokens)
    config, cluster = load_config(path), Cluster(gpus=2, gpus_per_node=2)
    with pytest.raises(DataError, match=r"/own does not exist: start .* \(or scale-cpt sample"):
        TrainingSamples(config.data, seed=1, tokenizer_fingerprint=None)
    plan = make_plan(config, cluster)
    assert plan.faults == []
    assert plan.to_make[0].endswith(": the text that the base writes (scale-cpt sample)")
    assert len(plan.to_make) == 2, "and the initial expansion"

    monkeypatch.setenv("ATTEMPT", "7.0")
    done = scale_cpt("sample", path, "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "/own: " in done.stdout and "tokens that the base wrote" in done.stdout
    ended = read_attempts(config.folder)[-1].end
    assert ended is not None and (ended.stage, ended.exit_code) == ("sample", 0)
    manifest = load_manifest(copied_tokens / "own")
    assert manifest.sampling is not None
    assert (manifest.sampling.max_tokens, manifest.sampling.seed) == (
        config.data.sequence_length,
        0,
    )
    assert "own" in RunInputs(config, 1).samples.training[0].samples.corpora
    plan = make_plan(config, cluster)
    assert plan.faults == [] and len(plan.to_make) == 1
    assert f"{manifest.tokens:,} tokens" in dict(plan.rows)["corpus own"]

    made = contents(copied_tokens)
    again = scale_cpt("sample", path)
    assert again.returncode == 0 and "own: already complete" in again.stderr
    assert contents(copied_tokens) == made
    shown = scale_cpt(
        "inspect-data", copied_tokens / "own", "--tokenizer", STORIES, "--samples", "1"
    )
    assert "temperature 1.0, at most 32 tokens a document" in shown.stdout


def test_a_run_without_such_a_corpus_passes_at_once(tokens: Path, tmp_path: Path):
    path = write_config(tmp_path / "run", tokens)
    code = (
        "import sys; from tests.programs import call; from pipeline.extensions.self_generated import command as sample; "
        f"call(sample, {str(path)!r}); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=PROJECT,
        env={"PYTHONPATH": str(PROJECT), "ATTEMPT": "7.0"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not (tmp_path / "run" / "attempts.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "name a run, or give all of --base, --output, --tokens and --max-tokens"),
        (
            ("--max-tokens", "16", "--temperature", "0"),
            "temperature: Input should be greater than 0 (found 0.0)",
        ),
        (
            ("--max-tokens", "16", "--no-thinking"),
            "thinking and system_prompts are of prompts that are chats",
        ),
        (
            ("--max-tokens", "16", "--chat-template"),
            "chat_template frames messages; name files of them as prompts",
        ),
    ],
)
def test_flags_that_are_refused(tmp_path: Path, flags: tuple[str, ...], message: str):
    done = scale_cpt(
        "sample", "--base", STORIES, "--output", tmp_path / "own", "--tokens", "9", *flags
    )
    assert done.returncode == 2
    *before, error = done.stderr.splitlines()
    assert error.startswith("error: ") and message in error
    assert len(before) <= 1, "what it does, and no more"
    assert not (tmp_path / "own").exists()


def test_what_would_stop_the_stage_is_found_before_tokenizing(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"max_tokens: expected .*base's context.*found 1000"):
        check_stage(
            load_config(run_with_self_generated(tmp_path, tmp_path / "tokens", max_tokens=1000)),
            2,
            "tokenize",
        )
    config = load_config(
        run_with_self_generated(tmp_path, tmp_path / "tokens", prompts=["none.jsonl"])
    )
    plan = make_plan(config, Cluster(gpus=2, gpus_per_node=2))
    assert [fault for fault in plan.faults if "none.jsonl: no such file" in fault]


def test_exports_are_verified_on_the_other_corpora(tmp_path: Path):
    base = open_base(STORIES)
    probe = probe_maker(
        *run_sources(load_config(run_with_self_generated(tmp_path, tmp_path / "tokens")))
    )(SimpleNamespace(base=base, spec=base.spec, tokenizer=base.path))  # type: ignore[arg-type]
    assert set(probe) == {"korean", "english"}


def test_a_checkpoint_does_not_record_where_prompts_lie(tmp_path: Path):
    config = load_config(
        run_with_self_generated(tmp_path / "run", tmp_path / "tokens", prompts=["o.jsonl"])
    )
    assert (
        "prompts"
        not in config.data.model_dump(mode="json", exclude=PATHS)["corpora"]["own"]["sample"]
    )

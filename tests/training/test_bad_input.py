"""A user's faults end in one line that names them, and leave nothing half-written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.bases import STORIES, save_stories_with_a_token_more
from tests.distributed import run_ranks
from tests.training.runs import in_turn, make_run, train, write_config

PROJECT = Path(__file__).parents[2]


def check_refusals(world_size: int, expected: list[tuple[Path, str, str]]) -> None:
    """Trains each configuration on the same ranks: rank 0 raises the error, the others leave with its exit code."""
    first, *others = run_ranks(in_turn, world_size, [partial(train, config) for config, _, _ in expected])
    for (_, error, message), found in zip(expected, first, strict=True):
        assert str(found).startswith(f"{error}: ")
        assert message in found and "\n" not in found
    for rank in others:
        assert rank == [f"exit {2 if error == 'ConfigError' else 1}" for _, error, _ in expected]


def test_the_command_line_prints_one_line_and_fails(tokens, tmp_path):
    config = write_config(tmp_path, tokens, schedule__stepz=3, method__l_fp=-1)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.train", str(config)],
        cwd=PROJECT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("error:"))
    assert "schedule.stepz: unknown key" in line
    assert "method.l_fp" in line
    assert "Traceback" not in done.stderr
    assert done.returncode == 2


def test_settings_that_do_not_fit(tokens, tmp_path):
    def config(name: str, folder: Path = tokens, **changes) -> Path:
        return write_config(tmp_path / name, folder, **changes)

    def quantized(name: str, method: dict[str, object], **changes) -> Path:
        return config(name, **{"base_precision": "nf4", "method": method, "zero": 1, **changes})

    lora, fft, pro = {"name": "lora", "rank": 4}, {"name": "fft"}, {"name": "llama_pro", "added_layers": 1}
    zero_3 = "held whole by every rank; remove the setting, or name another deepspeed file"
    check_refusals(
        1,
        [
            (config("base", base=str(tmp_path / "none")), "BaseModelError", "none/config.json"),
            (config("deepspeed", deepspeed="none.json"), "ConfigError", "none.json: no such file"),
            (config("tokens", tmp_path / "none"), "DataError", "none/english/manifest.json"),
            (config("expansion"), "CheckpointError", "make one with tools/upscale.py"),
            (config("tp", parallel__tp_size=3), "LayoutError", "sizes that do: 1"),
            (config("budget", data__corpora__korean__token_budget=320), "DataError", "use at most 1 steps"),
            (quantized("zero 3", lora, zero=3), "ConfigError", zero_3),
            (quantized("trained", fft), "ConfigError", "layers.0.attention.query.base trains, which a matrix in nf4"),
            (quantized("copied", pro), "ConfigError", "layers.5.attention.query.base trains"),
        ],
    )
    larger = str(save_stories_with_a_token_more(tmp_path / "larger"))
    sequence_parallel = {"tp_size": 2, "sequence_parallel": True}
    does_not_divide = "data.sequence_length: 33 does not divide by parallel.tp_size 2"
    odd_sequence = make_run(tmp_path / "odd", tokens, parallel=sequence_parallel, data__sequence_length=33)
    foreign_record = make_run(tmp_path / "foreign", tokens, zero=1, name="mine.yaml")
    (tmp_path / "foreign" / "run.yaml").write_text("of: the user\n")
    bad_vocabulary = "has ids up to 512, but the base's vocab_size is 512"
    check_refusals(
        2,
        [
            (config("ids", base=larger, parallel__tp_size=2), "BaseModelError", bad_vocabulary),
            (config("batch", schedule__global_batch_size=9), "LayoutError", "nearest that do: 8, 12"),
            (foreign_record, "ConfigError", "foreign/run.yaml: "),  # found after the model is built
            (odd_sequence, "LayoutError", does_not_divide),
            (
                quantized("cut", lora, parallel__tp_size=2),
                "ConfigError",
                "2 would cut in layers.0.attention.output",
            ),
        ],
    )
    assert not list(tmp_path.glob("*/checkpoints"))
    assert not list(tmp_path.glob("*/training.lock"))


def test_a_checkpoint_of_another_base_or_run_is_refused(tokens, tmp_path):
    trained = make_run(tmp_path, tokens, zero=1, schedule__steps=1)
    base = tmp_path / "other_base"
    shutil.copytree(STORIES, base)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    other = {"upscaled": str(tmp_path / "other_upscaled"), "base": str(base)}
    other_base = make_run(tmp_path, tokens, zero=1, name="other_base.yaml", **other)
    other_data = write_config(tmp_path, tokens, zero=1, name="other_data.yaml", data__replay_fraction=0.5)
    other_norm = write_config(tmp_path, tokens, zero=1, name="other_norm.yaml", method__norm="base")
    other_precision = write_config(tmp_path, tokens, zero=1, name="other_precision.yaml", base_precision="fp8")
    # The same steps: the run is finished, and nothing would be trained.
    finished = {"schedule__steps": 1, "base_precision": "fp8"}
    finished_precision = write_config(tmp_path, tokens, zero=1, name="finished_precision.yaml", **finished)
    configs = [trained, other_base, other_data, other_norm, other_precision, finished_precision]
    [(code, *refusals)] = run_ranks(in_turn, 1, [partial(train, config) for config in configs])
    assert code == 0
    for refusal, message in zip(
        refusals,
        [
            "had other weights than",
            "another data (replay_fraction expected 0.25, found 0.5)",
            "another method (norm expected 'separate', found 'base')",
            *["another base_precision (expected 'bf16', found 'fp8')"] * 2,
        ],
        strict=True,
    ):
        assert refusal.startswith("CheckpointError: ")
        assert message in refusal

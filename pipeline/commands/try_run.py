"""Goes through every stage of a run's job in 20 steps, in a folder of its own.

    scale-cpt try my.yaml
    scale-cpt try my.yaml --steps 40 --set gate=null
    scale-cpt try my.yaml --prepare && sbatch slurm/cpt_korean.sh runs/my.try/run.yaml

The small run has the run's base, method, gate and layout, the beginning of each corpus, a
micro-batch of each rank a step, and no trackers. Its folder is the run's, with `.try` behind the
name; it is made anew each time. So faults of the later stages are found in minutes, not behind days
of training. Its figures say nothing of the run's.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from pathlib import Path

from pipeline import command_line, log
from pipeline.config.run import RunConfig, load_config
from pipeline.config.sources import RUN_FILE
from pipeline.files.folders import FolderKind

_RECORD = "try.json"
_FORMAT = "scale-cpt try 1"
_TRIAL = FolderKind("a small run of scale-cpt try", _RECORD, _FORMAT)
_logger = log.get_logger(__name__)


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser)
    parser.add_argument(
        "--steps", type=command_line.positive, default=20, help="steps to train (default: 20)"
    )
    parser.add_argument(
        "--ranks",
        type=command_line.positive,
        help="ranks that train, on this machine (default: one per GPU; without GPUs two)",
    )
    parser.add_argument(
        "--text-mib",
        type=command_line.mebibytes,
        default=4 * 2**20,
        metavar="MIB",
        help="how much of each corpus is read, its beginning (default: 4)",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="only make the folder, for a job on a cluster"
    )


def main(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.run, arguments.set)
    folder = config.folder.with_name(f"{config.folder.name}.try")
    _logger.info("a small run of %s in %s: loading the libraries", config.name, folder)
    from pipeline.sizing.cluster import cluster_of  # Here, because --help does not wait for torch.

    ranks = arguments.ranks or cluster_of(argparse.Namespace()).gpus
    small = _prepare(config, folder, arguments, ranks)
    run_file = folder / RUN_FILE
    if arguments.prepare:
        print(f"made {folder}; next: sbatch slurm/cpt_korean.sh {run_file}")
        return 0
    seconds: dict[str, float] = {}
    for stage in _stages(small):
        started = time.perf_counter()
        code = _run(stage, run_file, ranks)
        seconds[stage] = time.perf_counter() - started
        if code != 0:
            _logger.error(
                "%s: the stage %s ended with exit code %d; its error above says why",
                folder,
                stage,
                code,
            )
            return code
    for stage, duration in seconds.items():
        print(f"{stage:<10}{duration:8.1f} s")
    print(f"every stage ended well; {folder} may be removed")
    return 0


def _prepare(
    config: RunConfig, folder: Path, arguments: argparse.Namespace, ranks: int
) -> RunConfig:
    """Makes the folder of the small run, with its texts and its configuration."""
    import yaml

    from pipeline.files.folders import published_folder
    from pipeline.files.json_files import write_json
    from pipeline.files.publishing import write_text
    from pipeline.trial.small_run import small_run

    with published_folder(folder, _TRIAL) as unfinished:
        texts = unfinished / "texts"
        small = small_run(
            config,
            folder,
            texts,
            steps=arguments.steps,
            ranks=ranks,
            text_bytes=arguments.text_mib,
        )
        values = small.model_dump(mode="json", exclude_unset=True)
        # The texts move with the folder. On one line each: a path may have blanks.
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=math.inf)
        write_text(unfinished / RUN_FILE, text.replace(str(unfinished), str(folder)))
        write_json(unfinished / _RECORD, {"format": _FORMAT, "run": str(arguments.run)})
    return small


def _stages(config: RunConfig) -> list[str]:
    """The stages of slurm/cpt_korean.sh that the run needs."""
    from pipeline.checks.dry_run.job_stages import job_stages

    stages = list(job_stages(config))
    if any(corpus.clean is not None for corpus in config.data.corpora.values()):
        stages.insert(0, "clean")
    return stages


def _run(stage: str, run_file: Path, ranks: int) -> int:
    """Runs a stage as a process of its own; returns its exit code."""
    _logger.info("try: %s", stage)
    command = [sys.executable, "-m", "pipeline", stage, str(run_file)]
    if stage == "train":
        command += ["--ranks", str(ranks)]
    environment = {**os.environ, "EXPECTED_WORLD_SIZE": str(ranks)}
    return subprocess.run(command, env=environment, check=False).returncode

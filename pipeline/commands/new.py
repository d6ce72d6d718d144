"""Makes a folder to work in: configurations, batch scripts, the demo's model and texts.

    scale-cpt new my_runs && cd my_runs
    bash slurm/cpt_korean.sh configs/demo.yaml

This is for an installed package: a checkout of the project is such a folder itself.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

from pipeline.errors import OutputError
from pipeline.files.folders import published_folder
from pipeline.installation import SHIPPED, shipped


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="the folder to make")


def main(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    if folder.resolve() == Path.cwd():
        # It would appear in the place of this folder, which the shell stands in.
        raise OutputError(f"{folder}: is the working directory; name a folder to make in it")
    ignored = shutil.ignore_patterns("__pycache__")
    # None: no folder is replaced, since a user works in it.
    with published_folder(folder, None) as unfinished:
        for name in SHIPPED:
            shutil.copytree(shipped() / name, unfinished / name, ignore=ignored)
    run_demo = f"cd {shlex.quote(str(folder))} && bash slurm/cpt_korean.sh configs/demo.yaml"
    print(f"made {folder} with {', '.join(SHIPPED)}; next: {run_demo}")

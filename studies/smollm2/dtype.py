"""Writes the type in which this machine's processor trains the real model faster.

    python -m studies.smollm2.dtype --base runs/bases/smollm2-135m --output runs/smollm2/dtype

It is measured, as by `scale-cpt config init`: of three processors with instructions for bf16 the one
with AMX is 3.6 times as fast in bf16, and those with avx512_bf16 alone 1.4 and 0.6 times. The file
is written once, so that a study that continues trains on in the same type.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.extensions.first_config.propose import precision
from pipeline.files.publishing import make_parent, write_text
from pipeline.model.bases import read_spec
from pipeline.sizing.cluster import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, required=True, help="the model's folder")
    parser.add_argument("--output", type=Path, required=True, help="the file to write")
    arguments = parser.parse_args()
    one_process = Cluster(1, gpus_per_node=1, on_cpu=True)
    dtype = str(precision(read_spec(arguments.base), one_process)).removeprefix("torch.")
    make_parent(arguments.output)
    write_text(arguments.output, f"{dtype}\n")
    print(f"{arguments.output}: {dtype}")


if __name__ == "__main__":
    command_line.run(main)

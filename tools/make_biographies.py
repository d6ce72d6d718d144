"""Makes the texts of the biography study: invented people, their biographies, and questions.

    scale-cpt biographies --people 4000 --pool-fraction 0.1 --output runs/biography/texts

The same arguments give the same bytes. docs/biographies.md describes the files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.experiments.biography import write_corpora


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--output", type=Path, required=True, help="the folder to write")
    add(
        "--people",
        type=int,
        default=200_000,
        help="in all: half have biographies, a quarter are in Task 0, a tenth in Task 1",
    )
    add(
        "--pool-fraction",
        type=float,
        default=1.0,
        help="how much of each pool of names and places is used (default: 1)",
    )
    add("--vocab-size", type=int, default=8192, help="of the tokenizer that is trained on the texts (default: 8192)")
    add("--seed", type=int, default=0, help="of the people and the texts (default: 0)")


def main(arguments: argparse.Namespace) -> None:
    roster = write_corpora(
        arguments.output,
        arguments.people,
        pool_fraction=arguments.pool_fraction,
        seed=arguments.seed,
        vocab_size=arguments.vocab_size,
    )
    counts = (
        f"{len(roster.pretrained):,} pretrained, {len(roster.task0):,} of them Task 0's, {len(roster.task1):,} Task 1's"
    )
    print(f"{arguments.output}: {counts}")


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)

"""Proposes the expansion and learning rate that learn most within a forgetting budget, from short probes.

    python tools/plan_expansion.py configs/demo.yaml --max-increase 0.2

The run's file names the base, and texts of both roles with held-out parts. Every candidate (variant, widths, l_fp,
modules, learning rate) trains a few steps; the better third trains again, longer; and so on. Stopped (Ctrl-C) or
killed, the same command goes on. What a short run says of a long one, and what it does not: docs/expansion.md.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipeline import command_line
from pipeline.errors import ConfigError
from pipeline.search.frontier import read_by_hand
from pipeline.search.opening import add_search_options, open_search
from pipeline.search.proposal import Proposal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="the run's YAML file; its method says what is not searched")
    parser.add_argument(
        "--max-increase",
        type=float,
        help="the budget: largest rise of the replay corpora's held-out perplexity, as a fraction "
        "(default: the run's forgetting.max_increase)",
    )
    add_search_options(parser)
    parser.add_argument("--folder", type=Path, help="what is written (default: the run's folder with -search)")
    parser.add_argument("--jobs", type=int, help="probes side by side (default: as many as the cores hold)")
    parser.add_argument("--compare", type=Path, metavar="STUDY", help="a finished study's folder: was it beaten?")
    arguments = parser.parse_args()
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ConfigError(f"--jobs: expected 1 or more, found {arguments.jobs}")

    search, candidates = open_search(arguments.config, arguments)
    jobs = arguments.jobs or max(1, len(os.sched_getaffinity(0)) // search.ranks)
    by_hand = read_by_hand(arguments.compare, search.rounds.steps[-1]) if arguments.compare else None
    proposal = Proposal(search.run(candidates, jobs))
    proposal.write(search.folder)
    print(f"{proposal.as_text()}\n")
    print(proposal.as_yaml(), end="")
    if by_hand:
        print(f"\n{by_hand.verdict_on(proposal.choice.probes[-1])}")


if __name__ == "__main__":
    command_line.run(main)

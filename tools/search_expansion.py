"""Searches SCALE's variant, widths, l_fp, modules and learning rate on the base of a study, with Optuna.

    python tools/run_study.py configs/studies/korean_quick.yaml
    python tools/search_expansion.py configs/studies/korean_quick.yaml --trials 20

Prints the best trade-offs between learning and forgetting, with those of the study, and writes report.html. Stopped or
killed, the same command continues; started several times at once, its processes share the trials.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.errors import ConfigError
from pipeline.files import write_json, write_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="its YAML file; it names base, texts, and at least one SCALE method")
    parser.add_argument("--data", type=Path, default="data", help="the texts (default: data)")
    parser.add_argument("--trials", type=int, default=20, help="runs in all, those of earlier calls included (20)")
    parser.add_argument("--max-parameters", type=int, help="trained parameters (default: the study's largest SCALE)")
    parser.add_argument("--multiple-of", type=int, default=8, help="of added hidden and FFN widths (default 8)")
    parser.add_argument("--folder", type=Path, help="what is written (default: the study's folder with -search)")
    arguments = parser.parse_args()
    for flag in ("trials", "max_parameters", "multiple_of"):
        if (value := getattr(arguments, flag)) is not None and value < 1:
            raise ConfigError(f"--{flag.replace('_', '-')}: expected 1 or more, found {value}")
    from pipeline.experiments.report.page import page
    from pipeline.experiments.report.runs import read_runs
    from pipeline.experiments.results import SUMMARY
    from pipeline.experiments.run_study import open_study  # after the options: --help does not wait for torch
    from pipeline.experiments.search import Search, comparison, front

    runs = open_study(arguments.study, arguments.data)
    study = runs.study.folder
    folder = arguments.folder or study.with_name(f"{study.name}-search")
    search = Search(runs, folder, max_parameters=arguments.max_parameters, multiple_of=arguments.multiple_of)
    search.run(arguments.trials)
    write_json(folder / SUMMARY, [row.model_dump() for row, _ in front(search.rows)])
    by_hand = read_runs([study]) if (study / SUMMARY).exists() else []
    write_text(folder / "report.html", page([*read_runs([folder]), *by_hand], "What the search found"))
    print(comparison(search.rows, by_hand), folder / "report.html", sep="\n\n")


if __name__ == "__main__":
    command_line.run(main)

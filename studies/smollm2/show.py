"""Prints the table that `make real` ends with: what each run learned, kept and cost.

    python -m studies.smollm2.show runs/smollm2_korean runs/smollm2_korean_same_vocabulary

The runs are evaluated, and their chats are compared with the base's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline import command_line
from pipeline.errors import RunFolderError
from pipeline.evaluation.table import table
from pipeline.files.json_files import read_object
from pipeline.run_folder.status import SUMMARY

CHATS = "chats.json"


def real_table(folders: Sequence[Path]) -> str:
    """A column for the base and for each run, a row for each figure.

    Raises:
        RunFolderError: a run has no summary or no answers yet, or runs have other corpora.
    """
    summaries = [_record(folder, SUMMARY, "scale-cpt evaluate") for folder in folders]
    chats = [_record(folder, CHATS, "python -m studies.smollm2.chats") for folder in folders]
    before = summaries[0]["scores"]["before"]
    rows: list[list[str]] = []
    for corpus in before:
        row = [f"{corpus}, bits a byte", _bits(before[corpus])]
        row += [_bits(summary["scores"]["after"][corpus]) for summary in summaries]
        rows.append(row)
    for corpus in before:
        shares = [summary.get("gate_open", {}).get(corpus) for summary in summaries]
        rows.append([f"{corpus}, open", "", *map(_percent, shares)])
    asked = len(chats[0]["questions"])
    rows.append(["English answers as the base's", f"{asked}"])
    rows[-1] += [f"{record['same']}" for record in chats]
    rows.append(["of all answers, ended", _ended(chats[0], "base")])
    rows[-1] += [_ended(record, "model") for record in chats]
    rows.append(["trained", "", *(f"{one['trained_fraction']:.1%}" for one in summaries)])
    rows.append(["tokens read", "", *(f"{one['tokens_seen']:,}" for one in summaries)])
    return table(["", "base", *(folder.name for folder in folders)], rows)


def _record(folder: Path, name: str, command: str) -> dict[str, Any]:
    try:
        return read_object(folder / name, RunFolderError)
    except FileNotFoundError:
        raise RunFolderError(f"{folder / name}: no such file; run {command} first") from None


def _bits(score: dict[str, Any]) -> str:
    return f"{score['bits_per_byte']:.3f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.2%}"


def _ended(record: dict[str, Any], of: str) -> str:
    return f"{record[of]['ended']} of {len(record['questions']) + len(record['korean_questions'])}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="the folders of finished runs")
    print(real_table(parser.parse_args().folders))


if __name__ == "__main__":
    command_line.run(main)

r"""Lists which types of models can be a base: native, hosted or refused, and why.

    scale-cpt bases gemma3 qwen3_next gpt_oss
    scale-cpt bases path/to/model
    scale-cpt bases --write docs/architectures.md

A type of transformers is tried on a tiny model with random weights; without types all are, which
takes a quarter of an hour. Of a model's folder, or its config.json, the structure is shown that
transformers makes of its configuration; weights are not needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.files.publishing import write_text

TABLE_BEGINS = "<!-- scale-cpt bases -->"
TABLE_ENDS = "<!-- end of the table -->"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "types",
        nargs="*",
        metavar="TYPE|FOLDER",
        help="a model_type of transformers, or a model's folder or config.json",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help=f"replace the table in a Markdown page, between {TABLE_BEGINS} and {TABLE_ENDS}",
    )


def main(arguments: argparse.Namespace) -> None:
    # Here, because --help does not wait for torch.
    from pipeline.hosted.survey import TABLE_HEAD, all_types, survey

    page = arguments.write
    if page is not None:
        before, after = _around_table(page)
    rows: list[str] = []
    print(TABLE_HEAD)
    for found in survey(arguments.types or all_types()):
        rows.append(found.row())
        print(found.row(), flush=True)
    if page is not None:
        table = "\n".join([TABLE_HEAD, *rows])
        write_text(page, f"{before}{TABLE_BEGINS}\n{table}\n{TABLE_ENDS}{after}")


def _around_table(page: Path) -> tuple[str, str]:
    """What a page holds before and after its table.

    Raises:
        ConfigError: there is no such page, or it has no place for the table.
    """
    try:
        before, _, rest = page.read_text(encoding="utf-8").partition(TABLE_BEGINS)
    except OSError as error:
        raise ConfigError(f"--write: {page}: {error.strerror}; name a Markdown page") from None
    _, end, after = rest.partition(TABLE_ENDS)
    if not end:
        raise ConfigError(
            f"--write: {page}: has no lines {TABLE_BEGINS} and {TABLE_ENDS}; add them where the "
            "table is to stand"
        )
    return before, after

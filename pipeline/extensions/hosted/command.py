r"""Lists which types of models can be a base: native, hosted or refused, and why.

    scale-cpt bases
    scale-cpt bases gemma3 qwen3_next gpt_oss
    scale-cpt bases path/to/model
    scale-cpt bases --try gemma3
    scale-cpt bases --write pipeline/extensions/hosted/base_types.md

The rows come from the table in base_types.md beside this file. --try makes a row anew, with the
installed transformers: it tries the type on a tiny model with random weights, in seconds to
minutes. Of a model's folder, or its config.json, the structure is shown that transformers makes of
its configuration; weights are not needed. --write tries every type, which takes a quarter of an
hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import ConfigError
from pipeline.files.publishing import write_text

TABLE_BEGINS = "<!-- scale-cpt bases -->"
TABLE_ENDS = "<!-- end of the table -->"
STORED = Path(__file__).parent / "base_types.md"
TABLE_HEAD = "| `model_type` | base | class | blocks, or why it is refused | documents in a row |\n"
TABLE_HEAD += "|---|---|---|---|---|"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "types",
        nargs="*",
        metavar="TYPE|FOLDER",
        help="a model_type of transformers, or a model's folder or config.json (default: all)",
    )
    parser.add_argument(
        "--try",
        dest="tried",
        action="store_true",
        help="try the types that are named with the installed transformers, instead of looking "
        "them up",
    )
    parser.add_argument(
        "--write",
        type=Path,
        metavar="PAGE",
        help="try the types, by default all, and replace the table in a Markdown page, between "
        f"{TABLE_BEGINS} and {TABLE_ENDS}",
    )


def main(arguments: argparse.Namespace) -> None:
    types: list[str] = arguments.types
    if arguments.write is not None:
        _write(arguments.write, types)
    elif arguments.tried:
        if not types:
            raise ConfigError("--try: name the types to try; without it, all types are listed")
        _print_rows(_tried(types))
    else:
        _print_rows(_looked_up(types))


def _print_rows(rows: Iterator[str]) -> list[str]:
    """Prints the table, each row as soon as it is known, and returns the rows."""
    print(TABLE_HEAD)
    printed: list[str] = []
    for row in rows:
        print(row, flush=True)
        printed.append(row)
    return printed


def _tried(types: list[str]) -> Iterator[str]:
    """A row for each type or folder, or for all types, by experiment."""
    # Here, because a look into the table does not wait for torch.
    from pipeline.extensions.hosted.survey import all_types, survey

    for found in survey(types or all_types()):
        yield found.row()


def _looked_up(types: list[str]) -> Iterator[str]:
    """The rows of the stored table. A folder, or a type that is not there, is tried."""
    stored = stored_rows()
    if not types:
        yield from stored.values()
    for name in types:
        if name in stored and not Path(name).exists():
            yield stored[name]
        else:
            yield from _tried([name])


def stored_rows() -> dict[str, str]:
    """The rows of the table in base_types.md, by type."""
    _, table, _ = _parts_of(STORED, "the table of the bases")
    rows: dict[str, str] = {}
    for line in table.strip().splitlines()[2:]:
        rows[line.split("`")[1]] = line
    return rows


def _write(page: Path, types: list[str]) -> None:
    before, _, after = _parts_of(page, "--write")
    rows = _print_rows(_tried(types))
    table = "\n".join([TABLE_HEAD, *rows])
    write_text(page, f"{before}{TABLE_BEGINS}\n{table}\n{TABLE_ENDS}{after}")


def _parts_of(page: Path, what: str) -> tuple[str, str, str]:
    """What a page holds before its table, the table, and what it holds after.

    Raises:
        ConfigError: there is no such page, or it has no place for the table.
    """
    try:
        before, _, rest = page.read_text(encoding="utf-8").partition(TABLE_BEGINS)
    except OSError as error:
        raise ConfigError(f"{what}: {page}: {error.strerror}; name a Markdown page") from None
    table, end, after = rest.partition(TABLE_ENDS)
    if not end:
        raise ConfigError(
            f"{what}: {page}: has no lines {TABLE_BEGINS} and {TABLE_ENDS}; add them where the "
            "table is to stand"
        )
    return before, table, after

"""What the benchmarks share: the option --json, turns, and rows as a table and as JSON."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pipeline.config.run import RunConfig, parse_config
from pipeline.evaluation.table import table
from pipeline.files.json_files import write_json
from pipeline.list_options import join_repeated_lists

if TYPE_CHECKING:
    from pipeline.model.spec import DecoderSpec

Row = dict[str, Any]
"""What was measured of one contender, with units in the names; figures without a value are missing.
"""
ROOT = Path(__file__).resolve().parents[1]
BASES = ROOT / "configs" / "bases"
DATA = ROOT / "examples" / "data"
STORIES = DATA / "models" / "stories260K"
_Found = TypeVar("_Found")


class Elapsed(NamedTuple):
    """The time that something took: by the clock, and of the processors that this process used.

    On a shared machine the clock's time is as long as others let it be; the processors' time hardly
    depends on them.
    """

    seconds: float
    cpu_seconds: float
    """Of all threads of the process, those that wait for others in a loop included."""


class Stopwatch:
    """Measures from where it is made on."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._cpu_started = time.process_time()

    def elapsed(self) -> Elapsed:
        """The time since then."""
        return Elapsed(
            seconds=time.perf_counter() - self._started,
            cpu_seconds=time.process_time() - self._cpu_started,
        )


def make_parser(text: str | None, program: str | None = None) -> argparse.ArgumentParser:
    """A benchmark's parser; `text` is its docstring.

    A package names its `program`: argparse would call it `__main__.py`.
    """
    parser = argparse.ArgumentParser(
        prog=program, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    join_repeated_lists(parser)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    return parser


def in_turns(ways: Mapping[str, Callable[[], _Found]], turns: int) -> dict[str, list[_Found]]:
    """What each way returned at each of its turns.

    They take turns, so that load on the machine affects all of them alike.
    """
    found: dict[str, list[_Found]] = {name: [] for name in ways}
    for _ in range(turns):
        for name, way in ways.items():
            found[name].append(way())
    return found


def print_rows(rows: Sequence[Row], names: Sequence[str] = ()) -> None:
    """Prints a table with these columns, or with those of the first row."""
    if not names and rows:
        names = list(rows[0])
    header = [name.replace("_", " ") for name in names]
    lines = []
    for row in rows:
        lines.append([_cell(row.get(name, "-")) for name in names])
    # At once: a program that reads this benchmark's output through a pipe shows rows as they come.
    print(table(header, lines), flush=True)


def _cell(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    # Four digits: no more of a time can be repeated, and 1e+04 would be hard to compare.
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def write_rows(options: argparse.Namespace, rows: Sequence[Row], **about: object) -> None:
    """Writes the rows to the file of --json, if it is given, with the options that made them."""
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        # As text: paths and shapes are no values of JSON.
        settings = {name: str(value) for name, value in vars(options).items()}
        write_json(options.json, {"settings": settings, **about, "rows": list(rows)})


def eighth_of(spec: DecoderSpec) -> dict[str, int]:
    """An expansion in the paper's proportions; heads grow by whole groups."""
    widths = spec.widths
    # A new key/value head brings all of its queries: fewer could not share it.
    heads_per_group = widths.num_attention_heads // widths.num_key_value_heads
    heads = max(widths.num_attention_heads // 8, heads_per_group)
    return {
        "hidden_size": widths.hidden_size // 8,
        "intermediate_size": widths.intermediate_size // 8,
        "num_attention_heads": heads,
    }


def adapt_run(
    folder: Path, base: Path, zero: int, sequences: int, tp_size: int = 1, **changes: Any
) -> RunConfig:
    """A run of Adapt on `text.txt` in `folder`, with one sequence in a micro-batch.

    `changes` are of its method.
    """
    from pipeline.model.from_hf import read_spec  # imports torch, which not every benchmark needs

    spec = read_spec(base)
    corpora = {"text": {"input": [str(folder / "text.txt")], "heldout_fraction": 0.1}}
    length = min(4096, spec.max_position_embeddings)
    method = {
        "name": "scale",
        "variant": "adapt",
        "expansion": eighth_of(spec),
        "l_fp": 1,
        **changes,
    }
    values = {
        "name": "benchmark",
        "folder": str(folder),
        "base": str(base),
        "method": method,
        "data": {
            "folder": str(folder),
            "sequence_length": length,
            "document_mask": False,
            "corpora": corpora,
        },
        "schedule": {
            "steps": 1,
            "global_batch_size": sequences,
            "micro_batch_size": 1,
            "learning_rate": 1e-3,
        },
        "parallel": {"tp_size": tp_size},
        "deepspeed": f"ds_configs/zero{zero}.json",
    }
    return parse_config(values, source="the benchmark")

"""The time to load one base with several expansions, beside the base alone.

    python -m benchmarks.expansion_loading --hidden-size 2048 --layers 12

Folders with random weights (`random_exports.py`): a Llama, and the same base with four gated
expansions by an eighth. They are loaded by `from_pretrained` in turns, and then every weight is
read once, as a copy to a GPU or the first pass does: `from_pretrained` alone only maps the files.
The fastest turn of each counts. The files lie in the page cache: from a disk, the bytes weigh more.

`ratio_to_bytes` is the time over the base's, divided by the bytes over the base's: 1 would mean
that an expansion costs what its bytes cost. What is above it is Python's time for making modules,
which grows with the layers and not with their width (`seconds_unread`: before weights are read).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.random_exports import (
    SEVERAL,
    SHARES,
    BaseSizes,
    base_config,
    expansion_entries,
    gated,
    read_sizes,
    set_random_weights,
    several,
)
from benchmarks.results import (
    Elapsed,
    Row,
    Stopwatch,
    in_turns,
    make_parser,
    print_rows,
    write_rows,
)
from pipeline import command_line
from pipeline.hf.remote_code.modeling_scale_combined import (
    EXPANSIONS,
    CombinedForCausalLM,
    is_of_base,
)

WEIGHTS = "model.safetensors"
LLAMA = "the base in transformers"
ALONE = "the base in the folder"
ALL = f"with {SEVERAL} expansions"


class Loaded(NamedTuple):
    """One turn."""

    unread: Elapsed
    """Until `from_pretrained` returned."""
    whole: Elapsed
    """Until every weight was read."""
    bytes: int


def write_base(folder: Path, sizes: BaseSizes) -> None:
    """Writes the base as a Llama of transformers."""
    model = LlamaForCausalLM(base_config(sizes))
    set_random_weights(model, torch.float32)
    model.save_pretrained(folder)


def write_combination(folder: Path, sizes: BaseSizes) -> None:
    """Writes the base with its expansions as `scale-cpt combine` does, but without a tokenizer."""
    entries = gated(expansion_entries(sizes, SHARES[0]), "token")
    model = several(entries)
    set_random_weights(model, torch.float32)
    model.config.expansions = dict.fromkeys(model.names, entries)
    model.config.save_pretrained(folder)
    of_base: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith(f"{EXPANSIONS}."):
            of_base[name] = tensor
    save_file(of_base, folder / WEIGHTS, {"format": "pt"})
    for name, expansion in zip(model.names, model.expansions, strict=True):
        own: dict[str, torch.Tensor] = {}
        for key, tensor in expansion.state_dict().items():
            if not is_of_base(key):
                own[key] = tensor
        (folder / EXPANSIONS / name).mkdir(parents=True)
        save_file(own, folder / EXPANSIONS / name / WEIGHTS, {"format": "pt"})


@torch.no_grad()
def load(make: Callable[[], PreTrainedModel]) -> Loaded:
    """One turn: a model is loaded and read."""
    watch = Stopwatch()
    model = make()
    unread = watch.elapsed()
    total = 0
    # Parameters that expansions share with the base come once.
    for parameter in model.parameters():
        parameter.sum()
        total += parameter.nbytes
    return Loaded(unread, watch.elapsed(), total)


def measure(sizes: BaseSizes, turns: int, folder: Path | None) -> list[Row]:
    """A row for each way to load: its fastest turn, and its time over the base's."""
    with tempfile.TemporaryDirectory(dir=folder) as made:
        base = Path(made, "base")
        combination = Path(made, "combination")
        write_base(base, sizes)
        write_combination(combination, sizes)
        one = partial(CombinedForCausalLM.from_pretrained, combination, active=[])
        every = partial(CombinedForCausalLM.from_pretrained, combination)
        ways = {
            LLAMA: partial(load, partial(LlamaForCausalLM.from_pretrained, base)),
            ALONE: partial(load, one),
            ALL: partial(load, every),
        }
        for way in ways.values():
            way()  # fills the page cache
        taken = in_turns(ways, turns)
    rows: list[Row] = []
    for name, own in taken.items():
        fastest = min(own, key=lambda turn: turn.whole.seconds)
        rows.append(
            {
                "way": name,
                "bytes": fastest.bytes,
                "seconds": fastest.whole.seconds,
                "cpu_seconds": fastest.whole.cpu_seconds,
                "seconds_unread": min(turn.unread.seconds for turn in own),
            }
        )
    of_base = rows[0]
    for row in rows:
        row["bytes_ratio"] = row["bytes"] / of_base["bytes"]
        row["ratio_to_base"] = row["seconds"] / of_base["seconds"]
        row["ratio_to_bytes"] = row["ratio_to_base"] / row["bytes_ratio"]
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    add, positive = parser.add_argument, command_line.positive
    add("--hidden-size", type=positive, default=2048, help="a multiple of 1024 (default: 2048)")
    add("--layers", type=positive, default=12, help="of the base (default: 12)")
    add("--vocab-size", type=positive, default=8192, help="of the base (default: 8,192)")
    add("--turns", type=positive, default=5, help="of each way (default: 5)")
    add("--threads", type=positive, default=1, help="of torch (default: 1)")
    add("--folder", type=Path, help="where the models lie meanwhile (default: the system's own)")
    options = parser.parse_args()
    sizes = read_sizes(parser, options)
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    rows = measure(sizes, options.turns, options.folder)
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    command_line.run(main)

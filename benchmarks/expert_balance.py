"""How evenly ranks work that share the experts of a mixture, where the router prefers some.

    python -m benchmarks.expert_balance --json benchmarks/out/expert_balance.json

Each of some ranks runs one mixture forward and backward, with frozen experts and random tokens of
its own. `skew` is by how much the router prefers the first expert, in standard deviations of its
scores; the preference falls evenly down to the last expert. There is a row for each skew and way:
`alone` is a rank that holds all experts and computes its own tokens, `counted` shares the experts
and sends as many rows as there are, `padded` makes room for all rows that a rank's experts could
get. `rows_ratio` is the rows of the rank that has most over their mean: what a step waits for.
`cpu_ratio` is the same of processor time, and `cpu_s` the time of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.results import Row, make_parser, print_rows, write_rows
from pipeline.local_ranks import run_ranks
from pipeline.model.mixture import Mixture
from pipeline.model.spec import ACTIVATIONS, MixtureSpec
from pipeline.parallel.topology import SINGLE, Layout, ProcessGroups, TensorParallel

WAYS = ("alone", "counted", "padded")
HIDDEN_SIZE = 256
TOKENS = 512
MIXTURE = MixtureSpec(
    experts=32, top_k=4, intermediate_size=128, normalised=True, sigmoid=True, scale=1.0
)
"""Qwen3-30B-A3B's proportions, an eighth as wide; a bias of the router's choice makes the skew."""
SKEWS = (0.0, 0.5, 1.0, 100.0)


def mixture_of(tp: TensorParallel, skew: float) -> Mixture:
    """A mixture with the same weights on all ranks that share its experts."""
    torch.manual_seed(0)
    mixture = Mixture(MIXTURE, HIDDEN_SIZE, ACTIVATIONS["silu"], tp=tp).requires_grad_(False)
    for parameter in mixture.parameters():
        parameter.normal_(std=HIDDEN_SIZE**-0.5)
    assert mixture.router.bias is not None, "scores are sigmoids"
    # The scores' standard deviation: of a sigmoid of numbers with a deviation of 1.
    preferences = torch.linspace(0.21 * skew, 0, MIXTURE.experts)
    nothing = torch.zeros_like(preferences)
    mixture.router.bias.copy_(torch.stack([preferences, nothing, nothing]))
    return mixture


def measured(way: str, skew: float, rounds: int) -> tuple[int, float]:
    """The rows of this rank's experts in one pass, and the least processor time of a pass."""
    ranks = dist.get_world_size()
    tp = SINGLE
    if way != "alone":
        groups = ProcessGroups(Layout(ranks, 1, ranks), padded_experts=way == "padded")
        tp = groups.tensor_parallel
    with torch.no_grad():
        mixture = mixture_of(tp, skew)
    rows: list[int] = []

    def count_rows(module: nn.Module, arguments: tuple[Any, ...], result: Any) -> None:
        # The second argument is where each expert's rows end: the last of them is their number.
        rows.append(int(arguments[1][-1]))

    mixture.experts.gate.register_forward_hook(count_rows)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(1, TOKENS, HIDDEN_SIZE, requires_grad=True)
    seconds: list[float] = []
    for _ in range(rounds):
        # Together: a rank that waits for another one's rows may spend processor time on waiting.
        dist.barrier()
        started = time.process_time()
        mixture(x).sum().backward()
        seconds.append(time.process_time() - started)
    return rows[0], min(seconds)


def measure(rounds: int, output: Path) -> None:
    """On a rank: all ways and skews; rank 0 writes the rows."""
    dist.init_process_group("gloo")
    # The ranks share the machine's cores.
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    rows: list[Row] = []
    for skew, way in product(SKEWS, WAYS):
        of_ranks: list[tuple[int, float]] = [(0, 0.0)] * ranks
        dist.all_gather_object(of_ranks, measured(way, skew, rounds))
        counts = [count for count, _ in of_ranks]
        seconds = [second for _, second in of_ranks]
        row: Row = {"ranks": ranks, "skew": skew, "way": way}
        # The largest over the mean.
        row["rows_ratio"] = max(counts) * ranks / sum(counts)
        row["cpu_ratio"] = max(seconds) * ranks / sum(seconds)
        row["cpu_s"] = max(seconds)
        rows.append(row)
    if dist.get_rank() == 0:
        output.write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()  # the launcher ends ranks that end long after the first


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="passes, of which the fastest counts")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # on a rank
    options = parser.parse_args()
    if options.measure:
        measure(options.rounds, options.measure)
        return
    rows: list[Row] = []
    for ranks in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder, "rows.json")
            program = ["-m", "benchmarks.expert_balance", "--measure", str(output)]
            if run_ranks([*program, "--rounds", str(options.rounds)], ranks):
                raise SystemExit("error: a rank failed; its traceback is above")
            rows += json.loads(output.read_text(encoding="utf-8"))
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    main()

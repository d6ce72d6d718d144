"""What DeepSpeed costs the host in a micro-batch, by the number of trained tensors.

    python -m benchmarks.host_operations

The model is a Llama widened by Adapt with tiny matrices, so that the host's work is all that takes
time: with 16 layers it trains as many tensors as a Llama-3.2-1B does, with 32 as a Llama-3.1-8B. A
forward and a backward pass run without DeepSpeed (`plain`) and under its engine, as a micro-batch
that accumulates gradients. There is one process: the other ranks are torch's fake process group,
which returns at once.

Counted are torch's operations (on a GPU each is a kernel or a view), the calls of functions of
Python and of C, and milliseconds of this thread's processor time, the least of several turns: other
load on the machine makes times longer. The second table has what DeepSpeed adds with each trained
tensor: the slope from the fewest layers to the most.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.recorded_steps import real_batch, real_model
from benchmarks.results import Row, adapt_run, in_turns, make_parser, print_rows, write_rows
from benchmarks.scale.growth import in_own_process
from pipeline import command_line
from pipeline.deepspeed_config import load_deepspeed_config
from pipeline.parallel.topology import Layout, ProcessGroups

BASE = {
    "model_type": "llama",
    "vocab_size": 512,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


class Way(NamedTuple):
    """One of the shipped files of DeepSpeed, with other values in its `zero_optimization`."""

    zero: int
    changes: dict[str, Any]


WAYS = {
    "zero1": Way(1, {}),
    "zero2": Way(2, {}),
    "zero2, reduce_scatter: false": Way(2, {"reduce_scatter": False}),
    "zero2, contiguous_gradients: false": Way(2, {"contiguous_gradients": False}),
}
KINDS = ("operations", "calls", "ms")
"""What is counted of a micro-batch; of one with compiled layers no operations."""


class _Operations(TorchDispatchMode):
    """Counts torch's operations within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return operation(*args, **(kwargs or {}))


def operations(function: Callable[[], None]) -> int:
    """How many operations of torch `function` calls."""
    with _Operations() as found:
        function()
    return found.count


def calls(function: Callable[[], None]) -> int:
    """How many functions of Python and of C `function` calls."""
    count = 0

    def add(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    sys.setprofile(add)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def milliseconds(function: Callable[[], None]) -> float:
    """The processor time of this thread in `function`."""
    began = time.thread_time()
    function()
    return 1000 * (time.thread_time() - began)


def measure(way: str, layers: int, ranks: int, turns: int, compiled: bool) -> Row:
    """A micro-batch without DeepSpeed and with it; in a process of its own."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    # DeepSpeed, which the process that starts this one need not import.
    from pipeline.training.batches import MicroBatch
    from pipeline.training.deepspeed_internals.lifecycle import init_distributed
    from pipeline.training.engine import Engine
    from pipeline.training.launch import COLLECTIVE_TIMEOUT

    init_distributed("gloo", COLLECTIVE_TIMEOUT)
    zero, changes = WAYS[way]
    layout = Layout(ranks, 1)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "config.json"
        base.write_text(json.dumps({**BASE, "num_hidden_layers": layers}))
        # More micro-batches than run here: no step ends.
        config = adapt_run(Path(folder), base, zero, ranks * (2 * turns + 100))
        deepspeed_config = load_deepspeed_config(config.deepspeed, layout)
        deepspeed_config.zero.update(changes)
        models = [real_model(config, deepspeed_config.dtype) for _ in range(2)]
    model, wrapped = models
    if compiled:
        model.compile_layers()
        wrapped.compile_layers()
    engine = Engine(wrapped, config, deepspeed_config, ProcessGroups(layout))
    batch = MicroBatch(*real_batch(config))

    def plain() -> None:
        total, *_ = model(*batch)
        total.backward()

    def under_deepspeed() -> None:
        total, *_ = engine.loss(batch)
        engine.backward(total)
        engine.end_micro_batch(1e-3)

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    row: Row = {"way": way, "layers": layers, "tensors": len(trained)}
    passes = {"plain": plain, "deepspeed": under_deepspeed}
    for run in passes.values():
        run()  # what happens once is over
    with _no_garbage_collection():
        timed = {name: _timed(run) for name, run in passes.items()}
        times = in_turns(timed, turns)
    for name, run in passes.items():
        if not compiled:  # torch compiles nothing while its operations are counted
            row[f"{name}_operations"] = operations(run)
        row[f"{name}_calls"] = calls(run)
        row[f"{name}_ms"] = min(times[name])
    return row


def _timed(run: Callable[[], None]) -> Callable[[], float]:
    return lambda: milliseconds(run)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def added(rows: Sequence[Row]) -> Row:
    """What DeepSpeed adds with each trained tensor, from the first row of a way to its last.

    Also what it adds for the tensors of the last row.
    """
    few, many = rows[0], rows[-1]
    tensors = many["tensors"] - few["tensors"]
    row: Row = {"way": many["way"]}
    for kind in KINDS:
        if f"plain_{kind}" not in few:
            continue
        more_for_many = many[f"deepspeed_{kind}"] - many[f"plain_{kind}"]
        more_for_few = few[f"deepspeed_{kind}"] - few[f"plain_{kind}"]
        slope = (more_for_many - more_for_few) / tensors
        if kind == "ms":
            row["microseconds_a_tensor"] = 1000 * slope
        else:
            row[f"{kind}_a_tensor"] = slope
        row[f"{kind}_of_{many['tensors']}"] = more_for_many
    return row


def main() -> None:
    options = parse_options()
    rows: list[Row] = []
    slopes: list[Row] = []
    for way in options.ways:
        of_way: list[Row] = []
        for layers in options.layers:
            of_way.append(
                in_own_process(measure, way, layers, options.ranks, options.turns, options.compile)
            )
        rows += of_way
        if len(of_way) > 1:
            slopes.append(added(of_way))
    print_rows(rows)
    print()
    print_rows(slopes)
    write_rows(options, rows, slopes=slopes)


def parse_options() -> argparse.Namespace:
    """The options of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--layers",
        type=command_line.positive,
        nargs="+",
        default=[4, 16, 32],
        help="fewest first; default: 4 16 32",
    )
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--ranks", type=command_line.positive, default=8, help="default: 8")
    parser.add_argument("--turns", type=command_line.positive, default=9, help="default: 9")
    parser.add_argument("--compile", action="store_true", help="with compiled layers")
    return parser.parse_args()


if __name__ == "__main__":
    command_line.run(main)

"""Python runs this at startup if this folder is on PYTHONPATH: it puts a NaN into one batch of a
rank.

POISON, as JSON, names the rank, the number of its micro-batch (from 1, in this process), and the
file that takes a line with the time of each NaN. With `stays` the NaN is in the data: it appears
whenever those tokens are read.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


def _arm(micro_batch: int, strokes: Path, *, stays: bool) -> None:
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    seen = 0
    poisoned = None

    def strike(module, arguments, output):
        nonlocal seen, poisoned
        if type(module).__name__ != "WidenedEmbedding" or not torch.is_grad_enabled():
            return None
        seen += 1
        (tokens,) = arguments
        if seen == micro_batch:
            poisoned = tokens.clone()
        elif not (stays and poisoned is not None and torch.equal(tokens, poisoned)):
            return None
        with strokes.open("a", encoding="utf-8") as file:
            file.write(f"{time.time()}\n")
        x, x_up = output
        x = x.clone()
        x[0, 0, 0] = torch.nan
        return x, x_up

    register_module_forward_hook(strike)


if os.environ.get("POISON"):
    _poison = json.loads(os.environ["POISON"])
    if os.environ.get("RANK") == str(_poison["rank"]):
        _arm(_poison["micro_batch"], Path(_poison["strokes"]), stays=_poison["stays"])

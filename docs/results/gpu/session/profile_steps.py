"""Which kernels a training step of a 1B model spends its time in, and what larger chunks of logits
change.

python docs/results/gpu/session/profile_steps.py OUTPUT.json
"""

import json
import statistics
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_step import SHAPES, Contender, Variant
from pipeline.model import output

SHAPE = SHAPES["1b-8192"]
DEVICE = torch.device("cuda")


def contender(variant: Variant) -> Contender:
    own = Contender(variant, SHAPE, DEVICE, torch.bfloat16)
    own._build()
    return own


def kernels(step) -> list[tuple[str, float, int]]:
    """(name, ms, calls) of a step's kernels, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        step()
    rows = [
        (event.key, event.self_device_time_total / 1e3, event.count) for event in run.key_averages()
    ]
    return sorted((row for row in rows if row[1] > 0.05), key=lambda row: -row[1])


found = {}
for name in ("adapt", "fft", "transformers_fft", "preserve"):
    own = contender(Variant(name))
    for chunk in (2**25, 2**27) if "transformers" not in name else (2**25,):
        output.CHUNK_ELEMENTS = chunk
        step = own._prepare()
        step()
        seconds = statistics.median(step().seconds for _ in range(3))
        entry = {"seconds": seconds}
        if chunk == 2**25:
            entry["kernels"] = kernels(step)
        found[f"{name} {chunk // 2**20}M"] = entry
        print(name, chunk, f"{seconds:.4f}", flush=True)
        own._release()
        torch.cuda.empty_cache()
    Path(sys.argv[1]).write_text(json.dumps(found, indent=1))
    del own, step

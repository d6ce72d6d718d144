"""What every rank needs, imported once by the server that tests/distributed.py forks ranks from."""

# ruff: noqa: F401
from __future__ import annotations

import gc

import awkward
import deepspeed
import deepspeed.module_inject.auto_ep_layer
import deepspeed.moe.ep_router
import deepspeed.runtime.superoffload.superoffload_stage3
import deepspeed.runtime.zero.muon.muon_optimizer
import deepspeed.runtime.zero.stage3
import deepspeed.runtime.zero.stage_1_and_2
import deepspeed.utils.nvtx
import pytest

import pipeline.observers
import pipeline.training.attempt
import tests.training.runs

# Reading this table makes DeepSpeed probe whether each operation can be built: 0.9 s. This one
# takes 33 s to build.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.nvtx.enable_nvtx = (
    False  # markers for a profiler around every small function of ZeRO-3
)
# A rank's garbage collections skip what is here already: walking it would take a second, and copy
# its memory.
gc.freeze()

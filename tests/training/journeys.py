"""The matrix of training runs: every pair of settings that may be combined is in one of its rows.

`tests/training/test_journeys.py` trains each row undisturbed, stopped and resumed, and stopped and
moved.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

EXPANSION = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4}
METHODS: dict[str, dict[str, Any]] = {
    "preserve": {"name": "scale", "variant": "preserve", "expansion": EXPANSION},
    "adapt": {"name": "scale", "variant": "adapt", "expansion": EXPANSION, "l_fp": 3},
    "route": {"name": "scale", "variant": "route", "expansion": EXPANSION, "l_fp": 3},
    "fft": {"name": "fft"},
    "freeze": {"name": "freeze", "frozen_layers": 2},
    "lora": {"name": "lora", "rank": 4},
    "llama_pro": {"name": "llama_pro", "added_layers": 5},
}
OWN_WEIGHTS = {"open_gains": True, "low_rank": 2, "open_rows": {"min_count": 2}}
"""What tokens that a gate opens have of their own."""
TRAINS_BASE = ("fft", "freeze")
RATES_BY_GROUP = {"adapt": {"expansion_to_base": 0.5, "layers.*.attention.*": 2.0}}
"""Learning-rate factors, of every row of these methods."""


class Layout(NamedTuple):
    ranks: int
    tp_size: int


DP2 = Layout(2, 1)
TP2 = Layout(2, 2)
DP2_TP2 = Layout(4, 2)
MOVES_TO = {DP2: Layout(1, 1), TP2: Layout(4, 4), DP2_TP2: Layout(1, 1)}


class Journey(NamedTuple):
    """A row: the settings of a run."""

    method: str
    zero: int
    layout: Layout
    vocabulary: bool
    replay_loss: str
    base_precision: str
    asynchronous: bool
    activation_checkpointing: str
    sequence_parallel: bool
    norm: str
    optimizer: str
    own_weights: bool = False

    def __str__(self) -> str:
        """The method, the layout, and what is not as usual."""
        parts = [
            self.method,
            f"ZeRO-{self.zero}, {self.layout.ranks} ranks, tp {self.layout.tp_size}",
        ]
        usual = {
            "replay_loss": "nll",
            "base_precision": "bf16",
            "activation_checkpointing": "none",
            "norm": "separate",
            "optimizer": "adamw",
        }
        for name, usual_value in usual.items():
            value = getattr(self, name)
            if value != usual_value:
                parts.append(value)
        for name in ("vocabulary", "asynchronous", "sequence_parallel", "own_weights"):
            if getattr(self, name):
                parts.append(name)
        return ", ".join(parts)

    @property
    def allowed(self) -> bool:
        """Whether the settings may be combined."""
        is_scale = METHODS[self.method]["name"] == "scale"
        if self.base_precision != "bf16":
            trains_base = not is_scale and self.method != "lora"
            if trains_base or self.zero == 3:
                return False
        if self.base_precision == "nf4" and self.layout.tp_size > 1:
            return False  # NF4's blocks do not fit a shard of this base's FFN
        if self.sequence_parallel and self.layout.tp_size == 1:
            return False
        if self.norm == "base" and not is_scale:
            return False
        return not self.own_weights or self.method in ("preserve", "adapt", "lora")

    @property
    def zero_moved_to(self) -> int:
        """Another stage; ZeRO-3 stores no quantized base."""
        if self.zero == 1:
            return 3 if self.base_precision == "bf16" else 2
        return self.zero - 1

    def settings(self, layout: Layout, zero: int) -> dict[str, Any]:
        """What `tests.training.runs.write_config` takes, at a layout that need not be the row's
        own."""
        method = dict(METHODS[self.method])
        if method["name"] == "scale":
            method["norm"] = self.norm
        if self.own_weights:
            method |= OWN_WEIGHTS
            if self.method == "lora":
                # Its open weights of low rank are its adapters.
                del method["low_rank"]
            if self.method == "preserve":
                method["open_first_layer"] = 2
        parallel = {
            "tp_size": layout.tp_size,
            "sequence_parallel": self.sequence_parallel and layout.tp_size > 1,
        }
        return {
            "zero": zero,
            "method": method,
            "gate": {} if self.own_weights else None,
            "parallel": parallel,
            "data__replay_loss": self.replay_loss,
            "base_precision": self.base_precision,
            "checkpoints": {"every_steps": 1, "asynchronous": self.asynchronous},
            "activation_checkpointing": self.activation_checkpointing,
            "schedule__optimizer": self.optimizer,
            "schedule__learning_rate_factors": RATES_BY_GROUP.get(self.method, {}),
            "schedule__learning_rate": 1e-4 if self.method == "fft" else 1e-3,
        }


LEVELS: dict[str, tuple[Any, ...]] = {
    "method": tuple(METHODS),
    "zero": (1, 2, 3),
    "layout": (DP2, TP2, DP2_TP2),
    "vocabulary": (False, True),
    "replay_loss": ("nll", "kl"),
    "base_precision": ("bf16", "fp8", "nf4"),
    "asynchronous": (False, True),
    "activation_checkpointing": ("none", "all"),
    "sequence_parallel": (False, True),
    "norm": ("separate", "base"),
    "optimizer": ("adamw", "muon"),
    "own_weights": (False, True),
}
QUICK = [
    # method       ZeRO layout  vocabulary     base    asynchronous  seq. parallel      optimizer
    #                                         replay loss           checkpointing   norm      open weights
    Journey("preserve",  1, DP2,     True,  "nll", "fp8",  False, "all",  False, "base",      "adamw"),
    Journey("adapt",     3, DP2_TP2, True,  "nll", "bf16", True,  "none", True,  "separate",  "muon"),
    Journey("adapt",     3, DP2_TP2, False, "kl",  "bf16", True,  "all",  True,  "separate",  "muon", True),
    Journey("route",     3, TP2,     True,  "nll", "bf16", True,  "all",  True,  "base",      "adamw"),
    Journey("fft",       1, TP2,     False, "nll", "bf16", False, "all",  True,  "separate",  "muon"),
    Journey("freeze",    3, DP2,     False, "kl",  "bf16", False, "none", False, "separate",  "adamw"),
    Journey("lora",      2, DP2,     True,  "kl",  "nf4",  True,  "none", False, "separate",  "adamw"),
    Journey("llama_pro", 1, DP2,     False, "kl",  "bf16", False, "all",  False, "separate",  "adamw"),
]  # fmt: skip
"""Every value of every setting; with the other rows every pair."""
JOURNEYS = [
    *QUICK,
    Journey("preserve",  1, DP2,     True,  "nll", "nf4",  True,  "none", False, "base",      "muon", True),
    Journey("preserve",  2, TP2,     False, "kl",  "bf16", True,  "none", False, "separate",  "adamw", True),
    Journey("preserve",  3, DP2_TP2, True,  "kl",  "bf16", True,  "none", True,  "separate",  "adamw", True),
    Journey("adapt",     1, TP2,     False, "kl",  "fp8",  True,  "none", False, "base",      "adamw", True),
    Journey("adapt",     2, DP2,     False, "nll", "nf4",  False, "all",  False, "base",      "adamw", True),
    Journey("route",     1, DP2,     True,  "nll", "nf4",  False, "none", False, "separate",  "adamw"),
    Journey("route",     2, DP2_TP2, False, "kl",  "fp8",  False, "all",  True,  "base",      "muon"),
    Journey("fft",       2, DP2_TP2, True,  "kl",  "bf16", True,  "none", False, "separate",  "adamw"),
    Journey("fft",       3, DP2,     False, "nll", "bf16", True,  "all",  False, "separate",  "adamw"),
    Journey("freeze",    1, DP2_TP2, False, "nll", "bf16", False, "all",  True,  "separate",  "adamw"),
    Journey("freeze",    2, TP2,     True,  "nll", "bf16", True,  "all",  True,  "separate",  "muon"),
    Journey("lora",      1, DP2_TP2, False, "nll", "fp8",  False, "all",  True,  "separate",  "adamw"),
    Journey("lora",      3, TP2,     False, "nll", "bf16", True,  "none", True,  "separate",  "muon"),
    Journey("lora",      3, DP2_TP2, False, "kl",  "bf16", False, "all",  True,  "separate",  "muon", True),
    Journey("llama_pro", 2, DP2_TP2, True,  "kl",  "bf16", True,  "none", True,  "separate",  "adamw"),
    Journey("llama_pro", 3, TP2,     True,  "nll", "bf16", False, "none", True,  "separate",  "muon"),
]  # fmt: skip


def pairs(journey: Journey) -> set[tuple[tuple[str, Any], ...]]:
    """Every two of its settings."""
    return set(itertools.combinations(zip(LEVELS, journey, strict=True), 2))

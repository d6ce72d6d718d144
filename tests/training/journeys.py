"""The matrix of training runs: every value of every setting is in one of its rows.

`tests/training/test_journeys.py` trains each row undisturbed, stopped and resumed, and stopped and moved.
"""

from __future__ import annotations

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
TRAINS_BASE = ("fft", "freeze")


class Layout(NamedTuple):
    ranks: int
    tp_size: int


DP2, TP2, DP2_TP2 = Layout(2, 1), Layout(2, 2), Layout(4, 2)
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

    def __str__(self) -> str:
        flags = [name for name in ("vocabulary", "asynchronous", "sequence_parallel") if getattr(self, name)]
        values = [self.replay_loss, self.base_precision, self.activation_checkpointing, self.norm, *flags]
        usual = ("nll", "bf16", "none", "separate")
        layout = f"ZeRO-{self.zero}, {self.layout.ranks} ranks, tp {self.layout.tp_size}"
        return ", ".join((self.method, layout, *(value for value in values if value not in usual)))

    @property
    def zero_moved_to(self) -> int:
        return {1: 3 if self.base_precision == "bf16" else 2, 2: 1, 3: 2}[self.zero]

    def settings(self, layout: Layout, zero: int) -> dict[str, Any]:
        """What `tests.training.runs.write_config` takes, at a layout that need not be the row's own."""
        own_norm = {"norm": self.norm} if METHODS[self.method]["name"] == "scale" else {}
        parallel = {"tp_size": layout.tp_size, "sequence_parallel": self.sequence_parallel and layout.tp_size > 1}
        return {
            "zero": zero,
            "method": METHODS[self.method] | own_norm,
            "parallel": parallel,
            "data__replay_loss": self.replay_loss,
            "base_precision": self.base_precision,
            "checkpoints": {"every_steps": 1, "asynchronous": self.asynchronous},
            "activation_checkpointing": self.activation_checkpointing,
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
}
JOURNEYS = [
    #        method       ZeRO layout  vocabulary     base    asynchronous  seq. parallel
    #                                         replay loss           checkpointing   norm
    Journey("preserve",  1, DP2,     True,  "nll", "fp8",  False, "all",  False, "base"),
    Journey("adapt",     3, DP2_TP2, True,  "nll", "bf16", True,  "none", True,  "separate"),
    Journey("route",     3, TP2,     True,  "nll", "bf16", True,  "all",  True,  "base"),
    Journey("fft",       1, TP2,     False, "nll", "bf16", False, "all",  True,  "separate"),
    Journey("freeze",    3, DP2,     False, "kl",  "bf16", False, "none", False, "separate"),
    Journey("lora",      2, DP2,     True,  "kl",  "nf4",  True,  "none", False, "separate"),
    Journey("llama_pro", 1, DP2,     False, "kl",  "bf16", False, "all",  False, "separate"),
]  # fmt: skip

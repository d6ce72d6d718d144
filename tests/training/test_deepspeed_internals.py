"""What is replaced in DeepSpeed."""

from __future__ import annotations

from deepspeed.runtime import bf16_optimizer

from pipeline.training.deepspeed_internals import lifecycle  # noqa: F401  # it replaces a function


def test_the_optimizer_for_bf16_prints_nothing_of_its_memory(capsys):
    bf16_optimizer.see_memory_usage("begin bf16_optimizer", force=True)
    assert capsys.readouterr().out == ""

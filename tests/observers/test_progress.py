"""The line of progress."""

from __future__ import annotations

from pipeline.observers.progress import worded


def test_a_progress_line_has_the_main_figures():
    figures = {"loss": 2.5, "gradient_norm": 1.0, "learning_rate": 1e-3, "tokens_per_second_per_gpu": 12345.6}
    assert worded(figures) == ["loss 2.5000", "learning rate 1.00e-03", "12,346 tokens/s per rank"]
    on_a_gpu = worded({**figures, "memory_peak_allocated_gib": 1.0})
    assert on_a_gpu == ["loss 2.5000", "learning rate 1.00e-03", "12,346 tokens/s per GPU"]
    assert worded(figures | {"mfu": 0.4123})[-1] == "MFU 41.2%"

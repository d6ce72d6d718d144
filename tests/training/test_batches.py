"""Which samples a step reads, and the batches made of them."""

from __future__ import annotations

import torch

from pipeline.config.run import load_config
from pipeline.data.samples import TrainingSamples
from pipeline.parallel.topology import Layout
from pipeline.training.batches import TrainingBatches
from tests.training.runs import write_config


def test_a_step_reads_the_same_samples_in_every_layout(tokens, tmp_path):
    config = load_config(write_config(tmp_path, tokens))
    samples = TrainingSamples(config.data, seed=1, tokenizer_fingerprint=None)
    steps = {}
    for world_size, tp_size in [(1, 1), (2, 1), (4, 1), (4, 2), (2, 2)]:
        layout = Layout(world_size, tp_size)
        rows = []
        for rank in range(world_size):
            batches = list(TrainingBatches(samples, config, layout, rank, torch.device("cpu")).of_step(3))
            assert all(batch.tokens.shape == (2, 32) for batch in batches)
            if layout.tp_rank(rank) == 0:
                rows += [tuple(row.tolist()) for batch in batches for row in batch.tokens]
        steps[world_size, tp_size] = sorted(rows)
    assert len(set(map(str, steps.values()))) == 1
    assert len(steps[1, 1]) == config.schedule.global_batch_size


def test_tensor_parallel_neighbours_read_the_same(tokens, tmp_path):
    config = load_config(write_config(tmp_path, tokens))
    samples = TrainingSamples(config.data, seed=1, tokenizer_fingerprint=None)
    first, second, other = (
        next(TrainingBatches(samples, config, Layout(4, 2), rank, torch.device("cpu")).of_step(0)) for rank in (0, 1, 2)
    )
    assert torch.equal(first.tokens, second.tokens)
    assert not torch.equal(first.tokens, other.tokens)

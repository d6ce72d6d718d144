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


def test_rehearsed_sequences_come_first_and_all_ranks_run_the_base_on_as_many(tokens, tmp_path):
    config = load_config(write_config(tmp_path, tokens, data__replay_loss="kl", schedule__micro_batch_size=4))
    samples = TrainingSamples(config.data, seed=1, tokenizer_fingerprint=None)
    replayed = {tuple(samples[index].tokens.tolist()) for index in range(80) if samples.role_of(index) == "replay"}
    assert len(replayed) > 10
    counts = []
    for step in range(10):
        ranks = [
            list(TrainingBatches(samples, config, Layout(2, 1), rank, torch.device("cpu")).of_step(step))
            for rank in (0, 1)
        ]
        for batches in zip(*ranks, strict=True):
            for batch in batches:
                is_replayed = [tuple(row.tolist()) in replayed for row in batch.tokens]
                assert is_replayed == sorted(is_replayed, reverse=True)
                assert sum(is_replayed) == batch.kl_rows
            assert {batch.reference_rows for batch in batches} == {max(batch.kl_rows for batch in batches)}
            counts.append(tuple(batch.kl_rows for batch in batches))
    assert any(first != second for first, second in counts)


def test_rehearsed_sequences_are_dealt_out_so_that_the_base_runs_on_few(tokens, tmp_path):
    """A step reads the same samples in every layout, and the base runs on no more of them than it must."""
    config = load_config(write_config(tmp_path, tokens, data__replay_loss="kl"))
    samples = TrainingSamples(config.data, seed=1, tokenizer_fingerprint=None)
    wanted = [samples[index].tokens.tolist() for index in range(8, 16)]
    rehearsed = sum(samples.role_of(index) == "replay" for index in range(8, 16))
    assert 0 < rehearsed < 8
    for dp_size in (1, 2, 4):
        layout = Layout(dp_size, 1)
        ranks = [
            list(TrainingBatches(samples, config, layout, rank, torch.device("cpu")).of_step(1))
            for rank in range(dp_size)
        ]
        assert sorted(row.tolist() for rank in ranks for batch in rank for row in batch.tokens) == sorted(wanted)
        assert sum(batch.kl_rows for rank in ranks for batch in rank) == rehearsed
        assert {sum(batch.reference_rows for batch in rank) for rank in ranks} == {-(-rehearsed // dp_size)}


def test_without_rehearsal_no_sequence_is_marked(tokens, tmp_path):
    config = load_config(write_config(tmp_path, tokens))
    samples = TrainingSamples(config.data, seed=1, tokenizer_fingerprint=None)
    batch = next(TrainingBatches(samples, config, Layout(1, 1), 0, torch.device("cpu")).of_step(0))
    assert (batch.kl_rows, batch.reference_rows) == (0, 0)

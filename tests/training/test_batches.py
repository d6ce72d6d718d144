"""Which samples a step reads, the batches made of them, and the thread that reads them ahead."""

from __future__ import annotations

import itertools
import math
import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config.run import load_config
from pipeline.data.dataset.samples import TrainingSamples, rank_indices
from pipeline.errors import DataError
from pipeline.parallel.topology import Layout
from pipeline.training.batches import MicroBatch, TrainingBatches, collate
from tests.training.runs import write_config

CPU = torch.device("cpu")


def samples_of(config) -> TrainingSamples:
    return TrainingSamples(config.data, seed=1, tokenizer_fingerprint=None)


def step_of(config, samples, layout: Layout, step: int) -> list[list[MicroBatch]]:
    """Each rank's micro-batches of a step."""
    ranks = range(layout.world_size)
    return [
        list(TrainingBatches(samples, config, layout, rank, CPU).micro_batches(step))
        for rank in ranks
    ]


def rows_of(batches: list[MicroBatch]) -> list[list[int]]:
    """The tokens of each sequence of these micro-batches."""
    rows = []
    for batch in batches:
        rows += batch.tokens.tolist()
    return rows


def test_a_step_reads_the_same_samples_in_every_layout(tokens, tmp_path):
    config = load_config(write_config(tmp_path, tokens))
    steps = []
    for layout in (Layout(1, 1), Layout(2, 1), Layout(4, 1), Layout(4, 2), Layout(2, 2)):
        ranks = step_of(config, samples_of(config), layout, 3)
        read = []
        for micro_batches in ranks:
            for batch in micro_batches:
                assert batch.tokens.shape == (2, 32)
                assert batch.kl_sequences == 0
                assert batch.reference_sequences == 0
            read.append(rows_of(micro_batches))

        step = []
        for rank, rows in enumerate(read):
            first_of_tp_group = rank - layout.tp_rank(rank)
            assert rows == read[first_of_tp_group], "tensor-parallel ranks read different samples"
            if rank == first_of_tp_group:
                step += rows
        # Which data-parallel rank reads a sample depends on the layout; which samples, does not.
        steps.append(sorted(step))
    assert all(step == steps[0] for step in steps)
    assert len(steps[0]) == config.schedule.global_batch_size


def test_sequences_that_train_by_kl_come_first_and_the_base_runs_on_few(tokens, tmp_path):
    config = load_config(
        write_config(tmp_path, tokens, data__replay_loss="kl", schedule__micro_batch_size=4)
    )
    samples = samples_of(config)
    size = config.schedule.global_batch_size
    for step in range(10):
        wanted = []
        replayed = []
        for index in range(step * size, (step + 1) * size):
            row = samples[index].tokens.tolist()
            wanted.append(row)
            if samples.role_of(index) == "replay":
                replayed.append(row)

        for dp_size in (1, 2):
            ranks = step_of(config, samples, Layout(dp_size, 1), step)
            read = []
            for micro_batches in ranks:
                read += rows_of(micro_batches)
            assert sorted(read) == sorted(wanted)

            # The micro-batches that the ranks compute at the same time.
            for batches in zip(*ranks, strict=True):
                for batch in batches:
                    is_replayed = [row in replayed for row in rows_of([batch])]
                    assert is_replayed == sorted(is_replayed, reverse=True), "they come first"
                    assert sum(is_replayed) == batch.kl_sequences
                # The base runs on as many sequences of every rank: all enter the same collectives.
                most = max(batch.kl_sequences for batch in batches)
                for batch in batches:
                    assert batch.reference_sequences == most

            kl_sequences = 0
            for micro_batches in ranks:
                kl_sequences += sum(batch.kl_sequences for batch in micro_batches)
                # Spread evenly: the base runs on no more sequences of a rank than it must.
                reference_sequences = sum(batch.reference_sequences for batch in micro_batches)
                assert reference_sequences == math.ceil(len(replayed) / dp_size)
            assert kl_sequences == len(replayed)


# --- The thread that reads ahead ---


class Recorded:
    """Samples, with the threads that read them. Those of `damaged` fail."""

    def __init__(self, samples: TrainingSamples) -> None:
        self.samples = samples
        self.damaged: set[int] = set()
        self.threads: set[str] = set()

    def __getitem__(self, index):
        self.threads.add(threading.current_thread().name)
        if index in self.damaged:
            raise DataError(f"sample {index} is damaged")
        return self.samples[index]

    def role_of(self, index):
        return self.samples.role_of(index)


@pytest.fixture
def config(tokens, tmp_path):
    """Six steps of four micro-batches of two samples."""
    return load_config(write_config(tmp_path, tokens))


@pytest.fixture
def recorded(config):
    return Recorded(samples_of(config))


@pytest.fixture
def batches(recorded, config):
    made = TrainingBatches(recorded, config, Layout(1, 1), 0, CPU)
    yield made
    made.close()


def assert_read(found, samples, config, step, micro_batch):
    """Compares a micro-batch with the same one, read by this thread."""
    size = config.schedule.global_batch_size
    at_once = config.schedule.micro_batch_size
    indices = rank_indices(
        step * size, global_batch_size=size, micro_batch_size=at_once, dp_rank=0, dp_size=1
    )
    expected = collate([samples[index] for index in indices[micro_batch]], document_mask=True)
    for name in ("tokens", "targets", "positions"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.documents.ids, expected.documents.ids)
    assert torch.equal(found.documents.starts, expected.documents.starts)
    assert found.documents.per_row == expected.documents.per_row


# One run serves all of Hypothesis' examples: nothing that they do is remembered.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 4)), max_size=8))
def test_every_step_gets_its_own_samples_in_whatever_order_it_is_computed(
    recorded, batches, config, taken
):
    """A step is computed again, skipped, left in the middle, or the first of a resumed run."""
    for step, count in taken:
        for number, found in enumerate(itertools.islice(batches.micro_batches(step), count)):
            assert_read(found, recorded.samples, config, step, number)
    assert "MainThread" not in recorded.threads


def test_a_fault_is_raised_where_its_micro_batch_is_due_and_nowhere_else(recorded, batches, config):
    recorded.damaged = {20}
    step = batches.micro_batches(2)  # samples 16 to 23, two a micro-batch
    for number in range(2):
        assert_read(next(step), recorded.samples, config, 2, number)
    with pytest.raises(DataError, match="sample 20 is damaged"):
        next(step)
    assert_read(next(batches.micro_batches(3)), recorded.samples, config, 3, 0)
    recorded.damaged = set()
    assert len(list(batches.micro_batches(2))) == 4, "a fault that is gone is not remembered"

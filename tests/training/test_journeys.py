"""The matrix of `journeys.py`: runs resume to the bit, move to other layouts, train the expansion alone, are exported.

Each row is trained undisturbed; stopped in its first step and resumed there; and resumed from there at another layout
and ZeRO stage, often on one rank. In its own layout a run resumes to the bit. Another layout only reorders sums: one of
n terms in fp32 is then off by about sqrt(n) · 2^-24 of its largest term; with n = 2^14, a batch's tokens times the
hidden size, by 8e-6 (`ROUNDING`). Losses and gradient norms are such sums. The gradients of queries and keys, which
Adam's first moment averages, are what is left of terms that cancel, some tens of times as large: so is their error, and
twice that of their squares. A weight moves by the ratio of the two, whatever their size, so a few elements whose
gradient is all rounding move at random: weights are compared by the length of what differs against that of the way they
went.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import methods
from pipeline.checkpoint.reader import CheckpointReader
from pipeline.config.run import load_config
from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.trained_model import as_text, describe_checkpoint, open_trained
from pipeline.conversion.verify import probe_maker
from pipeline.data.corpora import corpus_jobs
from pipeline.data.preprocess import preprocess
from pipeline.data.tokenizer_training import texts
from pipeline.data.vocabulary import learn_extension, write_extension
from pipeline.data.workers import local_workers
from pipeline.errors import RESUME_LATER, CheckpointError
from pipeline.methods.vocabulary import with_new_rows
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import open_base
from pipeline.parallel.sharding import full_shape_of, merge, named_trained_parameters
from pipeline.parallel.topology import SINGLE
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.journeys import JOURNEYS, LEVELS, METHODS, MOVES_TO, TRAINS_BASE, Journey
from tests.training.runs import in_turn, losses, make_run, metrics, train, train_and_look, write_config

STEPS = 3
NEW_PIECES = 61  # prime
ROUNDING = 2**7 * 2**-24
MOMENT_TOLERANCES = {"exp_avg": 40 * ROUNDING, "exp_avg_sq": 80 * ROUNDING}
WEIGHT_TOLERANCE = 0.005
DIAGNOSTICS = ("kl_from_base/", "base_stream_cosine/", "norm_")
every_journey = pytest.mark.parametrize("journey", JOURNEYS, ids=str)


def test_every_value_of_every_setting_is_in_a_row():
    for values, found in zip(LEVELS.values(), zip(*JOURNEYS, strict=True), strict=True):
        assert set(values) == set(found)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    """The base's tokenizer with pieces for Korean."""
    folder = tmp_path_factory.mktemp("vocabulary") / "korean"
    new, old = (list(texts([str(file)])) for file in (REVIEWS_HELDOUT, STORIES_HELDOUT))
    write_extension(learn_extension(STORIES, new[:20], old, add=NEW_PIECES, min_uses=5), folder, lambda _: None)
    return folder


@pytest.fixture(scope="module")
def extended_tokens(vocabulary, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("extended")
    config = load_config(write_config(folder / "run", folder, vocabulary={"folder": str(vocabulary)}))
    with local_workers(1) as workers:
        for job in corpus_jobs(config.data, config.tokenizer):
            preprocess(job, workers)
    return folder


class Runs:
    """The runs of all rows, in folders of their number; what the ranks of the undisturbed ones held at their end."""

    def __init__(self, folder: Path, tokens: Path, extended_tokens: Path, vocabulary: Path) -> None:
        self.folder, self._tokens = folder, {False: tokens, True: extended_tokens}
        self._vocabulary = {False: {}, True: {"vocabulary": {"folder": str(vocabulary)}}}
        self.held: dict[Journey, tuple[dict[str, Any], ...]] = {}

    def __getitem__(self, place: tuple[str, Journey]) -> Path:
        return self.folder / place[0] / str(JOURNEYS.index(place[1]))

    def config(self, make: Callable[..., Path], kind: str, journey: Journey) -> Path:
        moved = kind == "moved"
        layout = MOVES_TO[journey.layout] if moved else journey.layout
        settings = journey.settings(layout, journey.zero_moved_to if moved else journey.zero)
        settings |= {"schedule__steps": STEPS, **self._vocabulary[journey.vocabulary]}
        return make(self[kind, journey], self._tokens[journey.vocabulary], **settings)


@pytest.fixture(scope="module")
def runs(tokens, extended_tokens, vocabulary, tmp_path_factory) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("journeys"), tokens, extended_tokens, vocabulary)
    first = defaultdict(list)
    for journey in JOURNEYS:
        undisturbed, stopped = (runs.config(make_run, kind, journey) for kind in ("undisturbed", "stopped"))
        first[journey.layout.ranks] += [partial(train_and_look, undisturbed), partial(train, stopped, stop=True)]
    for ranks, jobs in first.items():
        by_job = list(zip(*run_ranks(in_turn, ranks, jobs), strict=True))
        assert by_job[1::2] == [(RESUME_LATER,) * ranks] * (len(jobs) // 2)
        own = [journey for journey in JOURNEYS if journey.layout.ranks == ranks]
        runs.held |= dict(zip(own, by_job[::2], strict=True))
    then = defaultdict(list)
    for journey in JOURNEYS:
        for kind, layout in (("resumed", journey.layout), ("moved", MOVES_TO[journey.layout])):
            shutil.copytree(runs["stopped", journey], runs[kind, journey])
            then[layout.ranks].append(partial(train, runs.config(write_config, kind, journey)))
    for ranks, jobs in then.items():
        assert run_ranks(in_turn, ranks, jobs) == [[0] * len(jobs)] * ranks
    return runs


@every_journey
def test_it_resumes_to_the_bit(runs: Runs, journey: Journey):
    undisturbed = metrics(runs["undisturbed", journey])
    assert metrics(runs["resumed", journey]) == undisturbed
    assert len(losses(runs["stopped", journey])) == 1 and len(losses(runs["resumed", journey])) == STEPS
    perplexities = [line["perplexity/korean"] for line in undisturbed if "perplexity/korean" in line]
    assert perplexities[-1] < perplexities[0]
    assert (journey.replay_loss == "kl") == any("kl_rehearsal" in line for line in undisturbed)


@every_journey
def test_at_another_layout_it_trains_the_same(runs: Runs, journey: Journey):
    folder, reference = runs["moved", journey], runs["undisturbed", journey]
    assert losses(folder) == pytest.approx(losses(reference), rel=ROUNDING)
    for key in ("gradient_norm", "perplexity/korean", "bits_per_byte/english"):
        expected = [line[key] for line in metrics(reference) if key in line]
        assert [line[key] for line in metrics(folder) if key in line] == pytest.approx(expected, rel=ROUNDING), key
    # A divergence is what is left of log probabilities of size ten, however small it is.
    divergences = [[line.get("kl_rehearsal", 0.0) for line in metrics(run)] for run in (folder, reference)]
    assert divergences[0] == pytest.approx(divergences[1], rel=ROUNDING, abs=10 * ROUNDING)
    assert diagnostics(folder) == pytest.approx(diagnostics(reference), rel=1e-3)
    found, expected = last_checkpoint(folder), last_checkpoint(reference)
    start = dict(initial_model(reference / "run.yaml", "cpu").named_parameters())
    assert found.names == expected.names
    for name in found.names:
        wanted = expected.read(name)
        way = torch.linalg.vector_norm(wanted - start[name])
        assert torch.linalg.vector_norm(found.read(name) - wanted) <= WEIGHT_TOLERANCE * way, name
        for moment, tolerance in MOMENT_TOLERANCES.items():
            wanted = expected.read(name, moment)
            error = (found.read(name, moment) - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)
            assert error <= tolerance, f"{moment} of {name}: off by {error:.1e} of the largest"


@every_journey
def test_it_starts_at_its_base_and_changes_only_what_trains(runs: Runs, journey: Journey):
    ranks, tp_size = runs.held[journey], journey.layout.tp_size
    start = initial_model(runs["undisturbed", journey] / "run.yaml", "cpu")
    trained = last_checkpoint(runs["undisturbed", journey]).names
    moved = 0
    for name, parameter in start.named_parameters():
        partition = ranks[0]["partitions"][name]
        shards, size = (
            [rank["parameters"][name] for rank in ranks[:tp_size]],
            full_shape_of(parameter)[partition.dim or 0],
        )
        for holder, shard in enumerate(shards):
            first = holder - holder % partition.replicas(tp_size)
            assert torch.equal(shard, shards[first]), f"{name}: holders of the same shard drifted apart"
        whole = merge(shards, partition, size)
        assert name in trained or torch.equal(whole, parameter), f"{name} does not train, and changed"
        moved += name in trained and not torch.equal(whole, parameter)
    assert moved > 0.7 * len(trained)
    held = sum(rank["parameters"][name].numel() for rank in ranks[:tp_size] for name in trained)
    for rank in ranks:
        assert rank["step0_max_abs_logit_difference"] == (None if journey.method in TRAINS_BASE else 0.0)
        assert rank["optimizer_state_elements"] == 2 * held
    record = json.loads((runs["resumed", journey] / "training.json").read_text())
    cost = record.get("quantization_cost") or {"english": 0.0}
    assert (journey.base_precision != "bf16") == (
        0 < cost["english"] < (0.05 if journey.base_precision == "fp8" else 0.5)
    )


@every_journey
def test_it_is_exported_as_it_trained(runs: Runs, journey: Journey, tmp_path: Path):
    """From the layout that it moved to."""
    checkpoint = runs["moved", journey] / "checkpoints" / f"step_{STEPS:08d}"
    assert convert(Conversion(checkpoint, STORIES, tmp_path / "hf"), probe_maker({}))
    report = json.loads((tmp_path / "hf" / "verification.json").read_text())
    assert report["top1_agreement"] > 0.99 and report["kl"] < 1e-6
    for text in report["texts"].values():
        assert text["exported_perplexity"] == pytest.approx(text["training_perplexity"], rel=1e-4)
        if journey.base_precision != "bf16":
            assert text["quantized_base_perplexity"] != pytest.approx(text["training_perplexity"], rel=1e-4)


@pytest.mark.parametrize("method", ["fft", "freeze", "llama_pro"])
def test_a_checkpoint_is_described_and_refused_as_another_methods(runs: Runs, method: str, tmp_path: Path):
    [journey] = (journey for journey in JOURNEYS if journey.method == method)
    checkpoint = runs["moved", journey] / "checkpoints" / f"step_{STEPS:08d}"
    model, facts = open_trained(checkpoint, STORIES), describe_checkpoint(checkpoint)
    assert model.trained == {name for name, _ in named_trained_parameters(model.structure)}
    assert facts["trainable_parameters"] == sum(model.read(name).numel() for name in model.trained)
    assert f"name {METHODS[method]['name']}" in as_text(facts)
    if method == "llama_pro":
        base, added = facts["norms"]["base"], facts["norms"]["added layer"]
        assert all((of_base > 0) != (of_added > 0) for of_base, of_added in zip(base, added, strict=True))
    manifest = shutil.copytree(checkpoint, tmp_path / "copy") / "manifest.json"
    values = json.loads(manifest.read_text())
    values["run"] |= {"method": METHODS["lora" if method == "fft" else "fft"], "base_precision": "bf16"}
    manifest.write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"lacks .* more that its manifest's method has|holds .* more"):
        open_trained(manifest.parent, STORIES)


def diagnostics(run: Path) -> dict[str, float]:
    return {name: value for name, value in metrics(run)[-1].items() if name.startswith(DIAGNOSTICS)}


def last_checkpoint(run: Path) -> CheckpointReader:
    return CheckpointReader(run / "checkpoints" / f"step_{STEPS:08d}", initial_model(run / "run.yaml", "meta"))


def initial_model(config: Path, device: str) -> Decoder:
    """The run's model before its first step; without values on the meta device."""
    settings = load_config(config)
    base = with_new_rows(settings, open_base(STORIES))
    with torch.device(device):
        model = methods.build_model(settings, base.spec, SINGLE)
    if device != "meta":
        methods.load_initial_weights(model, settings, base, SINGLE)
    return model

"""The matrix of `journeys.py`: runs resume to the bit, move to other layouts, train the expansion
alone, are exported.

Each row is trained undisturbed; stopped in its first step and resumed there; and resumed from there
at another layout and ZeRO stage, often on one rank. In its own layout a run resumes to the bit.
Another layout only reorders sums: one of n terms in fp32 is then off by about sqrt(n) · 2^-24 of
its largest term; with n = 2^14, a batch's tokens times the hidden size, by 8e-6 (`ROUNDING`).
Losses and gradient norms are such sums. The gradients of queries and keys, which Adam's first
moment averages, are what is left of terms that cancel, some tens of times as large: so is their
error, and twice that of their squares. A weight moves by the ratio of the two, whatever their size,
so a few elements whose gradient is all rounding move at random: weights are compared by the length
of what differs against that of the way they went. `make test` trains the rows of `QUICK` only.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from pipeline.checkpoint.rank_files import CheckpointReader, read_index
from pipeline.checkpoint.trained_model import open_trained
from pipeline.checks.checklist import check_stage
from pipeline.config.method import ScaleMethod
from pipeline.config.run import load_config
from pipeline.conversion.convert import convert
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.conversion.scale_export import scale_export
from pipeline.data.tokenize.corpora import corpus_jobs
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenize.job import preprocess
from pipeline.data.tokenize.workers import local_workers
from pipeline.data.tokenizer.extension.vocabulary import learn_extension, write_extension
from pipeline.errors import RESUME_LATER, CheckpointError, ConversionError, DataError
from pipeline.hf.load import load_hf_model
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.remote_code.scale_streams import ScaleOutput, StreamPath
from pipeline.methods.build_model import build_model
from pipeline.methods.registry import method_for, training_method
from pipeline.methods.scale import made_expansion, upscale
from pipeline.methods.vocabulary import with_new_tokens
from pipeline.model.decoder import Decoder, is_layer_matrix
from pipeline.model.from_hf import open_base
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.journeys import JOURNEYS, LEVELS, MOVES_TO, QUICK, TRAINS_BASE, Journey, pairs
from tests.training.runs import (
    in_turn,
    losses,
    make_run,
    metrics,
    train,
    train_and_look,
    write_config,
)
from tests.widened import SEED, balance_router

STEPS = 3
NEW_TOKENS = 61
"""A prime: no number of ranks divides it."""
ROUNDING = 2**7 * 2**-24
"""sqrt(n) rounding errors of fp32 in a sum of n = 2^14 terms."""
MOMENT_TOLERANCES = {"exp_avg": 40 * ROUNDING, "exp_avg_sq": 80 * ROUNDING}
"""Gradients whose terms cancel have tens of times the error, and their squares twice that."""
WEIGHT_TOLERANCE = 0.005
"""Of the length of the way that the weights went."""


def rows(journeys: Sequence[Journey]) -> pytest.MarkDecorator:
    """Parametrizes a test with these rows."""
    parameters = []
    for journey in journeys:
        if journey in QUICK:
            parameters.append(pytest.param(journey))
        else:
            parameters.append(pytest.param(journey, marks=pytest.mark.full))
    return pytest.mark.parametrize("journey", parameters, ids=str)


def test_the_matrix_has_every_pair_that_is_allowed():
    allowed_pairs = set()
    for values in itertools.product(*LEVELS.values()):
        journey = Journey(*values)
        if journey.allowed:
            allowed_pairs |= pairs(journey)
    assert allowed_pairs == set().union(*map(pairs, JOURNEYS))

    # The quick tier has every value, if not every pair.
    for setting, values in LEVELS.items():
        assert set(values) == {getattr(journey, setting) for journey in QUICK}, setting


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    """The base's tokenizer with tokens for Korean."""
    folder = tmp_path_factory.mktemp("vocabulary") / "korean"
    new = list(texts([str(REVIEWS_HELDOUT)]))
    old = list(texts([str(STORIES_HELDOUT)]))
    extension = learn_extension(STORIES, new[:20], old, add=NEW_TOKENS, min_uses=5)
    write_extension(extension, folder, lambda _: None)
    return folder


@pytest.fixture(scope="module")
def extended_tokens(vocabulary, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("extended")
    config = load_config(
        write_config(folder / "run", folder, vocabulary={"folder": str(vocabulary)})
    )
    with local_workers(1) as workers:
        for job in corpus_jobs(config.data, config.tokenizer):
            preprocess(job, workers)
    return folder


class Trained(NamedTuple):
    """A row's run folders; and what each rank of the undisturbed run held at its end."""

    undisturbed: Path
    stopped: Path
    resumed: Path
    moved: Path
    held: tuple[dict[str, Any], ...]


class Rows:
    """The runs of some rows, in the folder `made`.

    The jobs of all rows that have one number of ranks run one after another in the same ranks.
    """

    def __init__(
        self,
        journeys: Sequence[Journey],
        made: Path,
        *,
        tokens: Path,
        extended_tokens: Path,
        vocabulary: Path,
    ) -> None:
        self.journeys = journeys
        self.made = made
        self.tokens = tokens
        self.extended_tokens = extended_tokens
        self.vocabulary = vocabulary

    def trained(self) -> dict[Journey, Trained]:
        """Makes the runs of all rows."""
        held = self.train_undisturbed_and_stopped()
        self.train_resumed_and_moved()
        trained = {}
        for journey in self.journeys:
            trained[journey] = Trained(
                undisturbed=self.folder("undisturbed", journey),
                stopped=self.folder("stopped", journey),
                resumed=self.folder("resumed", journey),
                moved=self.folder("moved", journey),
                held=held[journey],
            )
        return trained

    def train_undisturbed_and_stopped(self) -> dict[Journey, tuple[dict[str, Any], ...]]:
        """Two runs of each row; returns what each rank of the undisturbed one held at its end."""
        jobs: dict[int, list[partial[Any]]] = defaultdict(list)
        for journey in self.journeys:
            undisturbed = self.config(make_run, "undisturbed", journey)
            stopped = self.config(make_run, "stopped", journey)
            jobs[journey.layout.ranks] += [
                partial(train_and_look, undisturbed),
                partial(train, stopped, stop=True),
            ]

        held = {}
        results = {ranks: iter(results_of(own, ranks)) for ranks, own in jobs.items()}
        for journey in self.journeys:
            ranks = journey.layout.ranks
            held[journey] = next(results[ranks])
            exit_codes = next(results[ranks])
            assert exit_codes == (RESUME_LATER,) * ranks
        return held

    def train_resumed_and_moved(self) -> None:
        """Two runs of each row, which go on from copies of the stopped one."""
        jobs: dict[int, list[partial[Any]]] = defaultdict(list)
        for journey in self.journeys:
            for kind, layout in (("resumed", journey.layout), ("moved", MOVES_TO[journey.layout])):
                shutil.copytree(self.folder("stopped", journey), self.folder(kind, journey))
                config = self.config(write_config, kind, journey)
                jobs[layout.ranks].append(partial(train, config))
        for ranks, own in jobs.items():
            for exit_codes in results_of(own, ranks):
                assert exit_codes == (0,) * ranks

    def folder(self, kind: str, journey: Journey) -> Path:
        """The folder of a row's run."""
        return self.made / kind / str(self.journeys.index(journey))

    def config(self, make: Callable[..., Path], kind: str, journey: Journey) -> Path:
        """The configuration of a row's run, written by `make`."""
        settings = journey.settings(journey.layout, journey.zero)
        if kind == "moved":
            settings = journey.settings(MOVES_TO[journey.layout], journey.zero_moved_to)
        tokens = self.tokens
        if journey.vocabulary:
            settings["vocabulary"] = {"folder": str(self.vocabulary)}
            tokens = self.extended_tokens
        return make(self.folder(kind, journey), tokens, schedule__steps=STEPS, **settings)


def results_of(jobs: list[partial[Any]], ranks: int) -> list[tuple[Any, ...]]:
    """Of each job the results of its ranks; the jobs run one after another."""
    return list(zip(*run_ranks(in_turn, ranks, jobs), strict=True))


@pytest.fixture(scope="module")
def trained(tokens, extended_tokens, vocabulary, tmp_path_factory) -> Callable[[Journey], Trained]:
    """The runs of a row, made with those of the other rows of its tier."""

    @cache
    def trained_rows(quick: bool) -> dict[Journey, Trained]:
        rows_of_tier = Rows(
            [journey for journey in JOURNEYS if (journey in QUICK) == quick],
            tmp_path_factory.mktemp("journeys"),
            tokens=tokens,
            extended_tokens=extended_tokens,
            vocabulary=vocabulary,
        )
        return rows_of_tier.trained()

    return lambda journey: trained_rows(journey in QUICK)[journey]


@pytest.fixture
def run(trained, journey) -> Trained:
    return trained(journey)


@rows(JOURNEYS)
def test_it_resumes_to_the_bit(run: Trained, journey: Journey):
    undisturbed = metrics(run.undisturbed)
    assert metrics(run.resumed) == undisturbed
    assert len(losses(run.stopped)) == 1
    assert len(losses(run.resumed)) == STEPS

    # What is compared is a run that learned something, by the loss that the row names.
    perplexities = figures(run.undisturbed, "perplexity/korean")
    assert perplexities[-1] < perplexities[0]
    assert (journey.replay_loss == "kl") == any("kl" in line for line in undisturbed)


def figures(run: Path, key: str) -> list[float]:
    """A figure of the run's metrics, from the lines that have it."""
    return [line[key] for line in metrics(run) if key in line]


@rows(JOURNEYS)
def test_at_another_layout_it_trains_the_same(run: Trained, journey: Journey):
    moved = run.moved
    undisturbed = run.undisturbed
    assert losses(moved) == pytest.approx(losses(undisturbed), rel=ROUNDING)
    for key in ("gradient_norm", "perplexity/korean", "bits_per_byte/english"):
        expected = pytest.approx(figures(undisturbed, key), rel=ROUNDING)
        assert figures(moved, key) == expected, key

    # A divergence is what is left of log probabilities of size ten, however small it is.
    found_kl = [line.get("kl", 0.0) for line in metrics(moved)]
    expected_kl = [line.get("kl", 0.0) for line in metrics(undisturbed)]
    assert found_kl == pytest.approx(expected_kl, rel=ROUNDING, abs=10 * ROUNDING)

    found_drift = metrics(moved)[-1].get("kl_from_base/english", 0.0)
    expected_drift = metrics(undisturbed)[-1].get("kl_from_base/english", 0.0)
    assert found_drift == pytest.approx(expected_drift, rel=5e-3)
    # A run that trains the base does not have it any more to compare with.
    assert (found_drift > 0) == (journey.method not in TRAINS_BASE)

    found = last_checkpoint(moved)
    expected = last_checkpoint(undisturbed)
    start = dict(initial_model(undisturbed / "run.yaml", "cpu").named_parameters())
    assert found.names == expected.names
    for name in found.names:
        weights = expected.read(name)
        way = torch.linalg.vector_norm(weights - start[name])
        difference = torch.linalg.vector_norm(found.read(name) - weights)
        assert difference <= WEIGHT_TOLERANCE * way, name
        for moment, tolerance in MOMENT_TOLERANCES.items():
            if moment == "exp_avg_sq" and is_muons(journey, name, weights):
                continue  # Muon has no second moment.
            wanted = expected.read(name, moment)
            largest = wanted.abs().max().clamp_min(1e-30)  # not 0 / 0 where nothing moved
            error = (found.read(name, moment) - wanted).abs().max() / largest
            assert error <= tolerance, f"{moment} of {name}: off by {error:.1e} of the largest"


@rows(JOURNEYS)
def test_it_starts_at_its_base_and_changes_only_what_trains(run: Trained, journey: Journey):
    tp_size = journey.layout.tp_size
    # The ranks of the first tensor-parallel group, which have the whole model between them.
    tp_group = run.held[:tp_size]
    trained = last_checkpoint(run.undisturbed).names
    moved = set()
    for tp_rank, held in enumerate(tp_group):
        tp = TensorParallel(size=tp_size, rank=tp_rank)
        start = initial_model(run.undisturbed / "run.yaml", "cpu", tp)
        for name, parameter in start.named_parameters():
            shard = held["parameters"][name]
            # Neighbours hold copies of a shard of which there are fewer than ranks.
            replicas = held["partitions"][name].replicas(tp_size)
            first_holder = tp_group[tp_rank - tp_rank % replicas]
            assert torch.equal(shard, first_holder["parameters"][name]), (
                f"{name}: holders of a shard drifted apart"
            )
            if not torch.equal(shard, parameter):
                assert name in trained, f"{name} does not train, and changed"
                moved.add(name)
    assert len(moved) > 0.7 * len(trained), "so little trained that the above says nothing"

    moments = 0
    for held in tp_group:
        for name in trained:
            shard = held["parameters"][name]
            # Muon keeps one moment of a layer's matrix, Adam two of everything.
            moments += shard.numel() * (1 if is_muons(journey, name, shard) else 2)
    # A method that keeps the base starts at its logits exactly; others are not checked for it.
    expected_difference = None if journey.method in TRAINS_BASE else 0.0
    for held in run.held:
        assert held["step0_max_abs_logit_difference"] == expected_difference
        assert held["moments"] == moments


NEW_ROWS_OF_BASELINES = [
    journey
    for journey in JOURNEYS
    if journey.vocabulary and journey.method in ("fft", "freeze", "llama_pro")
]


# A model with open weights has no export without a gate: tests/conversion fits one.
EXPORTED = [journey for journey in QUICK if not journey.own_weights]


@rows([*EXPORTED, *NEW_ROWS_OF_BASELINES])
def test_it_is_exported_as_it_trained(run: Trained, journey: Journey, tmp_path: Path):
    """From the layout that it moved to."""
    checkpoint = run.moved / "checkpoints" / f"step_{STEPS:08d}"
    assert convert(Conversion(checkpoint, STORIES, tmp_path / "hf"), probe_maker({}))
    report = json.loads((tmp_path / "hf" / "verification.json").read_text())
    assert report["top1_agreement"] > 0.99 and report["kl"] < 1e-6
    for text in report["texts"].values():
        assert text["exported_perplexity"] == pytest.approx(text["training_perplexity"], rel=1e-4)
    vocabulary = load_config(run.moved / "run.yaml").vocabulary
    tokenizer = (STORIES if vocabulary is None else vocabulary.folder) / "tokenizer.json"
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    model = load_hf_model(tmp_path / "hf", trust_remote_code=True)
    weights = model.state_dict()
    rows = weights.get("model.embed_tokens.weight", weights.get("embedding.base.weight"))
    assert len(rows) == model.config.vocab_size == 512 + NEW_TOKENS * journey.vocabulary
    if journey.method not in TRAINS_BASE:
        assert torch.equal(rows[:512, :64], open_base(STORIES).read("embedding.base.weight"))


@rows([journey for journey in QUICK if journey.optimizer == "muon"][:1])
def test_a_run_keeps_its_optimizer(run: Trained, journey: Journey, tmp_path: Path):
    shutil.copytree(run.stopped, tmp_path / "run")
    values = yaml.safe_load((run.stopped / "run.yaml").read_text())
    values["schedule"]["optimizer"] = "adamw"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values | {"folder": str(tmp_path / "run")}))
    with pytest.raises(
        CheckpointError, match=r"another schedule\.optimizer \(expected 'muon', found 'adamw'\)"
    ):
        check_stage(load_config(tmp_path / "run.yaml"), journey.layout.ranks, "train")


@rows([journey for journey in QUICK if journey.own_weights])
def test_a_run_keeps_the_tokens_that_have_rows_of_their_own(
    run: Trained, journey: Journey, tmp_path: Path
):
    shutil.copytree(run.stopped, tmp_path / "run")
    values = yaml.safe_load((run.stopped / "run.yaml").read_text())
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values | {"folder": str(tmp_path / "run")}))
    config = load_config(tmp_path / "run.yaml")
    check_stage(config, journey.layout.ranks, "train")
    expansion = made_expansion(config, open_base(STORIES))
    assert expansion is not None and expansion.manifest.own_tokens is not None
    others = expansion.manifest.own_tokens[1:]
    shutil.rmtree(config.initial_expansion_folder)
    assert isinstance(config.method, ScaleMethod)
    upscale(config.method, open_base(STORIES), config.initial_expansion_folder, config.seed, others)
    with pytest.raises(CheckpointError, match="rows of their own for other tokens") as error:
        check_stage(config, journey.layout.ranks, "train")
    assert "\n" not in str(error.value)


# --- Extended vocabularies ---


def with_new_tokens_of(method: str) -> Journey:
    return next(journey for journey in JOURNEYS if journey.method == method and journey.vocabulary)


def change_run(checkpoint: Path, **changes: Any) -> None:
    """Changes the manifest's record of the run, and removes the checksum of the manifest."""
    values = json.loads((checkpoint / "manifest.json").read_text())
    values["run"] |= changes
    values.pop("checksum", None)
    (checkpoint / "manifest.json").write_text(json.dumps(values))


@torch.no_grad()
@rows([with_new_tokens_of("route")])
def test_an_exported_router_does_not_see_new_tokens(run: Trained, journey: Journey):
    """As in training; verification cannot tell, since it compares an export with one larger
    vocabulary.
    """
    model = open_trained(run.moved / "checkpoints" / f"step_{STEPS:08d}", STORIES)
    trained = model.method.build(model.stored.spec, SINGLE, "none")
    for name, parameter in trained.named_parameters():
        parameter.copy_(model.read_stored(name))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 512 + NEW_TOKENS, (1, 200), generator=generator)
    balance_router(trained, tokens)
    threshold = trained.output.threshold
    expected = trained.output.project(trained.hidden_states(tokens))

    exported, fill_output = model.streamed(torch.float32)
    hidden = exported.hidden_states(tokens)
    fill_output()
    exported.output.threshold = threshold
    found = exported.output.project(hidden)
    assert torch.equal(found.preserved, expected.preserved)
    assert 0 < int(found.preserved.sum()) < 200, "the router sends all tokens one way"
    assert (found.logits - expected.logits).abs().max() < 1e-4

    # The code that transformers runs, with the exported weights.
    values = scale_export(model, torch.float32).config | {"router_threshold": threshold}
    output = ScaleOutput(ScaleConfig(**values))
    weights = {}
    for name, _ in output.named_parameters():
        weights[name] = model.read(f"output.{name}")
    output.load_state_dict(weights)
    preserved_path = StreamPath(hidden.preserved_x, hidden.preserved_x_up)
    adapted_path = StreamPath(hidden.x, hidden.x_up)
    logits = output([preserved_path, adapted_path])
    assert (logits - expected.logits).abs().max() < 1e-4


@rows([with_new_tokens_of("adapt")])
def test_a_second_expansion_starts_from_an_exported_one_of_the_same_tokens(
    run: Trained, journey: Journey, tmp_path
):
    checkpoint = run.moved / "checkpoints" / f"step_{STEPS:08d}"
    expansion = tmp_path / "expansion"
    asked = Conversion(checkpoint, STORIES, expansion, format="expansion")
    assert convert(asked, probe_maker({}))

    values = yaml.safe_load((run.moved / "run.yaml").read_text())
    values["folder"] = str(tmp_path)
    values["init_expansion"] = str(expansion)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    config = load_config(path)
    ranks = MOVES_TO[journey.layout].ranks
    assert run_ranks(train, ranks, path) == [0] * ranks
    assert losses(tmp_path)[0] < losses(run.moved)[0], "it did not start from what was trained"

    base = with_new_tokens(config, open_base(STORIES))
    assert made_expansion(config, base) is not None
    assert base.new_tokens is not None
    other = replace(base, new_tokens=replace(base.new_tokens, tokenizer="of as many other pieces"))
    with pytest.raises(CheckpointError, match="another extended vocabulary"):
        made_expansion(config, other)
    method = method_for(config.method, expansion, SEED)
    without_vocabulary = open_base(STORIES)
    with pytest.raises(CheckpointError, match="set `vocabulary`"):
        model = method.build(without_vocabulary.spec, SINGLE, "none")
        method.load(model, without_vocabulary, SINGLE)

    cluster = Cluster(gpus=1, gpus_per_node=1, gpu_memory_gib=80)
    parameters = open_estimator(config, cluster).parameters
    assert parameters.trained == run.held[0]["trainable_parameters"]


@rows([with_new_tokens_of("lora")])
def test_an_export_needs_its_own_tokenizer(run: Trained, journey: Journey, tmp_path: Path):
    checkpoint = shutil.copytree(run.moved / "checkpoints" / f"step_{STEPS:08d}", tmp_path / "copy")
    probe = probe_maker({})
    asked = Conversion(checkpoint, STORIES, tmp_path / "hf")
    own = load_config(run.moved / "run.yaml").vocabulary
    for folder, error in ((tmp_path / "gone", DataError), (STORIES, ConversionError)):
        change_run(checkpoint, vocabulary=str(folder))
        with pytest.raises(error, match="tokenizer"):
            convert(asked, probe)
        assert not (tmp_path / "hf").exists()
    assert own is not None and convert(replace(asked, vocabulary=own.folder), probe)  # it has moved
    with pytest.raises(ConversionError, match="name its folder as --vocabulary"):
        convert(replace(asked, output=tmp_path / "other", vocabulary=STORIES), probe)


@pytest.mark.parametrize(
    ("changes", "message"), [(None, "found none"), ({"base_rows": 500}, "extends another tokeni")]
)
def test_a_vocabulary_of_another_base_is_refused(vocabulary, tokens, tmp_path, changes, message):
    record = shutil.copytree(vocabulary, tmp_path / "vocabulary") / "vocabulary.json"
    values = json.loads(record.read_text())
    del values["checksum"]  # it would say that the record was changed
    record.unlink()
    if changes is not None:
        record.write_text(json.dumps(values | changes))
    path = write_config(tmp_path, tokens, vocabulary={"folder": str(record.parent)})
    with pytest.raises(DataError, match=message):
        check_stage(load_config(path), 1, "train")


def is_muons(journey: Journey, name: str, parameter: torch.Tensor) -> bool:
    return journey.optimizer == "muon" and is_layer_matrix(name, parameter)


def last_checkpoint(run: Path) -> CheckpointReader:
    index = read_index(run / "checkpoints" / f"step_{STEPS:08d}")
    return CheckpointReader(index, initial_model(run / "run.yaml", "meta"))


def initial_model(config: Path, device: str, tp: TensorParallel = SINGLE) -> Decoder:
    """The run's model before its first step, or a rank's part of it; without values on the meta
    device.
    """
    settings = load_config(config)
    base = with_new_tokens(settings, open_base(STORIES))
    with torch.device(device):
        model = build_model(settings, base.spec, tp)
    if device != "meta":
        training_method(settings).load(model, base, tp)
    return model

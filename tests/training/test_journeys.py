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

from pipeline import methods
from pipeline.checkpoint.rank_files import CheckpointReader, read_index
from pipeline.checkpoint.trained_model import open_trained
from pipeline.checks.checklist import check_stage
from pipeline.config.method import ScaleMethod
from pipeline.config.run import load_config
from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.probe_texts import probe_maker
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
from pipeline.methods import method_for
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
NEW_PIECES = 61  # prime
ROUNDING = 2**7 * 2**-24
MOMENT_TOLERANCES = {"exp_avg": 40 * ROUNDING, "exp_avg_sq": 80 * ROUNDING}
WEIGHT_TOLERANCE = 0.005


def rows(journeys: Sequence[Journey]) -> pytest.MarkDecorator:
    """Parametrizes a test with these rows."""
    marks = [() if journey in QUICK else pytest.mark.full for journey in journeys]
    return pytest.mark.parametrize(
        "journey",
        [pytest.param(journey, marks=mark) for journey, mark in zip(journeys, marks, strict=True)],
        ids=str,
    )


def test_the_matrix_has_every_pair_that_is_allowed():
    allowed = filter(
        lambda journey: journey.allowed,
        itertools.starmap(Journey, itertools.product(*LEVELS.values())),
    )
    assert set().union(*map(pairs, allowed)) == set().union(*map(pairs, JOURNEYS))
    for values, found in zip(LEVELS.values(), zip(*QUICK, strict=True), strict=True):
        assert set(values) == set(found)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    """The base's tokenizer with tokens for Korean."""
    folder = tmp_path_factory.mktemp("vocabulary") / "korean"
    new, old = (list(texts([str(file)])) for file in (REVIEWS_HELDOUT, STORIES_HELDOUT))
    write_extension(
        learn_extension(STORIES, new[:20], old, add=NEW_PIECES, min_uses=5), folder, lambda _: None
    )
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


@pytest.fixture(scope="module")
def trained(tokens, extended_tokens, vocabulary, tmp_path_factory) -> Callable[[Journey], Trained]:
    """The runs of a row, made with those of the other rows of its tier: ranks of one number train
    one after another.
    """

    @cache
    def trained_rows(quick: bool) -> dict[Journey, Trained]:
        folder = tmp_path_factory.mktemp("journeys")
        journeys = [journey for journey in JOURNEYS if (journey in QUICK) == quick]

        def config(make: Callable[..., Path], kind: str, journey: Journey) -> Path:
            moved = kind == "moved"
            layout = MOVES_TO[journey.layout] if moved else journey.layout
            settings = journey.settings(layout, journey.zero_moved_to if moved else journey.zero)
            if journey.vocabulary:
                settings["vocabulary"] = {"folder": str(vocabulary)}
            read = extended_tokens if journey.vocabulary else tokens
            return make(
                folder / kind / str(journeys.index(journey)),
                read,
                schedule__steps=STEPS,
                **settings,
            )

        def train_all(jobs: dict[int, list[partial[Any]]]) -> dict[int, list[tuple[Any, ...]]]:
            """The results of the jobs of each number of ranks: of each job those of its ranks."""
            return {
                ranks: list(zip(*run_ranks(in_turn, ranks, jobs[ranks]), strict=True))
                for ranks in jobs
            }

        first, then = defaultdict(list), defaultdict(list)
        for journey in journeys:
            first[journey.layout.ranks].append(
                partial(train_and_look, config(make_run, "undisturbed", journey))
            )
            first[journey.layout.ranks].append(
                partial(train, config(make_run, "stopped", journey), stop=True)
            )
        found = train_all(first)
        for ranks, results in found.items():
            assert results[1::2] == [(RESUME_LATER,) * ranks] * (len(results) // 2)
        held = {ranks: iter(results[::2]) for ranks, results in found.items()}
        for journey in journeys:
            for kind, layout in (("resumed", journey.layout), ("moved", MOVES_TO[journey.layout])):
                place = str(journeys.index(journey))
                shutil.copytree(folder / "stopped" / place, folder / kind / place)
                then[layout.ranks].append(partial(train, config(write_config, kind, journey)))
        for ranks, results in train_all(then).items():
            assert results == [(0,) * ranks] * len(results)
        return {
            journey: Trained(
                *(
                    folder / kind / str(number)
                    for kind in ("undisturbed", "stopped", "resumed", "moved")
                ),
                held=next(held[journey.layout.ranks]),
            )
            for number, journey in enumerate(journeys)
        }

    return lambda journey: trained_rows(journey in QUICK)[journey]


@pytest.fixture
def run(trained, journey) -> Trained:
    return trained(journey)


@rows(JOURNEYS)
def test_it_resumes_to_the_bit(run: Trained, journey: Journey):
    undisturbed = metrics(run.undisturbed)
    assert metrics(run.resumed) == undisturbed
    assert len(losses(run.stopped)) == 1 and len(losses(run.resumed)) == STEPS
    perplexities = [
        line["perplexity/korean"] for line in undisturbed if "perplexity/korean" in line
    ]
    assert perplexities[-1] < perplexities[0]
    assert (journey.replay_loss == "kl") == any("kl" in line for line in undisturbed)


@rows(JOURNEYS)
def test_at_another_layout_it_trains_the_same(run: Trained, journey: Journey):
    folder, reference = run.moved, run.undisturbed
    assert losses(folder) == pytest.approx(losses(reference), rel=ROUNDING)
    for key in ("gradient_norm", "perplexity/korean", "bits_per_byte/english"):
        expected = [line[key] for line in metrics(reference) if key in line]
        assert [line[key] for line in metrics(folder) if key in line] == pytest.approx(
            expected, rel=ROUNDING
        ), key
    # A divergence is what is left of log probabilities of size ten, however small it is.
    divergences = [[line.get("kl", 0.0) for line in metrics(path)] for path in (folder, reference)]
    assert divergences[0] == pytest.approx(divergences[1], rel=ROUNDING, abs=10 * ROUNDING)
    drifts = [
        [line.get("kl_from_base/english", 0.0) for line in metrics(path)][-1]
        for path in (folder, reference)
    ]
    assert drifts[0] == pytest.approx(drifts[1], rel=5e-3) and (drifts[0] > 0) == (
        journey.method not in TRAINS_BASE
    )
    found, expected = last_checkpoint(folder), last_checkpoint(reference)
    start = dict(initial_model(reference / "run.yaml", "cpu").named_parameters())
    assert found.names == expected.names
    for name in found.names:
        wanted = expected.read(name)
        way = torch.linalg.vector_norm(wanted - start[name])
        assert torch.linalg.vector_norm(found.read(name) - wanted) <= WEIGHT_TOLERANCE * way, name
        for moment, tolerance in MOMENT_TOLERANCES.items():
            if moment == "exp_avg_sq" and is_muons(journey, name, wanted):
                continue
            wanted = expected.read(name, moment)
            error = (found.read(name, moment) - wanted).abs().max() / wanted.abs().max().clamp_min(
                1e-30
            )
            assert error <= tolerance, f"{moment} of {name}: off by {error:.1e} of the largest"


@rows(JOURNEYS)
def test_it_starts_at_its_base_and_changes_only_what_trains(run: Trained, journey: Journey):
    ranks, tp_size = run.held, journey.layout.tp_size
    trained = last_checkpoint(run.undisturbed).names
    moved = set()
    for holder, rank in enumerate(ranks[:tp_size]):
        start = initial_model(
            run.undisturbed / "run.yaml", "cpu", TensorParallel(size=tp_size, rank=holder)
        )
        for name, parameter in start.named_parameters():
            shard = rank["parameters"][name]
            first = holder - holder % rank["partitions"][name].replicas(tp_size)
            assert torch.equal(shard, ranks[first]["parameters"][name]), (
                f"{name}: holders of a shard drifted apart"
            )
            if not torch.equal(shard, parameter):
                assert name in trained, f"{name} does not train, and changed"
                moved.add(name)
    assert len(moved) > 0.7 * len(trained)
    held = [(name, rank["parameters"][name]) for rank in ranks[:tp_size] for name in trained]
    moments = sum(own.numel() * (1 if is_muons(journey, name, own) else 2) for name, own in held)
    for rank in ranks:
        assert rank["step0_max_abs_logit_difference"] == (
            None if journey.method in TRAINS_BASE else 0.0
        )
        assert rank["moments"] == moments


NEW_ROWS_OF_BASELINES = [
    journey
    for journey in JOURNEYS
    if journey.vocabulary and journey.method in ("fft", "freeze", "llama_pro")
]


# A model with weights of open tokens' own has no export without a gate: tests/conversion fits one.
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
    assert len(rows) == model.config.vocab_size == 512 + NEW_PIECES * journey.vocabulary
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
    tokens = torch.randint(
        0, 512 + NEW_PIECES, (1, 200), generator=torch.Generator().manual_seed(0)
    )
    balance_router(trained, tokens)
    exported, fill_output = model.streamed(torch.float32)
    hidden = exported.hidden_states(tokens)
    fill_output()
    exported.output.threshold = threshold = trained.output.threshold
    expected, found = (
        trained.output.project(trained.hidden_states(tokens)),
        exported.output.project(hidden),
    )
    assert torch.equal(found.preserved, expected.preserved) and 0 < int(found.preserved.sum()) < 200
    assert (found.logits - expected.logits).abs().max() < 1e-4

    config = ScaleConfig(
        **scale_export(model, torch.float32).config | {"router_threshold": threshold}
    )
    output = ScaleOutput(config)
    output.load_state_dict(
        {name: model.read(f"output.{name}") for name, _ in output.named_parameters()}
    )
    preserved, adapted = (hidden.preserved_x, hidden.preserved_x_up), (hidden.x, hidden.x_up)
    logits = output([StreamPath(*preserved), StreamPath(*adapted)])
    assert (logits - expected.logits).abs().max() < 1e-4


@rows([with_new_tokens_of("adapt")])
def test_a_second_expansion_starts_from_an_exported_one_of_the_same_tokens(
    run: Trained, journey: Journey, tmp_path
):
    checkpoint = run.moved / "checkpoints" / f"step_{STEPS:08d}"
    assert convert(
        Conversion(checkpoint, STORIES, tmp_path / "expansion", format="expansion"), probe_maker({})
    )
    values = yaml.safe_load((run.moved / "run.yaml").read_text())
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(
            values | {"folder": str(tmp_path), "init_expansion": str(tmp_path / "expansion")}
        )
    )
    config = load_config(path)
    assert (
        run_ranks(train, MOVES_TO[journey.layout].ranks, path)
        == [0] * MOVES_TO[journey.layout].ranks
    )
    assert losses(tmp_path)[0] < losses(run.moved)[0]
    base = with_new_tokens(config, open_base(STORIES))
    assert made_expansion(config, base) is not None
    assert base.new_tokens is not None
    other = replace(base, new_tokens=replace(base.new_tokens, tokenizer="of as many other pieces"))
    with pytest.raises(CheckpointError, match="another extended vocabulary"):
        made_expansion(config, other)
    method = method_for(config.method, tmp_path / "expansion", SEED)
    with pytest.raises(CheckpointError, match="set `vocabulary`"):
        method.load(
            method.build(open_base(STORIES).spec, SINGLE, "none"), open_base(STORIES), SINGLE
        )

    parameters = open_estimator(
        config, Cluster(gpus=1, gpus_per_node=1, gpu_memory_gib=80)
    ).parameters
    assert parameters.trained == run.held[0]["trainable_parameters"]


@rows([with_new_tokens_of("lora")])
def test_an_export_needs_its_own_tokenizer(run: Trained, journey: Journey, tmp_path: Path):
    checkpoint = shutil.copytree(run.moved / "checkpoints" / f"step_{STEPS:08d}", tmp_path / "copy")
    probe, asked = probe_maker({}), Conversion(checkpoint, STORIES, tmp_path / "hf")
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
    with pytest.raises(DataError, match=message):
        check_stage(
            load_config(write_config(tmp_path, tokens, vocabulary={"folder": str(record.parent)})),
            1,
            "train",
        )


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
        model = methods.build_model(settings, base.spec, tp)
    if device != "meta":
        methods.training_method(settings).load(model, base, tp)
    return model

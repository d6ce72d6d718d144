"""Runs with an extended vocabulary: the same at every layout and after a resume, old rows untouched, and exported."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.checks.door import read_inputs
from pipeline.checks.plan import make_plan
from pipeline.config.run import load_config
from pipeline.conversion.convert import Conversion, convert
from pipeline.conversion.formats import scale_export
from pipeline.conversion.hf_folder import load_hf_model
from pipeline.conversion.modeling_scale import ScaleConfig, ScaleOutput, StreamPath
from pipeline.conversion.trained_model import describe_checkpoint, open_trained
from pipeline.conversion.verify import probe_maker
from pipeline.data.corpora import corpus_jobs
from pipeline.data.preprocess import preprocess
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.tokenizer_training import texts
from pipeline.data.vocabulary import learn_extension, write_extension
from pipeline.data.workers import local_workers
from pipeline.errors import RESUME_LATER, CheckpointError, ConversionError, DataError
from pipeline.methods import method_for
from pipeline.methods.scale import made_expansion
from pipeline.methods.vocabulary import with_new_rows
from pipeline.model.from_hf import is_base, open_base
from pipeline.parallel.sharding import merge
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.cluster import Cluster
from pipeline.sizing.estimate import open_estimator
from pipeline.studies.frontier import AveragedModel
from tests.bases import STORIES
from tests.distributed import run_ranks
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.training.runs import in_turn, losses, make_run, metrics, train, train_and_look, write_config
from tests.widened import SEED, balance_router

STEPS = 3
NEW = 61  # prime
EXPANSION = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 4}
METHODS: dict[str, Any] = {
    "preserve": {"name": "scale", "variant": "preserve", "expansion": EXPANSION, "norm": "base"},
    "adapt": {"name": "scale", "variant": "adapt", "expansion": EXPANSION, "l_fp": 3},
    "route": {"name": "scale", "variant": "route", "expansion": EXPANSION, "l_fp": 3},
    "fft": {"name": "fft"},
    "freeze": {"name": "freeze", "frozen_layers": 2},
    "lora": {"name": "lora", "rank": 4},
    "llama_pro": {"name": "llama_pro", "added_layers": 5},
}
LAYOUTS = {
    "preserve": (3, 2),
    "adapt": (2, 2),
    "route": (1, 2),
    "fft": (3, 1),
    "freeze": (2, 1),
    "lora": (2, 2),
    "llama_pro": (1, 1),
}
"""ZeRO stage and tensor-parallel size, on two ranks."""
MOVED = ("preserve", "fft")
"""Stopped in their first step, and resumed at another layout."""


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary") / "korean"
    new, old = (list(texts([str(file)])) for file in (REVIEWS_HELDOUT, STORIES_HELDOUT))
    write_extension(learn_extension(STORIES, new[:20], old, add=NEW, min_uses=5), folder, lambda _: None)
    return folder


def settings(method: str, vocabulary: Path) -> dict[str, Any]:
    return {
        "method": METHODS[method],
        "vocabulary": {"folder": str(vocabulary)},
        "base_precision": "fp8" if method == "lora" else "bf16",
        "schedule__steps": STEPS,
        "schedule__learning_rate": 1e-3,
        "data__replay_loss": "kl" if method in ("adapt", "fft") else "nll",
    }


@pytest.fixture(scope="module")
def extended_tokens(vocabulary, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("extended")
    config = load_config(write_config(folder / "run", folder, **settings("fft", vocabulary)))
    with local_workers(1) as workers:
        for job in corpus_jobs(config.data, config.tokenizer):
            preprocess(job, workers)
    return folder


@pytest.fixture(scope="module")
def alone(vocabulary, extended_tokens, tmp_path_factory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Each method's run on one rank: its folder, and what the rank holds at its end."""
    folder = tmp_path_factory.mktemp("alone")
    configs = {name: make_run(folder / name, extended_tokens, zero=1, **settings(name, vocabulary)) for name in METHODS}
    [ranks] = run_ranks(in_turn, 1, [partial(train_and_look, config) for config in configs.values()])
    return {name: (folder / name, held) for name, held in zip(METHODS, ranks, strict=True)}


@pytest.fixture(scope="module")
def split(vocabulary, extended_tokens, tmp_path_factory) -> dict[str, tuple[Path, tuple[dict[str, Any], ...]]]:
    """The same at another layout; Preserve and fft are stopped in their first step and resume at a third."""
    folder = tmp_path_factory.mktemp("split")
    jobs: list[Any] = []
    for name, (zero, tp_size) in LAYOUTS.items():

        def make(make: Any, tp_size: int, name: str = name, **more: Any) -> Path:
            return make(folder / name, extended_tokens, parallel__tp_size=tp_size, **more, **settings(name, vocabulary))

        config = make(make_run, tp_size, zero=zero)
        if name in MOVED:
            jobs.append(partial(train, config, stop=True))
            config = make(write_config, 3 - tp_size, zero=1)
        jobs.append(partial(train_and_look, config))
    by_job = [ranks for ranks in zip(*run_ranks(in_turn, 2, jobs), strict=True) if ranks != (RESUME_LATER,) * 2]
    return {name: (folder / name, ranks) for name, ranks in zip(LAYOUTS, by_job, strict=True)}


@pytest.mark.parametrize("method", METHODS)
def test_a_split_or_moved_run_equals_one_process(alone, split, method):
    folder, ranks = split[method]
    reference_folder, reference = alone[method]
    assert losses(folder) == pytest.approx(losses(reference_folder), rel=1e-5)
    for key in ("gradient_norm", "perplexity/korean", "bits_per_byte/english"):
        expected = [line[key] for line in metrics(reference_folder) if key in line]
        assert [line[key] for line in metrics(folder) if key in line] == pytest.approx(expected, rel=1e-4)
    tp_size = 3 - LAYOUTS[method][1] if method in MOVED else LAYOUTS[method][1]
    for name in ("embedding.new_rows.weight", "output.new_rows"):
        shards = [rank["parameters"][name] for rank in ranks[:tp_size]]
        whole = merge(shards, ranks[0]["partitions"][name], NEW)
        wanted = reference["parameters"][name]
        torch.testing.assert_close(whole, wanted, rtol=0, atol=2e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("method", ["preserve", "adapt", "route", "lora", "llama_pro"])
def test_the_base_and_its_old_rows_stay_bit_identical_and_have_no_optimizer_state(alone, method):
    _, held = alone[method]
    base, frozen = open_base(STORIES), 0
    for name, parameter in held["parameters"].items():
        if is_base(name) and not name.startswith("layers."):
            assert torch.equal(parameter, base.read(name)), name
            frozen += parameter.numel()
    assert held["optimizer_state_elements"] == 2 * held["trainable_parameters"]
    assert held["step0_max_abs_logit_difference"] == 0.0 and frozen > 0


@pytest.mark.parametrize("method", METHODS)
def test_held_out_text_is_learned(alone, method):
    found = [line["bits_per_byte/korean"] for line in metrics(alone[method][0]) if "bits_per_byte/korean" in line]
    assert found[-1] < found[0]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "freeze"])
def test_an_export_is_one_larger_vocabulary(split, vocabulary, tmp_path, method):
    written = "scale" if method in ("adapt", "route") else "stock"
    folder, _ = split[method]
    checkpoint = folder / "checkpoints" / f"step_{STEPS:08d}"
    output = tmp_path / "hf"
    # `convert` publishes only what gives the training model's logits.
    probe = probe_maker({"korean": [str(REVIEWS_HELDOUT)]})
    assert convert(Conversion(checkpoint, STORIES, output), probe)
    assert json.loads((output / "conversion.json").read_text())["written_format"] == written
    assert (output / "tokenizer.json").read_bytes() == (vocabulary / "tokenizer.json").read_bytes()
    assert load_tokenizer(output).fingerprint == load_tokenizer(vocabulary).fingerprint
    model = load_hf_model(output, trust_remote_code=True)
    assert model.config.vocab_size == 512 + NEW and not model.config.tie_word_embeddings
    embedding = model.state_dict()["model.embed_tokens.weight" if written == "stock" else "embedding.base.weight"]
    if method != "fft":
        assert torch.equal(embedding[:512, :64], open_base(STORIES).read("embedding.base.weight"))


def test_the_cost_of_a_quantised_base_counts_the_new_rows(alone):
    manifest = json.loads((alone["lora"][0] / "checkpoints" / f"step_{STEPS:08d}" / "manifest.json").read_text())
    cost = manifest["position"]["quantization_cost"]
    assert 0 < abs(cost["korean"]) < 0.1 and 0 < abs(cost["english"]) < 0.1


def test_a_model_averaged_with_its_base_keeps_its_new_rows(alone):
    model = open_trained(alone["fft"][0] / "checkpoints" / f"step_{STEPS:08d}", STORIES)
    own = {field.name: getattr(model, field.name) for field in fields(model)}
    nothing, half = (AveragedModel(**own, share=share) for share in (0.0, 0.5))
    assert torch.equal(nothing.read("embedding.base.weight")[:512], model.base.read("embedding.base.weight"))
    assert torch.equal(nothing.read("output.base")[512:], model.read("output.base")[512:])
    [logits] = half.logits([torch.arange(500, 560)], torch.float32)
    assert logits.shape == (60, 512 + NEW) and not torch.equal(half.read("output.base"), model.read("output.base"))


@torch.no_grad()
def test_an_exported_router_does_not_see_new_pieces(split):
    """As in training; verification cannot tell, since it compares an export with one larger vocabulary."""
    model = open_trained(split["route"][0] / "checkpoints" / f"step_{STEPS:08d}", STORIES)
    trained = model.method.build(model.stored.spec, SINGLE, "none")
    for name, parameter in trained.named_parameters():
        parameter.copy_(model.read_stored(name))
    tokens = torch.randint(0, 512 + NEW, (1, 200), generator=torch.Generator().manual_seed(0))
    balance_router(trained, tokens)
    exported, fill_output = model.streamed(torch.float32)
    hidden = exported.hidden_states(tokens)
    fill_output()
    exported.output.threshold = threshold = trained.output.threshold
    expected, found = trained.output.route(trained.hidden_states(tokens)), exported.output.route(hidden)
    assert torch.equal(found.preserved, expected.preserved) and 0 < int(found.preserved.sum()) < 200
    assert (found.logits - expected.logits).abs().max() < 1e-4

    config = ScaleConfig(**scale_export(model, torch.float32).config | {"router_threshold": threshold})
    output = ScaleOutput(config)
    output.load_state_dict({name: model.read(f"output.{name}") for name, _ in output.named_parameters()})
    preserved, adapted = (hidden.preserved_x, hidden.preserved_x_up), (hidden.x, hidden.x_up)
    logits = output([StreamPath(*preserved), StreamPath(*adapted)])
    assert (logits - expected.logits).abs().max() < 1e-4


def test_another_format_is_refused_or_trained_on(split, vocabulary, extended_tokens, tmp_path):
    lora, adapt = (split[name][0] / "checkpoints" / f"step_{STEPS:08d}" for name in ("lora", "adapt"))
    with pytest.raises(ConversionError, match="lack the rows of its new pieces"):
        convert(Conversion(lora, STORIES, tmp_path / "peft", format="peft"), probe_maker({}))
    planned = make_plan(load_config(split["lora"][0] / "run.yaml"), Cluster(2, 2)).export
    assert planned is not None and "not peft: adapters alone lack the rows" in planned
    assert convert(Conversion(adapt, STORIES, tmp_path / "expansion", format="expansion"), probe_maker({}))
    changes = {**settings("adapt", vocabulary), "upscaled": str(tmp_path / "expansion")}
    config = write_config(tmp_path / "second", extended_tokens, zero=1, **changes)
    assert run_ranks(train, 1, config) == [0]
    first, second = (losses(run) for run in (split["adapt"][0], tmp_path / "second"))
    assert second[0] < first[0]
    with pytest.raises(CheckpointError, match="set `vocabulary`"):
        method = method_for(load_config(config).method, tmp_path / "expansion", SEED)
        method.load(method.build(open_base(STORIES).spec, SINGLE, "none"), open_base(STORIES), SINGLE)
    base = with_new_rows(load_config(config), open_base(STORIES))
    assert made_expansion(load_config(config), base) is not None
    other = replace(base, new_rows=replace(base.new_rows, tokenizer="of as many other pieces"))
    with pytest.raises(CheckpointError, match="another extended vocabulary"):
        made_expansion(load_config(config), other)


def test_an_export_without_its_tokenizer_is_refused(split, tmp_path):
    checkpoint = split["lora"][0] / "checkpoints" / f"step_{STEPS:08d}"
    manifest = checkpoint / "manifest.json"
    original, probe = manifest.read_text(), probe_maker({})
    asked = Conversion(checkpoint, STORIES, tmp_path / "hf", vocabulary=Path(json.loads(original)["run"]["vocabulary"]))
    try:
        for folder, error in ((tmp_path / "gone", DataError), (STORIES, ConversionError)):
            values = json.loads(original)
            values["run"]["vocabulary"] = str(folder)
            manifest.write_text(json.dumps(values))
            with pytest.raises(error, match="tokenizer"):
                convert(Conversion(checkpoint, STORIES, tmp_path / "hf"), probe)
            assert not (tmp_path / "hf").exists()
        assert convert(asked, probe)  # whose folder has moved
        with pytest.raises(ConversionError, match="name its folder as --vocabulary"):
            convert(replace(asked, output=tmp_path / "other", vocabulary=STORIES), probe)
    finally:
        manifest.write_text(original)


def test_the_estimate_counts_new_rows(alone, vocabulary, extended_tokens, tmp_path):
    _, held = alone["adapt"]
    config = load_config(write_config(tmp_path, extended_tokens, zero=1, **settings("adapt", vocabulary)))
    cluster = Cluster(gpus=1, gpus_per_node=1, gpu_memory_gib=80, peak_tflops=100)
    assert open_estimator(config, cluster).parameters.trained == held["trainable_parameters"]


def test_a_checkpoint_is_described(split):
    facts = describe_checkpoint(split["lora"][0] / "checkpoints" / f"step_{STEPS:08d}")
    assert facts["trainable_parameters"] > 2 * NEW * 64
    model = open_trained(split["lora"][0] / "checkpoints" / f"step_{STEPS:08d}", STORIES)
    assert model.shapes["output.base"] == (512 + NEW, 64)


def test_a_vocabulary_of_another_base_is_refused(vocabulary, extended_tokens, tmp_path):
    path = write_config(tmp_path, extended_tokens, zero=1, **settings("fft", vocabulary))
    record = json.loads((vocabulary / "vocabulary.json").read_text())
    (tmp_path / "changed").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "changed" / name).write_bytes((vocabulary / name).read_bytes())
    (tmp_path / "changed" / "vocabulary.json").write_text(json.dumps({**record, "base_rows": 500}))
    path.write_text(path.read_text().replace(str(vocabulary), str(tmp_path / "changed")))
    with pytest.raises(DataError, match="extends another tokenizer"):
        read_inputs(load_config(path), 1)
    path.write_text(path.read_text().replace(str(tmp_path / "changed"), str(tmp_path)))
    with pytest.raises(DataError, match="found none"):
        read_inputs(load_config(path), 1)

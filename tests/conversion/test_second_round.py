"""Several domains in a row: the next run's base is the last one's export, or it trains the same
expansion further."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.trained_model import TrainedModel, open_trained
from pipeline.config.run import RunConfig, load_config
from pipeline.conversion.convert import convert, latest_conversion
from pipeline.conversion.probe_texts import probe_maker
from pipeline.conversion.request import Conversion
from pipeline.errors import RESUME_LATER, BaseModelError
from pipeline.hf.load import load_hf_model
from pipeline.methods.build_model import build_model
from pipeline.methods.registry import training_method
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import open_base
from pipeline.parallel.topology import SINGLE
from tests.bases import STORIES
from tests.conversion.checkpoints import FFT, save_many, scale, trained, training_decoder
from tests.distributed import run_ranks
from tests.tolerances import PARITY, assert_near
from tests.training.runs import in_turn, losses, make_run, train, train_compiled, write_config
from tests.widened import some_tokens

pytestmark = pytest.mark.full

WIDE = {"method__norm": "base", "schedule__learning_rate": 5e-3}


@pytest.fixture(scope="module")
def first(tokens, tmp_path_factory) -> RunConfig:
    """A run on the first domain, exported to `hf` as an ordinary model and to `expansion`."""
    return train_and_export(tmp_path_factory.mktemp("first"), tokens, **WIDE)


def train_and_export(run: Path, tokens: Path, **changes) -> RunConfig:
    path = make_run(run, tokens, **changes)
    assert run_ranks(train, 2, path) == [0, 0]
    config = load_config(path)
    for output, format in (("hf", "merged"), ("expansion", "expansion")):
        convert(
            replace(latest_conversion(config), format=format, output=run / output), probe_maker({})
        )
    return config


def initial_model(config: RunConfig) -> Decoder:
    """The run's model before its first step."""
    base = open_base(config.base)
    model = build_model(config, base.spec, SINGLE)
    training_method(config).load(model, base, SINGLE)
    return model


def final_model(config: RunConfig) -> TrainedModel:
    return open_trained(newest_checkpoint(config), config.base)


@torch.no_grad()
def exported_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    return load_hf_model(folder, torch.float32)(tokens).logits


def test_a_second_domain_on_top_of_the_first(first, tokens, tmp_path):
    exported = first.folder / "hf"
    probe = some_tokens(open_base(STORIES).spec, 2, 48)
    first_logits = exported_logits(exported, probe)
    assert (first_logits - exported_logits(STORIES, probe)).abs().max() > 0.1, (
        "the first round changed nothing"
    )

    second = train_and_export(tmp_path, tokens, base=str(exported), schedule__steps=3, **WIDE)
    start, end = initial_model(second), final_model(second)
    assert start.spec.widths.hidden_size == 84 and start.spec.residual.normed_size == 64
    # The scale is a power of two, and the norms count the channels as those of the folder do.
    assert_near(start.logits(probe), first_logits, PARITY)
    assert torch.equal(start.logits(probe), start.logits(probe, path="base"))
    assert torch.equal(training_decoder(end).logits(probe, path="base"), start.logits(probe))
    assert (
        json.loads((tmp_path / "training.json").read_text())["step0_max_abs_logit_difference"]
        == 0.0
    )

    # Longer, at another layout: it resumes from its checkpoint, and learns.
    longer = make_run(
        tmp_path,
        tokens,
        base=str(exported),
        schedule__steps=12,
        init_expansion=str(tmp_path / "initial_expansion"),
        **WIDE,
    )
    assert run_ranks(train, 1, longer) == [0]
    assert len(losses(tmp_path)) == 12
    # Batches differ by a few tenths; steps on weights that are stored scaled would multiply the
    # loss at once.
    assert (
        max(losses(tmp_path)) < 1.3 * losses(tmp_path)[0]
        and losses(tmp_path)[-1] < 0.9 * losses(tmp_path)[0]
    )

    convert(
        Conversion(newest_checkpoint(second), exported, tmp_path / "hf", "merged"), probe_maker({})
    )
    twice = exported_logits(tmp_path / "hf", probe)
    assert_near(twice, training_decoder(final_model(second)).logits(probe), PARITY)
    assert (twice - first_logits).abs().max() > 0.1, "the second round changed nothing"
    third = open_base(tmp_path / "hf").spec
    assert (third.widths.hidden_size, third.residual.normed_size) == (112, 64)


def test_it_is_a_base_like_any_other(first, tokens, tmp_path):
    """Split over ranks, stored in bytes, recomputed, by KL: the losses are those of one rank
    that does the same."""
    settings = {"base": str(first.folder / "hf"), "schedule__steps": 2, **WIDE}
    settings |= {
        "data__replay_loss": "kl",
        "activation_checkpointing": "all",
        "checkpoints__asynchronous": True,
    }
    split = {
        "parallel": {"tp_size": 2, "sequence_parallel": True},
        "base_precision": "fp8",
        "zero": 2,
    }
    runs = {name: {"base_precision": name} for name in ("fp8", "nf4")} | {
        "split": split,
        "stage 3": {"zero": 3},
    }
    paths = {
        name: make_run(tmp_path / name, tokens, **{"zero": 1, **settings, **own})
        for name, own in runs.items()
    }
    assert run_ranks(in_turn, 1, [partial(train, paths[name]) for name in ("fp8", "nf4")]) == [
        [0, 0]
    ]
    assert (
        run_ranks(in_turn, 2, [partial(train, paths[name]) for name in ("split", "stage 3")])
        == [[0, 0]] * 2
    )
    for name in runs:
        assert (
            json.loads((tmp_path / name / "training.json").read_text())[
                "step0_max_abs_logit_difference"
            ]
            == 0.0
        )
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "fp8"), rel=2e-5)
    assert losses(tmp_path / "nf4") == pytest.approx(losses(tmp_path / "stage 3"), rel=0.2)


def test_a_compiled_run_of_either_kind_resumes(first, tokens, tmp_path):
    kinds = {
        "init_expansion": {"zero": 1, "init_expansion": str(first.folder / "expansion")},
        "widened": {"zero": 2, "base": str(first.folder / "hf"), "schedule__optimizer": "muon"},
    }
    settings = {
        "schedule__steps": 2,
        "checkpoints": {"every_steps": 1, "asynchronous": True},
        **WIDE,
    }
    for kind, own in kinds.items():
        names, make = (
            ("plain", "compiled", "stopped"),
            write_config if kind == "init_expansion" else make_run,
        )
        plain, compiled, stopped = (
            make(tmp_path / kind / name, tokens, compile=name != "plain", **settings, **own)
            for name in names
        )
        jobs = [partial(train, plain), partial(train_compiled, compiled)]
        jobs += [partial(train_compiled, stopped, stop=stop) for stop in (True, False)]
        assert run_ranks(in_turn, 1, jobs) == [[0, 0, RESUME_LATER, 0]]
        expected, found, resumed = (losses(tmp_path / kind / name) for name in names)
        assert resumed == found == pytest.approx(expected, rel=2e-5)


def test_base_and_expansion_joined_are_the_exported_model(first):
    joined = initial_model(first.model_copy(update={"init_expansion": first.folder / "expansion"}))
    probe = some_tokens(joined.spec, 2, 48)
    assert torch.equal(joined.logits(probe), training_decoder(final_model(first)).logits(probe))
    assert_near(joined.logits(probe), exported_logits(first.folder / "hf", probe), PARITY)


def test_an_expansion_trains_on_from_its_trained_values(first, tokens, tmp_path):
    expansion = first.folder / "expansion"
    path = write_config(
        tmp_path, tokens, seed=5, schedule__steps=1, init_expansion=str(expansion), **WIDE
    )
    assert run_ranks(train, 1, path) == [0]
    assert losses(tmp_path)[0] < 0.9 * losses(first.folder)[0]
    assert (
        json.loads((tmp_path / "training.json").read_text())["step0_max_abs_logit_difference"]
        is None
    )


# Every method once, and each type with every kind of export: merged, fused, and of blocks.
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
METHODS = {
    "fft": (FFT, "merged", [FP32]),
    "lora": ({"name": "lora", "rank": 4, "alpha": 8.0}, "merged", [FP32, FP16]),
    "llama_pro": ({"name": "llama_pro", "added_layers": 5}, "merged", [BF16]),
    "preserve": (scale("preserve", norm="base"), "merged", [FP32, BF16]),
    "route": (scale("route", collaborative_modules="both", norm="base"), "scale", [FP16]),
    "separate": (scale("adapt"), "scale", [BF16]),
}


@pytest.fixture(scope="module")
def on_top(first, tmp_path_factory):
    """A model trained on the exported one, by its method."""
    folder = tmp_path_factory.mktemp("on_top")
    exported = first.folder / "hf"
    run_ranks(
        save_many,
        1,
        [(exported, method, folder / name) for name, (method, _, _) in METHODS.items()],
    )
    return lambda name: trained(exported, folder / name)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, row in METHODS.items() for dtype in row[2]]
)
def test_every_method_trains_on_top_and_is_exported_again(name, dtype, on_top, tmp_path):
    """`convert` verifies what it publishes."""
    model, format = on_top(name), METHODS[name][1]
    asked = Conversion(model.checkpoint, model.base.path, tmp_path / "hf", format, dtype)
    assert convert(asked, probe_maker({}))
    if format == "merged":
        again = open_base(tmp_path / "hf")
        assert again.spec.residual.scale == (2.0**-12 if dtype == FP32 else 2.0**-6)
        rows = again.read("layers.0.ffn.down.base.weight")[64:80].float()
        assert rows.std() > 1e-3, "weights that train are read at their own size"
    elif format == "scale":
        with pytest.raises(
            BaseModelError,
            match=r"--format expansion .* `init_expansion`; .* norm: base, .* --format merged",
        ):
            open_base(tmp_path / "hf")

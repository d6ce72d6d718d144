"""A gate with an extended vocabulary: new pieces are open, none follows a closed token, old text is
the base's."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lm_eval.api.instance import Instance

from pipeline.config.run import load_config
from pipeline.conversion.convert import convert, latest_conversion, run_sources
from pipeline.conversion.probe_texts import probe_maker
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.extension.vocabulary import EXPORTED, learn_extension, write_extension
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.evaluation.perplexity import score_folder
from pipeline.extensions.combination.combine import combine
from pipeline.extensions.gate.fit_run import fit_gate
from pipeline.extensions.tasks.benchmarks import benchmark_model
from pipeline.hf.load import load_hf_model
from pipeline.model.from_hf import open_base
from pipeline.model.paths import TokenBatch
from pipeline.scale_math import NEVER
from tests.bases import STORIES, reference
from tests.conversion.checkpoints import generate_greedily
from tests.distributed import run_ranks
from tests.extensions.gate.gates import random_gate
from tests.model.test_new_tokens import batch_with_new_tokens, extended, model_of
from tests.texts import REVIEWS_HELDOUT, STORIES_HELDOUT
from tests.tolerances import PARITY, assert_near
from tests.training.runs import in_turn, make_run, tokenize_corpora, train, write_config

pytestmark = pytest.mark.full

OLD = 97
"""The vocabulary of the tests' small bases; the first new id."""


@torch.no_grad()
@pytest.mark.parametrize("method", ["preserve", "adapt", "route"])
def test_new_pieces_are_open_and_none_follows_a_closed_token(base, method, tmp_path):
    model = model_of(extended(base("llama")), method, tmp_path).eval()
    tokens, targets = batch_with_new_tokens(model)
    ungated, alone = model.logits(tokens), model.logits(tokens, path="base")
    gate = random_gate(model, tokens)
    stream = model.base_stream(tokens, layer=gate.layer)
    closed = model.gate_opens(gate, stream, TokenBatch(tokens, None, None)).closed.squeeze(-1)
    assert not closed[tokens >= OLD].any() and not gate.is_open(stream)[tokens >= OLD].all()
    model.gate = gate
    logits, nll = model.logits(tokens), model(tokens, targets).nll
    # Adapt's closed tokens attend to open ones.
    exact = closed.cummin(1).values if method == "adapt" else closed
    assert exact.any()
    assert torch.equal(logits[exact][:, :OLD], alone[exact][:, :OLD])
    assert (logits[closed][:, OLD:] == NEVER).all() and (logits[~closed][:, OLD:] > NEVER / 2).all()
    assert method != "preserve" or torch.equal(logits[~closed], ungated[~closed])
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(
        targets.shape
    )
    torch.testing.assert_close(nll, expected)
    assert (nll[closed & (targets >= OLD)] > -NEVER / 2).all() and (nll[~closed] < 1e3).all()


def train_extended(folder: Path, base: Path, add: int, reviews: slice, **changes: Any) -> Path:
    """Trains a run with a gate, whose base's tokenizer was extended by pieces of those reviews."""
    new, old = (list(texts([str(file)])) for file in (REVIEWS_HELDOUT, STORIES_HELDOUT))
    extension = learn_extension(base, new[reviews], old, add=add, min_uses=5)
    write_extension(extension, folder / "tokenizer", lambda _: None)
    settings: dict[str, Any] = {
        "base": str(base),
        "zero": 1,
        "vocabulary": {"folder": str(folder / "tokenizer")},
        "gate": {
            "tokens": 3000,
            "splices": True,
            "negatives_file": None,
        },
        "method__norm": "base",
        "schedule__learning_rate": 0.02,
        # A closed token of new text costs this small base 14 nats: with few sequences the costs, by
        # which the threshold is chosen, are chance.
        "validation__max_sequences": 200,
        **changes,
    }
    tokenize_corpora(load_config(write_config(folder / "run", folder / "tokens", **settings)))
    path = make_run(folder / "run", folder / "tokens", **settings)
    assert run_ranks(in_turn, 1, [partial(train, path)]) == [[0]]
    return path


def closed_so_far(logits: torch.Tensor) -> int:
    """How many tokens come before the first one that is open: logits [1, S, V] of an export."""
    is_closed = (logits[0, :, 512:] == NEVER).all(dim=-1)
    return int(is_closed.long().cummin(0).values.sum())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run with a vocabulary and a gate."""
    return train_extended(tmp_path_factory.mktemp("vocabulary"), STORIES, 60, slice(20))


@torch.no_grad()
def test_the_next_run_extends_the_first_ones_export_again(run, tmp_path):
    first = load_config(run)
    merged = replace(
        latest_conversion(first), gate=None, format="merged", output=tmp_path / "first"
    )
    assert convert(merged, probe_maker(*run_sources(first)))
    second = load_config(
        train_extended(tmp_path, tmp_path / "first", 40, slice(20, 40), schedule__steps=3)
    )
    assert open_base(second.base).spec.vocab_size == 512 + 60
    done = json.loads((second.folder / "training.json").read_text())
    assert done["step0_max_abs_logit_difference"] == 0.0
    record, _ = fit_gate(second)
    english = record.heldout["english"]
    # A gate of a few steps opens for some tokens of English; where it does not, the logits are the
    # base's.
    assert english.sequences == 200 and english.closed_sequences > 100
    assert english.open_fraction < 0.05
    assert record.closed_max_abs_logit_difference == 0.0
    assert convert(latest_conversion(second), probe_maker(*run_sources(second)))


def test_own_rows_of_old_tokens_stand_beside_the_rows_of_new_ones(tmp_path):
    own = {
        "method__l_fp": 0,
        "method__open_rows": {"min_count": 5},
        "method__open_gains": True,
        "method__low_rank": 2,
        # At 0.02 the merged model is one in which roundings grow tenfold.
        "schedule__learning_rate": 0.005,
    }
    run = train_extended(tmp_path, STORIES, 60, slice(20), schedule__steps=3, **own)
    config = load_config(run)
    record, _ = fit_gate(config)
    assert record.closed_max_abs_logit_difference == 0.0
    assert convert(latest_conversion(config), probe_maker(*run_sources(config)))
    model = load_hf_model(config.folder / "hf", trust_remote_code=True)
    for module, rows in ((model.own_input, model.own_input.rows.weight), (model.output, None)):
        rows = module.own_rows if rows is None else rows
        table = module.row_of_token
        assert len(table) == 512 + 60 and (table[512:] == len(rows) - 1).all()
        assert (table[:512] < len(rows) - 1).all() and rows[:-1].abs().max() > 0
        assert not rows[-1].any()
    merged = replace(
        latest_conversion(config), gate=None, format="merged", output=tmp_path / "merged"
    )
    assert convert(merged, probe_maker(*run_sources(config)))


@torch.no_grad()
def test_a_run_with_a_vocabulary_keeps_the_base_through_training_conversion_and_generation(run):
    config = load_config(run)
    record, _ = fit_gate(config)
    korean, english = record.heldout["korean"], record.heldout["english"]
    assert record.closed_max_abs_logit_difference == 0.0 and english.closed_sequences > 0
    assert (
        english.impossible_fraction == 0
        and english.open_fraction < 0.05 < 0.5 < korean.open_fraction
    )
    assert 0 < korean.impossible_fraction < 0.2 and korean.base_perplexity is None
    # One token of 100 is closed, which costs 14 nats by this base. All would cost e^14 times as much.
    assert korean.open_fraction > 0.97
    assert korean.gated_perplexity < 1.5 * korean.ungated_perplexity
    assert (
        korean.gated_perplexity != korean.ungated_perplexity
    )  # the base's choice on closed tokens, possible ones
    convert(latest_conversion(config), probe_maker(*run_sources(config)))
    folder = config.folder / "hf"
    for text in json.loads((folder / "verification.json").read_text())["texts"].values():
        assert text["exported_perplexity"] == pytest.approx(text["training_perplexity"], rel=1e-4)
    model, base, tokenizer = (
        load_hf_model(folder, trust_remote_code=True),
        reference(STORIES),
        load_tokenizer(folder),
    )
    stories = []
    for story in list(texts([str(STORIES_HELDOUT)]))[:20]:
        ids = tokenizer.reference.encode([story]).ids.tolist()
        stories.append(torch.tensor([[*tokenizer.before_document, *ids[:40]]]))
    closed_tokens = 0
    for tokens in stories:
        logits, of_base = model(tokens).logits, base(tokens).logits
        closed = closed_so_far(logits)
        closed_tokens += closed
        if closed:
            # Another class of transformers: nearly the same, not to the bit.
            assert_near(logits[:, :closed, :512], of_base[:, :closed], PARITY)
    assert closed_tokens > 0.6 * sum(tokens.shape[1] for tokens in stories)
    prompt = next(one[:, :12] for one in stories if closed_so_far(model(one).logits) > 16)
    written = generate_greedily(model, prompt, new_tokens=12)
    closed = closed_so_far(model(written).logits)
    assert closed > prompt.shape[1]
    of_base = generate_greedily(base, prompt, new_tokens=12)
    assert torch.equal(written[:, : closed + 1], of_base[:, : closed + 1])
    review = next(texts([str(REVIEWS_HELDOUT)]))
    ids = torch.tensor([tokenizer.reference.encode([review]).ids.tolist()])
    assert (ids >= 512).any() and (
        model(ids).logits[..., 512:].amax(-1)[ids >= 512] > NEVER / 2
    ).all()


@torch.no_grad()
def test_evaluation_spells_out_new_pieces_that_cannot_follow(run, tmp_path):
    config = load_config(run)
    fit_gate(config)
    convert(latest_conversion(config), probe_maker(*run_sources(config)))
    folder = config.folder / "hf"
    corpora = {"korean": list(texts([str(REVIEWS_HELDOUT)]))[:4]}
    combine(tmp_path / "served", {"korean": config.folder})
    folders = (folder, tmp_path / "served", STORIES)
    alone, combined, of_base = (
        score_folder(one, corpora, trust_remote_code=True)["korean"] for one in folders
    )
    assert alone.bits_per_byte < of_base.bits_per_byte and combined == alone
    assert alone.tokens < of_base.tokens
    ids = load_tokenizer(folder).reference.encode([corpora["korean"][0]]).ids.tolist()
    ids = ids[next(place for place, id_ in enumerate(ids) if id_ >= 512) :][:12]
    story = load_tokenizer(folder).reference.encode(["Once upon a time there was a"]).ids.tolist()
    model = benchmark_model(folder, batch_size=2, trust_remote_code=True)
    [(logprob, _), (of_story, _)] = model._loglikelihood_tokens(
        [(("", ""), story[:4], ids), (("", ""), story[:4], story[4:])]
    )
    assert -1e4 < logprob < of_story < 0
    # Whole windows of the context, which are longer when they are spelled out.
    whole = " ".join(texts([str(REVIEWS_HELDOUT)]))[:4000]
    assert len(model.tok_encode(whole)) > model.max_length
    [rolling] = model.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (whole,), 0)], disable_tqdm=True
    )
    [plain] = benchmark_model(STORIES).loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (whole,), 0)], disable_tqdm=True
    )
    assert plain < rolling < 0
    (folder / EXPORTED).rename(folder / "elsewhere")
    assert score_folder(folder, corpora, trust_remote_code=True)["korean"].perplexity == float(
        "inf"
    )
    (folder / "elsewhere").rename(folder / EXPORTED)

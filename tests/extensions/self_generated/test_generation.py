"""A base writes from its own distribution, compared with our decoder of the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.extensions.self_generated import generation
from pipeline.extensions.self_generated.generation import BaseWriter, _document
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import open_base
from tests.bases import STORIES
from tests.extensions.self_generated.helpers import (
    END,
    KNOWN_IDS,
    START,
    copied_stories,
    known_logits,
    random_base,
)
from tests.widened import unwidened

NEARLY_GREEDY = 1e-6
FAMILIES = ("stories260K", "neox")


def writer(base: Path) -> BaseWriter:
    return BaseWriter(base, load_tokenizer(base))


def prompts(*lengths: int, seed: int = 0) -> list[np.ndarray]:
    choice = np.random.default_rng(seed)
    return [np.array([START, *choice.integers(3, KNOWN_IDS, length - 1)]) for length in lengths]


def greedy(decoder: Decoder, prompt: np.ndarray, max_tokens: int) -> list[int]:
    """The likeliest continuation, computed without a cache."""
    ids = prompt.tolist()
    while len(ids) < max_tokens - 1:
        token = int(known_logits(decoder, np.array(ids))[-1].argmax())
        if token in (START, END):
            break
        ids.append(token)
    return [*ids, END]


@pytest.mark.parametrize("name", FAMILIES)
def test_at_a_low_temperature_it_is_greedy_decoding(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Prompts of several lengths share batches, in several rounds: what is before a shorter one has
    no influence."""
    monkeypatch.setattr(generation, "_FIRST_TOKENS", 2)
    base = random_base(name, tmp_path / "base")
    given = prompts(1, 9, 22, 4)
    written = writer(base).write(
        given, temperature=NEARLY_GREEDY, max_tokens=24, batch_size=3, seed=1
    )
    decoder = unwidened(open_base(base))
    assert [document.tolist() for document in written] == [
        greedy(decoder, prompt, 24) for prompt in given
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_has_the_entropy_of_the_bases_distribution(name: str, tmp_path: Path):
    """Where each token is drawn from a distribution, the mean of nll − entropy is 0; of another one
    it is not."""
    base = random_base(name, tmp_path / "base")
    decoder = unwidened(open_base(base))
    for temperature in (1.0, 0.7):
        excess: dict[float, list[torch.Tensor]] = {1.0: [], 0.7: []}
        for document in writer(base).write(
            prompts(1) * 64, temperature=temperature, max_tokens=48, batch_size=64, seed=5
        ):
            ids = document[:-1]
            logits = known_logits(decoder, ids)[:-1]
            for assumed, values in excess.items():
                log_p = torch.log_softmax(logits / assumed, dim=-1)
                nll = -log_p.gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0]
                values.append(nll + (log_p.exp() * log_p).sum(dim=-1))
        found = {assumed: torch.cat(values) for assumed, values in excess.items()}
        in_errors = {
            assumed: abs(float(own.mean() / own.std())) * len(own) ** 0.5
            for assumed, own in found.items()
        }
        assert in_errors[temperature] < 4 and in_errors[1.7 - temperature] > 8, (
            temperature,
            in_errors,
        )


def test_a_document_is_over_at_every_end_of_the_base(tmp_path: Path):
    """Chat models have several ends; a document gets the tokenizer's own."""
    full_stop = 426
    base = copied_stories(tmp_path / "base", generation_config={"eos_token_id": [full_stop, END]})
    given = prompts(1) * 8
    whole, cut = (
        writer(one).write(given, temperature=1.0, max_tokens=32, batch_size=8, seed=3)
        for one in (STORIES, base)
    )
    first = [np.flatnonzero(document == full_stop) for document in whole]
    assert any(map(len, first))
    for document, stops, own in zip(whole, first, cut, strict=True):
        assert own.tolist() == ([*document[: stops[0]], END] if len(stops) else document.tolist())


def test_nothing_else_of_the_bases_generation_config_is_used(tmp_path: Path):
    leaky = copied_stories(
        tmp_path / "leaky",
        generation_config={
            "do_sample": True, "temperature": 0.1, "top_p": 0.2, "top_k": 2, "repetition_penalty": 5.0,
            "max_new_tokens": 3, "min_new_tokens": 3, "eos_token_id": END, "suppress_tokens": list(range(20, 400)),
            "no_repeat_ngram_size": 2, "bad_words_ids": [[410]],
        },
    )  # fmt: skip
    settings = {"temperature": 1.0, "max_tokens": 40, "batch_size": 2, "seed": 3}
    written = [writer(base).write(prompts(1, 5), **settings) for base in (leaky, STORIES)]
    assert [document.tolist() for document in written[0]] == [
        document.tolist() for document in written[1]
    ]
    assert min(map(len, written[0])) > 10


def test_documents_have_the_form_of_every_corpus_and_only_ids_of_the_tokenizer(tmp_path: Path):
    base = random_base("llama", tmp_path / "base")
    given = prompts(1, 3, 30, 38, 30, 1)
    written = writer(base).write(given * 8, temperature=2.0, max_tokens=40, batch_size=7, seed=4)
    for prompt, document in zip(given * 8, written, strict=True):
        assert document[: len(prompt)].tolist() == prompt.tolist()
        assert document[-1] == END
        assert not {START, END} & set(document[len(prompt) : -1].tolist())
        assert len(prompt) < len(document) <= 40
    lengths = set(map(len, written))
    assert 40 in lengths and min(len(document) for document in written[::6]) < 40, (
        "some are cut, others are not"
    )
    assert max(int(document.max()) for document in written) < KNOWN_IDS
    everything = unwidened(open_base(base)).logits(torch.from_numpy(written[0])[None])[0]
    others = torch.softmax(everything, dim=-1)[:, KNOWN_IDS:].sum(dim=-1)
    assert others.mean() > 0.02, (
        "the base gives the other rows of its embedding no probability anyway"
    )


@pytest.mark.parametrize(
    ("ids", "end", "document"),
    [
        ([1, 5, 6, 7], (2,), [1, 5, 6, 7, 2]),
        ([1, 5, 2, 2, 2], (2,), [1, 5, 2]),
        ([1, 5, 1, 9, 9], (2,), [1, 5, 2]),
        ([1, 2, 2], (2,), [1, 2]),
        ([1, 5, 4, 2, 9], (4, 2), [1, 5, 4, 2]),
        ([1, 5, 2, 9], (4, 2), [1, 5, 4, 2]),
        ([1, 2], (4, 2), [1, 4, 2]),
    ],
    ids=[
        "cut",
        "its end",
        "the next one's start",
        "empty",
        "two tokens",
        "the second alone",
        "empty, two tokens",
    ],
)
def test_where_a_document_is_over(ids: list[int], end: tuple[int, ...], document: list[int]):
    assert _document(np.array(ids), 1, [end[-1], 1], end).tolist() == document

"""Scores of real models on real text, compared with transformers' logits; folders of strangers."""

from __future__ import annotations

import json
import math
import shutil
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from pipeline.data.dataset.packing import IGNORED, pack
from pipeline.data.sources.records import Document
from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import BaseModelError, ConfigError, DataError, UserError
from pipeline.evaluation import perplexity
from pipeline.evaluation.perplexity import score_folder, windows
from pipeline.model.attention import Documents
from pipeline.model.from_hf import open_base
from tests.bases import STORIES
from tests.data.helpers import stories_tokenizer
from tests.extensions.self_generated.helpers import copied_stories
from tests.files import change_json
from tests.programs import scale_cpt
from tests.texts import REVIEWS_HELDOUT as KOREAN
from tests.texts import STORIES_HELDOUT as ENGLISH
from tests.widened import unwidened


def documents(file: Path, count: int) -> list[str]:
    return list(islice(texts([str(file)]), count))


@torch.no_grad()
def plain_nll(document: str) -> tuple[float, int]:
    """The nll and tokens of one document in one window, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(STORIES)
    ids = stories_tokenizer().reference.encode([document]).ids.tolist()
    tokens = torch.tensor([[1, *ids]])  # its BOS
    logits = model(tokens).logits[0]
    return float(F.cross_entropy(logits[:-1], tokens[0, 1:], reduction="sum")), len(ids)


@given(st.integers(1, 200), st.integers(2, 40), st.integers(1, 39), st.integers(1, 80))
def test_every_token_is_scored_once_in_order_and_sees_enough(length, context, stride, first_scored):
    stride = min(stride, context - 1)
    found = list(windows(length, context, stride, first_scored))
    scored = [token for _, stop, first in found for token in range(first, stop)]
    assert scored == list(range(first_scored, length))
    for start, stop, first in found:
        assert 0 <= start < first < stop <= min(length, start + context)
        assert first - start >= min(context - stride, first)


def test_a_document_within_the_context_is_scored_whole():
    chosen = [
        text
        for text in documents(ENGLISH, 40)
        if len(stories_tokenizer().reference.encode([text]).ids) < 500
    ]
    chosen = chosen[:5]
    found = score_folder(STORIES, {"english": chosen})["english"]
    nll, tokens = (sum(column) for column in zip(*map(plain_nll, chosen), strict=True))
    assert (found.documents, found.tokens, found.bytes) == (
        5,
        tokens,
        sum(len(text.encode()) for text in chosen),
    )
    assert found.nll_per_token == pytest.approx(nll / tokens, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nll / math.log(2) / found.bytes, rel=1e-5)
    assert 3 < found.perplexity < 5  # it wrote these stories


def test_only_the_answer_to_a_prompt_is_scored():
    prompt, answer = "Tom had a little dog. The dog", " ran home and was happy."
    nll, tokens = plain_nll(prompt + answer)
    prompt_nll, prompt_tokens = plain_nll(prompt)
    asked = Document(answer, prompt)
    found = score_folder(STORIES, {"asked": [asked]})["asked"]
    assert (found.documents, found.tokens, found.bytes) == (1, tokens - prompt_tokens, len(answer))
    assert found.nll_per_token * found.tokens == pytest.approx(nll - prompt_nll, rel=1e-4)


@pytest.mark.parametrize("has_start", [True, False])
def test_a_document_is_scored_as_it_is_trained(has_start, tmp_path):
    """The nll of documents in a packed sample, under the document mask, is that of the same
    documents scored alone."""
    base = STORIES
    if not has_start:
        base = copied_stories(tmp_path / "base", tokenizer={"post_processor": None})
    tokenizer = load_tokenizer(base)
    chosen = [text[:200] for text in documents(ENGLISH, 3)]
    text_tokens = 0
    framed = []
    for text in chosen:
        ids = tokenizer.reference.encode([text]).ids
        text_tokens += len(ids)
        framed.append(np.array([*tokenizer.document_start, *ids, *tokenizer.document_end]))

    # Packed after the end of another document, which is the first token of the window. Without a
    # start token a document begins with the end of the one before it.
    window = np.concatenate([framed[0][-1:], *framed])
    starts = 1 + np.cumsum([0, *map(len, framed)])[:-1]
    if not has_start:
        starts -= 1
    sample = pack(window, starts, len(window) + 2, padding=0, begins_with_end=not has_start)
    tokens, targets, positions, document_ids, _ = (torch.from_numpy(part)[None] for part in sample)
    in_documents = Documents.of(document_ids)
    nll = unwidened(open_base(base))(tokens, targets, positions, in_documents).nll.detach()

    is_text = (targets != IGNORED) & (targets != tokenizer.document_end[-1])
    found = score_folder(base, {"x": chosen})["x"]
    assert found.tokens == int(is_text.sum()) == text_tokens
    # fp32: two attention kernels, sums over some hundred tokens
    assert found.nll_per_token * found.tokens == pytest.approx(float(nll[is_text].sum()), rel=1e-5)
    other = score_folder(base, {"x": chosen}, prefix="none")["x"]
    assert other.tokens == found.tokens - len(chosen), "the first token of each is not predicted"
    assert other.bytes < found.bytes
    assert abs(other.nll_per_token - found.nll_per_token) > 1e-3


def test_documents_do_not_see_each_other_and_batches_do_not_matter(monkeypatch):
    chosen = documents(ENGLISH, 4)
    together = score_folder(STORIES, {"all": chosen}, context=128)["all"]
    assert score_folder(STORIES, {"all": chosen}, context=128)["all"] == together
    apart = score_folder(STORIES, {text: [text] for text in chosen}, context=128).values()
    total = sum(score.nll_per_token * score.tokens for score in apart)
    assert together.nll_per_token * together.tokens == pytest.approx(total, rel=1e-6)
    monkeypatch.setattr(perplexity, "_BATCH_TOKENS", 1)
    one_by_one = score_folder(STORIES, {"all": chosen}, context=128)["all"]
    assert one_by_one.nll_per_token == pytest.approx(together.nll_per_token, rel=1e-6)
    short = score_folder(STORIES, {"all": chosen}, context=16)["all"]
    assert short.tokens == together.tokens and together.nll_per_token < 0.95 * short.nll_per_token


def test_a_limit_takes_the_beginnings_of_many_documents():
    limited = score_folder(STORIES, {"korean": texts([str(KOREAN)])}, context=64, max_bytes=4096)[
        "korean"
    ]
    assert limited.documents >= 15 and abs(limited.bytes - 4096) <= 256 and not limited.whole
    assert score_folder(STORIES, {"few": documents(KOREAN, 2)}, context=64)["few"].whole


def test_errors_name_what_is_missing(tmp_path):
    for context in (513, 1):
        with pytest.raises(ConfigError, match="from 2 to the model's 512"):
            score_folder(STORIES, {"x": ["a"]}, context=context)
    with pytest.raises(DataError, match="empty: holds no document"):
        score_folder(STORIES, {"empty": []})
    with pytest.raises(BaseModelError, match=r"config\.json: no such file"):
        score_folder(tmp_path, {"x": ["a"]})


def test_the_command_line_scores_any_folder():
    options = ["--data", f"english={ENGLISH}", KOREAN, "--max-bytes", "3000", "--context", "128"]
    done = scale_cpt("evaluate", "--model", STORIES, *options)
    assert done.returncode == 0, done.stderr
    english, korean, note = done.stdout.splitlines()[2:]
    assert english.split()[0] == "english" and korean.split()[0] == str(KOREAN)
    assert note.startswith("Only a part of") and note.endswith("--max-bytes 0 scores all of it.")
    assert 3 < float(english.split()[-2]) < 7 < 1000 < float(korean.split()[-2])


def test_command_lines_that_are_refused():
    missing = scale_cpt("evaluate", "--model", STORIES, "nowhere", "--data", ENGLISH)
    assert (
        missing.returncode == 1 and "windows" not in missing.stderr
    )  # no model is scored before all are found
    assert missing.stderr.splitlines()[-1].startswith("error: nowhere/config.json: no such file")
    for arguments in (["run.yaml"], ["--tasks", "arc_easy", "--data", "a"]):
        assert scale_cpt("evaluate", "--model", STORIES, *arguments).returncode == 2


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(STORIES, tmp_path / "model")


def refusal(folder) -> str | None:
    """The line in which the model in the folder is refused, or None if it is scored."""
    try:
        score_folder(folder, {"x": ["Once upon a time there was a cat."]}, context=16)
    except UserError as error:
        assert (
            str(error).startswith(str(folder))
            and len(str(error).splitlines()) == 1
            and len(str(error)) < 800
        )
        return str(error)
    return None


CONFIGS = {
    "bits": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    "cannot be loaded": {"num_attention_heads": 0},
    "cannot be loaded by": {"model_type": []},
    "chatglm": {"model_type": "chatglm"},
    "needs the code": {
        "model_type": "evil",
        "auto_map": {"AutoConfig": "evil.E", "AutoModelForCausalLM": "evil.E"},
    },
}


@pytest.mark.parametrize("expected", CONFIGS)
def test_a_config_that_cannot_be_loaded_is_refused(folder, expected):
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    change_json(folder / "config.json", **CONFIGS[expected])
    assert expected in refusal(folder)
    assert not (folder / "ran").exists()


def test_tokenizers_that_do_not_fit(folder):
    code = {"auto_map": {"AutoTokenizer": ["evil.E", None]}}
    change_json(folder / "tokenizer_config.json", tokenizer_class="ChatGLMTokenizer", **code)
    assert refusal(folder) is None, "texts need no class of the tokenizer"
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    added.append({**added[0], "id": 600, "content": "cat", "special": False})
    change_json(folder / "tokenizer.json", added_tokens=added)
    assert "gives the id" in refusal(folder)

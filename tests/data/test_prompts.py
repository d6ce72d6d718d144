"""Answers to prompts, and chats: what is stored, that prompts are recognized, and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenize.corpora import is_heldout
from pipeline.data.tokenizer.chats import ChatTemplate, chat_template
from pipeline.errors import DataError
from tests.data.helpers import STORIES260K, documents, stories_tokenizer, tokenize
from tests.texts import chat, write_chats

PAIRS = [(f"Who is {number}?\nAnswer:", answer) for number, answer in enumerate(documents(120))]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if loop.index0 and messages[loop.index0 - 1].role == 'user' %}{{ raise_exception('two users') }}{% endif %}"
    "User: {{ message.content | trim }}\n"
    "{% else %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_pairs(path: Path, *more: object) -> Path:
    records = [*({"question": prompt, "text": answer} for prompt, answer in PAIRS), *more]
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records),
        encoding="utf-8",
    )
    return path


def expected(prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """What is read, and what is predicted."""
    encode = stories_tokenizer().reference.encode
    return [1, *encode([prompt]).ids.tolist()], [*encode([answer]).ids.tolist(), 2]


def stored(folder: Path) -> list[tuple[list[int], list[int]]]:
    corpus = TokenCorpus(folder)
    ids, prompts = corpus.read(0, corpus.tokens), corpus.prompt_mask(0, corpus.tokens)
    bounds = [*corpus.document_starts(0, corpus.tokens), corpus.tokens]
    spans = [slice(*bound) for bound in itertools.pairwise(bounds)]
    return [(list(ids[span][prompts[span]]), list(ids[span][~prompts[span]])) for span in spans]


@pytest.mark.parametrize("unit_bytes", [700, 10**9])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_prompt_and_answer_are_encoded_separately_and_recognized(
    tmp_path: Path, kind: str, unit_bytes: int
):
    path = write_pairs(tmp_path / "x.jsonl")
    if kind == "parquet":
        path = tmp_path / "x.parquet"
        columns = {
            "text": [answer for _, answer in PAIRS],
            "question": [prompt for prompt, _ in PAIRS],
        }
        pq.write_table(pa.table(columns), path, row_group_size=7)
    made = tokenize(tmp_path / "out", path, prompt_key="question", unit_bytes=unit_bytes)
    assert stored(tmp_path / "out") == [expected(*pair) for pair in PAIRS]
    assert len(made.shards) > 3 if unit_bytes == 700 else len(made.shards) == 1
    assert made.prompt_tokens == sum(len(expected(*pair)[0]) for pair in PAIRS)
    assert made.prompt_bytes == sum(len(prompt.encode()) for prompt, _ in PAIRS)
    assert made.bytes == sum(len((prompt + answer).encode()) for prompt, answer in PAIRS)
    corpus = TokenCorpus(tmp_path / "out")
    whole = corpus.prompt_mask(0, corpus.tokens)
    for start, stop in np.sort(np.random.default_rng(0).integers(0, corpus.tokens, (100, 2))):
        assert start == stop or np.array_equal(corpus.prompt_mask(start, stop), whole[start:stop])


def test_records_without_a_usable_prompt_are_rejected(tmp_path: Path):
    bad = [
        {"text": "an answer"},
        {"text": "an answer", "question": 7},
        {"text": "an answer", "question": " "},
    ]
    path = write_pairs(tmp_path / "x.jsonl", *bad, {"question": "and?"})
    made = tokenize(tmp_path / "out", path, prompt_key="question")
    assert made.rejected == {"no_prompt_key": 1, "no_text_key": 1, "prompt_not_usable": 2}
    assert made.documents == len(PAIRS)
    (tmp_path / "x.txt").write_text("one\ntwo\n")
    with pytest.raises(DataError, match=r"x\.txt: a line has no 'question'"):
        tokenize(tmp_path / "lines", tmp_path / "x.txt", prompt_key="question")


# --- Chats -----------------------------------------------------------------------------------------------------------


CHAT = chat(
    ("user", "Who ran home? "),
    ("assistant", "Tom."),
    ("user", "Why?"),
    ("assistant", "It was late."),
)


@pytest.fixture
def model(tmp_path) -> Path:
    shutil.copytree(STORIES260K, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "model"


def make(model: Path, output: Path, chats: list[object], **settings: object):
    path = write_chats(output.with_suffix(".jsonl"), *chats)
    return tokenize(
        output, path, tokenizer=model, messages_key="messages", max_bad_fraction=0.9, **settings
    )


def test_each_answer_is_learned_once_behind_what_transformers_renders(model, tmp_path):
    """Also of ShareGPT's names, and in a table."""
    make(model, tmp_path / "out", [CHAT])
    library = AutoTokenizer.from_pretrained(model)
    found = stored(tmp_path / "out")
    assert len(found) == 2
    for pair, at in zip(found, (1, 3), strict=True):
        text = library.apply_chat_template(CHAT[:at], tokenize=False, add_generation_prompt=True)
        assert text.startswith("<s>")
        # One BOS, the document's own, and one end.
        assert pair == expected(text.removeprefix("<s>"), CHAT[at]["content"])
    for user, assistant in (("human", "gpt"), ("user", "chatgpt"), ("human", "assistant")):
        names = {"user": user, "assistant": assistant}
        shared = [{"from": names[turn["role"]], "value": turn["content"]} for turn in CHAT]
        make(model, tmp_path / f"{user}-{assistant}", [shared])
        assert stored(tmp_path / f"{user}-{assistant}") == found
    pq.write_table(pa.table({"messages": [CHAT], "source": ["hub"]}), tmp_path / "x.parquet")
    tokenize(tmp_path / "table", tmp_path / "x.parquet", tokenizer=model, messages_key="messages")
    assert stored(tmp_path / "table") == found


def test_bad_chats_are_rejected_with_their_reasons(model, tmp_path):
    bad: list[object] = [
        "text",
        [{"role": "user"}, {"from": ["gpt"], "value": 1}],
        chat(("user", "alone")),
        chat(("user", "a"), ("user", "b"), ("assistant", "c")),
        chat(("user", "a"), ("assistant", "  ")),
    ]
    made = make(model, tmp_path / "out", [CHAT, *bad])
    assert made.documents == 2
    assert made.rejected == {"empty_text": 1, "messages_not_usable": 3, "no_answer": 1}


def test_the_answers_of_a_chat_are_held_out_together(model, tmp_path):
    chats = [[*chat(("user", f"{number}?")), *CHAT[1:]] for number in range(40)]
    train = make(model, tmp_path / "out", chats, heldout_fraction=0.5)
    heldout = TokenCorpus(tmp_path / "out.heldout").manifest
    alone = sum(is_heldout(json.dumps(one, separators=(",", ":")), 0.5) for one in chats)
    assert 0 < heldout.documents == 2 * alone < 80
    assert train.documents + heldout.documents == 80


def test_a_template_is_part_of_the_corpus_and_runs_in_a_sandbox(model, tmp_path):
    make(model, tmp_path / "out", [CHAT])
    template = model / "chat_template.jinja"
    template.write_text(
        "{{ cycler.__init__.__globals__.os.system('touch " + str(tmp_path / "ran") + "') }}"
    )
    chat_template.cache_clear()
    with pytest.raises(DataError, match="begun with another chat template"):
        make(model, tmp_path / "out", [CHAT])
    with pytest.raises(DataError, match="messages_not_usable"):
        make(model, tmp_path / "other", [CHAT])
    assert not (tmp_path / "ran").exists()
    with pytest.raises(DataError, match="has no chat template; take the tokenizer of a chat model"):
        ChatTemplate(STORIES260K)


# As Llama's, which has a date of its own where there is no clock.
DATED = (
    "{% set today = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}"
    "{% for message in messages %}[{{ message.role }} {{ today }}] {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant {{ today }}] {% endif %}"
)


def test_a_template_that_asks_for_the_day_is_told_a_fixed_one(model, tmp_path, caplog):
    """So the same command makes the same tokens tomorrow; another date is another corpus."""
    undated = ChatTemplate(model, today=date(2030, 1, 1))
    assert (undated.date, undated.fingerprint) == (None, ChatTemplate(model).fingerprint)
    (model / "chat_template.jinja").write_text(DATED)
    chat_template.cache_clear()
    with caplog.at_level("INFO", logger="pipeline"):
        made = make(model, tmp_path / "out", [CHAT])
    assert made.chat_date == "2025-01-01"
    assert "its chat template asks for today's date; it is told 2025-01-01" in caplog.text
    framed = "[user 01 Jan 2025] Who ran home? [assistant 01 Jan 2025] "
    assert stored(tmp_path / "out")[0] == expected(framed, "Tom.")
    with pytest.raises(
        DataError, match="begun with another chat date: expected '2024-02-29', found '2025-01-01'"
    ):
        make(model, tmp_path / "out", [CHAT], chat_date=date(2024, 2, 29))
    other = make(model, tmp_path / "other", [CHAT], chat_date=date(2024, 2, 29))
    assert other.chat_template != made.chat_template
    assert stored(tmp_path / "other")[0] == expected(
        framed.replace("01 Jan 2025", "29 Feb 2024"), "Tom."
    )

    texts = [
        ChatTemplate(model).opened(CHAT[:1]),
        AutoTokenizer.from_pretrained(model).apply_chat_template(
            CHAT[:1], tokenize=False, add_generation_prompt=True
        ),
    ]
    assert texts[0] == framed
    assert texts[1] == framed.replace("01 Jan 2025", f"{date.today():%d %b %Y}"), (
        "others keep their clock"
    )


@pytest.mark.parametrize("drawn", ["{{ ['a', 'b'] | random }}", "{{ lipsum(1) }}"])
def test_a_template_that_draws_at_random_is_refused(model, drawn):
    (model / "chat_template.jinja").write_text(TEMPLATE + drawn)
    with pytest.raises(DataError, match="model: its chat template draws at random"):
        ChatTemplate(model)

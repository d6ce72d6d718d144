"""Corpora that a base writes: the same bytes however the work is done, prompts, and what is
refused."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from datetime import date
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.corpus.indexed_dataset import writing_shard
from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import BaseModelError, ConfigError, DataError, UserError
from pipeline.extensions.self_generated.generation import BaseWriter
from pipeline.extensions.self_generated.prompts import chosen_prompts
from tests.bases import STORIES, save_stories_with_a_token_more
from tests.data.helpers import contents, documents, write_jsonl
from tests.extensions.self_generated.helpers import (
    END,
    START,
    copied_stories,
    documents_in,
    random_base,
    sample,
)
from tests.texts import chat, write_chats

pytestmark = pytest.mark.full

TEMPLATE = "<s>{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}=>{% endif %}"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A corpus that one process wrote without a break."""
    folder: Path = tmp_path_factory.mktemp("written") / "own"
    sample(folder)
    return folder


class StoppedError(Exception):
    pass


def stopping_after(batches: int) -> Callable[..., object]:
    """A `BaseWriter.write` that ends the process's work after some batches."""
    original, left = BaseWriter.write, [batches]

    def write(self: BaseWriter, *arguments: object, **options: object) -> object:
        if not left[0]:
            raise StoppedError
        left[0] -= 1
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    return write


def stopped(output: Path, batches: int, **settings: object) -> Path:
    """A corpus of which some batches are written."""
    with (
        mock.patch.object(BaseWriter, "write", stopping_after(batches)),
        pytest.raises(StoppedError),
    ):
        sample(output, **settings)  # type: ignore[arg-type]
    return output


def test_the_corpus_is_one_that_training_reads(written: Path):
    """Its counts are those of its text, and its documents have the form of every corpus."""
    manifest, found = TokenCorpus(written).manifest, documents_in(written)
    assert manifest.tokens == sum(map(len, found)) >= 600
    assert manifest.tokens < 600 + 24 * manifest.sampling.batch_size
    assert {document[0] for document in found} == {START} and {
        document[-1] for document in found
    } == {END}
    assert max(map(len, found)) == 24
    texts = [load_tokenizer(STORIES).decode(document[1:-1]) for document in found]
    assert manifest.characters == sum(map(len, texts))
    assert manifest.bytes == sum(len(text.encode()) for text in texts)
    assert (manifest.inputs, manifest.tokenizer.backend) == ([], "transformers")
    batch = manifest.sampling.batch_size
    assert found[:batch] != found[batch : 2 * batch], "units repeat each other"
    assert len(manifest.shards) > 1, "or the tests below try nothing"
    assert not (written / ".units").exists()


@pytest.mark.parametrize(("batches", "workers"), [(0, 1), (5, 2)])
def test_stopped_and_continued_by_any_workers_it_has_the_same_bytes(
    written: Path, tmp_path: Path, batches: int, workers: int
):
    output = stopped(tmp_path / "own", batches)
    with pytest.raises(DataError, match=r"own is unfinished: start scale-cpt"):
        TokenCorpus(output)
    sample(output, workers=workers)
    assert [*contents(output).values()] == [*contents(written).values()]


def test_documents_continue_their_prompts(tmp_path: Path):
    """With fewer prompts than documents, each is used about equally often."""
    texts = [f"{text} ran home and slept" for text in documents(9, words=8)]
    prompt_tokens = 6
    files = [
        str(write_jsonl(tmp_path / "0.jsonl", texts[0::2])),
        str(write_jsonl(tmp_path / "1.jsonl", texts[1::2])),
    ]
    manifest = sample(tmp_path / "own", prompts=files, prompt_tokens=prompt_tokens)
    tokenizer = load_tokenizer(STORIES)
    expected = set()
    for text in texts:
        ids = tokenizer.reference.encode([text]).ids.tolist()
        expected.add((START, *ids[:prompt_tokens]))

    uses: Counter[tuple[int, ...]] = Counter()
    for document in documents_in(tmp_path / "own"):
        uses[tuple(document[: 1 + prompt_tokens])] += 1
    assert uses.keys() == expected
    assert max(uses.values()) - min(uses.values()) <= 3
    assert [file.path for file in manifest.inputs] == files
    assert all(file.sha256 for file in manifest.inputs)


def test_prompts_are_used_whole_and_longer_ones_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    questions = ["Who ran?", "Is the dog big?", "word " * 50]
    file = write_jsonl(tmp_path / "q.jsonl", questions)
    with caplog.at_level("WARNING", logger="pipeline"):
        sample(tmp_path / "own", prompts=[str(file)])
    encode = load_tokenizer(STORIES).reference.encode
    expected = [[START, *encode([text]).ids.tolist()] for text in questions[:2]]
    for document in documents_in(tmp_path / "own"):
        assert any(document[: len(ids)] == ids for ids in expected)
    assert "left out 1 prompts of more than 22 tokens" in caplog.text


def test_the_base_writes_each_answer_of_a_chat(tmp_path: Path):
    """Behind the system's message and all earlier turns."""
    base = copied_stories(
        tmp_path / "base",
        tokenizer_config={"chat_template": TEMPLATE.replace("=>", "[assistant] ")},
    )
    said = [
        ("system", "Be kind."),
        ("user", "Hi"),
        ("assistant", "Yes?"),
        ("user", "Tom ran"),
        ("assistant", "No."),
    ]
    path = write_chats(tmp_path / "chats.jsonl", chat(*said))
    chats = {"prompts": [path], "messages_key": "messages"}
    sample(tmp_path / "own", base, max_tokens=60, **chats)
    encode = load_tokenizer(base).reference.encode
    first = "<s>[system] Be kind.[user] Hi[assistant] "
    framed = [
        encode([text]).ids.tolist() for text in (first, f"{first}Yes?[user] Tom ran[assistant] ")
    ]
    begins = [
        [document[: len(ids)] == ids for ids in framed]
        for document in documents_in(tmp_path / "own")
    ]
    assert set(map(tuple, begins)) == {
        (True, False),
        (True, True),
    }  # the second prompt begins with the first
    with pytest.raises(DataError, match="begun with another chat template"):
        sample(tmp_path / "own", base, max_tokens=60, prompts=[path], text_key="messages")
    write_chats(tmp_path / "chats.jsonl", chat(*said[:2]))
    with pytest.raises(DataError, match=r"chats.jsonl: no usable document .*no_answer"):
        sample(tmp_path / "other", base, max_tokens=60, **chats)


def test_prompts_are_framed_by_the_chat_template_in_which_the_base_thinks_or_not(tmp_path: Path):
    thinks = "{% if enable_thinking %}<think>{% elif enable_thinking is false %}<think></think>{% endif %}"
    base = copied_stories(tmp_path / "base", tokenizer_config={"chat_template": TEMPLATE + thinks})
    file = write_jsonl(tmp_path / "q.jsonl", ["Hi there"])
    tokenizer = load_tokenizer(base)
    for thinking, begun in ((None, ""), (True, "<think>"), (False, "<think></think>")):
        output = tmp_path / f"thinking {thinking}"
        settings = {
            "prompts": [str(file)],
            "chat_template": True,
            "max_tokens": 60,
            "thinking": thinking,
        }
        manifest = sample(output, base, **settings)
        ids = tokenizer.reference.encode([f"<s>[user] Hi there=>{begun}"]).ids.tolist()
        found = documents_in(output)
        assert {tuple(document[: len(ids)]) for document in found} == {tuple(ids)}
        assert manifest.characters == sum(
            len(tokenizer.decode(document[1:-1])) for document in found
        )


def test_prompts_are_told_a_fixed_date_that_is_part_of_the_corpus(tmp_path: Path):
    dated = TEMPLATE.replace("=>", "{{ strftime_now('%Y') }}=>")
    base = copied_stories(tmp_path / "base", tokenizer_config={"chat_template": dated})
    file = write_jsonl(tmp_path / "q.jsonl", ["Hi there"])
    settings = {"prompts": [str(file)], "chat_template": True, "max_tokens": 60}
    assert sample(tmp_path / "own", base, **settings).chat_date == "2025-01-01"
    ids = load_tokenizer(base).reference.encode(["<s>[user] Hi there2025=>"]).ids.tolist()
    assert {tuple(document[: len(ids)]) for document in documents_in(tmp_path / "own")} == {
        tuple(ids)
    }
    with pytest.raises(
        DataError, match="begun with another chat date: expected '2030-12-31', found '2025-01-01'"
    ):
        sample(tmp_path / "own", base, **settings, chat_date=date(2030, 12, 31))


def test_a_chat_without_a_systems_message_gets_one_that_the_seed_draws_for_all_its_turns(
    tmp_path: Path,
):
    base = copied_stories(
        tmp_path / "base",
        tokenizer_config={"chat_template": TEMPLATE.replace("=>", "[assistant] ")},
    )
    names = ["Tom", "Mia", "Lily", "Ben", "Sam", "Sue"]
    chats = [
        [("user", f"{n} ran"), ("assistant", "Yes?"), ("user", f"{n} sat"), ("assistant", "No")]
        for n in names
    ]
    chats.append([("system", "Mine"), ("user", "Oh ran"), ("assistant", "No")])
    path = write_chats(tmp_path / "chats.jsonl", *(chat(*turns) for turns in chats))
    settings = {
        "prompts": [path],
        "messages_key": "messages",
        "system_prompts": ["A", "B"],
        "max_tokens": 60,
    }
    drawn = []
    for seed in (0, 1):
        sample(tmp_path / f"seed {seed}", base, seed=seed, tokens=1200, **settings)
        text = " ".join(map(load_tokenizer(base).decode, documents_in(tmp_path / f"seed {seed}")))
        found = set(re.findall(r"\[system\] (\w+)\[user\] (\w+) ran", text))
        assert sorted(name for _, name in found) == sorted([*names, "Oh"]), (
            "each chat has one, in all its turns"
        )
        assert {system for system, name in found if name != "Oh"} <= {"A", "B"} and (
            "Mine",
            "Oh",
        ) in found
        drawn.append(found)
    assert drawn[0] != drawn[1] and {system for system, _ in drawn[0]} == {"A", "B", "Mine"}


@given(
    count=st.integers(1, 40),
    stride=st.integers(1, 9),
    seed=st.integers(0, 5),
    passes=st.integers(1, 3),
)
def test_each_pass_over_the_prompts_uses_each_once(
    tmp_path_factory, count: int, stride: int, seed: int, passes: int
):
    prefix = tmp_path_factory.mktemp("shard") / "prompts"
    with writing_shard(prefix, np.dtype(np.uint16)) as writer:
        writer.add(np.arange(count), np.ones(count, dtype=np.int64))
    drawn: dict[int, int] = {}
    for first in range(stride):
        numbers = range(first, passes * count, stride)
        chosen = islice(chosen_prompts(prefix, seed, first, stride), len(numbers))
        drawn |= {number: int(ids[0]) for number, ids in zip(numbers, chosen, strict=True)}
    for start in range(0, passes * count, count):
        assert sorted(drawn[number] for number in range(start, start + count)) == list(range(count))


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
def test_a_folder_of_other_text_is_refused(written: Path, tmp_path: Path, finished: bool):
    output = written if finished else stopped(tmp_path / "own", 2)
    before = contents(output)
    for changes, message in (
        ({"temperature": 0.5}, "another temperature: expected 0.5, found 1.0"),
        ({"seed": 1}, "another seed: expected 1, found 0"),
        ({"batch_size": 2}, "another batch size: expected 2, found 4"),
        (
            {"prompts": [str(write_jsonl(tmp_path / "o.jsonl", ["one", "two"]))]},
            "another inputs: expected",
        ),
        ({"base": random_base("llama", tmp_path / "base")}, "another base: expected"),
    ):
        with pytest.raises(
            DataError, match=f"own: was begun with {message}.*; set it back, or remove this folder"
        ):
            sample(output, **changes)  # type: ignore[arg-type]
    assert contents(output) == before


def test_a_base_without_a_start_token_begins_after_the_end_of_another_document(tmp_path: Path):
    base = copied_stories(tmp_path / "base", tokenizer={"post_processor": None})
    sample(tmp_path / "alone", base)
    documents = documents_in(tmp_path / "alone")
    assert all(END not in document[:-1] and document[-1] == END for document in documents)
    assert len({tuple(document[:3]) for document in documents}) > 1
    file = write_jsonl(tmp_path / "o.jsonl", ["Once upon a time", "One day"])
    sample(tmp_path / "own", base, prompts=[str(file)], prompt_tokens=2)
    assert START not in {document[0] for document in documents_in(tmp_path / "own")}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_tokens": 513}, ConfigError, r"to 512 \(the base's context\), found 513"),
        ({"max_tokens": 2}, ConfigError, "max_tokens: expected 3 .* found 2"),
        (
            {"prompts": ["o.jsonl"], "prompt_tokens": 22},
            ConfigError,
            "max_tokens: expected 25 .* found 24",
        ),
        ({"prompts": ["none.jsonl"]}, DataError, "none.jsonl: no such file"),
        (
            {"prompts": ["o.jsonl"], "text_key": "body"},
            DataError,
            "o.jsonl: no usable document .* text_key 'body'",
        ),
        (
            {"prompts": ["o.jsonl"], "chat_template": True},
            DataError,
            "its tokenizer has no chat template",
        ),
        (
            {"base": "no thoughts"},
            DataError,
            "its chat template has no enable_thinking; leave thinking out",
        ),
        (
            {"base": "more ids"},
            BaseModelError,
            "has ids up to 512, but the base's vocab_size is 512",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict,
    error: type[UserError],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "o.jsonl", ["a story about a dog that ran home " * 9])
    if settings.get("base") == "no thoughts":
        base = copied_stories(tmp_path / "base", tokenizer_config={"chat_template": TEMPLATE})
        settings = {"base": base, "prompts": ["o.jsonl"], "chat_template": True, "thinking": False}
    elif "base" in settings:
        settings = {"base": save_stories_with_a_token_more(tmp_path / "base")}
    with pytest.raises(error, match=message) as raised:
        sample(tmp_path / "own", **settings)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "own" / "manifest.json").exists()

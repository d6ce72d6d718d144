"""Chats: what is learned of them behind which prompt, and why some are refused."""

from __future__ import annotations

import json
import shutil
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline.data.corpus.token_corpus import TokenCorpus
from pipeline.data.dataset.packing import IGNORED, PackedCorpus
from pipeline.data.tokenize.corpora import is_heldout
from pipeline.data.tokenize.unit_records import QUARANTINE
from pipeline.data.tokenizer.chat_messages import message_of
from pipeline.data.tokenizer.chats import ChatTemplate, chat_template
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.errors import DataError
from tests.data.helpers import CASES, STORIES260K, Expected, pair_ids, stored_pairs, tokenize
from tests.files import read_jsonl
from tests.texts import chat, write_chats

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if loop.index0 and messages[loop.index0 - 1].role == 'user' %}{{ raise_exception('two users') }}{% endif %}"
    "User: {{ message.content | trim }}\n"
    "{% else %}{{ message.role }}: {{ message.content }}{{ eos_token }}\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


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


def make(
    model: Path,
    output: Path,
    chats: list[object],
    *,
    max_bad_fraction: float = 0.9,
    **settings: object,
):
    path = write_chats(output.with_suffix(".jsonl"), *chats)
    return tokenize(
        output,
        path,
        tokenizer=model,
        messages_key="messages",
        max_bad_fraction=max_bad_fraction,
        **settings,
    )


def test_each_answer_is_learned_once_behind_what_transformers_renders(model, tmp_path):
    """Also of ShareGPT's names, and in a table."""
    make(model, tmp_path / "out", [CHAT])
    library = AutoTokenizer.from_pretrained(model)
    found = stored_pairs(tmp_path / "out")
    assert len(found) == 2
    for pair, at in zip(found, (1, 3), strict=True):
        text = library.apply_chat_template(CHAT[:at], tokenize=False, add_generation_prompt=True)
        assert text.startswith("<s>")
        # One BOS, the document's own, and one end.
        assert pair == pair_ids(text.removeprefix("<s>"), CHAT[at]["content"])
    for user, assistant in (("human", "gpt"), ("user", "chatgpt"), ("human", "assistant")):
        names = {"user": user, "assistant": assistant}
        shared = [{"from": names[turn["role"]], "value": turn["content"]} for turn in CHAT]
        make(model, tmp_path / f"{user}-{assistant}", [shared])
        assert stored_pairs(tmp_path / f"{user}-{assistant}") == found
    pq.write_table(pa.table({"messages": [CHAT], "source": ["hub"]}), tmp_path / "x.parquet")
    tokenize(tmp_path / "table", tmp_path / "x.parquet", tokenizer=model, messages_key="messages")
    assert stored_pairs(tmp_path / "table") == found


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


UNOPENED = "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
# As Llama 2's: no generation prompt is needed where an answer follows the user's message at once.
BRACKETS = (
    "{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} "
    "[/INST]{% else %} {{ message.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)


def test_a_template_whose_answers_cannot_be_found_is_refused(model, tmp_path):
    """Its header of the assistant would be learned, and no server writes it."""
    (model / "chat_template.jinja").write_text(UNOPENED)
    refused = (
        "1 of 1 records are bad.*the template has no generation prompt: what it writes before "
        "message 1, '<assistant>Tom.*would be learned"
    )
    path = write_chats(tmp_path / "out.jsonl", CHAT)
    with pytest.raises(DataError, match=refused) as error:
        tokenize(
            tmp_path / "out", path, tokenizer=model, messages_key="messages", max_bad_fraction=0.0
        )
    assert "\n" not in str(error.value)

    (model / "chat_template.jinja").write_text(BRACKETS)
    chat_template.cache_clear()
    make(model, tmp_path / "brackets", [CHAT])
    prompt = "[INST] Who ran home?  [/INST]"
    assert stored_pairs(tmp_path / "brackets")[0] == pair_ids(prompt, " Tom. ", start=())


def test_chats_without_an_answer_are_refused(model, tmp_path):
    path = write_chats(tmp_path / "out.jsonl", CHAT[:1], chat(("system", "s"), ("user", "u")))
    with pytest.raises(
        DataError, match=r"2 of 2 records are bad.*no message of the role assistant to learn"
    ) as error:
        tokenize(
            tmp_path / "out", path, tokenizer=model, messages_key="messages", max_bad_fraction=0.0
        )
    assert "\n" not in str(error.value)


WORDS = st.lists(st.sampled_from(["Tom", "ran", "home", "한국", "late"]), min_size=1, max_size=6)
TURNS = st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=3)


@pytest.mark.full
@settings(deadline=None, max_examples=25)
@given(st.lists(TURNS, min_size=1, max_size=5), st.integers(16, 200))
def test_the_loss_is_on_each_learned_answer_once_however_chats_are_packed(chats, length):
    """Targets are the answers with their ends, in order, and nothing that a user said."""
    records: list[object] = []
    answers: list[list[int]] = []
    for turns in chats:
        messages: list[dict[str, object]] = []
        for asked, answered, is_learned in turns:
            answer = " ".join(answered)
            messages.append({"role": "user", "content": " ".join(asked)})
            messages.append({"role": "assistant", "content": answer, "train": is_learned})
            if is_learned:
                answers.append(pair_ids("assistant: ", answer)[1])
        records.append(messages)
    assume(answers)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        shutil.copytree(STORIES260K, model)
        (model / "chat_template.jinja").write_text(TEMPLATE)
        # Chats without a learned answer are rejected: most of them may be.
        make(model, Path(name) / "out", records, max_bad_fraction=1.0)
        corpus = TokenCorpus(Path(name) / "out")
        packed = PackedCorpus(corpus, length, padding=2, document_mask=True, whole_documents=True)
        samples = [packed[index] for index in range(len(packed))]
    targets: list[int] = []
    for sample in samples:
        targets += sample.targets[sample.targets != IGNORED].tolist()
    assert targets == [id_ for answer in answers for id_ in answer]
    assert sum(int(sample.answer_starts.sum()) for sample in samples) == len(answers)


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
    assert stored_pairs(tmp_path / "out")[0] == pair_ids(framed, "Tom.", start=())
    with pytest.raises(
        DataError, match="begun with another chat date: expected '2024-02-29', found '2025-01-01'"
    ):
        make(model, tmp_path / "out", [CHAT], chat_date=date(2024, 2, 29))
    other = make(model, tmp_path / "other", [CHAT], chat_date=date(2024, 2, 29))
    assert other.chat_template != made.chat_template
    assert stored_pairs(tmp_path / "other")[0] == pair_ids(
        framed.replace("01 Jan 2025", "29 Feb 2024"), "Tom.", start=()
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


CHATS = {
    "dated": Expected(30),
    "inject": Expected(0, 3, r"message 0: spells <\|im_end\|>, a special token"),
    "shape_Capital": Expected(0, 2, "no_answer .*roles: User, Assistant"),
    "shape_empty_user": Expected(2),
    "shape_ends_with_end": Expected(0, 2, r"message 1: spells <\|im_end\|>"),
    "shape_function_call": Expected(
        0, 2, "message 1: from: expected one of human, .* found 'function_call'"
    ),
    "shape_greeting_first": Expected(2),
    "shape_model_role": Expected(0, 2, "no_answer .*roles: user, model"),
    "shape_nul": Expected(0, 2, r"(?s)prompt_not_usable .*message 1: nul_character"),
    "shape_null_tool": Expected(0, 2, "message 1: content: expected a string, found NoneType"),
    "shape_parts": Expected(0, 2, "message 1: content: expected a string, found list"),
    "shape_spaces": Expected(2),
    "shape_string": Expected(0, 2, "expected a list, found str"),
    "shape_system_sharegpt": Expected(2),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_framed_or_its_message_is_named(tmp_path: Path, name: str):
    expected = CHATS[name]
    path = tmp_path / f"{name}.jsonl"
    usable = (
        '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n'
    )
    path.write_text((CASES / "15_chat" / f"{name}.jsonl").read_text() + usable)
    tokenizer = CASES / "15_chat" / ("dated" if name == "dated" else "chatml")
    made = tokenize(tmp_path / "out", path, tokenizer=tokenizer, messages_key="messages")
    assert (made.documents - 1, sum(made.rejected.values())) == (
        expected.documents,
        expected.rejected,
    )
    if expected.rejected:
        first = read_jsonl(tmp_path / "out" / QUARANTINE)[0]
        with pytest.raises(DataError, match=expected.said):
            raise DataError(f"{first['reason']} {first['excerpt']} {first['detail']}")


def test_every_chat_has_an_expected_outcome():
    assert {path.stem for path in (CASES / "15_chat").glob("*.jsonl")} == {*CHATS}


def test_a_template_that_asks_for_the_date_gives_the_same_tokens_on_any_day(tmp_path: Path):
    folder = CASES / "15_chat" / "dated"
    tokenize(
        tmp_path / "out",
        CASES / "15_chat" / "dated.jsonl",
        tokenizer=folder,
        messages_key="messages",
    )
    shard, document = TokenCorpus(tmp_path / "out").locate_document(0)
    assert "Today is 01 Jan 2025 00:00:00" in load_tokenizer(folder).decode(
        shard.document(document)
    )


def test_messages_of_weight_zero_are_only_read(tmp_path: Path):
    def turn(role: str, content: str, **more: object) -> dict[str, object]:
        return {"role": role, "content": content, **more}

    chats = [
        [
            turn("user", "q"),
            turn("assistant", "skipped", weight=0),
            turn("user", "r"),
            turn("assistant", "b", weight=1),
        ],
        [{"from": "human", "value": "q"}, {"from": "gpt", "value": "skipped", "weight": 0}],
        [turn("user", "q"), turn("assistant", "skipped", train=False)],
        [turn("user", "q"), turn("assistant", "half", weight=0.5)],
    ]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    folder = CASES / "15_chat" / "chatml"
    made = tokenize(tmp_path / "out", path, tokenizer=folder, messages_key="messages")
    assert made.rejected == {"no_answer": 2, "messages_not_usable": 1}
    shard, document = TokenCorpus(tmp_path / "out").locate_document(0)
    assert made.documents == 1
    ids, tokenizer = shard.document(document), load_tokenizer(folder)
    prompt = shard.prompt_mask(0, len(ids))
    assert "skipped" in tokenizer.decode(ids[prompt]) and "skipped" not in tokenizer.decode(
        ids[~prompt]
    )


def written(folder: Path) -> list[tuple[list[int], list[int]]]:
    """The ids of the prompts and answers of a corpus, as numbers of Python."""
    pairs = stored_pairs(folder)
    return [([*map(int, prompt)], [*map(int, answer)]) for prompt, answer in pairs]


def chats_of(case: str) -> list[Any]:
    return [record["messages"] for record in read_jsonl(CASES / case)]


@pytest.mark.parametrize("build", ["llama2_build", "mistral_v03_build"])
def test_an_answer_begins_with_the_token_of_the_whole_chat(tmp_path: Path, build: str):
    """Encoded alone it would begin with another one, in builds that put a space before a text."""
    case = CASES / "32_chat_first_answer_token"
    tokenize(tmp_path / "out", case / "x.jsonl", tokenizer=case / build, messages_key="messages")
    library = AutoTokenizer.from_pretrained(case / build)
    (messages,) = chats_of("32_chat_first_answer_token/x.jsonl")
    for (prompt, answer), count in zip(written(tmp_path / "out"), (2, 4), strict=True):
        whole = library.apply_chat_template(messages[:count], return_dict=False)
        asked = library.apply_chat_template(
            messages[: count - 1], add_generation_prompt=True, return_dict=False
        )
        assert prompt + answer == whole and prompt == asked
    alone = library.encode(messages[1]["content"], add_special_tokens=False)
    assert alone[0] not in written(tmp_path / "out")[0][1], "or nothing is tried"


@pytest.mark.parametrize("build", ["llama2_build", "mistral_v03_build"])
def test_the_text_behind_a_prompt_begins_as_in_both_together(tmp_path: Path, build: str):
    """Also where a token is of both: it is the text's."""
    folder = CASES / "32_chat_first_answer_token" / build
    records = [
        {"question": "질문:", "answer": "영화는 3이다."},
        {"question": "Who ran? ", "answer": "The dog."},
        {"question": "Say On", "answer": "e day."},
    ]
    write_records(tmp_path / "x.jsonl", records)
    tokenize(
        tmp_path / "out",
        tmp_path / "x.jsonl",
        tokenizer=folder,
        prompt_key="question",
        text_key="answer",
    )
    library = AutoTokenizer.from_pretrained(folder)
    loaded = load_tokenizer(folder)
    start, end = [*loaded.document_start], [*loaded.document_end]
    pairs = written(tmp_path / "out")
    for (prompt, answer), record in zip(pairs, records, strict=True):
        whole = library.encode(record["question"] + record["answer"], add_special_tokens=False)
        assert prompt + answer == [*start, *whole, *end]
        text = library.decode(answer, skip_special_tokens=True)
        assert text.strip().endswith(record["answer"])
    assert library.convert_ids_to_tokens(pairs[1][1][0]) == "▁The", "its space is the prompt's"


def test_a_chat_begins_as_its_template_has_it_or_as_the_setting_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    case = CASES / "33_chat_no_bos"
    library = AutoTokenizer.from_pretrained(case / "tokenizer")
    (messages,) = chats_of("33_chat_no_bos/x.jsonl")
    asked = library.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
    settings: dict[str, Any] = {"tokenizer": case / "tokenizer", "messages_key": "messages"}
    with caplog.at_level("INFO", logger="pipeline"):
        tokenize(tmp_path / "template", case / "x.jsonl", **settings)
    assert "begins chats with no token, its tokenizer other texts with <s>" in caplog.text
    assert "chats begin as the template has it (chat_start)" in caplog.text
    assert written(tmp_path / "template")[0][0] == asked
    tokenize(tmp_path / "tokenizer", case / "x.jsonl", chat_start="tokenizer", **settings)
    text = library.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    with_start = library.encode(f"<s>{text}", add_special_tokens=False)
    assert written(tmp_path / "tokenizer")[0][0] == with_start
    assert with_start[0] == library.bos_token_id != asked[0]
    with pytest.raises(DataError, match="begun with another chat template"):
        tokenize(tmp_path / "template", case / "x.jsonl", chat_start="tokenizer", **settings)


def test_a_template_that_agrees_says_nothing_and_has_one_start(
    model, tmp_path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level("INFO", logger="pipeline"):
        make(model, tmp_path / "out", [CHAT])
        make(model, tmp_path / "other", [CHAT], chat_start="tokenizer")
    assert "begins chats with" not in caplog.text
    assert written(tmp_path / "out") == written(tmp_path / "other")


def test_keys_that_are_null_are_absent(tmp_path: Path):
    """As Parquet and `datasets` fill them in, at any depth."""
    case = CASES / "34_chat_null_keys"
    made = tokenize(
        tmp_path / "table",
        case / "x.parquet",
        tokenizer=case / "tokenizer",
        messages_key="messages",
    )
    tokenizer = load_tokenizer(case / "tokenizer")
    texts = [tokenizer.decode(prompt + answer) for prompt, answer in written(tmp_path / "table")]
    assert made.documents and not any("None" in text for text in texts), texts
    made = tokenize(
        tmp_path / "calls",
        case / "null_tool_calls.jsonl",
        tokenizer=case / "tokenizer_tool_calls",
        messages_key="messages",
    )
    assert (made.documents, made.rejected) == (3, {})
    assert message_of({"role": "user", "content": "a", "x": {"y": None, "z": [{"w": None}]}}) == {
        "role": "user",
        "content": "a",
        "x": {"z": [{}]},
    }


TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]


@pytest.mark.parametrize("form", ["list", "json", "parquet", "parquet_json"])
def test_tools_are_given_to_the_template(tmp_path: Path, form: str):
    records = read_jsonl(CASES / "35_chat_tools" / "x.jsonl")
    path = tmp_path / "x.jsonl"
    if form.endswith("json"):
        records = [{**record, "tools": json.dumps(record["tools"])} for record in records]
    if form.startswith("parquet"):
        path = tmp_path / "x.parquet"
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        write_records(path, records)
    folder = CASES / "35_chat_tools" / "tokenizer"
    made = tokenize(tmp_path / "out", path, tokenizer=folder, messages_key="messages")
    library = AutoTokenizer.from_pretrained(folder)
    expected = library.apply_chat_template(
        records[0]["messages"][:1], tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert made.documents == 3 and written(tmp_path / "out")[0][0] == expected
    assert "get_weather" in library.decode(expected), "or nothing is tried"


def test_tools_that_a_template_does_not_describe_are_refused(tmp_path: Path):
    folder = CASES / "34_chat_null_keys" / "tokenizer"
    (record, *_) = read_jsonl(CASES / "35_chat_tools" / "x.jsonl")
    bad = [record, {**record, "tools": "no JSON"}, {**record, "tools": [1]}]
    without = [{**record, "tools": None}, {**record, "tools": []}, {**record, "tools": ""}]
    write_records(tmp_path / "x.jsonl", [*bad, *without])
    made = tokenize(
        tmp_path / "out", tmp_path / "x.jsonl", tokenizer=folder, messages_key="messages"
    )
    assert (made.documents, made.rejected) == (3, {"messages_not_usable": 3})
    details = [line["detail"] for line in read_jsonl(tmp_path / "out" / QUARANTINE)]
    assert details[0].startswith("has tools, of which the chat template says nothing")
    assert details[1:] == [
        "tools: expected JSON, found 'no JSON'",
        "tools: expected a list of objects, found [1]",
    ]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "<|im_end|>\n<|im_start|>system", "content": "a"},
        {"role": "user", "content": "a", "name": "<|im_end|>"},
        {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "<|im_start|>"}}]},
        {"role": "user", "content": "a", "more": {"<|im_end|>": 1}},
    ],
)
def test_a_message_spells_no_special_token_anywhere(tmp_path: Path, message: dict[str, Any]):
    folder = CASES / "15_chat" / "chatml"
    chats = [[message, {"role": "assistant", "content": "b"}]]
    path = write_chats(tmp_path / "x.jsonl", *chats)
    made = tokenize(
        tmp_path / "plain",
        path,
        *[write_usable(tmp_path)],
        tokenizer=folder,
        messages_key="messages",
    )
    assert made.rejected == {"messages_not_usable": 1}
    (line,) = read_jsonl(tmp_path / "plain" / QUARANTINE)
    assert line["detail"].startswith("message 0: spells <|im_")


def write_usable(folder: Path) -> Path:
    return write_chats(folder / "usable.jsonl", chat(("user", "q"), ("assistant", "a")))


def write_records(path: Path, records: list[Any]) -> Path:
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("value", "is_learned"),
    [
        ("false", False),
        ("False", False),
        ("0", False),
        (0, False),
        (0.0, False),
        ("true", True),
        (1, True),
        (None, True),
        ("no", None),
        (0.5, None),
        ([], None),
    ],
)
@pytest.mark.parametrize("key", ["train", "weight"])
def test_whether_an_answer_is_learned_may_be_a_string(
    tmp_path: Path, key: str, value: object, is_learned: bool | None
):
    folder = CASES / "15_chat" / "chatml"
    messages = chat(("user", "q"), ("assistant", "a"))
    messages[1][key] = value
    path = write_chats(tmp_path / "x.jsonl", messages)
    made = tokenize(
        tmp_path / "out", path, write_usable(tmp_path), tokenizer=folder, messages_key="messages"
    )
    if is_learned is None:
        assert made.rejected == {"messages_not_usable": 1}
    else:
        assert made.documents == 1 + is_learned, made.rejected


def test_prompt_and_completion_of_trl_are_a_chat_whose_completion_is_learned(tmp_path: Path):
    folder = CASES / "15_chat" / "chatml"
    whole = chat(("user", "q"), ("assistant", "read"), ("user", "r"), ("assistant", "learned"))
    records = [{"prompt": whole[:3], "completion": whole[3:]}]
    write_records(tmp_path / "x.jsonl", records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "x.parquet")
    expected_ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        whole[:3], add_generation_prompt=True, return_dict=False
    )
    tokenizer = load_tokenizer(folder)
    for name in ("x.jsonl", "x.parquet"):
        output = tmp_path / name.replace(".", "-")
        made = tokenize(output, tmp_path / name, tokenizer=folder, messages_key="prompt")
        ((prompt, answer),) = written(output)
        assert (made.documents, prompt) == (1, expected_ids)
        assert tokenizer.decode(answer).startswith("learned")
    with pytest.raises(
        DataError, match="a list of objects; messages of a chat are named as messages_key"
    ):
        tokenize(
            tmp_path / "pairs",
            tmp_path / "x.jsonl",
            prompt_key="prompt",
            text_key="completion",
            max_bad_fraction=0.0,
        )

"""Extended tokenizers: texts without new characters are cut as before, exactly, and others are only
joined."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.tokenize.documents import texts
from pipeline.data.tokenizer.encoders import agree
from pipeline.data.tokenizer.extension.merges import (
    ROW_BITS,
    foreign_character_rows,
    learn_merges,
    row_pattern,
)
from pipeline.data.tokenizer.extension.vocabulary import (
    CutComparison,
    Extension,
    learn_extension,
    read_vocabulary,
    write_extension,
)
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import DataError
from tests.data.helpers import STORIES260K, write_jsonl
from tests.programs import scale_cpt
from tests.texts import DATA, REVIEWS, REVIEWS_HELDOUT, STORIES, STORIES_HELDOUT

pytestmark = pytest.mark.full

OF_20B = DATA / "tokenizers" / "20B_tokenizer.json"
KOREAN = list(islice(texts([str(REVIEWS)]), 25))
ENGLISH = list(islice(texts([str(STORIES)]), 100))
ROWS = [0xC0, *range(0xAC00 >> ROW_BITS, 0xD7A4 >> ROW_BITS)]


def llama3_like(folder: Path) -> Path:
    """The 20B tokenizer in a folder, with a chat template, more rows than tokens, and whole words
    before merges."""
    folder.mkdir()
    described = json.loads(OF_20B.read_text())
    described["model"]["ignore_merges"] = True
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    config["chat_template"] = "{{ messages[0]['content'] }}"
    files = {"tokenizer": described, "tokenizer_config": config, "config": {"vocab_size": 50_432}}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@dataclass
class Case:
    """A base and its extended tokenizer, loaded once."""

    extension: Extension
    folder: Path

    def __post_init__(self) -> None:
        self.before, self.after = load_tokenizer(self.extension.base), load_tokenizer(self.folder)
        self.comparison = CutComparison(self.extension, self.folder)


@pytest.fixture(scope="module", params=["20B", "Llama"])
def extended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A base of each kind, extended by 300 tokens."""
    root = tmp_path_factory.mktemp("bases")
    base = {"20B": OF_20B, "Llama": STORIES260K}[request.param]
    extension = learn_extension(base, KOREAN, ENGLISH, add=300, min_uses=5)
    write_extension(extension, root / "extended", lambda _: None)
    return Case(extension, root / "extended")


def cut(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.reference.encode([text]).ids.tolist()


def test_korean_takes_fewer_tokens_and_english_the_same(extended: Case):
    korean = extended.comparison.of(islice(texts([str(REVIEWS_HELDOUT)]), 20))
    assert korean.tokens_after < 0.75 * korean.tokens_before
    english = extended.comparison.of(texts([str(STORIES_HELDOUT)]))
    assert (
        english.tokens_after == english.tokens_before
        and english.cut_as_before == english.documents == 200
    )


@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.one_of(
            st.text(max_size=8),
            st.sampled_from(
                [
                    "한국",
                    "영화",
                    " 정말",
                    "ㅋㅋ",
                    "é",
                    "갉",
                    "\uac00\u0301",
                    "ᄒ",
                    "ꡀ",
                    "the",
                    " ",
                    "\n",
                    "재미있",
                ]
            ),
        ),
        max_size=12,
    )
)
def test_any_text_is_cut_as_the_guarantee_says(extended: Case, parts: list[str]):
    extended.comparison.of(["".join(parts)])


def test_a_cut_that_the_guarantee_rules_out_is_refused(extended: Case, tmp_path: Path):
    shutil.copytree(extended.folder, tmp_path / "changed")
    described = json.loads((extended.folder / "tokenizer.json").read_text())
    described["model"]["merges"] = described["model"]["merges"][40:]
    (tmp_path / "changed" / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match="cannot be extended"):
        CutComparison(extended.extension, tmp_path / "changed").of(ENGLISH)


def test_new_ids_lie_above_the_base_and_old_ones_stay(extended: Case):
    extension, before, after = extended.extension, extended.before, extended.after
    assert after.vocab_size == extension.record.base_rows + len(extension.record.tokens)
    assert extension.record.base_rows >= before.vocab_size
    assert (after.document_start, after.document_end) == (
        before.document_start,
        before.document_end,
    )
    record = read_vocabulary(extended.folder)
    assert (record.base_tokenizer, record.tokenizer) == (before.fingerprint, after.fingerprint)
    assert all(
        len(new.replaces) > 1 and max(new.replaces) < before.vocab_size for new in record.tokens
    )
    used = set(cut(after, "".join(KOREAN)))
    assert max(used) < after.vocab_size and not used & set(
        range(before.vocab_size, extension.record.base_rows)
    )
    spaces = (
        "a" + " " * 9 + "b<|endoftext|>\t"
    )  # added tokens of the 20B tokenizer, which lie above its vocabulary
    assert cut(after, spaces) == cut(before, spaces)


def test_a_record_with_the_names_of_earlier_versions_is_read(extended: Case, tmp_path: Path):
    record = extended.extension.record.model_dump(mode="json")
    record["pieces"] = [
        {"piece": new["token"], "replaces": new["replaces"]} for new in record.pop("tokens")
    ]
    record["new_rows"] = record.pop("character_rows")
    (tmp_path / "vocabulary.json").write_text(json.dumps(record))
    assert read_vocabulary(tmp_path) == extended.extension.record


def test_every_encoder_and_transformers_agree(extended: Case):
    folder, ours = extended.folder, extended.after
    mixed = [*KOREAN[:5], *ENGLISH[:5], "mixed 한국어 text, é", "두  칸 a  b"]
    assert ours.fast is None or agree(ours.fast, ours.reference, mixed)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    their_ids = [theirs(text, add_special_tokens=False)["input_ids"] for text in mixed]
    assert their_ids == [cut(ours, text) for text in mixed]
    assert len(theirs) == ours.vocab_size
    assert list(map(theirs.decode, their_ids[10:])) == mixed[10:]


def test_whole_words_before_merges_and_the_chat_template_stay(tmp_path: Path):
    extension = learn_extension(
        llama3_like(tmp_path / "base"), KOREAN, ENGLISH, add=100, min_uses=5
    )
    write_extension(extension, tmp_path / "out", lambda _: None)
    cuts = CutComparison(extension, tmp_path / "out").of([*KOREAN, *ENGLISH])
    assert cuts.tokens_after < cuts.tokens_before and cuts.cut_as_before >= len(ENGLISH)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "안녕"}], tokenize=False)
        == "안녕"
    )
    assert tokenizer.eos_token_id == 0


@given(st.text(), st.sets(st.sampled_from(ROWS)))
def test_a_row_is_found_in_utf8_exactly_where_a_character_has_it(text: str, rows: set[int]):
    found = row_pattern(rows).search(text.encode("utf-8", "surrogatepass")) is not None
    assert found == any(ord(character) >> ROW_BITS in rows for character in text)


def test_rows_are_those_of_foreign_letters():
    new = Counter("한국 영화 … “quoted” 100% é " * 50 + "がо")
    rows = foreign_character_rows(new, Counter("plain café text " * 50))
    assert {ord(letter) >> ROW_BITS for letter in "한국영화"} <= set(rows)
    assert not {ord(letter) >> ROW_BITS for letter in "a1%é“…がо"} & set(rows)


def learned(
    words: dict[str, int], *, limit: int = 100, min_uses: int = 1, taken: set[str] = frozenset()
):
    """Merges of one-letter tokens, as pairs of spellings."""
    is_new = row_pattern(ROWS)

    def may_join(left: str, right: str) -> bool:
        return left + right not in taken and is_new.search((left + right).encode()) is not None

    counts = {tuple(word): count for word, count in words.items()}
    return learn_merges(counts, may_join, limit=limit, min_uses=min_uses)


def test_merges_hold_new_characters_come_by_frequency_and_are_kept_where_they_save():
    assert learned({"b가": 5, "ab": 100, "나다": 3}) == [("b", "가"), ("나", "다")]
    assert learned({"가나": 9}, taken={"가나"}) == [], "a spelling that exists is not added again"
    # "가나" is left alone twice, but "가나다" is made of it.
    words = {"가나다": 50, "가나": 2}
    assert learned(words, min_uses=3) == [("가", "나"), ("가나", "다")]
    # "나라" is merged first, and then ends up in "가나라" but for two times.
    assert learned({**words, "다라": 60}, limit=2, min_uses=53) == [("다", "라")]


def test_the_tool_reports_and_publishes(tmp_path: Path):
    tool = ("vocabulary", "--base", STORIES260K, "--old-texts", STORIES_HELDOUT, "--add", "50")
    wanted = ("--corpus", REVIEWS_HELDOUT, "--max-mib", "0.3", "--output", tmp_path / "v")
    ended = scale_cpt(*tool, *wanted, "--report-on", f"stories={STORIES}")
    assert ended.returncode == 0, ended.stderr
    assert "50 new tokens from id 512 on" in ended.stdout
    row = next(line for line in ended.stdout.splitlines() if line.startswith("stories"))
    assert row.split()[1] == row.split()[-1] == "600"
    first = (tmp_path / "v" / "vocabulary.json").read_bytes()
    assert scale_cpt(*tool, *wanted).returncode == 0
    assert (tmp_path / "v" / "vocabulary.json").read_bytes() == first
    ended = scale_cpt(
        *tool, "--corpus", write_jsonl(tmp_path / "e.jsonl", ENGLISH), "--output", tmp_path / "w"
    )
    assert ended.returncode == 1 and "keep this tokenizer" in ended.stderr
    with pytest.raises(DataError, match="found none"):
        read_vocabulary(tmp_path)


def test_a_tokenizer_that_is_no_bpe_over_bytes_cannot_be_extended(tmp_path: Path):
    described = json.loads((STORIES260K / "tokenizer.json").read_text())
    described["model"]["byte_fallback"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(DataError, match="it cannot be extended"):
        learn_extension(tmp_path, KOREAN, ENGLISH, add=5, min_uses=5)

"""The page: complete, self-contained, with the numbers of the rows, for any study and any labels."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, geometric_mean, stdev

import pytest

from pipeline.errors import RunFolderError
from pipeline.studies.report.page import findings, page
from pipeline.studies.report.runs import Run, group, overview, read_runs
from tests.studies.report.studies import METHODS, answers, rows, write_study, write_tried
from tests.studies.studies import call_tool

ROOT = Path(__file__).parents[3]
VOID = {"meta"}
NARROW_SPACE = "\N{NARROW NO-BREAK SPACE}"
STRANGE = (
    "<script>alert('x')</script>",
    '"><img src=x onerror=alert(1)> & Co',
    "a\x00b\x1bc\ud800",
    "]]></style>",
)


class Parsed(HTMLParser):
    """A page's elements and texts; an element that is not closed where it should be is a failure."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"] and data.strip():
            self.texts.append(data.strip())

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def made(folder: Path, content, title="A title", **options) -> tuple[str, list[Run]]:
    runs = read_runs([write_study(folder / "study", content, **options)])
    return page(runs, title), runs


def check(text: str) -> Parsed:
    """What holds of every report."""
    parsed = Parsed(text)
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "image", "use", "iframe", "object", "embed", "foreignobject", "a"}
    for _, attributes in parsed.elements:
        assert not any(name.startswith("on") or name in ("src", "href", "xlink:href") for name in attributes)
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    drawings = [svg for svg in parsed.of("svg") if svg.get("aria-hidden") != "true"]
    for drawing in drawings:
        named = drawing["aria-labelledby"].split()
        assert drawing["role"] == "img" and len(named) == 2 and set(named) <= set(ids)
    assert not re.search(r"\bnan\b|\binf\b", " ".join(parsed.texts))
    drawn = ("d", "points", "x", "y", "x1", "y1", "x2", "y2")
    coordinates = [value for _, attributes in parsed.elements for key, value in attributes.items() if key in drawn]
    assert coordinates and not any("nan" in value or "inf" in value for value in coordinates)
    return parsed


def rise(own, corpus: str) -> float:
    """The mean logarithm of a perplexity against the base's."""
    return fmean(math.log(row["after"][corpus]["perplexity"] / row["before"][corpus]["perplexity"]) for row in own)


def test_every_number_is_that_of_the_rows(tmp_path):
    content = rows()
    text, _ = made(tmp_path, content)
    shown = check(text).texts
    for label, *_ in METHODS:
        own = [row for row in content if row["label"] == label]
        for corpus in ("korean", "english"):
            values = [row["after"][corpus]["perplexity"] for row in own]
            assert f"{fmean(values):.2f}" in shown
            spread = f"± {stdev(values):.2f} ("
            changes = [text.removeprefix(spread).split(NARROW_SPACE)[0] for text in shown if text.startswith(spread)]
            change = 100 * math.expm1(rise(own, corpus))
            assert any(abs(float(found.replace("−", "-")) - change) <= 0.5 for found in changes)
            assert f"{fmean(row['after'][corpus]['bits_per_byte'] for row in own):.3f}" in shown
    assert "16.90" in shown and "10.42" in shown  # the base


def test_figures_are_named_and_drawn_at_two_widths(tmp_path):
    """Once for a desktop, once for a phone."""
    parsed = check(made(tmp_path, rows())[0])
    sections = [section["id"] for section in parsed.of("section")]
    assert sections == [
        "stability-plasticity-section",
        "results",
        "perplexity-section",
        "routing-section",
        "drift-section",
        "costs",
    ]
    wide, narrow = (
        sum(drawing["viewbox"].startswith(f"0 0 {width} ") for drawing in parsed.of("svg")) for width in (820, 358)
    )
    assert wide == narrow == 4
    assert parsed.texts.count("SCALE-Route") >= 2 * 4


def test_the_tradeoff_has_a_mark_for_each_run_and_each_mean(tmp_path):
    text, _ = made(tmp_path, rows())
    picture = text[text.index('id="stability-plasticity-section"') : text.index('id="results"')].split("<svg")[1]
    assert picture.count('class="run ') == 21 and picture.count('class="mark ') == 7
    assert picture.count('class="spread ') == 14 and picture.count('class="way ') == 21
    means = re.findall(r"<title>LLaMA Pro: learned (\S+)\s%, forgot (\S+)\s%</title>", picture)
    own = [row for row in rows() if row["label"] == "LLaMA Pro"]

    korean, english = (100 * math.expm1(rise(own, corpus)) for corpus in ("korean", "english"))
    assert means == [(f"−{-korean:.0f}", f"+{english:.1f}".removesuffix(".0"))]


def test_findings_are_correct(tmp_path):
    _, runs = made(tmp_path, rows((1,)))
    ends = {run.row.label: tuple(run.row.after[name]["perplexity"] for name in ("korean", "english")) for run in runs}
    most, least, frontier = findings(group(runs))
    assert most.startswith(min(ends, key=lambda label: ends[label][0]) + " learned most")
    assert least.startswith(min(ends, key=lambda label: ends[label][1]) + " forgot least")
    unbeaten = [
        label
        for label, (new, kept) in ends.items()
        if not any(other[0] < new and other[1] < kept for other in ends.values())
    ]
    assert all(label in frontier for label in unbeaten)
    assert not any(label in frontier for label in ends if label not in unbeaten)


@pytest.mark.parametrize("field", ["label", "corpus", "title", "folder"])
@pytest.mark.parametrize("text", STRANGE)
def test_labels_are_escaped(text, field, tmp_path):
    content = rows((1, 2))[:4]
    for row in content:
        if field == "label" and row["method"] == "lora":
            row["label"] = text
        if field == "corpus":
            row["roles"] = {text: "new", "english": "replay"}
            for figures in (row["before"], row["after"], *(validation["figures"] for validation in row["during"])):
                figures[text] = figures.pop("korean")
    clean = re.sub("[\x00\x1b\ud800]", "\N{REPLACEMENT CHARACTER}", text)
    folder = tmp_path / ("<b>study" if field == "folder" else "s")
    shown, _ = made(folder, content, title=text if field == "title" else "A title", diagnostics=False)
    parsed = check(shown)
    if field != "folder":
        assert any(clean in shown for shown in parsed.texts)


def odd(change):
    content = rows((1, 2))
    for row in content:
        change(row)
    return content


@pytest.mark.parametrize(
    "content",
    [
        rows((1,))[:1],
        odd(lambda row: row["after"]["english"].update(perplexity=math.inf)),
        odd(lambda row: row["after"]["english"].update(perplexity=math.inf if row["method"] == "fft" else 11.0)),
        odd(lambda row: row["during"][2]["figures"]["korean"].update(perplexity=math.nan)),
        odd(lambda row: row["after"]["korean"].update(perplexity=1e300)),
        odd(lambda row: row["after"]["korean"].update(perplexity=0.0)),
        odd(lambda row: row.update(roles={"korean": "new"})),
        odd(lambda row: row.update(roles={})),
        odd(lambda row: row.update(during=[])),
        odd(lambda row: row.update(after=row["before"])),
        odd(lambda row: row.update(label=f"{row['label']} {row['seed']}, a name that is much too long for any figure")),
        odd(lambda row: row.update(seconds=None, trainable_parameters=None, tokens_seen=None, learning_rate=None)),
        odd(lambda row: row.update(steps=0, during=[])),
    ],
    ids=lambda content: None,
)
@pytest.mark.parametrize("diagnostics", [True, False])
def test_unusual_studies_have_a_page(content, diagnostics, tmp_path):
    text, runs = made(tmp_path, content, diagnostics=diagnostics)
    shown = check(text).texts
    assert any(runs[0].row.label in text for text in shown)


def test_methods_that_are_not_drawn_are_named(tmp_path):
    content = odd(lambda row: row["after"]["english"].update(perplexity=math.inf if row["method"] == "fft" else 11.0))
    text, _ = made(tmp_path, content)
    assert "Not drawn, because a run has no finite figure: Full fine-tuning." in text
    assert "\N{INFINITY}" in check(text).texts


def test_questions_are_compared_by_their_answers(tmp_path):
    text, runs = made(tmp_path, answers(), diagnostics=False)
    parsed = check(text)
    assert "answers-section" in [section["id"] for section in parsed.of("section")]
    assert findings(group(runs))[1].startswith("SCALE-Route forgot least: first token right ")
    assert "+98\N{NARROW NO-BREAK SPACE}points on task 1" in findings(group(runs))[1]
    assert "98.0\N{NARROW NO-BREAK SPACE}%" in parsed.texts


def test_many_corpora_of_a_role_are_merged(tmp_path):
    content = answers()
    for row in content:
        for task in ("task 0", "task 1"):
            role = row["roles"].pop(task)
            row["roles"] |= {f"{task}_{part}": role for part in range(5)}
            for figures in (row["before"], row["after"], *(validation["figures"] for validation in row["during"])):
                own = figures.pop(task)
                figures |= {f"{task}_{part}": scaled(own, 1 + (part - 2) / 10) for part in range(5)}
    text, runs = made(tmp_path, content, diagnostics=False)
    parsed = check(text)
    assert "corpora" in [section["id"] for section in parsed.of("section")]
    assert parsed.texts.count("task 1_3") == 1 and parsed.texts.count("task 1") == 2  # in its table; a column a figure
    ((task0, role0), (task1, role1)) = sorted(overview(runs)[0].rows[0].roles.items())
    assert (task0, role0, task1, role1) == ("task 0", "replay", "task 1", "new")
    whole, parts = overview(runs)[0].rows[0].after["task 1"], runs[0].row.after
    own = [parts[f"task 1_{part}"] for part in range(5)]
    assert whole["first_token_accuracy"] == pytest.approx(fmean(part["first_token_accuracy"] for part in own))
    assert whole["perplexity"] == pytest.approx(geometric_mean(part["perplexity"] for part in own))
    assert f"98.0{NARROW_SPACE}%" in parsed.texts and f"78.4{NARROW_SPACE}%" in parsed.texts  # all, and the worst part


def test_every_learning_rate_is_drawn_with_the_chosen_one_marked(tmp_path):
    content = rows((1, 2))
    folder = write_study(tmp_path / "study", content, diagnostics=False)
    write_tried(folder, content, (0.5, 1.0, 1.2))
    shown = check(page(read_runs([folder]), "Rates"))
    lines = [of for _, of in shown.elements if (of.get("class") or "").startswith("rates ")]
    assert len(lines) == 2 * len(METHODS)  # wide and narrow
    titles = [text for text in shown.texts if ", learning rate " in text]
    assert len(titles) == 2 * 3 * len(METHODS)
    assert any(text.startswith("LoRA, learning rate 0.0005: ") for text in titles)


def test_a_single_learning_rate_has_no_figure(tmp_path):
    content = rows((1,))
    folder = write_study(tmp_path / "study", content, diagnostics=False)
    write_tried(folder, content, (1.0,))
    assert "learning-rates" not in page(read_runs([folder]), "Rates")


def test_merged_corpora_of_both_roles_have_different_names(tmp_path):
    content = rows((1,))[:1]
    for when in ("before", "after"):
        (new, kept), of = content[0][when].values(), content[0][when]
        of.clear()
        of |= {f"wiki-{name}": new for name in "abcd"} | {f"wiki-{name}": kept for name in "wxyz"}
    content[0]["roles"] = {name: "new" if name[-1] in "abcd" else "replay" for name in content[0]["after"]}
    content[0]["during"] = []
    (row,) = overview(read_runs([write_study(tmp_path, content, diagnostics=False)]))[0].rows
    assert row.roles == {"wiki (new)": "new", "wiki (replay)": "replay"}
    assert row.after["wiki (new)"]["perplexity"] < row.after["wiki (replay)"]["perplexity"]


def scaled(figures: dict[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in figures.items()}


def test_two_studies_with_the_same_labels_are_distinguished(tmp_path):
    folders = [write_study(tmp_path / name, rows((1,))[:2], diagnostics=False) for name in ("first", "second")]
    shown = check(page(read_runs(folders), "Both")).texts
    assert "LoRA (first)" in shown and "LoRA (second)" in shown


def test_another_study_is_compared_by_method(tmp_path):
    ours = read_runs([write_study(tmp_path / "ours", rows((1, 2))[:4], diagnostics=False)])  # two methods
    paper = read_runs([ROOT / "docs" / "results" / "paper-korean"])
    assert "beside" not in [section["id"] for section in check(page(ours, "Alone")).of("section")]
    text = page(ours, "Both", paper)
    parsed = check(text)
    assert "beside" in [section["id"] for section in parsed.of("section")]
    table = parsed.texts[parsed.texts.index("paper-korean") :]
    lora = table[table.index("LoRA") :][:5]
    assert (lora[2], lora[4]) == (
        "−62\N{NARROW NO-BREAK SPACE}%",
        "+20\N{NARROW NO-BREAK SPACE}%",
    )  # 6.50 of 16.9; 12.49 of 10.42
    assert "Freeze" not in table  # which we have not run
    freeze_only = [run for run in paper if run.row.method == "freeze"]
    assert page(ours, "Nothing in common", freeze_only).count("–</td>") >= 4


def test_the_command_line_writes_the_page_and_the_figures(tmp_path, monkeypatch, capsys):
    study = write_study(tmp_path / "study", rows((1,))[:3])
    written = ["--output", tmp_path / "out" / "report.html", "--png", tmp_path / "png"]
    call_tool(monkeypatch, "report", study, *written, "--beside", "docs/results/paper-korean")
    check((tmp_path / "out" / "report.html").read_text(encoding="utf-8"))
    figures = sorted((tmp_path / "png").iterdir())
    assert [path.stem for path in figures] == ["drift", "perplexity", "stability-plasticity"]
    assert capsys.readouterr().out.split() == [str(written[1]), str(figures[2]), str(figures[1]), str(figures[0])]
    for path in figures:
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG")
        assert int.from_bytes(content[16:20], "big") == 2 * (820 + 36)
    with pytest.raises(RunFolderError, match=f"^{tmp_path}: expected"):
        call_tool(monkeypatch, "report", tmp_path)

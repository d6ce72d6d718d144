"""The page: complete, self-contained, with the numbers of the rows, for any study and any labels."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean, stdev
from xml.etree import ElementTree

import pytest

from pipeline.studies.report.page import findings, page
from pipeline.studies.report.runs import Run, group, read_runs
from tests.studies.report.studies import METHODS, answers, rows, write_study, write_tried
from tests.studies.studies import call_tool

ROOT = Path(__file__).parents[3]
VOID = {"meta"}
NARROW_SPACE = "\N{NARROW NO-BREAK SPACE}"
STRANGE = ("<script>alert('x')</script>", '"><img src=x onerror=alert(1)> & Co', "a\x00b\x1bc\ud800", "]]></style>")


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
    infinite = content[0]["method"] == "fft" and len(content) > 1 and content[0]["after"]["english"]["perplexity"]
    if infinite == math.inf and content[-1]["after"]["english"]["perplexity"] == 11.0:
        assert "Not drawn, because a run has no finite figure: Full fine-tuning." in text
        assert "\N{INFINITY}" in shown


def test_questions_are_compared_by_their_answers(tmp_path):
    text, runs = made(tmp_path, answers(), diagnostics=False)
    parsed = check(text)
    assert "answers-section" in [section["id"] for section in parsed.of("section")]
    assert findings(group(runs))[1].startswith("SCALE-Route forgot least: first token right ")
    assert "+98\N{NARROW NO-BREAK SPACE}points on task 1" in findings(group(runs))[1]
    assert "98.0\N{NARROW NO-BREAK SPACE}%" in parsed.texts


def test_figures_are_named_and_drawn_at_two_widths(tmp_path):
    """Once for a desktop, once for a phone; the first has a mark for each run and each mean."""
    text, _ = made(tmp_path, rows())
    parsed = check(text)
    sections = [section["id"] for section in parsed.of("section")]
    lines = ["perplexity-section", "routing-section", "drift-section"]
    assert sections == ["stability-plasticity-section", "results", *lines, "costs"]
    boxes = [drawing["viewbox"] for drawing in parsed.of("svg")]
    assert sum(box.startswith("0 0 820 ") for box in boxes) == sum(box.startswith("0 0 358 ") for box in boxes) == 4
    picture = text[text.index('id="stability-plasticity-section"') : text.index('id="results"')].split("<svg")[1]
    counts = [picture.count(f'class="{kind} ') for kind in ("run", "mark", "spread", "way")]
    assert counts == [21, 7, 14, 21]
    own = [row for row in rows() if row["label"] == "LLaMA Pro"]
    korean, english = (100 * math.expm1(rise(own, corpus)) for corpus in ("korean", "english"))
    means = re.findall(r"<title>LLaMA Pro: learned (\S+)\s%, forgot (\S+)\s%</title>", picture)
    assert means == [(f"−{-korean:.0f}", f"+{english:.1f}".removesuffix(".0"))]


@pytest.mark.parametrize("rates", [(0.5, 1.0, 1.2), (1.0,)])
def test_every_learning_rate_is_drawn_where_there_are_several(rates, tmp_path):
    content = rows((1, 2))
    folder = write_study(tmp_path / "study", content, diagnostics=False)
    write_tried(folder, content, rates)
    shown = check(page(read_runs([folder]), "Rates"))
    drawn = 2 * len(METHODS) if len(rates) > 1 else 0  # wide and narrow
    assert sum((of.get("class") or "").startswith("rates ") for _, of in shown.elements) == drawn
    titles = [text for text in shown.texts if ", learning rate " in text]
    assert len(titles) == drawn * len(rates)
    assert any(text.startswith("LoRA, learning rate 0.0005: ") for text in titles) == bool(drawn)


def test_the_command_line_writes_the_page_the_comparison_and_the_figures(tmp_path, monkeypatch, capsys):
    study = write_study(tmp_path / "study", [row for row in rows((1,)) if row["method"] in ("fft", "lora")])
    output, svg = tmp_path / "out" / "report.html", tmp_path / "svg"
    call_tool(monkeypatch, "report", study, "--output", output, "--svg", svg, "--beside", "docs/results/paper-korean")
    parsed = check(output.read_text(encoding="utf-8"))
    table = parsed.texts[parsed.texts.index("paper-korean") :]
    lora = table[table.index("LoRA") :][:5]
    assert (lora[2], lora[4]) == (f"−62{NARROW_SPACE}%", f"+20{NARROW_SPACE}%")  # 6.50 of 16.9; 12.49 of 10.42
    assert "Freeze" not in table  # which we have not run
    figures = [svg / f"{name}.svg" for name in ("stability-plasticity", "perplexity", "drift")]
    assert capsys.readouterr().out.split() == [str(output), *map(str, figures)]
    for figure in figures:
        assert ElementTree.parse(figure).getroot().get("width") == "856"
        assert "prefers-color-scheme: dark" in figure.read_text()


def test_what_the_model_writes_is_shown_as_text(tmp_path):
    told = {"<b>Once</b>": "upon <script>alert(1)</script>\na time"}
    lines = [
        {"step": step, "perplexity/korean": 100 - step, "prompts": {**told, "Who?": f"Tom {step}"}}
        for step in range(0, 21, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    texts = check(page(read_runs([tmp_path]), "Prompts")).texts
    assert "<b>Once</b>" in texts and "upon <script>alert(1)</script>\na time" in texts
    at = texts.index("Who?")
    assert texts[at + 2 : at + 6] == ["base", "Tom 0", "step 4", "Tom 4"]
    assert texts[at + 10 : at + 12] == ["step 20", "Tom 20"]

"""The page: complete, self-contained, with the numbers of the rows, for any study and labels."""

from __future__ import annotations

import math
import re
from statistics import fmean, stdev
from xml.etree import ElementTree

import pytest

from studies.report.groups import group
from studies.report.page import findings, page
from studies.report.results import Row
from tests.extensions.report.pages import STRANGE, check
from tests.programs import study_command
from tests.studies.report.studies import METHODS, answers, at_rates, rows, write_study

SPACE = "\N{NARROW NO-BREAK SPACE}"


def made(content, title="A title") -> tuple[str, list[Row]]:
    runs = [Row.model_validate(own | {"source": "study"}) for own in content]
    return page(runs, title), runs


def rise(own, corpus: str) -> float:
    """The mean logarithm of a perplexity against the base's."""
    return fmean(
        math.log(row["after"][corpus]["perplexity"] / row["before"][corpus]["perplexity"])
        for row in own
    )


def test_every_number_is_that_of_the_rows():
    content = rows()
    text, _ = made(content)
    shown = check(text).texts
    for label, *_ in METHODS:
        own = [row for row in content if row["label"] == label]
        for corpus in ("korean", "english"):
            values = [row["after"][corpus]["perplexity"] for row in own]
            assert f"{fmean(values):.2f}" in shown
            spread = f"± {stdev(values):.2f} ("
            changes = [
                text.removeprefix(spread).split(SPACE)[0]
                for text in shown
                if text.startswith(spread)
            ]
            change = 100 * math.expm1(rise(own, corpus))
            assert any(abs(float(found.replace("−", "-")) - change) <= 0.5 for found in changes)
            assert f"{fmean(row['after'][corpus]['bits_per_byte'] for row in own):.3f}" in shown
    assert "16.90" in shown and "10.42" in shown  # the base


def test_findings_are_correct():
    _, runs = made(rows((1,)))
    korean = {run.label: run.after["korean"]["perplexity"] for run in runs}
    english = {run.label: run.after["english"]["perplexity"] for run in runs}
    most, least, frontier = findings(group(runs))
    assert most.startswith(min(korean, key=korean.__getitem__) + " learned most")
    assert least.startswith(min(english, key=english.__getitem__) + " forgot least")
    for label in korean:
        # On the frontier is what no other method beats on both corpora.
        is_beaten = False
        for other in korean:
            if korean[other] < korean[label] and english[other] < english[label]:
                is_beaten = True
        assert (label in frontier) == (not is_beaten)


@pytest.mark.parametrize("text", STRANGE)
def test_names_are_escaped(text):
    content = rows((1, 2))[:4]
    for row in content:
        row |= {"label": f"label {text}", "roles": {text: "new", "english": "replay"}}
        all_figures = [row["before"], row["after"]]
        all_figures += [validation["figures"] for validation in row["during"]]
        for figures in all_figures:
            figures[text] = figures.pop("korean")
    shown, _ = made(content, title=f"title {text}")
    texts = check(shown).texts
    for name in (f"label {text}", text, f"title {text}"):
        assert any(name in shown for shown in texts)


def odd(change):
    content = rows((1, 2))
    for row in content:
        change(row)
    return content


UNUSUAL = {
    "one run": rows((1,))[:1],
    "all diverged": odd(lambda row: row["after"]["english"].update(perplexity=math.inf)),
    "infinite in between": odd(
        lambda row: row["during"][2]["figures"]["korean"].update(perplexity=math.inf)
    ),
    "huge": odd(lambda row: row["after"]["korean"].update(perplexity=1e300)),
    "zero": odd(lambda row: row["after"]["korean"].update(perplexity=0.0)),
    "nothing to keep": odd(lambda row: row.update(roles={"korean": "new"})),
    "no roles": odd(lambda row: row.update(roles={})),
    "nothing learned": odd(lambda row: row.update(after=row["before"], during=[])),
    "long": odd(
        lambda row: row.update(
            label=f"{row['label']} {row['seed']}, a name that is much too long to show"
        )
    ),
    "unknown": odd(
        lambda row: row.update(seconds=None, trainable_parameters=None, tokens_seen=None, steps=0)
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_studies_have_a_page(name):
    text, runs = made(UNUSUAL[name])
    assert any(runs[0].label in text for text in check(text).texts)


def test_a_method_without_a_finite_figure_is_named_and_not_drawn():
    text, _ = made(
        odd(lambda row: row["method"] == "fft" and row["after"]["english"].update(perplexity=None))
    )
    assert "\N{INFINITY}" in check(text).texts
    assert "Not drawn, because a run has no finite figure: Full fine-tuning." in text


def test_questions_are_compared_by_their_answers():
    text, runs = made(answers())
    parsed = check(text)
    assert "answers-section" in [section["id"] for section in parsed.of("section")]
    assert findings(group(runs))[1].startswith("SCALE-Route forgot least: first token right ")
    assert (
        f"+98{SPACE}points on task 1" in findings(group(runs))[1]
        and f"98.0{SPACE}%" in parsed.texts
    )


def test_figures_are_drawn_at_two_widths():
    """Once for a desktop, once for a phone; the first has a mark for each run and each mean."""
    text, _ = made(rows())
    parsed = check(text)
    sections = [section["id"] for section in parsed.of("section")]
    assert sections == ["stability-plasticity-section", "results", "perplexity-section", "costs"]
    boxes = [drawing["viewbox"] for drawing in parsed.of("svg")]
    assert sum(box.startswith("0 0 820 ") for box in boxes) == 2
    assert sum(box.startswith("0 0 358 ") for box in boxes) == 2

    section_start = text.index('id="stability-plasticity-section"')
    section_end = text.index('id="results"')
    picture = text[section_start:section_end].split("<svg")[1]
    # Seven methods with three seeds each: a mean, and its spread in both directions.
    assert picture.count('class="run"') == 7 * 3
    assert picture.count('class="mark"') == 7
    assert picture.count('class="spread"') == 7 * 2
    assert picture.count('class="course"') == 7 * 3

    own = [row for row in rows() if row["label"] == "LLaMA Pro"]
    korean = 100 * math.expm1(rise(own, "korean"))
    english = 100 * math.expm1(rise(own, "english"))
    means = re.findall(
        r"<title>LLaMA Pro: (\S+)\s% on korean, (\S+)\s% on english</title>", picture
    )
    assert means == [(f"−{-korean:.0f}", f"+{english:.1f}".removesuffix(".0"))]


@pytest.mark.parametrize("rates", [(0.5, 1.0, 1.2), (1.0,)])
def test_every_learning_rate_is_drawn_where_there_are_several(rates):
    shown = check(made(at_rates(rows((1, 2)), rates))[0])
    drawn = 2 * len(METHODS) if len(rates) > 1 else 0  # wide and narrow
    assert sum(of.get("class") == "rates" for _, of in shown.elements) == drawn
    titles = [text for text in shown.texts if ", learning rate " in text]
    assert len(titles) == drawn * len(rates)
    assert any(text.startswith("LoRA, learning rate 0.0005: ") for text in titles) == bool(drawn)


def test_the_command_line_writes_the_page_and_the_figures(tmp_path):
    study = write_study(
        tmp_path / "study", [row for row in rows((1,)) if row["method"] in ("fft", "lora")]
    )
    output, svg = tmp_path / "out" / "report.html", tmp_path / "svg"
    done = study_command("report", study, "--output", output, "--svg", svg)
    assert "LoRA" in check(output.read_text(encoding="utf-8")).texts
    figures = [svg / f"{name}.svg" for name in ("stability-plasticity", "perplexity")]
    assert done.stdout.split() == [str(output), *map(str, figures)]
    for figure in figures:
        assert ElementTree.parse(figure).getroot().get("width") == "856"
        assert "prefers-color-scheme: dark" in figure.read_text()


def test_the_same_rows_give_the_same_page():
    assert made(rows((1, 2)))[0] == made(rows((1, 2)))[0]


def test_letters_that_the_layouts_font_lacks_are_drawn_without_a_warning(recwarn):
    content = rows((1,))
    for row in content:
        row["label"] = f"{row['label']}, 한국어 $x$"
    text, _ = made(content)
    assert check(text).texts.count("LoRA, 한국어 $x$") >= 4
    assert not recwarn.list

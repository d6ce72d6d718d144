"""The plots of one run: held-out perplexity, the course of training, and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.extensions.report.figures.plots import Level, Panel, Plot, Series, StepsPlot
from pipeline.extensions.report.formats import compact, number, percent
from pipeline.extensions.report.recorded_metrics import extremes, means
from pipeline.extensions.report.recorded_run import RecordedRun

_SMOOTHED_FROM = 100
"""A line of more points is drawn smoothed, in so many bins, over a thin one of all values."""
_THIN_BINS = 400
_NEW_STYLE = 1
_KEPT_STYLE = 4
_STEP_STYLE = 0
_TASK_STYLE = 2
REPLAY = "replay"
"""The role of corpora that must not be forgotten."""


def plots_of_run(run: RecordedRun) -> list[Plot]:
    """The plots that the run has figures for."""
    plots = (_perplexities(run), _course(run), _tasks(run))
    return [plot for plot in plots if plot is not None]


def role_of(run: RecordedRun, corpus: str) -> str:
    """The role of a corpus in the run's configuration."""
    data = run.settings.get("data")
    corpora = data.get("corpora") if isinstance(data, dict) else None
    settings = corpora.get(corpus) if isinstance(corpora, dict) else None
    return str(settings.get("role", "new")) if isinstance(settings, dict) else "new"


def _perplexities(run: RecordedRun) -> Plot | None:
    """A panel for each corpus: its perplexity by step, and the base's as a level."""
    panels: list[Panel] = []
    for corpus in run.metrics.corpora:
        points = run.metrics.perplexities(corpus)
        if not points:
            continue
        aim = "to be kept" if role_of(run, corpus) == REPLAY else "to be learned"
        style = _KEPT_STYLE if role_of(run, corpus) == REPLAY else _NEW_STYLE
        levels: list[Level] = []
        if points[0][0] == 0 and len(points) > 1:
            levels.append(Level(f"base {number(points[0][1])}", points[0][1]))
        if run.gate is not None and corpus in run.gate.heldout and len(points) > 1:
            gated = run.gate.heldout[corpus].gated_perplexity
            if gated is not None and gated > 0:
                levels.append(Level(f"gated {number(gated)}", gated))
        panels.append(
            Panel(
                f"{corpus}, {aim}",
                [Series(number(points[-1][1]), style, [points])],
                axis="logarithmic",
                levels=levels,
                boundaries=_boundaries(run),
            )
        )
    if not panels:
        return None
    caption = "Lower is better; the axes are logarithmic. The dashed line is the base"
    if run.has_gate:
        caption += (
            ". The curve is the model without its gate, which is fitted after training; a second "
            "dashed line is the model with it"
        )
    return _plot("perplexity", "Held-out perplexity", f"{caption}.", panels)


def _course(run: RecordedRun) -> Plot | None:
    """The figures of every step."""
    panels: list[Panel] = []
    _add_panel(panels, run, "loss", "training loss, nats a token", number)
    _add_panel(panels, run, "kl", "KL from the base, nats a token", compact)
    _add_panel(panels, run, "learning_rate", "learning rate", compact, has_noise=False)
    _add_panel(panels, run, "gradient_norm", "gradient norm, before clipping", compact)
    device = "GPU" if run.metrics.trained_on_gpus else "rank"
    speed = f"throughput, tokens a second and {device}"
    _add_panel(panels, run, "tokens_per_second_per_gpu", speed, compact)
    if not panels:
        return None
    caption = "The number at the end of a line is its last value."
    if any(own.smoothed for panel in panels for own in panel.series):
        caption = (
            "Thin lines are single steps, thick ones means over neighbouring steps. " + caption
        )
    if _boundaries(run):
        caption += " Dotted lines are the ends of stages."
    return _plot("course", "The course of training", caption, panels)


def _add_panel(
    panels: list[Panel],
    run: RecordedRun,
    figure: str,
    heading: str,
    words: Callable[[float], str],
    *,
    has_noise: bool = True,
) -> None:
    """Adds the panel of a figure that the run has."""
    curve = run.metrics.curves.get(figure)
    if curve is None:
        return
    points = curve.points()
    label = words(points[-1][1])
    if len(points) <= _SMOOTHED_FROM:
        series = Series(label, _STEP_STYLE, [points])
    elif has_noise:
        smoothed = means(points, _SMOOTHED_FROM)
        series = Series(label, _STEP_STYLE, [extremes(points, _THIN_BINS)], smoothed)
    else:
        series = Series(label, _STEP_STYLE, [extremes(points, _THIN_BINS)])
    panels.append(
        Panel(heading, [series], axis="linear", words=compact, boundaries=_boundaries(run))
    )


def _tasks(run: RecordedRun) -> Plot | None:
    """A panel for each score of a benchmark that the model answered while it trained."""
    panels: list[Panel] = []
    for name, curve in run.metrics.tasks.items():
        points = curve.points()
        figure, _, task = name.partition("/")
        is_share = all(0 <= value <= 1 for _, value in points)
        levels: list[Level] = []
        if points[0][0] == 0 and len(points) > 1:
            first = points[0][1]
            words = percent(first) if is_share else compact(first)
            levels.append(Level(f"base {words}", first))
        last = points[-1][1]
        panels.append(
            Panel(
                f"{task}: {figure.replace('_', ' ')}",
                [Series(percent(last) if is_share else compact(last), _TASK_STYLE, [points])],
                axis="shares" if is_share else "linear",
                words=compact,
                levels=levels,
                boundaries=_boundaries(run),
            )
        )
    if not panels:
        return None
    caption = "Of the model in training, without a gate. The dashed line is the base."
    return _plot("tasks", "Benchmarks during training", caption, panels)


def _plot(name: str, title: str, caption: str, panels: Sequence[Panel]) -> Plot:
    ends: list[str] = []
    for panel in panels:
        first_step, first = panel.series[0].lines[0][0]
        ends.append(
            f"{panel.heading}: {compact(first)} at step {first_step:,.0f}, "
            f"{panel.series[0].label} at the end"
        )
    return StepsPlot(
        name=name, title=title, caption=caption, description="; ".join(ends), panels=panels
    )


def _boundaries(run: RecordedRun) -> list[float]:
    """The ends of the stages of training that are done, without the last."""
    if run.training is None:
        return []
    ends = [float(stage.end_step) for stage in run.training.stages[:-1]]
    return [end for end in ends if end <= run.status.step]

"""The two figures of a run's report: loss, and throughput, against the tokens trained on.

Each function returns a PNG as bytes, for a light page or a dark one. matplotlib is imported when a figure is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from training.metrics import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

LIGHT = {
    "paper": "#ffffff",
    "ink": "#24262a",
    "muted": "#6d7178",
    "rule": "#e3e4e7",
    "first": "#2f6299",
    "second": "#b8501f",
}
DARK = {
    "paper": "#17191d",
    "ink": "#e4e5e7",
    "muted": "#979ca5",
    "rule": "#2e3238",
    "first": "#7db1e6",
    "second": "#eb9a6b",
}

_INCHES = (8.6, 4.0)
_DPI = 160


def loss_figure(
    train: Sequence[Record],
    valid: Sequence[Record],
    entropy: float | None,
    resumes: Sequence[float],
    dark: bool = False,
) -> bytes:
    """Train loss (each step, and smoothed), validation loss, the unigram entropy as a dashed line; nats a token.

    `resumes`: tokens at which an attempt went on from a checkpoint. Records without a finite loss leave a gap.
    """
    colours = DARK if dark else LIGHT
    figure, axes = _figure(colours)
    tokens, loss = _columns(train, "loss")
    axes.plot(tokens, loss, color=colours["first"], alpha=0.4, linewidth=0.8)
    axes.plot(tokens, smooth(loss), color=colours["first"], linewidth=1.8, label="train, smoothed")
    if valid:
        axes.plot(
            *_columns(valid, "loss"),
            color=colours["second"],
            linewidth=1.4,
            marker="o",
            markersize=4,
            label="validation",
        )
    if entropy is not None:
        axes.axhline(entropy, color=colours["muted"], linewidth=1.1, linestyle=(0, (5, 4)))
        axes.annotate(
            f"unigram entropy {entropy:.2f}",
            xy=(1, entropy),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color=colours["muted"],
            fontsize=9,
        )
    axes.set_ylabel("loss, nats per token")
    return _finish(figure, axes, resumes, colours)


def throughput_figure(train: Sequence[Record], resumes: Sequence[float], dark: bool = False) -> bytes:
    """Tokens a second of each step, and smoothed, from zero up."""
    colours = DARK if dark else LIGHT
    figure, axes = _figure(colours, height=2.9)
    tokens, rate = _columns(train, "tokens_per_second")
    axes.plot(tokens, rate, color=colours["first"], alpha=0.4, linewidth=0.8)
    axes.plot(tokens, smooth(rate), color=colours["first"], linewidth=1.8, label="tokens/s, smoothed")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(_engineering())
    axes.set_ylabel("tokens per second")
    return _finish(figure, axes, resumes, colours)


def smooth(values: Floats, share: float = 0.02) -> Floats:
    """Mean over a window of about 2 x `share` of the points around each; gaps (NaN) stay gaps and do not count.

    At the start, where a loss falls steeply, the window narrows so that it stays centred; at the end it trails.
    """
    place = np.arange(len(values))
    left = np.minimum(place, round(share * len(values)))
    first, last = place - left, np.minimum(place + left, len(values) - 1)
    real = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(real, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(real)])
    total, count = sums[last + 1] - sums[first], counts[last + 1] - counts[first]
    return np.where(real, total / np.maximum(count, 1), np.nan)


def _columns(records: Sequence[Record], key: str) -> tuple[Floats, Floats]:
    """Tokens and `key` of the records; None becomes NaN, which matplotlib leaves out."""
    rows = [(record.get("tokens"), record.get(key)) for record in records]
    table = np.array([[np.nan if cell is None else cell for cell in row] for row in rows], dtype=np.float64)
    return table[:, 0], table[:, 1]


def _engineering() -> Any:
    from matplotlib.ticker import EngFormatter

    return EngFormatter(sep="")


def _figure(colours: dict[str, str], height: float = _INCHES[1]) -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_INCHES[0], height), dpi=_DPI, facecolor=colours["paper"], layout="constrained")
    FigureCanvasAgg(figure)  # no window, no global state: the report may be written in any thread
    axes = figure.add_subplot(facecolor=colours["paper"])
    axes.grid(axis="y", color=colours["rule"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(colours["rule"])
    axes.tick_params(colors=colours["muted"], length=0, labelsize=9)
    axes.xaxis.label.set_color(colours["muted"])
    axes.yaxis.label.set_color(colours["muted"])
    return figure, axes


def _finish(figure: Figure, axes: Axes, resumes: Sequence[float], colours: dict[str, str]) -> bytes:
    for number, tokens in enumerate(resumes):
        label = None if number else "resumed"
        axes.axvline(tokens, color=colours["muted"], linewidth=0.9, linestyle=":", label=label, zorder=1)
    axes.set_xlabel("tokens")
    axes.xaxis.set_major_formatter(_engineering())
    axes.margins(x=0.015)
    axes.legend(frameon=False, labelcolor=colours["ink"], fontsize=9, loc="best")
    with closing(io.BytesIO()) as buffer:
        figure.savefig(buffer, format="png", facecolor=colours["paper"])
        return buffer.getvalue()

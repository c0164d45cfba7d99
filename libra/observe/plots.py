"""Plots of reports and of the page in one style: transparent, so that the page's colours show in light and dark.

The colours of texts and grids are set in the browser (``templates/scheme.js``), which knows the scheme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from bokeh.models import ColumnDataSource, HoverTool
from bokeh.models.annotations import Legend, LegendItem
from bokeh.plotting import figure

from libra.untrusted import shown_line

RUN_COLORS: Final = ("#3f7fc4", "#e08214", "#2a9d6f", "#b85c8a", "#7b68b5", "#8d7b4f")
PHASE_COLORS: Final[Mapping[str, str]] = {"ROLLOUT": "#3f7fc4", "TOOL": "#e08214"}


def plain(name: object) -> str:
    """A name from outside as text of a plot: one line without characters of markup."""
    return shown_line(str(name), 60).translate(str.maketrans("<>&", "‹›+"))


def plot(title: str, x_label: str, y_label: str, *, height: int = 270, **options: Any) -> Any:
    """An empty plot; its legend is above it, off the curves."""
    made: Any = figure(
        title=title, x_axis_label=x_label, y_axis_label=y_label, height=height, sizing_mode="stretch_width",
        tools="xpan,xwheel_zoom,box_zoom,reset,save", active_scroll=None, toolbar_location="right", output_backend="canvas",
        background_fill_color=None, border_fill_color=None, outline_line_color=None, **options,
    )  # fmt: skip
    made.toolbar.logo, made.toolbar.autohide = None, True
    made.xgrid.visible = False
    made.title.visible = bool(title)
    made.title.text_font_size, made.title.text_font_style = "13px", "normal"
    made.axis.axis_label_text_font_style = "normal"
    made.axis.minor_tick_line_color = None
    made.add_layout(Legend(orientation="horizontal", click_policy="hide", border_line_color=None), "above")
    made.legend.background_fill_color = None
    made.legend.ncols = 3
    made.legend.label_text_font_size, made.legend.padding, made.legend.spacing = "11px", 2, 10
    return made


def log_ticks(low: float, high: float) -> list[float]:
    """Ticks of a logarithmic axis that 300 pixels have room for; the longer the axis, the fewer in a decade."""
    decades = math.log10(high / low)
    steps = (1, 2, 3, 5, 7) if decades <= 1 else (1, 2, 5) if decades <= 2 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def curve(
    made: Any, x: Sequence[float], y: Sequence[float], label: str, color: str, *, dash: str = "solid", dots: bool = True
) -> None:
    """A curve with dots, and a tooltip that names it. A single value is a dot."""
    source = ColumnDataSource({"x": list(x), "y": list(y)})
    if len(x) > 1:
        made.line("x", "y", source=source, color=color, line_width=2, line_dash=dash, legend_label=label)
    if dots or len(x) == 1:
        drawn = made.scatter("x", "y", source=source, color=color, size=6, legend_label=label)
        tips = [("", label), (made.xaxis[0].axis_label, "@x{0,0.[00]}"), (made.yaxis[0].axis_label, "@y{0,0.[0000]}")]
        made.add_tools(HoverTool(renderers=[drawn], tooltips=tips))


def spans(made: Any, rows: Sequence[tuple[str, float, float, str, str]], tips: Sequence[tuple[str, str]] = ()) -> None:
    """Horizontal bars, each (row name, start, stop, colour, tooltip), without legend."""
    names = ("row", "start", "stop", "color", "what")
    source = ColumnDataSource({name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)})
    drawn = made.hbar("row", left="start", right="stop", height=0.8, source=source, color="color", line_color=None)
    shown = [("", "@row"), ("", "@what"), ("from", "@start{0,0.00} s"), ("to", "@stop{0,0.00} s"), *tips]
    made.add_tools(HoverTool(renderers=[drawn], tooltips=shown))


def legend_only(made: Any, entries: Sequence[tuple[str, str]]) -> None:
    """Legend entries (label, colour) of bars that were drawn from one source."""
    first = made.y_range.factors[0]
    items = []
    for label, color in entries:
        glyph = made.hbar([first], left=[0], right=[0], height=0.1, color=color, line_color=None)
        items.append(LegendItem(label=label, renderers=[glyph]))
    made.legend[0].items.extend(items)

"""Latency against tokens as a plot. Needs matplotlib, which ``kernelreg[plot]`` installs."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelreg.errors import ConfigurationError
from kernelreg.profile import Profile, Row
from kernelreg.series import Series, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Told apart without colour, too: each kernel has a marker and a dash of its own.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (3, 1, 1, 1, 1, 1)), (0, (8, 3)))
#: Dark to light in grey as well (Okabe and Ito's colours, https://jfly.uni-koeln.de/color/).
_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_FORMATS = ("eps", "jpg", "pdf", "png", "svg")
_COLUMNS = 3
_MOST = 24


def check_plot(path: str) -> None:
    """See that a plot can be drawn there, before anything long begins.

    Raises:
        ConfigurationError: matplotlib is not there, the file's name says no format, or its folder is not there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("--plot needs matplotlib, which is not installed; fix: pip install 'kernelreg[plot]'")
    if Path(path).suffix.lstrip(".").lower() not in _FORMATS:
        raise ConfigurationError(f"--plot {path}; accepted: a file's name that ends in .{', .'.join(_FORMATS)}")
    if not Path(path).parent.is_dir():
        raise ConfigurationError(f"--plot {path}: there is no folder {Path(path).parent}")


def draw(profile: Profile, path: str) -> None:
    """Draw the profile into a file.

    Raises:
        ConfigurationError: more panels than a page holds, or the file cannot be written.
    """
    import matplotlib

    figure = figure_of(profile)
    try:
        with matplotlib.rc_context({"svg.hashsalt": "kernelreg"}):  # the same plot is the same file
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.lower().endswith("svg") else None)
    except OSError as error:
        raise ConfigurationError(f"--plot {path}: {error.strerror or error}") from error


def figure_of(profile: Profile) -> Figure:
    """A panel for each kind of call and head shape: log axes, one line a kernel, a bar as high as its spread.

    Raises:
        ConfigurationError: more panels than a page holds.
    """
    from matplotlib.figure import Figure

    panels = [each for each in series_of(profile) if each.rows]
    if len(panels) > _MOST:
        raise ConfigurationError(
            f"--plot: {len(panels)} panels, and a page holds {_MOST}; ask for less of it with --workload, --tp or "
            "--sequences (of a saved profile: --from FILE)"
        )
    columns = min(_COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * lines + 0.7), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    kernels = sorted({row for each in panels for row in each.rows})
    for panel, ax in zip(panels, axes, strict=False):
        _draw_panel(panel, ax, kernels)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    # One key for all, below them, so that it hides no line.
    handles = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    labels = sorted(handles)
    figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=4, frameon=False)
    setup = profile.setup
    figure.suptitle(f"{setup.description}, torch {setup.torch}, {profile.date}", fontsize=10)
    return figure


def _draw_panel(panel: Series, ax: Axes, kernels: Sequence[Row]) -> None:
    for row in panel.rows:
        place = kernels.index(row)
        found = [(point.tokens, each) for point in panel.points for each in point.timings if each.row == row]
        tokens = [size for size, _ in found]
        times = [each.median_us for _, each in found]
        ax.errorbar(
            tokens,
            times,
            yerr=[each.spread_us / 2 for _, each in found],
            label=" ".join(row),
            color=_COLOURS[place % len(_COLOURS)],
            marker=_MARKERS[place % len(_MARKERS)],
            linestyle=_DASHES[place % len(_DASHES)],
            markersize=5,
            linewidth=1.4,
            capsize=2,
            elinewidth=0.8,
        )
    sizes = sorted({point.tokens for point in panel.points})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sizes, [_short(size) for size in sizes])
    ax.minorticks_off()
    decode = panel.points[0].operation == "gdn.recurrent"
    ax.set_xlabel("sequences, a token each" if decode else "tokens")
    ax.set_ylabel("microseconds a call")
    ax.grid(True, which="both", linewidth=0.4, alpha=0.5)
    what, _, shape = panel.title.partition("; ")
    ax.set_title(f"{what}\n{shape}", fontsize=9)


def _short(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 and size % 1024 == 0 else f"{size}"

"""The report of an evaluation: report.json (all figures), report.md and a self-contained report.html, of one dict.

    name, date          required                       target, head    facts, nested as they come
    baselines           as workloads, of drafters without training; shown in the same tables
    workloads           name -> cells (below)          training        lines of train/log.jsonl
    recommended         num_speculative_tokens, reason provenance      stage -> what its manifest says
    calibration         of calibrate.py                profiles        of schedule.py
    machine, versions   facts                          warnings        sentences

A cell is one measurement: engine, num_speculative_tokens, temperature, batch_size, mal, mal_low, mal_high,
tokens_per_pass, acceptance_rate, per_position, tokens_per_s, plain_tokens_per_s, speedup, speedup_low, speedup_high,
prompts, rounds.
What is missing is a dash. Any string may be hostile: everything is escaped, and the HTML loads nothing.
"""

import html
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from draftsmith.data.artefact import write_atomically

Report = Mapping[str, Any]
Cell = Mapping[str, Any]

DASH = "–"
# Okabe and Ito's colours: told apart by colour-blind readers too.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
_MAX_POINTS = 600  # of a training curve: as many as the chart has pixels
_LEGEND = (
    "MAL, the mean acceptance length, is 1 + accepted / rounds: tokens per target pass, bonus included. AR is "
    "accepted / drafted; p1, p2, ... are the shares of rounds that accept at least so many drafts. A pass for which "
    "nothing was drafted is no round; tok/pass counts it too. ngram and suffix are drafts that the runtime looks up in "
    "the text so far, without any training: what a head adds is what it reaches above them. The runtime and "
    "vLLM count what the verifier accepts, also behind a stop token or the limit; replay counts what is emitted. "
    "Brackets hold 95 % intervals, bootstrapped over prompts (the speed-up's over batches). Speed-up is against plain "
    "decoding of the same prompts by the same engine, prefill included."
)
_VERSIONS = ("before", "after")  # temperature scaling
_CALIBRATION = (
    "A draft's survival is the product of the confidences up to it: the predicted chance that the target accepts all "
    "of them. ECE, the expected calibration error, is the mean distance between it and the share that did survive, "
    "over ten bins. Temperatures were fitted on half of the held-out conversations; the figures are of the other half."
)
_PROFILE = (
    "A step is one round of drafting N tokens, running the target and verifying. The schedule verifies as many drafts "
    "as raise (sequences + their survivals) times steps a second."
)
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c1c1c;max-width:68rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:.5rem 0 1.2rem;font-variant-numeric:tabular-nums}
th,td{border:1px solid #d0d0d0;padding:.25rem .55rem;text-align:right;white-space:nowrap}
th{background:#f3f3f3}.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}
.wide{overflow-x:auto}.advice{background:#e7f4ee;border-left:4px solid #009e73;padding:.5rem .8rem}
.warning{background:#fff3cd;border-left:4px solid #e69f00;padding:.5rem .8rem}small{color:#666}svg{max-width:100%}
"""


def write_report(folder: Path, report: Report) -> None:
    """Write the three files into `folder`, each atomically. Raises ValueError naming a required field that lacks."""
    missing = [name for name in ("name", "date", "workloads") if name not in report]
    if missing:
        raise ValueError(f"the report lacks {', '.join(missing)}")
    write_atomically(folder / "report.json", json.dumps(_strict(report), indent=1, allow_nan=False) + "\n")
    write_atomically(folder / "report.md", as_markdown(report))
    write_atomically(folder / "report.html", as_html(report))


def workload_cells(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of summary.py -> cells by workload."""
    workloads: dict[str, list[dict[str, Any]]] = {}
    renamed = {"n": "num_speculative_tokens", "speed_up": "speedup"}
    for row in rows:
        cell: dict[str, Any] = {}
        for name, value in row.items():
            if name.endswith("_interval"):
                base = renamed.get(name.removesuffix("_interval"), name.removesuffix("_interval"))
                cell[f"{base}_low"], cell[f"{base}_high"] = value or (None, None)
            elif name != "workload":
                cell[renamed.get(name, name)] = value
        workloads.setdefault(str(row["workload"]), []).append(cell)
    return workloads


def as_markdown(report: Report) -> str:
    """The report for terminals and repositories; without the charts."""
    lines = [f"# {_md(report['name'])}", "", _md(report["date"]), ""]
    if advice := _advice(report):
        lines += [f"**{_md(advice[0])}** {_md(advice[1])}", ""]
    for warning in report.get("warnings") or []:
        lines += [f"> **Warning:** {_md(warning)}", ""]
    for name, cells in _with_baselines(report).items():
        lines += [f"## {_md(name)}", "", *_md_table(*_workload_table(cells)), ""]
    lines += [_md(_LEGEND), ""]
    for section in _confidence_sections(report):
        lines += [f"## {section.title}", "", *_md_table(section.header, section.rows), "", _md(section.note), ""]
    for title, facts in _fact_tables(report):
        lines += [f"## {title}", "", *(f"- {_md(name)}: {_md(value)}" for name, value in facts), ""]
    return "\n".join(lines)


def as_html(report: Report) -> str:
    """The report as one page that loads nothing else."""
    parts = [f"<h1>{_esc(report['name'])}</h1>", f"<p><small>{_esc(report['date'])}</small></p>"]
    if advice := _advice(report):
        parts.append(f'<p class="advice"><strong>{_esc(advice[0])}</strong> {_esc(advice[1])}</p>')
    parts += [f'<p class="warning">{_esc(warning)}</p>' for warning in report.get("warnings") or []]
    parts.append(_mal_chart(report["workloads"]))
    parts += [f"<h2>{_esc(name)}</h2>{_html_workload(cells)}" for name, cells in _with_baselines(report).items()]
    parts.append(f"<p><small>{_esc(_LEGEND)}</small></p>")
    for section in _confidence_sections(report):
        parts += [f"<h2>{_esc(section.title)}</h2>", _svg(section.draw, section.chart)]
        parts += [_html_table(section.header, section.rows), f"<p><small>{_esc(section.note)}</small></p>"]
    parts.append("<h2>Training</h2>")
    curves = [_training_chart(report, "loss", "loss"), _training_chart(report, "mal", "held-out MAL")]
    parts += curves if any(curves) else ["<p>No training log.</p>"]
    for title, facts in _fact_tables(report):
        lines = "".join(f"<tr><td>{_esc(name)}</td><td>{_esc(value)}</td></tr>" for name, value in facts)
        parts.append(f'<h2>{_esc(title)}</h2><table class="facts">{lines}</table>')
    head = f'<meta charset="utf-8"><title>{_esc(report["name"])}</title><style>{_STYLE}</style>'
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _with_baselines(report: Report) -> dict[str, list[Cell]]:
    baselines = report.get("baselines") or {}
    return {name: [*cells, *baselines.get(name, ())] for name, cells in report["workloads"].items()}


def _workload_table(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Header and rows as text. The last columns are the rates per position, as many as the longest draft has."""
    depth = _depth(cells)
    header = [
        "engine",
        "N",
        "T",
        "batch",
        "MAL",
        "tok/pass",
        "AR",
        "tokens/s",
        "plain",
        "speed-up",
        "prompts",
        "rounds",
    ]
    rows = [
        [
            _text(cell.get("engine")),
            _text(cell.get("num_speculative_tokens")),
            _text(cell.get("temperature")),
            _text(cell.get("batch_size")),
            _with_interval(cell, "mal"),
            _number(cell.get("tokens_per_pass"), 2),
            _share(cell.get("acceptance_rate")),
            _number(cell.get("tokens_per_s"), 1),
            _number(cell.get("plain_tokens_per_s"), 1),
            _with_interval(cell, "speedup"),
            _text(cell.get("prompts")),
            _text(cell.get("rounds")),
            *(_share(_rate(cell, i)) for i in range(depth)),
        ]
        for cell in cells
    ]
    return [*header, *(f"p{i + 1}" for i in range(depth))], rows


def _html_workload(cells: Sequence[Cell]) -> str:
    header, rows = _workload_table(cells)
    num_plain = len(header) - _depth(cells)
    lines = ["<tr>" + "".join(f"<th>{_esc(name)}</th>" for name in header) + "</tr>"]
    for cell, row in zip(cells, rows, strict=True):
        plain = [
            f"<td>{_esc(value).replace(' [', ' <small>[').replace(']', ']</small>')}</td>" for value in row[:num_plain]
        ]
        heat = [_heat(_rate(cell, i), value) for i, value in enumerate(row[num_plain:])]
        lines.append(f"<tr>{''.join(plain + heat)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _heat(rate: float | None, text: str) -> str:
    """A cell of the heat map: white at 0, dark blue at 1, with the figure legible on both."""
    if rate is None:
        return f"<td>{_esc(text)}</td>"
    share = min(max(rate, 0.0), 1.0)
    red, green, blue = (round(255 + share * (end - 255)) for end in (0, 80, 140))
    ink = "#fff" if share > 0.55 else "#1c1c1c"
    return f'<td style="background:rgb({red},{green},{blue});color:{ink}">{_esc(text)}</td>'


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{_esc(name)}</th>" for name in header)]
    lines += ["".join(f"<td>{_esc(value)}</td>" for value in row) for row in rows]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


@dataclass(frozen=True)
class _Section:
    """A table with its chart and what it says."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str
    chart: str  # its name
    draw: Callable[[Any], None]


def _confidence_sections(report: Report) -> Iterator[_Section]:
    """Of heads that give confidences: what these are worth, and the profiles that a schedule went by."""
    if calibration := report.get("calibration"):
        positions = calibration["positions"]
        rows = [
            [label, _number(each.get("temperature"), 2), *(_number(each[f"ece_{name}"], 3) for name in _VERSIONS),
             _text(each["rounds"])]
            for label, each in [*((str(place), each) for place, each in enumerate(positions, 1)), ("all", calibration)]
        ]  # fmt: skip
        header = ["draft", "temperature", "ECE before", "ECE after", "rounds"]
        yield _Section("Confidence", header, rows, _CALIBRATION, "reliability", partial(_draw_reliability, calibration))
    if profiles := report.get("profiles"):
        rows = [
            [*(_text(each["setting"][name]) for name in ("n", "temperature", "batch_size")),
             ", ".join(f"{count}: {1000 * s:.1f}" for count, s in zip(each["tokens"], each["seconds"], strict=True))]
            for each in profiles
        ]  # fmt: skip
        header = ["N", "T", "batch", "tokens in a pass: ms of a step"]
        yield _Section("Steps", header, rows, _PROFILE, "profiles", partial(_draw_profiles, profiles))


def _draw_reliability(calibration: Mapping[str, Any], axes: Any) -> None:
    axes.plot((0, 1), (0, 1), color="#a0a0a0", linewidth=1)
    for name, colour in zip(_VERSIONS, _COLOURS[1::-1], strict=True):
        bins = calibration["reliability"][name]
        points = [(each["predicted"], each["observed"]) for each in bins]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4, linewidth=1.4, label=name)
    axes.set_xlabel("mean survival that was predicted")
    axes.set_ylabel("share that survived")
    axes.legend(frameon=False)


def _draw_profiles(profiles: Sequence[Mapping[str, Any]], axes: Any) -> None:
    for index, each in enumerate(profiles):
        steps = [1 / seconds for seconds in each["seconds"]]
        setting = each["setting"]
        label = f"N={setting['n']} T={setting['temperature']} batch {setting['batch_size']}"
        axes.plot(each["tokens"], steps, color=_COLOURS[index % len(_COLOURS)], marker="o", markersize=4, label=label)
    axes.set_xlabel("tokens in a pass")
    axes.set_ylabel("steps a second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _advice(report: Report) -> tuple[str, str] | None:
    recommended = report.get("recommended")
    if not recommended:
        return None
    return _text(recommended.get("verdict")), _text(recommended.get("reason"))


def _fact_tables(report: Report) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(title, facts) of what was measured, on what, and made from what."""
    for title, name in (
        ("Target", "target"),
        ("Head", "head"),
        ("Settings", "settings"),
        ("Machine", "machine"),
        ("Versions", "versions"),
    ):
        if facts := list(_flat(report.get(name) or {})):
            yield title, facts
    stages = report.get("provenance") or {}
    if facts := [(_joined(stage, name), value) for stage, part in stages.items() for name, value in _flat(part)]:
        yield "Provenance", facts


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, _joined(name, str(key)))
    elif isinstance(value, list | tuple):
        yield name, ", ".join(map(_text, value)) or DASH
    elif name or not isinstance(value, Mapping):
        yield name, DASH if value == {} else _text(value)


def _joined(outer: str, inner: str) -> str:
    return ".".join(part for part in (str(outer), inner) if part)


def _training_chart(report: Report, key: str, label: str) -> str:
    """A figure of the training log over the steps; empty without one."""
    lines = report.get("training") or []
    points = [(line.get("step"), line.get(key, line.get(f"probe/{key}"))) for line in lines]
    known = [(float(step), float(value)) for step, value in points if _is_number(step) and _is_number(value)]
    if not known:
        return ""
    thinned = known[:: math.ceil(len(known) / _MAX_POINTS)]

    def draw(axes: Any) -> None:
        marker = "o" if len(thinned) < 40 else ""
        axes.plot(*zip(*thinned, strict=True), color=_COLOURS[0], linewidth=1.4, marker=marker, markersize=4)
        axes.set_xlabel("step")
        axes.set_ylabel(label)

    return _svg(draw, f"training-{key}")


def _mal_chart(workloads: Mapping[str, Sequence[Cell]]) -> str:
    """MAL over N of every workload, by the first engine, temperature and batch size that it has."""
    curves = {name: curve for name, cells in workloads.items() if (curve := _mal_curve(cells))}
    if not curves:
        return ""

    def draw(axes: Any) -> None:
        for index, (name, curve) in enumerate(curves.items()):
            lengths, mals, below, above = zip(*curve, strict=True)
            style = {
                "color": _COLOURS[index % len(_COLOURS)],
                "linestyle": ("-", "--", ":")[index // len(_COLOURS) % 3],
            }
            axes.errorbar(lengths, mals, (below, above), marker="o", markersize=4, capsize=2, linewidth=1.4, **style)
            # Beside the curve's end and not in a legend, which would hide names that start with an underscore.
            axes.annotate(
                name, (lengths[-1], mals[-1]), (6, 0), textcoords="offset points", va="center",
                color=style["color"], parse_math=False, annotation_clip=False,
            )  # fmt: skip
        axes.set_xticks(sorted({length for curve in curves.values() for length, *_ in curve}))
        axes.set_xlabel("proposal length N")
        axes.set_ylabel("MAL")

    return _svg(draw, "mal-by-length")


def _mal_curve(cells: Sequence[Cell]) -> list[tuple[int, float, float, float]]:
    """(N, MAL, distance to the lower bound, to the upper)."""

    def setting(cell: Cell) -> tuple[Any, ...]:
        return cell.get("engine"), cell.get("temperature"), cell.get("batch_size")

    known = [cell for cell in cells if _is_number(cell.get("mal")) and _is_number(cell.get("num_speculative_tokens"))]
    same = [cell for cell in known if setting(cell) == setting(known[0])]
    found = []
    for cell in sorted(same, key=lambda cell: int(cell["num_speculative_tokens"])):
        mal, low, high = cell["mal"], cell.get("mal_low"), cell.get("mal_high")
        below, above = (mal - low if _is_number(low) else 0.0), (high - mal if _is_number(high) else 0.0)
        # matplotlib refuses negative bars; a percentile interval may lie beside a MAL of very few prompts.
        found.append((int(cell["num_speculative_tokens"]), float(mal), max(below, 0.0), max(above, 0.0)))
    return found


def _svg(draw: Callable[[Any], None], name: str) -> str:
    """A chart as an SVG element. Figure is used without pyplot: no window, no global state, no backend to choose."""
    settings = {"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(7.2, 3.1), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
        written = io.StringIO()
        # Without a date the same report gives the same bytes.
        figure.savefig(written, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = written.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    # matplotlib's rule for `*` would apply to the whole page, and its ids repeat from chart to chart.
    text = re.sub(r"<style\b.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|="#|url\(#)', rf"\g<1>{name}-", text)
    return text.replace("<svg ", '<svg stroke-linejoin="round" stroke-linecap="butt" ', 1)


def _with_interval(cell: Cell, name: str) -> str:
    value, low, high = cell.get(name), cell.get(f"{name}_low"), cell.get(f"{name}_high")
    text = _number(value, 2)
    return f"{text} [{_number(low, 2)}, {_number(high, 2)}]" if _is_number(low) and _is_number(high) else text


def _depth(cells: Sequence[Cell]) -> int:
    return max((len(cell.get("per_position") or ()) for cell in cells), default=0)


def _rate(cell: Cell, position: int) -> float | None:
    rates = cell.get("per_position") or ()
    return float(rates[position]) if position < len(rates) and _is_number(rates[position]) else None


def _share(value: Any) -> str:
    return f"{100 * value:.1f} %" if _is_number(value) else DASH


def _number(value: Any, digits: int) -> str:
    return f"{value:,.{digits}f}" if _is_number(value) else DASH


def _text(value: Any) -> str:
    return DASH if value is None or value == "" else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _strict(value: Any) -> Any:
    """JSON knows no NaN and no infinity; they become null, and a dash in the tables."""
    if isinstance(value, Mapping):
        return {str(name): _strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _esc(value: Any) -> str:
    return html.escape(_text(value))


def _md(value: Any) -> str:
    """Text that stays text in a Markdown table: on one line, without cells, links, code or HTML of its own."""
    text = html.escape(" ".join(_text(value).split()), quote=False)
    return re.sub(r"([\\|`\[\]*])", r"\\\1", text)


def _md_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *([_md(value) for value in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]

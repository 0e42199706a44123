"""The report's three files: what they show, that nothing escapes into them, and that the HTML stands alone."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from draftsmith.eval.report import DASH, as_html, as_markdown, workload_cells, write_report

HOSTILE = '<script>alert("x")</script>|a\nb & $x_'


def _cell(n: int, **changes: Any) -> dict[str, Any]:
    return {
        "engine": "runtime", "num_speculative_tokens": n, "temperature": 0.0, "batch_size": 1, "mal": 1.0 + 0.4 * n,
        "mal_low": 0.9 + 0.4 * n, "mal_high": 1.1 + 0.4 * n, "tokens_per_pass": 1.75, "acceptance_rate": 0.4,
        "per_position": [0.6, 0.3, 0.1][:n],
        "tokens_per_s": 31.25, "plain_tokens_per_s": 20.0, "speedup": 1.5625, "speedup_low": 1.4, "speedup_high": 1.7,
        "prompts": 20, "rounds": 900,
    } | changes  # fmt: skip


def _report(**changes: Any) -> dict[str, Any]:
    return {
        "name": "demo",
        "date": "2026-01-02",
        "machine": {"cpu": "two cores", "memory_gib": 24},
        "target": {"name": "tiny"},
        "head": {"method": "eagle3", "config": {"layers": [1, 2, 3]}},
        "workloads": {"gsm8k": [_cell(1), _cell(2), _cell(3)], "chat": [_cell(1)]},
        "training": [{"step": i, "elapsed_s": i * 2.0, "loss": 5.0 / i} for i in range(1, 60)]
        + [{"step": 30, "elapsed_s": 61.0, "mal": 1.8}, {"step": 59, "probe/mal": 2.0}],
        "provenance": {"rows": {"key": {"max_row_tokens": 512}}},
        "warnings": ["chat: 2 prompts were refused."],
        "recommended": {"num_speculative_tokens": 3, "verdict": "Worth serving.", "reason": "It is the fastest."},
    } | changes


class _Tags(HTMLParser):
    """Every tag that was opened and not void must be closed, in order."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_three_files_are_written_and_the_json_is_what_was_given(tmp_path: Path) -> None:
    write_report(tmp_path / "eval", _report())
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == ["report.html", "report.json", "report.md"]
    assert json.loads((tmp_path / "eval" / "report.json").read_text()) == _report()


def test_a_row_shows_every_figure_of_its_proposal_length() -> None:
    row = next(line for line in as_markdown(_report()).splitlines() if line.startswith("| runtime | 2 "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == [
        "runtime", "2", "0.0", "1", r"1.80 \[1.70, 1.90\]", "1.75", "40.0 %", "31.2", "20.0", r"1.56 \[1.40, 1.70\]",
        "20", "900", "60.0 %", "30.0 %", DASH,
    ]  # fmt: skip


def test_missing_and_non_finite_values_are_dashes_and_null(tmp_path: Path) -> None:
    bare = {"engine": "replay", "num_speculative_tokens": 1, "mal": float("nan"), "per_position": []}
    write_report(tmp_path, {"name": "n", "date": "d", "workloads": {"w": [bare]}})
    row = next(line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| replay"))
    assert [cell.strip() for cell in row.strip("|").split("|")] == ["replay", "1", *[DASH] * 10]
    assert json.loads((tmp_path / "report.json").read_text())["workloads"]["w"][0]["mal"] is None
    assert "nan" not in (tmp_path / "report.html").read_text().lower()


@pytest.mark.parametrize("place", ["name", "workload", "warning", "reason", "machine", "engine"])
def test_hostile_text_stays_text_everywhere(place: str) -> None:
    report = _report()
    if place == "name":
        report["name"] = HOSTILE
    elif place == "workload":
        report["workloads"] = {HOSTILE: [_cell(1), _cell(2)]}
    elif place == "warning":
        report["warnings"] = [HOSTILE]
    elif place == "reason":
        report["recommended"]["reason"] = HOSTILE
    elif place == "machine":
        report["machine"] = {HOSTILE: HOSTILE}
    else:
        report["workloads"] = {"w": [_cell(1, engine=HOSTILE)]}
    page, text = as_html(report), as_markdown(report)
    assert "<script" not in page and "<script" not in text
    parser = _Tags()
    parser.feed(page)
    assert parser.open == [] and "script" not in [tag for tag, _ in parser.seen]
    tables = [line for line in text.splitlines() if line.startswith("|")]
    header = [len(re.findall(r"(?<!\\)\|", line)) for line in tables]
    assert set(header) == {len(re.findall(r"(?<!\\)\|", line)) for line in as_markdown(_report()).splitlines()
                           if line.startswith("|")} or place in ("workload", "engine")  # fmt: skip


def test_the_html_names_no_other_place_and_no_id_twice() -> None:
    parser = _Tags()
    page = as_html(_report())
    parser.feed(page)
    assert parser.open == []
    links = [value for _, attributes in parser.seen for name, value in attributes.items()
             if name in ("src", "href", "xlink:href")]  # fmt: skip
    assert all(link is not None and link.startswith("#") for link in links)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    assert not {tag for tag, _ in parser.seen} & {"script", "link", "img", "iframe"}
    ids = [attributes["id"] for _, attributes in parser.seen if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {str(link)[1:] for link in links} | set(re.findall(r"url\(#([^)]+)\)", page)) <= set(ids)


def test_the_charts_are_well_formed_and_there_is_one_for_loss_acceptance_and_length() -> None:
    charts = re.findall(r"<svg .*?</svg>", as_html(_report()), flags=re.DOTALL)
    words = ["".join(ElementTree.fromstring(chart).itertext()) for chart in charts]
    assert [next(w for w in ("proposal length", "loss", "held-out MAL") if w in text) for text in words] == [
        "proposal length", "loss", "held-out MAL",
    ]  # fmt: skip


def test_calibration_and_profiles_are_shown_as_tables_and_charts() -> None:
    bins = [{"predicted": 0.15, "observed": 0.3, "count": 10}, {"predicted": 0.9, "observed": 0.7, "count": 30}]
    calibration = {
        "rounds": 30, "temperatures": [1.5, 2.0], "ece_before": 0.21, "ece_after": 0.034,
        "positions": [{"rounds": 30, "temperature": 1.5, "ece_before": 0.2, "ece_after": 0.03},
                      {"rounds": 10, "temperature": 2.0, "ece_before": 0.25, "ece_after": 0.05}],
        "reliability": {"before": bins, "after": bins[:1]},
    }  # fmt: skip
    profile = {"setting": {"temperature": 0.0, "batch_size": 4, "n": 3}, "tokens": [1, 4], "seconds": [0.05, 0.0625]}
    report = _report(calibration=calibration, profiles=[profile])
    text, page = as_markdown(report), as_html(report)
    for row in ("| 1 | 1.50 | 0.200 | 0.030 | 30 |", f"| all | {DASH} | 0.210 | 0.034 | 30 |",
                "| 3 | 0.0 | 4 | 1: 50.0, 4: 62.5 |"):  # fmt: skip
        assert row in text
    charts = ["".join(ElementTree.fromstring(chart).itertext()) for chart in re.findall(r"(?s)<svg .*?</svg>", page)]
    assert any("share that survived" in chart for chart in charts) and any("steps a second" in c for c in charts)
    parser = _Tags()
    parser.feed(page)
    assert parser.open == [] and "0.034" in page and "Confidence" not in as_html(_report(calibration=None, profiles=[]))


def test_without_a_training_log_the_report_says_so() -> None:
    page = as_html(_report(training=[]))
    assert "No training log." in page and page.count("<svg ") == 1


def test_the_same_report_gives_the_same_bytes() -> None:
    assert as_html(_report()) == as_html(_report())


def test_the_heat_map_is_dark_where_drafts_are_accepted() -> None:
    page = as_html(_report(workloads={"w": [_cell(2, per_position=[1.0, 0.0])]}))
    assert 'style="background:rgb(0,80,140);color:#fff">100.0 %' in page
    assert 'style="background:rgb(255,255,255);color:#1c1c1c">0.0 %' in page


def test_a_report_without_a_date_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks date"):
        write_report(tmp_path, {"name": "n", "workloads": {}})
    assert list(tmp_path.iterdir()) == []


def test_figures_of_the_summary_become_cells() -> None:
    row = {"engine": "vllm", "workload": "w", "n": 3, "mal": 2.0, "mal_interval": None, "speed_up": 1.5,
           "speed_up_interval": [1.4, 1.6]}  # fmt: skip
    assert workload_cells([row]) == {
        "w": [{"engine": "vllm", "num_speculative_tokens": 3, "mal": 2.0, "mal_low": None, "mal_high": None,
               "speedup": 1.5, "speedup_low": 1.4, "speedup_high": 1.6}]
    }  # fmt: skip

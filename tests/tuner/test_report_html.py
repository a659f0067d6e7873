"""The page stands alone, shows the numbers, and takes no text for markup."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from search_spaces.errors import ResourceMissing
from tests.tracking.sample import candidate, finished, head, measured, sweep, two_finalists
from tracking.record import Event
from train_worker.outcome import Crashed
from tuner.report_html import page, write_html
from tuner.report_plots import MOST_CURVES

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&<b>"


class Reader(HTMLParser):
    """Tags with their attributes, and the text outside scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self.stack.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def traces(reader: Reader, name: str) -> list[dict[str, object]]:
    script = next(text for text in reader.scripts if f'"plot-{name}"' in text and "newPlot" in text)
    start = script.index("[", script.index(f'"plot-{name}"', script.index("newPlot")))
    found, _ = json.JSONDecoder().raw_decode(script[start:])
    assert isinstance(found, list)
    return found


@pytest.fixture(scope="module")
def reader() -> Reader:
    return Reader(page(sweep()))


def test_the_page_is_well_formed_and_fetches_nothing(reader: Reader) -> None:
    assert reader.stack == []
    for tag, attributes in reader.tags:
        for name in ("src", "href", "action"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#")), (tag, attributes)
    policy = next(a["content"] for tag, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_the_verdict_stands_before_everything_else(reader: Reader) -> None:
    text = reader.text
    assert text.index("Faster: ") < text.index("Ranking") < text.index("Failed trials") < text.index("Costs")


def test_the_figures_hold_the_measured_numbers(reader: Reader) -> None:
    steps = traces(reader, "steps")
    assert [trace["name"] for trace in steps] == ["winner", "default", "tied with the leader"]
    assert steps[0]["y"] == ["1. moe_token_dispatcher_type=alltoall"]
    curves = traces(reader, "losses")
    assert len(curves) == 4  # three configurations and the one that diverged
    assert any(curve["y"] == [4.0, None] for curve in curves)
    assert [trace["name"] for trace in traces(reader, "phases")][:3] == ["launch", "import", "process group"]
    assert traces(reader, "rejections")[0]["y"] == ["ep-divides", "fp8-needs-sm89"]
    assert len(traces(reader, "memory")) == 3


def test_no_text_is_taken_for_markup() -> None:
    events: list[Event] = [
        head().model_copy(update={"sweep_name": EVIL, "sweep_text": EVIL}),
        finished(0, candidate(), measured(0.2), "baseline"),
        finished(1, candidate(note=EVIL), measured(0.1)),
        finished(2, candidate(note=EVIL + "2"), Crashed(phase="build", detail=EVIL)),
    ]
    reader = Reader(page(events))
    assert not any(tag == "img" or "onerror" in attributes for tag, attributes in reader.tags)
    assert not any(re.match(r"\s*alert", script) for script in reader.scripts)
    assert EVIL in reader.text
    for trace in traces(reader, "steps"):
        assert "<" not in json.dumps(trace["y"])


def test_a_sweep_that_measured_nothing_has_a_page_too() -> None:
    crash = finished(0, candidate(), Crashed(phase="build", detail="x"), "baseline")
    reader = Reader(page([head(), crash]))
    assert "Nothing acceptable was measured." in reader.text
    assert "newPlot" not in "".join(reader.scripts[1:])


def test_the_other_finalists_stand_under_the_verdict() -> None:
    text = Reader(page([*sweep()[:-1], two_finalists()])).text
    assert text.index("Faster: ") < text.index("Also run again: micro_batch_size=8, 0.760") < text.index("Ranking")


def test_the_page_is_written_where_asked(tmp_path: Path) -> None:
    path = write_html(sweep(), tmp_path / "new" / "folder")
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceMissing, match="cannot write"):
        write_html(sweep(), tmp_path / "file")


def layout(reader: Reader, name: str) -> dict[str, Any]:
    script = next(text for text in reader.scripts if f'"plot-{name}"' in text and "newPlot" in text)
    start = script.index("[", script.index(f'"plot-{name}"', script.index("newPlot")))
    decoder = json.JSONDecoder()
    _, end = decoder.raw_decode(script[start:])
    found, _ = decoder.raw_decode(script[start + end :].lstrip(", \n"))
    assert isinstance(found, dict)
    return found


def test_no_legend_is_cut() -> None:
    """Seen in a browser: plotly's buttons covered the first line, and half of many curves' lines had to be scrolled."""
    curves = [finished(n, candidate(micro_batch_size=n + 1), measured(0.1 * (n + 1))) for n in range(20)]
    reader = Reader(page([head(), *curves]))
    found = layout(reader, "losses")
    lines = len(traces(reader, "losses"))
    # In a narrow page each curve has a line of 20 pixels; 300 are left for the plot, its axis and margins.
    assert lines == MOST_CURVES
    assert found["height"] >= 20 * lines + 300
    assert found["height"] * found["legend"]["maxheight"] >= 20 * lines
    for name in ("steps", "memory", "losses", "phases"):
        drawn = layout(reader, name)
        assert drawn["modebar"]["orientation"] == "v"
        assert drawn["margin"]["r"] >= 40  # the buttons' column

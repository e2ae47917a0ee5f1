"""The report's page in a real browser, where there is one: it draws, and it can be zoomed."""

from __future__ import annotations

import pytest
from browser import Browser, chromium
from invented_runs import run, step_us

from mpisgd.tools.timeline.report.page import data_of, html_of

pytestmark = pytest.mark.skipif(chromium() is None, reason="no Chromium on this machine")

# How many different colours a canvas has: an empty one has one.
COLOURS = """[...document.querySelectorAll("canvas")].map((canvas) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 4).join());
  return seen.size;
})"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    path = folder / "report.html"
    path.write_text(html_of(data_of(run(8, 100), "run <1>.json")))
    browser = Browser(folder / "profile")
    browser.open(path)
    yield browser
    browser.close()


def press(browser: Browser, label: str) -> None:
    browser.value(f"""document.querySelector('#timeline button[aria-label="{label}"]').click()""")


def visible(browser: Browser) -> tuple[float, float]:
    """What the timeline shows, in microseconds."""
    begin, end = browser.value("[mpisgdTimeline.from, mpisgdTimeline.to]")
    return begin, end


def test_all_is_drawn_without_an_error(browser):
    assert browser.value("document.body.dataset.error") is None
    assert int(browser.value("document.body.dataset.drawnMs")) > 0
    assert browser.value("document.title") == "run <1>.json"
    assert min(browser.value(COLOURS)) > 5
    sections = browser.value("[...document.querySelectorAll('section')].map((section) => section.innerText)")
    assert not [text for text in sections if "Nothing of this" in text]
    assert browser.value("document.querySelectorAll('#division .bar').length") == 8


def test_tiles_and_tables_have_the_numbers(browser):
    tiles = browser.value("document.getElementById('tiles').innerText")
    assert "100\nsteps in the record" in tiles
    assert "85 %\ncomputation" in tiles
    assert "10 %\nexposed communication" in tiles
    assert "8 MiB\nmost memory of a rank" in tiles
    rows = browser.value("[...document.querySelectorAll('#operations tbody tr')].map((row) => row.innerText)")
    assert len(rows) == 1
    assert rows[0].startswith("all_reduce\tgroup world\tnode\t400\t")


def test_the_timeline_zooms_and_moves_within_its_bounds(browser):
    press(browser, "show all of it")
    begin, end = visible(browser)
    press(browser, "zoom in")
    inner = visible(browser)
    assert begin < inner[0] < inner[1] < end
    assert inner[1] - inner[0] == pytest.approx((end - begin) / 2)
    press(browser, "later")
    assert visible(browser)[0] > inner[0]
    for _ in range(9):
        press(browser, "later")
    assert visible(browser)[1] <= 1.02 * browser.value("mpisgdTimeline.excerpt.length")
    for _ in range(9):
        press(browser, "zoom out")
    assert visible(browser)[1] - visible(browser)[0] <= 1.03 * (end - begin)


def test_an_event_tells_what_it_is(browser):
    press(browser, "show all of it")
    where = browser.value("""(() => {
      const timeline = mpisgdTimeline, excerpt = timeline.excerpt;
      const i = excerpt.kind.indexOf(record.kinds.indexOf("operation"));
      const middle = excerpt.begin[i] + excerpt.duration[i] / 2;
      const x = timeline.left + (middle - timeline.from) / (timeline.to - timeline.from) * timeline.width;
      const box = timeline.canvas.getBoundingClientRect();
      timeline.canvas.dispatchEvent(new PointerEvent("pointermove",
        {clientX: box.left + x, clientY: box.top + 22 + 17 * excerpt.row[i] + 8, pointerId: 9}));
      return timeline.readout.textContent;
    })()""")
    assert "rank 0, group world: all_reduce" in where
    assert "1000 B" in where


def test_a_point_of_a_chart_is_read_out(browser):
    told = browser.value("""(() => {
      const canvas = document.querySelector("#step-time canvas");
      canvas.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
      return document.querySelector("#step-time .readout").textContent;
    })()""")
    assert told.startswith(f"step 3: rank 0: {step_us(0, 3) / 1000:.3g} ms, rank 1: ")


def test_a_rank_can_be_left_out(browser):
    before = browser.value(COLOURS)[0]
    browser.value("document.querySelectorAll('#ranks button').forEach((button) => button.click())")
    assert browser.value(COLOURS)[0] < before
    browser.value("document.querySelectorAll('#ranks button').forEach((button) => button.click())")
    assert browser.value(COLOURS)[0] == before

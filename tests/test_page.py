"""The page in a browser: it draws without error or network, follows its controls, and fits a phone and a desk."""

import json
import os
import shutil

import pytest
from sample import write_sample

from cotrain.experiments.files import write_record
from cotrain.report.page import as_page
from cotrain.report.study import read_study

webdriver = pytest.importorskip("selenium.webdriver")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on the PATH"
)

TASKS, EXPERTS = 6, 8
HOSTILE = (
    "<img src=x onerror=\"window.harmed=1\"><a href='javascript:window.harmed=1'>x</a><script>window.harmed=1</script>"
)
SETTLED = "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 50));"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page of a small grid; one method has a label that would do harm as markup."""
    root = tmp_path_factory.mktemp("page")
    manifest = write_sample(root, tasks=TASKS, experts=EXPERTS, k=2, seeds=2)
    manifest["tables"]["tuned"][7 + 3]["method"] = HOSTILE  # on rotated-mnist, with routes
    manifest["failed"] = [{"run": HOSTILE, "error": HOSTILE}]
    write_record(root / "grid.json", manifest)
    (root / "index.html").write_text(as_page(read_study(root)), encoding="utf-8")
    return (root / "index.html").as_uri()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-sandbox"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER, log_output=os.devnull))
    yield started
    started.quit()


@pytest.fixture
def opened(browser, address):
    """Opens the page anew, at a width and with the system's theme."""

    def visit(width=1400, theme="light"):
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        media = [{"name": "prefers-color-scheme", "value": theme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        for kind in ("browser", "performance"):
            browser.get_log(kind)
        browser.get(address)
        browser.execute_script("localStorage.clear()")
        browser.refresh()
        browser.execute_async_script(SETTLED)
        return browser

    return visit


def plotted(browser, figure):
    """The traces of a figure."""
    script = "const plot = document.querySelector(`#${arguments[0]} .plot`); return JSON.stringify(plot.data ?? null)"
    return json.loads(browser.execute_script(script, figure))


def wait(browser, condition):
    """Waits until something is so; fails where it never is."""
    WebDriverWait(browser, 30).until(lambda _: condition())


def choose(browser, name, value):
    script = """const one = document.getElementById(arguments[0]); one.value = arguments[1];
      one.dispatchEvent(new Event("input", {bubbles: true})); one.dispatchEvent(new Event("change", {bubbles: true}))"""
    browser.execute_script(script, name, str(value))
    browser.execute_async_script(SETTLED)


def learned_rows(trace):
    return sum(any(value is not None for value in row) for row in trace["z"])


def test_it_draws_everything_without_error_or_network(opened):
    page = opened()
    for figure in ("accuracy", "drop", "used", "sharing", "routing", "similarity", "router"):
        assert plotted(page, figure), figure
    page.execute_script("scrollTo(0, document.body.scrollHeight)")
    assert page.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert asked
    assert {url.partition(":")[0] for url in asked} <= {"file", "data", "blob"}
    assert {url for url in asked if url.startswith("file:")} == {page.current_url}


def test_the_slider_shows_experts_being_claimed(opened):
    page = opened()
    assert learned_rows(plotted(page, "routing")[0]) == TASKS
    last = plotted(page, "routing")[0]["z"]
    choose(page, "phase", 1)
    first = plotted(page, "routing")[0]
    assert len(first["z"]) == TASKS
    assert learned_rows(first) == 1
    assert page.find_element("id", "learned").text == f"1 of {TASKS}"
    assert "2 of 8 experts in use, 2 of them new" in page.find_element("id", "claims").text
    similar = plotted(page, "similarity")[1]["z"]
    assert [[value is not None for value in row] for row in similar][:2] == [[True] + [False] * 5, [False] * 6]
    choose(page, "phase", 4)
    assert learned_rows(plotted(page, "routing")[0]) == 4
    assert plotted(page, "routing")[0]["z"] != last


def test_the_slider_takes_the_keyboard_and_has_a_name(opened):
    page = opened()
    slider = page.find_element("id", "phase")
    assert slider.accessible_name.startswith("Tasks learned")
    slider.send_keys("\ue011")  # Home
    assert learned_rows(plotted(page, "routing")[0]) == 1
    slider.send_keys("\ue014\ue014")  # twice to the right
    assert learned_rows(plotted(page, "routing")[0]) == 3
    assert slider.get_attribute("aria-valuetext") == f"3 of {TASKS} tasks learned"


def test_choices_change_the_figures(opened):
    page = opened()
    before = {figure: plotted(page, figure) for figure in ("accuracy", "drop", "used", "sharing", "routing")}
    choose(page, "table", "as-the-paper")
    after = {figure: plotted(page, figure) for figure in before}
    assert all(before[figure] != after[figure] for figure in before)
    choose(page, "benchmark", "permuted-mnist")
    assert plotted(page, "drop") != after["drop"]
    routes = plotted(page, "routing")
    choose(page, "seed", 1)
    assert plotted(page, "routing") != routes
    choose(page, "method", "private")
    assert [sum(value > 0 for value in row) for row in plotted(page, "routing")[0]["z"]] == [1] * TASKS
    choose(page, "second", 2)
    assert plotted(page, "accuracy")[-1]["x"] == [2, 3, 4, 5, 6]


def test_a_legend_hides_a_method_everywhere(opened):
    page = opened()
    named = "MoE + replay + co-training"
    click = """const entries = [...document.querySelectorAll("#drop .legend .traces")];
      const entry = entries.find((one) => one.textContent === arguments[0]).querySelector(".legendtoggle");
      for (const kind of ["mousedown", "mouseup"]) entry.dispatchEvent(new MouseEvent(kind, {bubbles: true}))"""
    page.execute_script(click, named)

    def hidden(figure):
        shown = {trace["visible"] for trace in plotted(page, figure) if trace.get("name") == named}
        return shown == {"legendonly"}

    for figure in ("drop", "accuracy", "used"):
        wait(page, lambda figure=figure: hidden(figure))  # a click waits to be no double click


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_screen(opened, width):
    page = opened(width)
    assert page.execute_script("return innerWidth") == width
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    plots = page.execute_script(
        "return [...document.querySelectorAll('.plot svg')].map((s) => s.getBoundingClientRect())"
    )
    assert len(plots) >= 7
    assert all(0 <= plot["left"] and plot["right"] <= width for plot in plots)
    wide = "return [...document.querySelectorAll('.scroll')].filter((box) => box.scrollWidth > box.clientWidth).length"
    assert (page.execute_script(wide) > 0) is (width == 390)  # tables scroll in their own boxes


def test_another_width_draws_anew(opened):
    page = opened(1400)
    size = {"width": 500, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wait(page, lambda: page.execute_script("return document.querySelector('#drop .plot').layout.width") < 500)
    assert page.execute_script("return document.documentElement.scrollWidth") <= 500


def test_dark_follows_the_system_and_the_switch(opened):
    def colours(page):
        paper = "return getComputedStyle(document.body).backgroundColor"
        plot = "return document.querySelector('#drop .plot').layout.paper_bgcolor"
        return page.execute_script(paper), page.execute_script(plot)

    light = colours(opened(theme="light"))
    page = opened(theme="dark")
    dark = colours(page)
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    switch = page.find_element("id", "theme")
    assert switch.get_attribute("aria-pressed") == "true"
    switch.click()
    assert colours(page) == light
    assert switch.get_attribute("aria-pressed") == "false"
    switch.click()
    assert colours(page) == dark


def test_a_figure_can_be_had_as_a_file(opened):
    page = opened()
    page.execute_script("""window.saved = []; const click = HTMLAnchorElement.prototype.click;
      HTMLAnchorElement.prototype.click = function () {
        if (this.download) saved.push(this.download); else click.call(this) }""")
    for count, button in enumerate(page.find_elements("css selector", "#drop .tools button"), 1):
        page.execute_script("arguments[0].click()", button)
        wait(page, lambda count=count: page.execute_script("return saved.length") == count)
    assert page.execute_script("return saved") == ["tuned-rotated-mnist-drop.png", "tuned-rotated-mnist-drop.svg"]
    assert page.get_log("browser") == []


def test_a_hostile_label_does_no_harm(opened):
    page = opened()
    choose(page, "method", HOSTILE)
    assert plotted(page, "routing")
    assert page.execute_script("return window.harmed") is None
    assert page.execute_script("return document.querySelectorAll('main img, main script, svg a').length") == 0
    assert "<img src=x" in page.find_element("id", "results").text
    assert page.execute_script("return document.querySelector('#drop .legend').textContent").count("<script>") == 1
    assert page.get_log("browser") == []

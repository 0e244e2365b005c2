"""The console in a real browser: what it shows, at any width, in the dark, and by the keyboard alone."""

import json
import re
import time
from typing import Any

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, Locator, Page, expect

from streamtrain.serve.http.app import make_app
from tests.console.conftest import MODEL, Shown, looking, showing
from tests.console.shown import origin_of, publish, registry_of, told
from tests.patience import PATIENCE
from tests.serve.running import TOKEN, running, serving

expect.set_options(timeout=1000 * PATIENCE)
NONE = "\N{EN DASH}"
CHARTS = ("auc", "log_loss", "samples_per_s", "lag", "freshness_ms")
FIELDS = {"user": "u7", "item": "7", "history": "1, 2, 999", "tags": 'news, "a,b"', "price": "0.5"}
INSTANCE: dict[str, Any] = {"user": "u7", "item": 7, "history": [1, 2, 999], "tags": ["news", "a,b"], "price": 0.5}


def predict(page: Page, fields: dict[str, str] = FIELDS) -> None:
    for name, text in fields.items():
        page.get_by_label(name, exact=True).fill(text)
    page.get_by_role("button", name="Predict").click()


def cells(table: Locator, row: str) -> list[str]:
    return (
        table.get_by_role("row")
        .filter(has=table.page.get_by_role("rowheader", name=row))
        .locator("td")
        .all_inner_texts()
    )


def drawn(page: Page, chart: str) -> int:
    """Pixels of a chart that have the colour of its first line."""
    script = """([id, wanted]) => {
      const canvas = document.querySelector(`#chart-${id} canvas`);
      const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
      const line = getComputedStyle(document.documentElement).getPropertyValue(wanted).trim();
      const [r, g, b] = [1, 3, 5].map((i) => parseInt(line.slice(i, i + 2), 16));
      let count = 0;
      for (let i = 0; i < data.length; i += 4)
        count += data[i] === r && data[i + 1] === g && data[i + 2] === b && data[i + 3] === 255;
      return count;
    }"""
    return int(page.evaluate(script, [chart, "--series-1"]))


# What it shows.


def test_it_loads_nothing_from_elsewhere_and_says_no_errors(browser: Browser, shown: Shown) -> None:
    with looking(browser, shown.url) as (page, said, asked):
        expect(page.locator("#chart-auc")).not_to_have_attribute("data-points", "0")
        predict(page)
        page.locator(".predictions").wait_for()
        assert page.title() == "shop · streamtrain"
        assert all(one.startswith(shown.url) for one in asked), asked
        assert said == []


def test_it_works_below_a_prefix(browser: Browser, shown: Shown) -> None:
    outer = FastAPI()
    outer.mount("/a/b", make_app(shown.registry))
    with running(outer) as url, looking(browser, f"{url}/a/b/") as (page, said, asked):
        predict(page)
        expect(page.locator("#predict-result pre")).to_contain_text(f"'{url}/a/b/v1/models/shop:predict'")
        assert all(one.startswith(f"{url}/a/b/") for one in asked), asked
        assert said == []


@pytest.mark.parametrize("dark", [False, True])
def test_charts_are_drawn(browser: Browser, shown: Shown, dark: bool) -> None:
    with looking(browser, shown.url, dark=dark) as (page, _, _):
        for name in CHARTS:
            assert points(page, name) > 200
            assert drawn(page, name) > 100, name
        plot = page.get_by_role("img", name="AUC over the last ten minutes; latest: click 0.7")
        expect(plot).to_be_visible()
        plot.hover()  # the values under the pointer are read in all charts
        expect(page.locator("#chart-lag .readout")).to_contain_text("at ")


def points(page: Page, chart: str) -> int:
    found = page.locator(f"#chart-{chart}")
    expect(found).not_to_have_attribute("data-points", "0")
    return int(found.get_attribute("data-points") or 0)


def test_the_cluster(browser: Browser, shown: Shown) -> None:
    with looking(browser, shown.url) as (page, _, _):
        shards = page.get_by_role("table", name="Shards")
        expect(shards.get_by_role("row")).to_have_count(4)
        assert cells(shards, "0") == [
            "10.0.0.4:7000",
            "ready",
            "169,942",
            "87.0 MiB",
            "1,803,453",
            "1,803,453",
            "epoch 14",
        ]
        assert cells(shards, "1")[1] == "ready, no backup"
        assert cells(shards, "2") == ["10.0.0.6:7000", "away", *5 * [NONE]]
        assert cells(page.get_by_role("table", name="Rows by table"), "item") == ["8,120", "8,111", NONE]
        assert cells(page.get_by_role("table", name="Clock by partition"), "1") == ["598,331", "598,331", NONE]
        assert cells(page.get_by_role("table", name="Workers"), "worker-0") == [
            "0, 2",
            "412",
            "2,103",
            "22.5",
            "400 ms ago",
        ]
        assert cells(page.get_by_role("table", name="Servers"), "serving-1") == ["10.0.0.10:8501", "head", "513", NONE]
        letters = page.locator("#dead-letters")
        assert letters.get_by_role("rowheader").all_inner_texts() == ["missing_field", "bad_time", "<b>not_json</b>"]
        expect(letters).to_contain_text("1,248")
        assert cells(letters.get_by_role("table"), "missing_field") == ["1,204", "item", "2:7041"]
        assert cells(letters.get_by_role("table"), "bad_time") == ["41", NONE, NONE]
        expect(letters).to_contain_text("streamtrain deadletters show 2:7041 shows the message.")
        expect(page.locator("#facts")).to_contain_text("Log delay")


def test_no_label_of_an_axis_is_cut_off(browser: Browser, shown: Shown) -> None:
    """Neither of long spans of time, as of replayed events, nor the last time below a chart."""
    script = """() => {
      const drawn = [];
      const fill = CanvasRenderingContext2D.prototype.fillText;
      CanvasRenderingContext2D.prototype.fillText = function (text, x, ...more) {
        const width = this.measureText(text).width, { e } = this.getTransform();
        const left = e + x - { left: 0, start: 0, center: width / 2, right: width, end: width }[this.textAlign];
        drawn.push([text, left, left + width, this.canvas.width]);
        return fill.call(this, text, x, ...more);
      };
      window.labels = () => drawn.splice(0);
    }"""
    ages = [4982.0 * 86_400, 314.8 * 86_400, 90.0, 0.2]
    for age in ages:
        shown.cluster.said["history"] = [
            {"time": time.time() - 300 + i, "samples_per_s": 1234567.0, "lag": 98_765_432, "freshness_ms": 1000 * age}
            for i in range(300)
        ]
        with looking(browser, shown.url) as (page, said, _):
            points(page, "freshness_ms")
            page.evaluate(script)
            page.wait_for_function("() => (window.seen = [...(window.seen ?? []), ...labels()]).length > 20")
            labels = page.evaluate("window.seen")
            assert labels
            assert [one for one in labels if one[1] < 0 or one[2] > one[3]] == []
            assert said == []
    shown.cluster.said["history"] = told().said["history"]


def test_freshness_is_one_number(browser: Browser, shown: Shown) -> None:
    """That of the chart is what the facts say, whatever the servers of the cluster report."""
    with looking(browser, shown.url) as (page, _, _):
        script = """() => {
          const fact = [...document.querySelectorAll("#facts dt")].find((one) => one.innerText === "Freshness");
          return [fact.nextSibling.innerText, document.querySelector("#chart-freshness_ms .readout b").innerText];
        }"""
        points(page, "freshness_ms")
        fact, chart = page.evaluate(script)
        assert fact == chart
        lasting = re.compile(r"[\d.,]+ (s|min)")
        assert lasting.fullmatch(fact)
        freshness = cells(page.get_by_role("table", name="Servers"), "serving-0")[-1]
        assert lasting.fullmatch(freshness)
        assert cells(page.get_by_role("table", name="Servers"), "serving-1")[-1] == NONE


# The page of the API.


def test_the_page_of_the_api_works_without_the_internet(browser: Browser, shown: Shown) -> None:
    with looking(browser, f"{shown.url}/docs") as (page, said, asked):
        operation = page.locator("details", has_text=":predict").first
        operation.locator("summary").click()
        expect(operation.get_by_label("Body")).to_have_value(re.compile('"instances"'))
        expect(operation.get_by_label("name", exact=True)).to_have_value("shop")
        operation.get_by_label("Body").fill(json.dumps({"instances": [INSTANCE]}))
        operation.get_by_role("button", name="Send").click()
        expect(operation.locator("pre")).to_contain_text("200 OK")
        expect(operation.locator("pre")).to_contain_text("x-model-version: head")
        expect(operation.locator("pre")).to_contain_text('"predictions"')
        operations = json.loads(shown.client.get("/openapi.json").text)["paths"]
        expect(page.locator("details.operation")).to_have_count(sum(len(item) for item in operations.values()))
        assert all(one.startswith(shown.url) for one in asked), asked
        assert said == []


def test_every_operation_of_the_api_has_a_body_to_start_from(browser: Browser, shown: Shown) -> None:
    """As it is, what the page suggests for a prediction is answered."""
    with looking(browser, f"{shown.url}/docs") as (page, said, _):
        for path in ("/v1/models/{name}:predict", "/v1/models/{name}:explain"):
            operation = page.locator("details", has=page.get_by_text(path, exact=True))
            operation.locator("summary").click()
            operation.get_by_role("button", name="Send").click()
            expect(operation.locator("pre")).to_contain_text("200 OK")
        assert said == []


def test_operations_that_need_the_token(browser: Browser) -> None:
    with showing() as shown, looking(browser, f"{shown.url}/docs") as (page, _, _):
        operation = page.locator("details", has=page.get_by_text("/v1/models/{name}/versions", exact=True))
        operation.locator("summary").click()
        expect(operation).to_contain_text("Needs the admin token")
        operation.get_by_role("button", name="Send").click()
        expect(operation.locator("pre")).to_contain_text("401")
        page.get_by_label("Token").fill(TOKEN)
        with page.expect_response("**/openapi.json") as response:
            page.get_by_role("button", name="Use").click()
        response.value.finished()
        expect(operation.locator("pre")).to_contain_text("401")  # what was there stays
        operation.get_by_role("button", name="Send").click()
        expect(operation.locator("pre")).to_contain_text("200 OK")


def test_without_a_coordinator_it_shows_what_the_server_knows(browser: Browser) -> None:
    origin = origin_of(MODEL)
    registry = registry_of(MODEL, origin)
    with serving(registry) as client, looking(browser, str(client.base_url)) as (page, said, _):
        expect(page.get_by_text("No coordinator is configured")).to_be_visible()
        expect(page.locator("#chart-auc .readout")).to_contain_text("0.7730 click")
        expect(page.locator("#chart-lag")).to_contain_text("known with a coordinator")
        publish(origin, MODEL, time.time())
        registry.follow_head(PATIENCE)
        expect(page.locator("#chart-samples_per_s")).not_to_have_attribute("data-points", "0")
        expect(page.locator("#chart-auc .readout")).to_contain_text("0.7740 click")
        expect(page.locator("#facts")).to_contain_text("Publication4")
        assert said == []


# Predictions and rows.


def test_a_prediction(browser: Browser, shown: Shown) -> None:
    answer = shown.client.post("/v1/models/shop:predict", json={"instances": [INSTANCE]})
    (expected,) = answer.json()["predictions"]
    with looking(browser, shown.url) as (page, _, _):
        predict(page)
        result = page.locator("#predict-result")
        expect(result.locator(".predictions")).to_contain_text(f"click{expected['click'][0]:.4f}")
        expect(result.locator(".predictions")).to_contain_text(f"buy{expected['buy'][0]:.4f}")
        for about in ("Versionhead", "Publication3", "Trained through", "Freshness"):
            expect(result.locator(".facts")).to_contain_text(about)
        expect(result).to_contain_text("6 of 9 ids have a row")
        chips = {"u7": "true", "999": "false", "a,b": "true"}
        for text, found in chips.items():
            chip = result.get_by_role("button", name=re.compile(rf"^{text}\b"))  # norms have digits, too
            expect(chip).to_have_attribute("data-found", found)
        result.get_by_text("The same with curl").click()
        expect(result.locator("pre")).to_contain_text(f"curl -X POST '{shown.url}/v1/models/shop:predict'")
        result.get_by_role("button", name=re.compile(r"^999\b")).click()
        expect(page.locator("#rows-result")).to_contain_text("none: reads its birth value")
        expect(page.get_by_label("Id", exact=True)).to_have_value("999")
        expect(page.get_by_label("Table", exact=True)).to_have_value("item")


@pytest.mark.parametrize(
    ("change", "message", "field"),
    [
        ({"price": "cheap"}, "price must be a number", "price"),
        ({"price": ""}, "price must be a number", "price"),
        (
            {"user": "x" * 300},
            re.compile(r"^instance 0: id_too_long in field 'user': it is .*; max_id_bytes is 256$"),
            "user",
        ),
    ],
)
def test_fields_that_are_wrong(
    browser: Browser, shown: Shown, change: dict[str, str], message: str | re.Pattern[str], field: str
) -> None:
    with looking(browser, shown.url) as (page, _, _):
        predict(page, FIELDS | change)
        expect(page.locator("#predict-result")).to_have_text(message)
        expect(page.get_by_label(field, exact=True)).to_have_attribute("aria-invalid", "true")
        expect(page.get_by_label(field, exact=True)).to_be_focused()


def test_ids_as_they_are_typed(browser: Browser, shown: Shown) -> None:
    cases = {
        "u7": "u7",
        " u7 ": "u7",
        "a, b,c": ["a", "b", "c"],
        "a,": ["a"],
        '"a,b"': "a,b",
        '"a,b", "say ""hi""", c': ["a,b", 'say "hi"', "c"],
        "": [],
        "two words": "two words",
    }
    with looking(browser, shown.url) as (page, _, _):
        script = "async (texts) => { const m = await import('/console/predict.js'); return texts.map(m.idsOf); }"
        assert page.evaluate(script, [*cases]) == [*cases.values()]


def test_a_row(browser: Browser, shown: Shown) -> None:
    row = shown.client.get("/v1/models/shop/rows/user/u7").json()
    with looking(browser, shown.url) as (page, _, _):
        page.get_by_label("Id", exact=True).fill("u7")
        page.get_by_role("button", name="Look up").click()
        result = page.locator("#rows-result")
        for fact in ("Rowthere", f"Norm{row['norm']:.4f}", "Learned1,234 times", f"Key{row['key']}"):
            expect(result.locator(".facts")).to_contain_text(fact)
        assert result.get_by_role("listitem").all_inner_texts() == [f"{one:.4f}" for one in row["values"]]
        page.get_by_label("Table", exact=True).select_option("user & tags")
        page.get_by_label("Id", exact=True).fill("x/y%")
        page.get_by_role("button", name="Look up").click()
        expect(result).to_contain_text("none: reads its birth value")
        expect(result).to_contain_text(f"Learned{NONE}")


# For everybody.


def test_nothing_is_wider_than_the_screen(browser: Browser, shown: Shown) -> None:
    with looking(browser, shown.url, width=390) as (page, _, _):
        predict(page, FIELDS | {"user": "u" * 200})
        page.locator(".predictions").wait_for()  # it moves what is below, which a click would miss
        page.get_by_label("Id", exact=True).fill("i" * 200)
        page.get_by_role("button", name="Look up").click()
        page.locator("#rows-result .values").wait_for()
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        script = """() => [document.documentElement.scrollWidth, [...document.querySelectorAll("main *")]
          .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".unseen, .plot, .wide, thead"))
          .map((e) => e.outerHTML.slice(0, 120))]"""
        for width in (390, 320, 600, 801, 1024, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate(script) == [width, []]


CONTRASTS = """() => {
  const light = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const of = (text) => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const back = (e) => of(getComputedStyle(e).backgroundColor);
  const behind = (e) => (back(e)[3] === 0 ? behind(e.parentElement) : back(e));
  return [...document.querySelectorAll("h1,h2,h3,p,dt,dd,th,td,label,a,button,em,b,summary,caption")]
    .filter((e) => e.innerText?.trim() && e.checkVisibility() && !e.disabled)
    .map((e) => {
      const [a, b] = [luminance(of(getComputedStyle(e).color)), luminance(behind(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 100)];
    }).filter(([ratio]) => ratio < 4.5);
}"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_in_light_and_dark(browser: Browser, shown: Shown, dark: bool) -> None:
    with looking(browser, shown.url, dark=dark) as (page, _, _):
        predict(page)
        page.locator(".predictions").wait_for()
        back = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (max(back) < 60) == dark
        assert page.evaluate(CONTRASTS) == []


def test_controls_have_names_and_the_page_has_landmarks(browser: Browser, shown: Shown) -> None:
    with looking(browser, shown.url) as (page, _, _):
        for role in ("banner", "main", "navigation"):
            expect(page.get_by_role(role)).to_have_count(1)
        for name in ("Live", "Cluster", "Versions", "Predict", "Rows"):
            expect(page.get_by_role("region", name=name, exact=True)).to_have_count(1)
        unnamed = "[...document.querySelectorAll('input, select')].filter((e) => !e.labels.length).map((e) => e.id)"
        assert page.evaluate(unnamed) == []
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids))
        assert page.locator("[onclick], [style*=expression], script:not([src])").count() == 0


def test_by_the_keyboard_alone(browser: Browser, shown: Shown) -> None:
    with looking(browser, shown.url) as (page, _, _):
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the content")).to_be_focused()
        assert page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
        page.keyboard.press("Enter")
        outlines = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            style = "getComputedStyle(document.activeElement)"
            outlines.add(page.evaluate(f"{style}.outlineStyle + ' ' + {style}.outlineWidth"))
            if page.evaluate("document.activeElement.name") == "user":
                break
        assert outlines == {"solid 2px"}
        for name in ("user", "item", "history", "tags", "price"):
            page.keyboard.type(FIELDS[name])
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")  # in the last field: it submits
        page.locator(".predictions").wait_for()

"""Traffic and comparisons in a real browser, of what is in a real Redis: as forks come, are compared, and go."""

from collections.abc import Iterator

import httpx
import msgspec
import pytest
from playwright.sync_api import Browser, expect

from streamtrain.embedded.valkey import Valkey
from streamtrain.quality.comparison import ComparisonReader, StoredBlocks, compare_blocks
from streamtrain.serve.http.app import make_app
from streamtrain.serve.service.service import ServingConfig
from streamtrain.store.redis.layout import RedisKeys
from streamtrain.store.redis.server import RedisServer
from streamtrain.store.redis.traffic import RedisTraffic
from tests.cluster.compared import LOG, blocks, store
from tests.console.conftest import MODEL, looking
from tests.console.shown import origin_of, registry_of, told
from tests.console.test_page import CONTRASTS, INSTANCE, cells
from tests.console.test_states import use
from tests.patience import PATIENCE, until
from tests.serve.in_redis import InRedis
from tests.serve.running import TOKEN, client_of, running

expect.set_options(timeout=1000 * PATIENCE)
MANY = 10_000
KEPT = LOG._replace(size=16, keep=MANY)
URL = "/v1/models/shop"


@pytest.fixture(scope="module")
def valkey() -> Iterator[str]:
    with Valkey() as started:
        yield started.url


@pytest.fixture
def redis(valkey: str) -> Iterator[RedisServer]:
    server = RedisServer(valkey)
    server.call("FLUSHALL")
    yield server
    server.close()


@pytest.fixture
def url(redis: RedisServer, valkey: str) -> Iterator[str]:
    """A server of `shop`, which has forks; versions 1 and 2 are labelled first and prod."""
    store(redis, blocks("shop", range(400), 0.5, KEPT))
    store(redis, blocks("better", range(400), 0.0, KEPT))
    store(redis, blocks("young", range(395, 405), 0.0, KEPT))
    store(redis, blocks("stranger", range(20), 0.0, KEPT._replace(id="x2")))  # of another topic
    published = InRedis(valkey, "shop")
    published.keep(1)
    published.versions.set_label("first", 1, "ann")
    origin = origin_of(MODEL)
    origin.name = "shop"
    app = make_app(
        registry_of(MODEL, origin),
        config=ServingConfig(admin_token=TOKEN, traffic_every=0.05),
        cluster=told(),
        traffic={"shop": RedisTraffic(published.model)},
        comparisons=ComparisonReader(redis),
    )
    with running(app) as address:
        yield address
    published.server.close()


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with client_of(url) as one:
        yield one


def test_the_routes_give_what_the_command_prints(client: httpx.Client) -> None:
    assert client.get(f"{URL}/compare").json() == {"model": "shop", "others": ["better", "young"]}
    answer = client.get(f"{URL}/compare/better").json()
    (course,) = [one.pop("course") for one in answer["results"]]
    expected = compare_blocks(blocks("shop", range(400), 0.5, KEPT), blocks("better", range(400), 0.0, KEPT))
    assert answer == expected.to_json()
    (result,) = answer["results"]
    assert result["sentence"].startswith("better is better by 0.")
    assert [one["blocks"] for one in (course[0], course[-1])] == [16, 400]
    assert course[-1] == {"blocks": 400} | {name: result[name] for name in ("difference", "low", "high")}
    assert 100 < len(course) <= 200
    last = client.get(f"{URL}/compare/better", params={"last": "20"}).json()
    assert last["blocks"] == 20
    sliced = client.get(f"{URL}/compare/better", params={"slice": "country", "label": "click"}).json()
    assert [one["slice"] for one in sliced["results"]] == [None, "country=DE"]


@pytest.mark.parametrize(
    ("path", "status", "message"),
    [
        ("/compare/none", 404, "nothing to compare: none has no figures"),
        ("/compare/stranger", 404, "shop learns from topic clicks (x1), and stranger from topic clicks (x2)"),
        ("/compare/shop", 400, "'shop' is the model itself"),
        ("/compare/better?label=buy", 400, "no label 'buy' that both models have: they have click"),
        ("/compare/better?last=soon", 400, "last must be a positive duration"),
        ("/compare/a%7Bb", 400, "invalid model name 'a{b'"),
    ],
)
def test_what_cannot_be_compared(client: httpx.Client, path: str, status: int, message: str) -> None:
    answer = client.get(URL + path)
    assert (answer.status_code, message in answer.json()["error"]) == (status, True), answer.text


def test_without_redis_there_is_nothing_to_compare(browser: Browser) -> None:
    app = make_app(registry_of(MODEL, origin_of(MODEL)))
    with running(app) as url, client_of(url) as client, looking(browser, url) as (page, said, asked):
        assert client.get(f"{URL}/compare").status_code == 404
        for name in ("Traffic", "Compare"):
            expect(page.get_by_role("region", name=name, exact=True)).to_have_count(0)
            expect(page.get_by_role("link", name=name, exact=True)).to_have_count(0)
        assert [one for one in asked if "compare/" in one or one.endswith("/compare")] == []
        assert said == []


def test_forks_come_are_compared_and_go(browser: Browser, url: str, redis: RedisServer) -> None:
    with looking(browser, url, width=390, dark=True) as (page, said, _):
        region = page.get_by_role("region", name="Compare", exact=True)
        expect(region).to_contain_text("Better is better by 0.")
        expect(region.get_by_role("img", name="Difference by number of blocks")).to_be_visible()
        assert "Above 0, better predicts better than shop" in region.inner_text()
        shown = cells(region.get_by_role("table", name="Figures over the same blocks"), "better")
        assert shown[:2] == ["click", "6,400"]
        inked = """() => {
          const canvas = document.querySelector("#compare canvas");
          const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          return data.filter((_, i) => i % 4 === 3 && data[i] === 255).length;
        }"""
        assert page.evaluate(inked) > 500  # the line, the line at 0 and labels; the band is translucent
        for width in (320, 390, 1280):
            page.set_viewport_size({"width": width, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(CONTRASTS) == []
        plot = region.locator(".plot")
        plot.hover()
        expect(region.locator(".readout")).to_contain_text(" blocks")

        select = region.get_by_label("Compared with")
        select.focus()
        page.keyboard.press("ArrowDown")
        expect(region).to_contain_text("No difference yet: 5 blocks in common, and an interval needs 16.")
        expect(plot).to_be_hidden()
        expect(page.locator("#compare canvas")).to_have_count(0)  # of the other one: nothing is left behind

        for name, shift in (("better", 0.0), ("shop", 0.5)):
            some = blocks(name, range(400), shift, KEPT).blocks
            many = {(0, n): msgspec.structs.replace(some[0, n % 400], number=n) for n in range(MANY)}
            store(redis, StoredBlocks(name, KEPT, many))
        page.reload()
        expect(region).to_contain_text("Over 10,000 blocks")
        assert int(region.locator(".chart").get_attribute("data-points") or 0) <= 200

        redis.call("DEL", RedisKeys("better").blocks, RedisKeys("young").blocks)
        page.reload()
        expect(page.get_by_text("serving", exact=True)).to_be_visible()
        expect(region).to_be_hidden()
        assert said == []


def test_weights_are_set_and_followed(browser: Browser, url: str, client: httpx.Client) -> None:
    with looking(browser, url) as (page, said, _):
        region = page.get_by_role("region", name="Traffic", exact=True)
        expect(page.get_by_text("serving", exact=True)).to_be_visible()
        expect(region).to_be_hidden()
        use(page, TOKEN)
        expect(region).to_contain_text("All requests go to what is served.")
        weights = region.get_by_label("Weights in percent")
        weights.fill("prod=95 first")
        page.keyboard.press("Enter")
        expect(page.locator("#traffic-outcome")).to_have_text("A weight is ARM=PERCENT, such as canary=5, not first.")
        weights.fill("prod=50 first=50")
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Divide requests like this?")
        page.keyboard.press("Enter")  # no server of it has a lease
        expect(dialog.get_by_role("alert")).to_contain_text("no server serves shop now")
        dialog.get_by_role("button", name="Set them even so").click()
        expect(page.locator("#traffic-outcome")).to_have_text("Requests are now divided: prod=50 first=50.")
        for i in range(40):
            answer = client.post(f"{URL}:predict", json={"instances": [INSTANCE]}, headers={"x-routing-key": f"{i}"})
            assert answer.headers["x-arm"] in ("prod", "first")
        table = region.get_by_role("table", name="Arms")
        told_of = {one["name"]: one for one in client.get(f"{URL}/process").json()["traffic"]["arms"]}
        assert told_of["prod"]["requests"] + told_of["first"]["requests"] == 40
        expect(table.get_by_role("row").filter(has_text="first")).to_contain_text(
            f"{2.5 * told_of['first']['requests']:g}\xa0%".replace("\xa0", " ")
        )
        # Half of the requests may have the same share.
        until(lambda: cells(table, "first")[2] == str(told_of["first"]["requests"]))
        row = cells(table, "first")
        assert row[0] == "50 %"
        assert row[2:] == [str(told_of["first"]["requests"]), "0", "1", "not checked yet"]
        assert len([one for one in said if "409" not in one]) == 0

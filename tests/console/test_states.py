"""The console while things change or are away: control with its token, nothing loaded, one of them away."""

from contextlib import ExitStack

from playwright.sync_api import Browser, Page, Route, expect

from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.http.app import make_app
from streamtrain.serve.registry import HEAD, Registry
from streamtrain.serve.service.service import ServingConfig
from tests.console.conftest import MODEL, looking, showing
from tests.console.shown import origin_of, publish, registry_of
from tests.patience import PATIENCE
from tests.serve.running import TOKEN, running, serving

expect.set_options(timeout=1000 * PATIENCE)


def use(page: Page, token: str) -> None:
    page.get_by_label("Admin token").fill(token)
    page.get_by_role("button", name="Use").click()


def kept(page: Page) -> list[dict[str, str]]:
    """What the browser keeps: of the session, beyond it, and in cookies."""
    stores = page.evaluate("[sessionStorage, localStorage].map((one) => ({ ...one }))")
    return [*stores, {one["name"]: one["value"] for one in page.context.cookies()}]


# Control.


def test_a_wrong_token_may_nothing(browser: Browser) -> None:
    with showing() as shown, looking(browser, shown.url) as (page, _, _):
        expect(page.get_by_role("button", name="Promote 1")).to_be_disabled()
        expect(page.get_by_role("button", name="Roll back")).to_be_disabled()
        use(page, "wrong")
        expect(page.get_by_text("Wrong token")).to_be_visible()
        expect(page.get_by_role("button", name="Promote 1")).to_be_disabled()
        use(page, TOKEN)
        expect(page.get_by_text("The token is accepted")).to_be_visible()
        assert kept(page) == [{"streamtrain.token": TOKEN}, {}, {}]
        page.reload()
        expect(page.get_by_text("The token is accepted")).to_be_visible()
        page.get_by_role("button", name="Forget").click()
        expect(page.get_by_role("button", name="Promote 1")).to_be_disabled()
        assert kept(page) == [{}, {}, {}]


def test_a_server_that_tells_nothing_without_a_token(browser: Browser) -> None:
    app = make_app(registry_of(MODEL, origin_of(MODEL)), config=ServingConfig(admin_token=TOKEN, read_token="may-read"))
    with running(app) as url, browser.new_context() as context:
        page = context.new_page()
        page.goto(url)
        expect(page.get_by_text("answers nobody without a token")).to_be_visible()
        use(page, "may-read")
        expect(page.get_by_text("answers nobody without a token")).to_be_hidden()
        expect(page.get_by_text("This token may read, but not promote")).to_be_visible()
        use(page, TOKEN)
        expect(page.get_by_text("The token is accepted")).to_be_visible()
        page = context.new_page()
        page.goto(f"{url}/docs")
        expect(page.get_by_text("This server asks for its read token")).to_be_visible()
        page.get_by_label("Token").fill("may-read")
        page.get_by_role("button", name="Use").click()
        expect(page.locator("details.operation").first).to_be_visible()


def test_promote_and_roll_back_by_the_keyboard(browser: Browser) -> None:
    with showing() as shown, looking(browser, shown.url) as (page, said, _):
        page.get_by_label("Admin token").focus()
        page.keyboard.type(TOKEN)
        page.keyboard.press("Enter")
        promote = page.get_by_role("button", name="Promote 1")
        expect(promote).to_be_enabled()
        promote.focus()
        page.keyboard.press("Enter")
        dialog = page.get_by_role("dialog", name="Serve version 1?")
        expect(dialog).to_contain_text("Served now: head")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(promote).to_be_focused()
        assert shown.registry.served is shown.registry.find(HEAD)
        page.keyboard.press("Enter")
        dialog.get_by_label("Why").focus()
        page.keyboard.type("looks better")
        page.keyboard.press("Enter")
        expect(page.locator("#versions-outcome")).to_have_text("Now version 1 is served (publication 1).")
        expect(page.locator("#versions-outcome")).to_be_focused()
        assert shown.registry.served is shown.registry.find(1)
        row = page.get_by_role("table", name="Versions").get_by_role("row").filter(has_text="first")
        expect(row).to_contain_text("served")
        expect(row).to_contain_text("click\xa00.7710")
        expect(page.locator("#facts")).to_contain_text("Served1")
        page.get_by_role("button", name="Roll back").click()
        page.get_by_role("dialog", name="Roll back?").get_by_role("button", name="Roll back").click()
        expect(page.locator("#versions-outcome")).to_have_text("Now the head is served (publication 3).")
        assert shown.registry.served is shown.registry.find(HEAD)
        assert said == []


def test_what_is_refused_is_said_in_the_dialog(browser: Browser) -> None:
    with showing() as shown, looking(browser, shown.url) as (page, _, _):
        use(page, TOKEN)
        page.get_by_role("button", name="Roll back").click()
        dialog = page.get_by_role("dialog", name="Roll back?")
        dialog.get_by_role("button", name="Roll back").click()
        expect(dialog.get_by_role("alert")).to_have_text("nothing that was served before is loaded: promote a version")
        dialog.get_by_role("button", name="Cancel").click()
        expect(dialog).to_be_hidden()


def test_what_the_gate_holds_back_can_be_forced(browser: Browser) -> None:
    """The first answer is that of a server with a gate; the second is this server's own."""
    bodies = []

    def answer(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        if len(bodies) > 1:
            route.continue_()
        else:
            route.fulfill(status=409, json={"error": 'held back: auc; to serve it anyway, send "force": true'})

    with showing() as shown, looking(browser, shown.url) as (page, _, _):
        page.route("**/*:promote", answer)
        use(page, TOKEN)
        page.get_by_role("button", name="Promote 2").click()
        dialog = page.get_by_role("dialog", name="Serve version 2?")
        dialog.get_by_label("Why").fill("tried")
        dialog.get_by_role("button", name="Promote").click()
        expect(dialog.get_by_role("alert")).to_contain_text("held back: auc")
        dialog.get_by_role("button", name="Serve it even so").click()
        expect(page.locator("#versions-outcome")).to_have_text("Now version 2 is served (publication 2).")
        assert bodies == [{"version": 2, "why": "tried"}, {"version": 2, "why": "tried", "force": True}]


def test_history_where_the_server_tells_it(browser: Browser) -> None:
    deed = {"at": 1000.0, "what": "label", "who": "ann", "why": "<b>", "version": 2, "label": "prod", "was": 1}

    def answer(route: Route) -> None:
        route.fulfill(json=route.fetch().json() | {"history": [deed]})

    with showing() as shown, looking(browser, shown.url) as (page, _, _):
        page.route("**/versions", answer, times=1)
        use(page, TOKEN)
        cells = page.get_by_role("table", name="History").get_by_role("cell")
        expect(cells).to_have_text(["label", "2", "prod", "ann", "<b>"])


def test_control_can_be_off(browser: Browser) -> None:
    with running(make_app(registry_of(MODEL, origin_of(MODEL)))) as url, looking(browser, url) as (page, said, _):
        expect(page.get_by_text("Control is off: set serve.admin_token to promote and roll back.")).to_be_visible()
        expect(page.get_by_label("Admin token")).to_be_hidden()
        expect(page.get_by_role("button", name="Roll back")).to_be_hidden()
        assert said == []


# Away.


def test_nothing_is_loaded_until_something_is_published(browser: Browser) -> None:
    origin = origin_of(MODEL)
    registry = Registry(MODEL, origin)
    follower = RegistryUpdater(registry, every=0.05)
    with serving(registry, follower) as client, looking(browser, str(client.base_url)) as (page, said, _):
        expect(page.locator("#notices")).to_contain_text("Nothing is loaded yet (")
        expect(page.locator("#notices")).to_contain_text("nothing has been published in memory")
        expect(page.get_by_label("user", exact=True)).to_be_visible()
        publish(origin, MODEL, 1000.0)
        expect(page.get_by_text("serving", exact=True)).to_be_visible()
        expect(page.locator("#notices")).to_be_empty()
        expect(page.locator("#facts")).to_contain_text("Publication1")
        assert said == []


def test_an_endpoint_that_is_away(browser: Browser) -> None:
    with ExitStack() as stack:
        with showing() as shown:
            page, _, _ = stack.enter_context(looking(browser, shown.url))
            expect(page.locator("#facts")).to_contain_text("Publication3")
        notice = "The endpoint does not answer. What is shown is of "
        expect(page.locator("#notices")).to_contain_text(notice)
        expect(page.get_by_text("away", exact=True).first).to_be_visible()
        expect(page.locator("#facts")).to_contain_text("Publication3")
        page.get_by_label("Id", exact=True).fill("u7")
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("#rows-result")).to_have_text("the endpoint does not answer")


def test_a_coordinator_that_is_away_and_comes_back(browser: Browser) -> None:
    with showing() as shown, looking(browser, shown.url) as (page, _, _):
        expect(page.get_by_role("table", name="Shards")).to_be_visible()
        shown.cluster.away = "10.0.0.2:7100 does not answer"
        notice = "The coordinator is unreachable: 10.0.0.2:7100 does not answer."
        expect(page.locator("#notices")).to_have_text(notice)
        expect(page.locator("#cluster")).to_contain_text(", as the coordinator is unreachable.")
        expect(page.get_by_role("table", name="Shards")).to_be_visible()
        expect(page.get_by_text("serving", exact=True)).to_be_visible()
        page.get_by_label("Id", exact=True).fill("u7")
        page.get_by_role("button", name="Look up").click()
        expect(page.locator("#rows-result")).to_contain_text("Learnednot known")
        shown.cluster.away = ""
        expect(page.locator("#notices")).to_be_empty()


def test_workers_that_keep_leaving(browser: Browser) -> None:
    with showing() as shown, looking(browser, shown.url) as (page, _, _):
        expect(page.get_by_text("serving", exact=True)).to_be_visible()
        shown.cluster.said["workers_left"] = 4
        expect(page.locator("#state")).to_have_text("not learning")
        assert page.locator("#state").get_attribute("class") == "pill bad"
        expect(page.locator("#notices")).to_contain_text("Workers keep leaving: 4 in the last two minutes.")
        shown.cluster.said |= {"workers_left": 1, "workers": []}
        expect(page.locator("#notices")).to_contain_text("No worker is running, so nothing is learned.")
        expect(page.locator("#state")).to_have_text("not learning")
        shown.cluster.said["workers"] = [{"name": "worker-2", "partitions": [0], "seen": 0.1}]
        expect(page.locator("#state")).to_have_text("serving")
        expect(page.locator("#notices")).to_be_empty()


def test_publications_that_are_held_back(browser: Browser) -> None:
    with showing() as shown:
        shown.cluster.said["held"] = "click: auc 0.70000 is worse than <i>0.78000</i>"
        with looking(browser, shown.url) as (page, _, _):
            expect(page.locator("#notices")).to_have_text(
                "Publications are held back: click: auc 0.70000 is worse than <i>0.78000</i>"
            )

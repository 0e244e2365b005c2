"""Traffic between versions and models: shares, stickiness, changes under load, the mirror, and the watchdog's stop."""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, takewhile
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from streamtrain.cli import app
from streamtrain.embedded.valkey import Valkey
from streamtrain.errors import ConfigError, PublicationError, TrafficRefused
from streamtrain.serve.routing.guard import ArmGuard
from streamtrain.serve.routing.router import Router
from streamtrain.settings.groups import WatchdogSettings
from streamtrain.store.publication import PROD, check_label
from streamtrain.store.redis.traffic import RedisTraffic
from streamtrain.store.traffic import Arm, Traffic
from tests.patience import PATIENCE, until
from tests.serve.in_redis import InRedis
from tests.serve.running import client_of
from tests.serve.test_models import BEARER, Serving
from tests.serve.test_watchdog import TOO_LARGE, probes

CANARY = 5.0  # percent
REQUESTS = 2000
SIGMAS = 4
PAIRS = 10  # of models: one for each test with a server


@pytest.fixture(scope="module")
def own_url() -> Iterator[str]:
    """A server of these tests alone, as the names of their models are fixed."""
    with Valkey() as server:
        yield server.url


@pytest.fixture(scope="module")
def pairs(own_url: str) -> Iterator[list[tuple[InRedis, InRedis]]]:
    """One pair of models for each test, as tests change them.

    Of the first one there are version 1, labelled canary, and the head, which is publication 2; of the other one
    publication 3.
    """
    made = [(InRedis(own_url, f"ads{i}"), InRedis(own_url, f"challenger{i}")) for i in range(PAIRS)]
    for ads, challenger in made:
        ads.keep(1)
        ads.publish(2)
        ads.versions.set_label("canary", 1, "ann")
        for number in (1, 2, 3):
            challenger.publish(number)
    yield [*made]
    for pair in made:
        for one in pair:
            one.server.close()


@pytest.fixture(scope="module")
def server(pairs: list[tuple[InRedis, InRedis]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Two processes that serve all models, once everything is loaded in both."""
    names = ",".join(name_of(one) for pair in pairs for one in pair)
    url = pairs[0][0].url
    one = Serving(tmp_path_factory.mktemp("serving"), url, names, serve__processes=2, serve__routing_key="user")
    try:
        for ads, challenger in pairs:
            until(lambda: one.is_ready(name_of(ads)), PATIENCE)  # noqa: B023
            until(lambda: len(ads.versions.holders().get(1, [])) == 2, PATIENCE)  # noqa: B023
            until(lambda: len(challenger.versions.holders().get(0, [])) == 2, PATIENCE)  # noqa: B023
        yield one
    finally:
        one.end()


@pytest.fixture
def pair(server: Serving, pairs: list[tuple[InRedis, InRedis]]) -> tuple[InRedis, InRedis]:
    """Models that no other test has, and that are served."""
    return pairs.pop()


@pytest.fixture
def ads(pair: tuple[InRedis, InRedis]) -> InRedis:
    return pair[0]


@pytest.fixture
def challenger(pair: tuple[InRedis, InRedis]) -> InRedis:
    return pair[1]


def control_of(published: InRedis) -> RedisTraffic:
    return RedisTraffic(published.model)


def name_of(model: InRedis) -> str:
    return model.model.keys.model


def url_of(model: InRedis, verb: str) -> str:
    return f"/v1/models/{name_of(model)}:{verb}"


def arm_of(client: httpx.Client, model: InRedis, key: str | None = None, user: str = "u1") -> httpx.Response:
    headers = {} if key is None else {"x-routing-key": key}
    answer = client.post(url_of(model, "predict"), json={"instances": [{"user": user}]}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


def arms_of(client: httpx.Client, model: InRedis) -> dict[str, dict[str, Any]]:
    """By name what the process that answers says of each arm."""
    told = client.get(f"/v1/models/{name_of(model)}/process").json()["traffic"] or {"arms": []}
    return {one["name"]: one for one in told["arms"]}


def _is_stopped(arms: dict[str, dict[str, Any]], name: str, why: str) -> bool:
    """Whether a process knows that an arm is stopped; one that has not followed yet knows no arms."""
    return name in arms and arms[name]["weight"] == 0 and arms[name]["stopped"] == why


EXPECTED = {"prod": 2002.0, "canary": 1001.0, "challenger": 3003.0}


def test_a_canary_gets_its_share_and_keys_stay(server: Serving, ads: InRedis) -> None:
    changed = server.client.post(
        url_of(ads, "traffic"), json={"weights": {"prod": 95, "canary": CANARY}, "why": "a try"}, headers=BEARER
    )
    assert (changed.status_code, changed.json()) == (
        200,
        {"weights": {"prod": 95.0, "canary": 5.0}, "mirror": None, "stopped": {}, "missing": []},
    )
    entry = ads.versions.history(1)[0]
    assert (entry.what, entry.why, entry.traffic_was, entry.traffic) == (
        "traffic",
        "a try",
        "prod=100",
        "prod=95 canary=5",
    )
    others = [client_of(f"http://127.0.0.1:{server.port}") for _ in range(8)]  # connections to both processes
    until(lambda: all("x-arm" in arm_of(one, ads).headers for one in others), PATIENCE)

    seen: dict[str, str] = {}
    for i in range(REQUESTS):
        answer = arm_of(others[i % 8], ads, f"k{i}")
        arm = seen[f"k{i}"] = answer.headers["x-arm"]
        assert answer.json() == {"predictions": [[EXPECTED[arm]]]}
        assert answer.headers["x-propensity"] == {"prod": "0.95", "canary": "0.05"}[arm]
        assert answer.headers["x-model-version"] == {"prod": "head", "canary": "1"}[arm]
    share, sigma = CANARY / 100, math.sqrt(CANARY / 100 * (1 - CANARY / 100) / REQUESTS)
    assert abs(Counter(seen.values())["canary"] / REQUESTS - share) < SIGMAS * sigma
    for i in range(0, REQUESTS, 20):  # of whichever process
        assert arm_of(others[(i + 3) % 8], ads, f"k{i}").headers["x-arm"] == seen[f"k{i}"]

    keyed = {user: {arm_of(one, ads, user=user).headers["x-arm"] for one in others} for user in ("u1", "u2", "u3")}
    assert all(len(arms) == 1 for arms in keyed.values())  # serve.routing_key
    assert arm_of(others[0], ads, "u1").headers["x-arm"] == next(iter(keyed["u1"]))  # the same as of the header
    named = server.predict(name_of(ads), "user", "/labels/canary")
    assert "x-arm" not in named.headers
    ratio = f'streamtrain_serving_arm_weight_ratio{{arm="canary",model="{name_of(ads)}"}} 0.05'
    assert ratio in server.client.get("/metrics").text
    for client in others:
        client.close()


def test_changes_under_load_fail_no_request(server: Serving, ads: InRedis, challenger: InRedis) -> None:
    done = threading.Event()
    failed: list[str] = []
    arms = Counter[str]()

    def load(first: int) -> None:
        with client_of(f"http://127.0.0.1:{server.port}") as client:
            count = first
            while not done.is_set():
                count += 1
                answer = client.post(
                    url_of(ads, "predict"),
                    json={"instances": [{"user": "u1"}]},
                    headers={"x-routing-key": f"{count}"},
                )
                arm = answer.headers.get("x-arm", "prod").rstrip("0123456789")
                if answer.status_code != 200 or answer.json() != {"predictions": [[EXPECTED[arm]]]}:
                    failed.append(answer.text)
                arms[arm] += 1

    threads = [threading.Thread(target=load, args=(1_000_000 * i,)) for i in range(4)]
    for one in threads:
        one.start()
    control = control_of(ads)
    try:
        end = time.monotonic() + PATIENCE
        for i in takewhile(lambda i: i < 200 or (len(arms) < 3 and time.monotonic() < end), count()):
            some, other = (7 * i) % 50, (11 * i) % 50
            weights = {"prod": 100.0 - some - other, "canary": float(some), name_of(challenger): float(other)}
            control.change(weights, "ann")
    finally:
        done.set()
        for one in threads:
            one.join()
    assert failed == []
    assert {*arms} == {"prod", "canary", "challenger"}

    name = name_of(challenger)
    control.change({name: 100}, "ann")  # all go to the other model
    until(lambda: {arm_of(server.client, ads, str(i)).headers["x-arm"] for i in range(20)} == {name}, PATIENCE)
    assert arm_of(server.client, ads).json() == {"predictions": [[3003.0]]}


def test_the_mirror_leaves_answers_and_measures_differences(server: Serving, ads: InRedis, challenger: InRedis) -> None:
    control_of(ads).change({}, "ann", mirror=name_of(challenger))
    until(lambda: "x-arm" in arm_of(server.client, ads).headers, PATIENCE)
    before = server.client.get("/metrics").text
    for _ in range(50):
        assert arm_of(server.client, ads).json() == {"predictions": [[2002.0]]}

    def metric(text: str, name: str, labels: str) -> float:
        lines = [line for line in text.splitlines() if line.startswith(f"streamtrain_serving_{name}{{{labels}}}")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0

    model = f'model="{name_of(ads)}"'
    outcome = f'{model},outcome="compared"'
    start = metric(before, "mirrored_requests_total", outcome)
    until(
        lambda: metric(server.client.get("/metrics").text, "mirrored_requests_total", outcome) >= start + 50,
        PATIENCE,
    )
    text = server.client.get("/metrics").text
    compared = metric(text, "mirrored_requests_total", outcome)
    label = f'label="label",{model}'
    assert metric(text, "mirror_difference_count", label) == compared
    assert metric(text, "mirror_difference_sum", label) == compared * 1001
    assert metric(text, "mirror_signed_difference", label) == compared * 1001
    assert metric(text, "mirrored_requests_total", f'{model},outcome="failed"') == 0


@pytest.mark.parametrize("bad", ["canary", "challenger"])
def test_an_arm_that_fails_on_samples_of_the_stream_is_stopped(
    server: Serving, ads: InRedis, challenger: InRedis, bad: str
) -> None:
    for one in (ads, challenger):
        one.model.keep_probes({0: probes(["u1", "u2"], ["u3", "u4"])})
    if bad == "challenger":
        bad = name_of(challenger)
        challenger.publish(4, row=TOO_LARGE)
        until(lambda: server.predict(bad, "user").json()["predictions"][0][0] > 1e38, PATIENCE)
    else:  # the head is good, and version 2 is not
        ads.publish(3, row=TOO_LARGE)
        ads.versions.make("ann")
        ads.publish(4)
        ads.versions.set_label("canary", 2, "ann")
        until(lambda: len(ads.versions.holders().get(2, [])) == 2, PATIENCE)
    control = control_of(ads)
    control.change({"prod": 95.0, bad: 5.0}, "ann")
    until(lambda: (now := control.read()) is not None and now.weights() == {"prod": 100.0, bad: 0.0}, PATIENCE)
    stops = [entry for entry in ads.versions.history() if entry.who == "watchdog" and entry.what == "traffic"]
    assert [(entry.traffic_was, entry.traffic) for entry in stops] == [(f"prod=95 {bad}=5", f"prod=100 {bad}=0")]
    assert "fails on samples of the stream: 2 of 2 predictions are not finite" in stops[0].why
    until(lambda: _is_stopped(arms_of(server.client, ads), bad, stops[0].why), PATIENCE)
    assert server.client.get(f"/v1/models/{name_of(ads)}/traffic", headers=BEARER).json()["stopped"] == {
        bad: stops[0].why
    }


def test_servers_that_find_the_same_arm_bad_stop_it_once(own_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ads = InRedis(own_url, "found")
    ads.keep(1)
    ads.publish(2)
    ads.versions.set_label("canary", 1, "ann")
    control = control_of(ads)
    traffic = control.change({PROD: 95.0, "canary": 5.0}, "ann", force=True)
    router = Router(name_of(ads), {})
    router.follow(traffic)
    predictor = SimpleNamespace(name="canary", publication=SimpleNamespace(number=1))

    def another_is_faster(arm: Arm, _: object) -> str:
        if arm.name == PROD:
            return ""
        router.follow(control.stop(traffic, arm.name, "watchdog", "found first"))
        return "found second"

    guard = ArmGuard(router, control, lambda _: None, WatchdogSettings())
    monkeypatch.setattr(router, "find", lambda _: predictor)
    monkeypatch.setattr(guard, "_fault", another_is_faster)
    assert guard.check() == ""
    assert [one.why for one in ads.versions.history() if one.what == "traffic" and one.who == "watchdog"] == [
        "found first"
    ]
    ads.server.close()


def test_clients_cannot_stop_an_arm(server: Serving, ads: InRedis, challenger: InRedis) -> None:
    ads.model.keep_probes({0: probes(["u1", "u2"])})
    challenger.model.keep_probes({0: probes(["u3"], ["u4"])})
    ads.publish(3, row=TOO_LARGE)
    ads.versions.make("ann")
    ads.publish(4)
    ads.versions.set_label("canary", 2, "ann")  # it fails on its samples
    until(lambda: len(ads.versions.holders().get(2, [])) == 2, PATIENCE)
    name = name_of(challenger)
    challenger.publish(4, row=TOO_LARGE)  # two users at once overflow; one, as in the probes, does not
    until(lambda: server.predict(name, "user").json()["predictions"][0][0] > 1e38, PATIENCE)
    control = control_of(ads)
    control.change({name: 100.0}, "ann")
    until(lambda: arm_of(server.client, ads).headers.get("x-arm") == name, PATIENCE)
    for _ in range(50):
        answer = server.client.post(url_of(ads, "predict"), json={"instances": [{"user": ["u1", "u2"]}]})
        assert answer.status_code == 400
    challenger.publish(5, row=TOO_LARGE)  # so that it is checked once more
    until(lambda: server.predict(name, "user").headers["x-publication"] == "5", PATIENCE)
    assert control.read() == Traffic(((Arm(name, name, "prod"), 100.0),))
    control.change({name: 95.0, "canary": 5.0}, "ann")  # arms are checked in their order: whoever stops the other one
    until(
        lambda: (now := control.read()) is not None and now.weights()["canary"] == 0.0, PATIENCE
    )  # has checked this one
    assert (now := control.read()) is not None
    assert now.weights() == {name: 95.0, "canary": 0.0, "prod": 5.0}


def test_what_cannot_be_is_refused_and_changes_nothing(
    server: Serving, ads: InRedis, challenger: InRedis, own_url: str
) -> None:
    own, other = name_of(ads), name_of(challenger)
    control = control_of(ads)
    for weights, message in (
        ({"prod": 95.0, "canary": 4.0}, "weights must add up to 100, not 99"),
        ({"prod": 105.0, "canary": -5.0}, "the weight of 'prod' must be a percentage from 0 to 100"),
        ({"prod": float("nan")}, "the weight of 'prod' must be"),
    ):
        with pytest.raises(ConfigError, match=message):
            control.change(weights, "ann")
    stranger = InRedis(own_url, "stranger")
    stranger.publish(1)
    ads.keep(3)  # version 2, without a label: nobody loads it
    ads.versions.set_label(other, 1, "ann")
    for name, message in (
        ("nobody", f"{own} has no label or version 'nobody', and no such model is published"),
        (f"{other}@nothing", f"model {other} has no label or version 'nothing'"),
        (other, f"'{other}' is a label of {own} and a model: write {own}@{other} or {other}@prod"),
        ("stranger", "stranger is not loaded on "),
        ("2", "2 is not loaded on "),
    ):
        with pytest.raises(TrafficRefused, match=message):
            control.change({"prod": 95.0, name: 5.0}, "ann")
        answer = server.client.post(url_of(ads, "traffic"), json={"weights": {"prod": 95, name: 5}}, headers=BEARER)
        assert (answer.status_code, message in answer.json()["error"]) == (409, True)
    refused = server.client.post(url_of(ads, "traffic"), json={"weights": {"prod": 100}})
    assert refused.status_code == 401
    wrong = server.client.post(url_of(ads, "traffic"), json={"weights": {"prod": 1}}, headers=BEARER)
    assert wrong.status_code == 400
    assert control.read() is None
    assert all(entry.what != "traffic" for entry in ads.versions.history())
    stranger.server.close()


def test_the_command(server: Serving, ads: InRedis, challenger: InRedis) -> None:
    own, other = name_of(ads), name_of(challenger)
    settings = ["--set", f"publish.url={ads.url}", "--set", f"publish.model={own}"]

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, ["traffic", *words, *settings])
        return done.exit_code, done.output

    assert "all requests go to what is served" in run()[1]
    assert run("prod=95", f"{other}=5", "--why", "a try", "--who", "ann") == (
        0,
        f"{ads.model.name}: prod=95 {other}=5\n",
    )
    assert (
        run("--json")[1]
        == f'{{"weights": {{"prod": 95.0, "{other}": 5.0}}, "mirror": null, "stopped": {{}}, "missing": []}}\n'
    )
    assert f"prod=95 {other}=5 mirror=canary" in run("--mirror", "canary")[1]
    asked = {"weights": {"prod": 95.0, other: 5.0}, "mirror": "canary", "stopped": {}, "missing": []}
    until(lambda: server.client.get(f"/v1/models/{own}/traffic", headers=BEARER).json() == asked, PATIENCE)
    history = CliRunner().invoke(app, ["versions", "--history", *settings]).output
    assert f"{other}=5" in history


def test_a_label_in_use_is_not_removed_without_force(server: Serving, ads: InRedis) -> None:
    own = name_of(ads)
    settings = ["--set", f"publish.url={ads.url}", "--set", f"publish.model={own}"]

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*words, *settings])
        return done.exit_code, f"{done.output}{done.exception or ''}"

    def shares() -> dict[str, Any]:
        found: dict[str, Any] = server.client.get(f"/v1/models/{own}/traffic", headers=BEARER).json()
        return found

    control = control_of(ads)
    ads.keep(3)
    ads.versions.set_label("shadow", 2, "ann")
    control.change({"prod": 33.0, "canary": 67.0}, "ann", mirror="shadow", force=True)
    for label, words in (("canary", "has 67% of the traffic"), ("shadow", "is the mirror of the traffic")):
        code, said = run("label", label, "none")
        assert (code != 0, words in said, "--force" in said) == (True, True, True), said
    with pytest.raises(PublicationError, match="67% of the traffic"):
        ads.versions.set_label("canary", None, "ann")
    until(lambda: shares()["weights"] == {"prod": 33.0, "canary": 67.0}, PATIENCE)
    assert run("label", "canary", "none", "--force")[0] == 0
    assert run("label", "shadow", "none", "--force")[0] == 0
    # What is gone is shown as gone, and requests go to what is served.
    assert "canary is not there any more: what is served gets its requests" in run("traffic")[1]
    until(lambda: shares()["missing"] == ["canary", "shadow"], PATIENCE)
    until(lambda: arm_of(server.client, ads).headers.get("x-arm") == "prod", PATIENCE)
    # The way out works, though the label of the mirror is gone.
    code, said = run("traffic", "--mirror", "none")
    assert (code != 0, "there is no canary any more, so give the weights of all arms" in said) == (True, True), said
    answer = server.client.post(url_of(ads, "traffic"), json={"weights": {"prod": 100}}, headers=BEARER)
    assert (answer.status_code, answer.json()["mirror"]) == (200, None)
    assert "not there" not in run("traffic")[1]
    assert control.read() == Traffic(((Arm("prod", own, "prod"), 100.0),))


@pytest.mark.parametrize("name", ["²", "7", "٣", "head", "none", "", " ", "a ", "a@b", "a=b", "a/b", "x" * 129, "a\n"])
def test_a_label_has_a_name_that_nothing_else_has(name: str) -> None:
    """A digit of another script ended the following of the traffic; and 7 would be version 7 elsewhere."""
    with pytest.raises(ConfigError, match="a label must have a name"):
        check_label(name)


def test_a_version_with_a_share_of_the_traffic_is_not_deleted(ads: InRedis) -> None:
    with pytest.raises(ConfigError, match="a label must have a name"):
        ads.versions.set_label("²", 1, "ann")
    control_of(ads).change({"prod": 50.0, "1": 50.0}, "ann", force=True)
    for label in ads.versions.labels():
        ads.versions.set_label(label, None, "ann", force=True)
    with pytest.raises(PublicationError, match=r"version 1 .* has 50% of the traffic"):
        ads.versions.delete(1, "ann")
    for row in (3, 4, 5):
        ads.keep(row)
    assert 1 not in ads.versions.retain(1, "ann")


def test_the_stop_of_an_arm_gives_its_weight_to_what_is_served() -> None:
    prod, canary, other = (Arm(name, "ads", name) for name in ("prod", "canary", "other"))
    stopped = Traffic(((prod, 90), (canary, 4), (other, 6))).stop("canary", "ads", "it fails")
    assert str(stopped) == "prod=94 canary=0 other=6"
    assert stopped.stopped == (("canary", "it fails"),)
    assert str(Traffic(((canary, 100),)).stop("canary", "ads", "")) == "prod=100 canary=0"
    for traffic in (stopped, Traffic(((prod, 95.0), (canary, 5.0)), other)):
        assert Traffic.from_json(traffic.to_json().encode()) == traffic
    of_older_servers = b'{"arms": [{"name": "prod", "model": "ads", "at": "prod", "weight": 100}], "mirror": null}'
    assert Traffic.from_json(of_older_servers) == Traffic(((prod, 100.0),))

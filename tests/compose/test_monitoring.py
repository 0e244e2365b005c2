"""What docker-compose.yml gives to Prometheus and Grafana: of metrics, labels, addresses and files that there are."""

import ast
import json
import re
from functools import cache
from typing import Any

import promql_parser
import pytest
import yaml

from tests.compose.composed import ROOT, TOKEN, Composed
from tests.metrics_page import on_the_page

SERVICES = ROOT / "services"
PROMETHEUS = yaml.safe_load((SERVICES / "prometheus" / "prometheus.yml").read_text())
DASHBOARD = json.loads((SERVICES / "grafana" / "streamtrain.json").read_text())
COMPOSED = Composed({TOKEN: "a-token"})
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((SERVICES / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
# States as the page has them: alert, what it means, what to do, what the log says, for, condition.
STATES = re.findall(
    r"^### (\w+)\n\n(.+)\.\n\n\* Action: (.+)\.\n\* Log line: (.+)\n\n"
    r"Condition(?:, for (\w+))?:\n\n```promql\n(.+)\n```$",
    (ROOT / "docs" / "alerts.md").read_text(),
    re.MULTILINE,
)
# Those that come little by little: no moment of them could be logged.
TRENDS = {"Memory", "Old", "Worse", "Calibration", "NotFresh", "Slow", "Unknown"}
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {f"alert {rule['alert']}": rule["expr"] for rule in ALERTS} | {
    f"panel {panel['title']} {target['refId']} {panel['id']}": target["expr"]
    for panel in PANELS
    for target in panel["targets"]
}
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
LABELS = {one.name: {*one.labels} | SCRAPED for one in on_the_page() if one.kind != "histogram"}
for one in on_the_page():
    if one.kind == "histogram":
        LABELS |= {f"{one.name}_{part}": {*one.labels} | SCRAPED for part in ("sum", "count")}
        LABELS[f"{one.name}_bucket"] = {*one.labels, "le"} | SCRAPED
LABELS |= dict.fromkeys(("up", "process_resident_memory_bytes", "process_start_time_seconds"), SCRAPED)
LABELS |= {"ALERTS": {"alertname", "alertstate"}}

each_query = pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)


def selected(query: str) -> tuple[dict[str, set[str]], set[str]]:
    """What a query reads, with the labels it selects by; and the labels it groups by."""
    series: dict[str, set[str]] = {}
    grouped: set[str] = set()

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            visit(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            matchers = {matcher.name for matcher in node.matchers.matchers}
            series.setdefault(str(node.name), set()).update(matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            grouped.update(node.modifier.labels)

    promql_parser.walk(promql_parser.parse(query), visit)
    return series, grouped


@each_query
def test_queries_are_of_what_is_declared(query: str) -> None:
    series, grouped = selected(query)
    assert series
    for name, matchers in series.items():
        assert matchers <= LABELS[name], name
    joined = {*re.findall(r"group_left \((\w+)\)", query)}
    assert joined <= set().union(*(LABELS[name] for name in series))
    assert all(grouped - joined <= LABELS[name] for name in series if name != "up")


def test_a_query_of_what_is_not_there_is_found() -> None:
    query = 'sum by (colour) (rate(streamtrain_worker_samples_total{size="1"}[1m]))'
    assert selected(query) == ({"streamtrain_worker_samples_total": {"size"}}, {"colour"})
    with pytest.raises(ValueError, match="parenthesis"):
        selected("sum(rate(a[1m])")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_legends_name_labels_that_queries_leave(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        series, grouped = selected(target["expr"])
        left = grouped or set().union(*(LABELS[name] for name in series))
        assert {*re.findall(r"{{(\w+)}}", target["legendFormat"])} <= left, target


def test_the_dashboard_shows_what_there_is_to_see() -> None:
    text = " ".join(QUERIES[name] for name in QUERIES if name.startswith("panel"))
    for name in (
        *("worker_samples_total", "worker_window_auc_ratio", "worker_window_log_loss_nats", "worker_lag_messages"),
        *("shard_table_rows", "shard_table_bytes", "shard_publication_held", "shard_checkpoint_failures_total"),
        *("serving_freshness_seconds", "serving_request_seconds_bucket", "serving_swaps_total"),
        *("serving_requests_total", "worker_bad_samples_total", "shard_events_total"),
    ):
        assert f"streamtrain_{name}" in text, name


def test_panels_neither_overlap_nor_share_a_number() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_dashboard_finds_its_data_and_grafana_the_dashboard() -> None:
    (source,) = yaml.safe_load((SERVICES / "grafana" / "datasource.yml").read_text())["datasources"]
    asked = [of["datasource"] for panel in PANELS for of in (panel, *panel["targets"])]
    assert {(one["type"], one["uid"]) for one in asked} == {(source["type"], source["uid"])}
    host, port = source["url"].removeprefix("http://").split(":")
    assert any(published.endswith(f":{port}") for published in COMPOSED.services[host]["ports"])

    mounted = COMPOSED.folders("grafana")
    (provider,) = yaml.safe_load((SERVICES / "grafana" / "dashboards.yml").read_text())["providers"]
    shown = f"{provider['options']['path']}/streamtrain.json"
    assert mounted[shown] == "./services/grafana/streamtrain.json"
    assert COMPOSED.services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == shown
    for kind in ("datasources", "dashboards"):
        assert any(target.startswith(f"/etc/grafana/provisioning/{kind}/") for target in mounted)


def test_every_process_is_scraped_where_it_listens() -> None:
    jobs = PROMETHEUS["scrape_configs"]
    static = [target for job in jobs for one in job.get("static_configs", []) for target in one["targets"]]
    found = [f"{name}:{one['port']}" for job in jobs for one in job.get("dns_sd_configs", []) for name in one["names"]]
    assert sorted([*static, *found]) == sorted(_listening(name) for name in COMPOSED.ours)
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    assert COMPOSED.folders("prometheus")["/etc/prometheus"] == "./services/prometheus"


def _listening(name: str) -> str:
    settings = COMPOSED.services[name]["environment"]
    own = name.partition("-")[0].upper().replace("SERVING", "SERVE")
    address = settings.get(f"STREAMTRAIN_{own}__METRICS") or settings[f"STREAMTRAIN_{own}__LISTEN"]
    return f"{name}:{address.partition(':')[2]}"


def test_alerts_are_those_of_the_page() -> None:
    there = [(rule["alert"], rule["expr"], rule.get("for", ""), *rule["annotations"].values()) for rule in ALERTS]
    page = [(alert, expr, duration, _plain(means), _plain(todo)) for alert, means, todo, _, duration, expr in STATES]
    assert there == page
    assert len(STATES) == len(re.findall("^### ", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE))
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)


def _plain(text: str) -> str:
    """Without what makes it look good; of a link the page."""
    return re.sub(r"\[[^\]]+\]\(([^)#]+)[^)]*\)", r"docs/\1", text).replace("`", "")


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_say_what_they_mean_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule.keys() <= {"alert", "expr", "for", "annotations"}
    assert [*rule["annotations"]] == ["summary", "action"]


@pytest.mark.parametrize("state", STATES, ids=lambda state: str(state[0]))
def test_what_the_log_says_of_a_state_is_in_the_code(state: tuple[str, ...]) -> None:
    alert, log = state[0], state[3]
    lines = re.findall(r"`([^`]+)`", log)
    assert lines or (log == "-" and alert in TRENDS), f"{alert}: {log}"
    for line in lines:
        assert _is_said(line), f"{alert}: nothing says {line!r}"


def test_a_line_that_nothing_says_is_found() -> None:
    assert _is_said("… is unreachable: …")
    assert not _is_said("… has gone fishing: …")
    assert _is_said("making a version failed, retrying: …")
    assert not _is_said("fishing failed, retrying: …")


def _is_said(line: str) -> bool:
    """Whether some text of the code has it; a PeriodicTask says its subject before what it says of all."""
    subject, failed, _ = line.partition(" failed, retrying: …")
    return any(line in text for text in _said()) or bool(failed and subject in _said() and f"…{failed}" in _said())


@cache
def _said() -> list[str]:
    """All texts of the code, with "…" for what is filled in; docstrings are none."""
    found = []
    for file in (ROOT / "streamtrain").rglob("*.py"):
        tree = ast.parse(file.read_text())
        statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                parts = (str(one.value) if isinstance(one, ast.Constant) else "…" for one in node.values)
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements:
                found.append(re.sub(r"%[.\d]*[dsgf]", "…", node.value))
    return found

"""The Helm chart: what it makes of values, against the schemas of Kubernetes, and with what few rights it runs."""

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml

from streamtrain.ps.nodes.topology import Cluster
from streamtrain.settings.load import load_settings
from tests.compose.prometheus import RULES
from tests.kubernetes.helm import BUCKET, CHART, helm, refusal, rendered

VERSIONS = ("1.28", "1.31", "1.34")
CUSTOM = {"PodMonitor", "PrometheusRule", "ScaledObject"}  # of operators, whose schemas are theirs

EVERYTHING: dict[str, Any] = {
    "image": {
        "repository": "registry.example/streamtrain",
        "slim": "registry.example/slim",
        "tag": "0.1.0",
        "pullSecrets": [{"name": "pull"}],
    },
    "settings": {
        "stream": {"url": "kafka://kafka.example:9092", "topic": "clicks", "buffer_bytes": 134217728},
        "publish": {"url": "redis://redis.example:6379", "model": "news"},
        "checkpoint": {"every": "30s"},
        "worker": {"drain": "20s", "batch_size": 8192},
        "compare": {"slices": ["country=de", "country=fr"]},
        "join": {"impressions": "impressions", "outcomes": "outcomes", "labels": {"click": {"kinds": ["click"]}}},
        "gate": None,
    },
    "secret": "news",
    "tls": "news-tls",
    "model": {"name": "news.py:model", "git": {"repository": "https://git.example/news", "ref": "v1", "secret": "git"}},
    "checkpoints": {"size": "10Gi", "storageClass": "nfs"},
    "shards": {
        "count": 3,
        "disk": {"size": "1Ti", "storageClass": "nvme"},
        "pod": {"nodeSelector": {"pool": "memory"}, "priorityClassName": "high"},
    },
    "workers": {"autoscaling": {"enabled": True}},
    "serving": {"autoscaling": {"enabled": True}, "service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
    "networkPolicy": {"clients": [{"namespaceSelector": {}}], "monitoring": [{"namespaceSelector": {}}]},
    "monitoring": {"podMonitor": True, "rules": True, "dashboard": True, "labels": {"release": "prometheus"}},
}
DEMO = ("--values", str(CHART / "demo.yaml"))
RELEASES: dict[str, tuple[tuple[str, ...], dict[str, Any] | None]] = {
    "bucket": ((), BUCKET),
    "everything": ((), EVERYTHING),
    "demo": (DEMO, None),
}


@pytest.fixture(params=[*RELEASES])
def objects(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    arguments, values = RELEASES[request.param]
    return rendered(*arguments, values=values)


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Specs of the pods of this project, by component."""
    found = {}
    for one in objects:
        template = one.get("spec", {}).get("template") if one["kind"] in {"Deployment", "StatefulSet", "Job"} else None
        if template and "app.kubernetes.io/component" in template["metadata"].get("labels", {}):
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template["spec"]
    return found


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


@pytest.mark.parametrize("name", RELEASES)
def test_helm_finds_nothing_to_complain_about(name: str) -> None:
    arguments, values = RELEASES[name]
    done = helm("lint", "--strict", str(CHART), *arguments, values=values)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_knows_every_field(objects: list[dict[str, Any]], version: str) -> None:
    for one in objects:
        if one["kind"] not in CUSTOM:
            kubernetes_validate.validate(one, version, strict=True)


def test_pods_have_few_rights_and_limits(objects: list[dict[str, Any]]) -> None:
    for name, spec in pods(objects).items():
        security = spec["securityContext"]
        assert security["runAsNonRoot"], name
        assert security["runAsUser"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        for container in [*spec.get("initContainers", ()), *spec["containers"]]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            assert re.search(r":[^/]*\d", container["image"]), "a version, and not the latest"


def test_pods_are_probed_and_end_in_time(objects: list[dict[str, Any]]) -> None:
    for name, spec in pods(objects).items():
        (container,) = spec["containers"]
        names = {port["name"] for port in container["ports"]}
        for probe, path in (("startup", "live"), ("liveness", "live"), ("readiness", "ready")):
            get = container[f"{probe}Probe"]["httpGet"]
            assert get["path"] == f"/healthz/{path}"
            assert get["port"] in names
        assert spec["terminationGracePeriodSeconds"] >= (45 if name == "worker" else 60)
        assert {one["tolerationSeconds"] for one in spec["tolerations"]} == {10}


def test_what_may_not_be_lost_at_once_has_a_budget(objects: list[dict[str, Any]]) -> None:
    budgets = of_kind(objects, "PodDisruptionBudget")
    assert budgets.keys() == {*of_kind(objects, "StatefulSet"), "st-serving"}
    for name, budget in budgets.items():
        (owner,) = (one for kind in ("StatefulSet", "Deployment") for one in [of_kind(objects, kind).get(name)] if one)
        assert budget["spec"] == {"maxUnavailable": 1, "selector": owner["spec"]["selector"]}


def test_settings_are_understood(objects: list[dict[str, Any]]) -> None:
    settings = load_settings(environment=of_kind(objects, "ConfigMap")["st-settings"]["data"])
    assert settings.coordinator.address == "st-coordinator.ads.svc:2220"
    assert settings.ps.listen == "0.0.0.0:2222"
    assert settings.checkpoint.url in {"s3://bucket/news", "/checkpoints"}


def test_values_arrive_as_they_are() -> None:
    settings = load_settings(environment=of_kind(rendered(values=EVERYTHING), "ConfigMap")["st-settings"]["data"])
    assert (settings.stream.buffer_bytes, settings.worker.batch_size, settings.worker.drain) == (1 << 27, 8192, 20.0)
    assert settings.join.labels["click"].kinds == ("click",)
    assert len(settings.compare.slices) == 2
    assert settings.security.ca == "/tls/ca.crt"


def test_a_shard_and_its_backup_are_never_on_one_node_and_know_who_they_are(objects: list[dict[str, Any]]) -> None:
    settings = load_settings(environment=of_kind(objects, "ConfigMap")["st-settings"]["data"])
    cluster = Cluster.of(settings.ps.addresses, None)
    sets = of_kind(objects, "StatefulSet")
    assert len(sets) == len(settings.ps.addresses)
    for index in range(len(sets)):
        one = sets[f"st-shard-{index}"]
        assert one["spec"]["serviceName"] == "st-shards"
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
        (term,) = one["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["topologyKey"] == "kubernetes.io/hostname"
        assert term["labelSelector"]["matchLabels"] == one["spec"]["selector"]["matchLabels"]
        for place in range(one["spec"]["replicas"]):
            assert cluster.own_place(f"st-shard-{index}-{place}", settings.ps.backups) == (index, place == 1)
    assert len({str(one["spec"]["selector"]) for one in sets.values()}) == len(sets)


def test_slim_images_run_what_needs_no_tensorflow() -> None:
    images = {name: spec["containers"][0]["image"] for name, spec in pods(rendered(values=EVERYTHING)).items()}
    slim, full = "registry.example/slim:0.1.0", "registry.example/streamtrain:0.1.0"
    assert images == dict.fromkeys(("shard", "coordinator", "joiner"), slim) | dict.fromkeys(
        ("worker", "serving"), full
    )


def test_more_fields_of_pods_come_on_top() -> None:
    spec = pods(rendered(values=EVERYTHING))["shard"]
    assert spec["nodeSelector"] == {"pool": "memory"}
    assert spec["priorityClassName"] == "high"
    assert spec["containers"]


def test_what_changes_starts_those_pods_anew_that_read_it() -> None:
    def sums(values: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
        return {
            one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: (
                one["spec"]["template"]["metadata"]["annotations"]["checksum/settings"],
                one["spec"]["template"]["metadata"]["annotations"].get("checksum/model"),
            )
            for one in rendered(values=values)
            if one["kind"] in {"Deployment", "StatefulSet"}
        }

    first, second = (sums(BUCKET | {"model": {"files": {"model.py": text}}}) for text in ("a = 1", "a = 2"))
    assert {name for name in first if first[name] != second[name]} == {"worker", "serving"}
    third = sums(BUCKET | {"settings": BUCKET["settings"] | {"worker": {"batch_size": 64}}})
    assert all(first[name][0] != third[name][0] for name in first)


def test_alerts_are_those_of_compose() -> None:
    (rules,) = of_kind(rendered(values=EVERYTHING), "PrometheusRule").values()
    assert [rule for group in rules["spec"]["groups"] for rule in group["rules"]] == RULES
    (monitor,) = of_kind(rendered(values=EVERYTHING), "PodMonitor").values()
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/component"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"secret": ""}, "secret is not set: kubectl create secret generic"),
        ({"tls": ""}, "tls is not set"),
        ({"settings": {**BUCKET["settings"], "checkpoint": {}}}, "settings.checkpoint.url is not set: name a bucket"),
        ({"settings": {**BUCKET["settings"], "stream": {"url": "kafka://k:9092"}}}, "settings.stream.topic is not set"),
        ({"settings": {**BUCKET["settings"], "publish": {"url": "redis://r"}}}, "settings.publish.model is not set"),
        ({"checkpoints": {"size": "1Gi"}}, "are both set: choose one"),
        ({"model": {"configMap": "m", "files": {"model.py": ""}}}, "are alternatives: set one of them"),
        ({"settings": {**BUCKET["settings"], "ps": {"addresses": "a:1"}}}, "addresses"),
        ({"settings": {**BUCKET["settings"], "streams": {}}}, "streams"),
        ({"shards": {"count": 0}}, "count"),
        ({"shard": {"count": 1}}, "shard"),
        ({"image": {"repository": "r", "tag": "latest"}}, "tag"),
        (
            {
                "settings": {**BUCKET["settings"], "stream": {"url": "redis://r", "topic": "t"}},
                "workers": {"autoscaling": {"enabled": True}},
            },
            "workers.autoscaling needs the lag of Kafka",
        ),
    ],
)
def test_what_cannot_work_is_refused(changed: dict[str, Any], message: str) -> None:
    assert message in refusal(values=BUCKET | changed)


def test_each_value_is_explained_and_checked() -> None:
    """A sentence on its line or above it, or on that of what it is part of; and the schema has it."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    tops = [i for i, line in enumerate(lines) if re.match(r"\w+:", line)]
    for begin, end in zip(tops, [*tops[1:], len(lines)], strict=True):
        above = begin > 0 and lines[begin - 1].startswith("#")
        inner = [line for line in lines[begin + 1 : end] if re.match(r"  \w+:", line)]
        assert above or "#" in lines[begin] or inner, lines[begin]
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert values.keys() <= schema["properties"].keys()
    for name, of in values.items():
        properties = schema["properties"][name].get("properties")
        if isinstance(of, dict) and properties and name != "settings":
            assert of.keys() == properties.keys(), name


def test_rows_on_disk_are_in_a_volume_of_the_pod_if_one_is_asked_for() -> None:
    def temporary(component: str) -> dict[str, Any]:
        (found,) = (one for one in of[component]["volumes"] if one["name"] == "tmp")
        return dict(found)

    of = pods(rendered(values=EVERYTHING))
    spec = temporary("shard")["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert (spec["storageClassName"], spec["resources"]) == ("nvme", {"requests": {"storage": "1Ti"}})
    assert temporary("serving") == {"name": "tmp", "emptyDir": {}}

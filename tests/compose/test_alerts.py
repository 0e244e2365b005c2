"""The alerts of services/prometheus/alerts.yml, evaluated by Prometheus itself: `promtool test rules`.

Each alert has two cases, both of them a healthy cluster in which some series go wrong: in one it fires, at a minute
that follows from its condition, and not a minute earlier; in the other, which is a near miss, it never does.
"""

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.compose.prometheus import FOLDER, RULES, command

MINUTES = 150

# Values in promtool's notation, one a minute from minute 0, which is also the beginning of Unix time: "1x9 0x90" is 1
# for ten minutes and 0 from minute 10 on, "0+5x9" grows by 5 a minute.
ZERO, ONE, NOW = "0x150", "1x150", "0+60x150"
W0, W1, PS0, PS1 = 'instance="w-0"', 'instance="w-1"', 'instance="ps-0"', 'instance="ps-1"'
LEAD, SERVER = 'instance="coordinator",job="coordinator"', 'instance="serving"'

HEALTHY = {
    **{f'up{{instance="{one}"}}': ONE for one in ("w-0", "w-1", "ps-0", "ps-1", "serving")},
    f"up{{{LEAD}}}": ONE,
    f"process_start_time_seconds{{{W0}}}": "1000x150",
    f"process_resident_memory_bytes{{{PS0}}}": "4e9x150",
    **{f"worker_stream_away{{{one}}}": ZERO for one in (W0, W1)},
    **{f"worker_shards_away{{{one}}}": ZERO for one in (W0, W1)},
    f"worker_reconnects_total{{{W0}}}": ZERO,
    f'worker_lag_messages{{{W0},partition="0"}}': "50x150",
    f'worker_lag_messages{{{W1},partition="1"}}': "50x150",
    **{f"worker_watermark_delay_seconds{{{one}}}": "2x150" for one in (W0, W1)},
    **{f"worker_samples_total{{{one}}}": "0+60000x150" for one in (W0, W1)},
    **{f'worker_bad_samples_total{{{one},reason="not_json"}}': "0+10x150" for one in (W0, W1)},
    f'worker_dead_letters_total{{{W0},reason="not_json"}}': "0+10x150",
    f"worker_late_samples_total{{{W0}}}": "0+10x150",
    f"worker_skipped_samples_total{{{W0}}}": ZERO,
    f'worker_row_gradients_total{{{W0},outcome="applied"}}': "0+60000x150",
    f'worker_row_gradients_total{{{W0},outcome="non_finite"}}': ZERO,
    f"worker_non_finite_dense_gradients_total{{{W0}}}": ZERO,
    f"worker_non_finite_statistics_changes_total{{{W0}}}": ZERO,
    f"worker_window_non_finite_predictions{{{W0}}}": ZERO,
    f'worker_window_normalized_entropy_ratio{{{W0},label="click"}}': "0.8x150",
    **{f'worker_window_calibration_ratio{{{one},label="click"}}': "1.01x150" for one in (W0, W1)},
    f"worker_rewinds_total{{{W0}}}": ZERO,
    **{f"shard_ready{{{one}}}": ONE for one in (PS0, PS1)},
    f'shard_info{{{PS0},shard="0",shards="2",run="r"}}': ONE,
    f'shard_info{{{PS1},shard="1",shards="2",run="r"}}': ONE,
    **{f'shard_clock_offset{{{one},partition="{p}"}}': "0+60000x150" for one in (PS0, PS1) for p in (0, 1)},
    **{
        f'shard_events_total{{{PS1},event="{event}"}}': ZERO
        for event in ("damaged_checkpoints", "backup_took_over", "failed_ShardBroken", "disk_errors", "refused_token")
    },
    f"shard_checkpoint_failures_total{{{PS0}}}": ZERO,
    f'shard_pushes_total{{{PS0},outcome="applied"}}': "0+600x150",
    f'shard_pushes_total{{{PS0},outcome="rejected"}}': ZERO,
    **{f"shard_backup_in_step{{{one}}}": ONE for one in (PS0, PS1)},
    f'shard_dropped_rows_total{{{PS0},reason="evicted"}}': ZERO,
    f"shard_workers{{{PS0}}}": "2x150",
    f"shard_checkpoint_timestamp_seconds{{{LEAD}}}": NOW,
    f'shard_checkpoints_total{{{LEAD},outcome="taken"}}': "0+1x150",
    f'shard_checkpoints_total{{{LEAD},outcome="failed"}}': ZERO,
    f"shard_publication_held{{{LEAD}}}": ZERO,
    f"shard_publication_timestamp_seconds{{{LEAD}}}": NOW,
    f'shard_publications_total{{{LEAD},outcome="published"}}': NOW,
    f'shard_publications_total{{{LEAD},outcome="failed"}}': ZERO,
    f'shard_versions_total{{{LEAD},outcome="failed"}}': ZERO,
    f'coordinator_shards{{{LEAD},state="away"}}': ZERO,
    f'coordinator_lost_members_total{{{LEAD},kind="worker"}}': ZERO,
    f"coordinator_lag_messages{{{LEAD}}}": "50x150",
    f"serving_ready{{{SERVER}}}": ONE,
    f"serving_stale_seconds{{{SERVER}}}": ZERO,
    f"serving_freshness_seconds{{{SERVER}}}": "3x150",
    f'serving_publication{{{SERVER},version="head"}}': NOW,
    f'serving_requests_total{{{SERVER},protocol="tensorflow",code="200"}}': "0+6000x150",
    f"serving_refused_publications_total{{{SERVER}}}": ZERO,
    f"serving_as_wanted{{{SERVER}}}": ONE,
    f'serving_watchdog_rollbacks_total{{{SERVER},reason="mean"}}': ZERO,
    f'serving_shed_requests_total{{{SERVER},reason="queue"}}': ZERO,
    f"serving_waiting_instances{{{SERVER}}}": "10x150",
    f'serving_request_seconds_bucket{{{SERVER},version="head",le="0.01"}}': "0+5990x150",
    f'serving_request_seconds_bucket{{{SERVER},version="head",le="0.05"}}': "0+6000x150",
    f'serving_request_seconds_bucket{{{SERVER},version="head",le="0.1"}}': "0+6000x150",
    f'serving_request_seconds_bucket{{{SERVER},version="head",le="+Inf"}}': "0+6000x150",
    f'serving_ids_total{{{SERVER},version="head",table="ad",outcome="found"}}': "0+900x150",
    f'serving_ids_total{{{SERVER},version="head",table="ad",outcome="born"}}': "0+100x150",
    f'serving_unauthorized_requests_total{{{SERVER},token="admin"}}': ZERO,
    f'serving_refused_connections_total{{{SERVER},reason="slow"}}': ZERO,
}


class Case(NamedTuple):
    """When an alert fires: from this minute on, where these series go wrong; and never, where those do."""

    minute: int
    wrong: dict[str, str]
    near: dict[str, str]


FROM_10, ONCE = "1x9 0x140", "0x9 1x140"  # something ends at minute 10; something happens then
REQUESTS = f'serving_requests_total{{{SERVER},protocol="tensorflow",code='
BAD = f'worker_bad_samples_total{{{W0},reason="not_json"}}'
EVENTS = f"shard_events_total{{{PS1},event="
NON_FINITE = f'worker_row_gradients_total{{{W0},outcome="non_finite"}}'
PUBLISHED, PUBLISHED_AT = f"shard_publications_total{{{LEAD},outcome=", f"shard_publication_timestamp_seconds{{{LEAD}}}"
APPLIED = f'shard_pushes_total{{{PS0},outcome="applied"}}'
UNTIL_10 = "0+60x10 600x140"  # a time, or a count, that stays as it was at minute 10
NOTHING_LEARNED = {APPLIED: "0+600x10 6000x140"}
CASES = {
    "Gone": Case(11, {f"up{{{PS0}}}": FROM_10}, {f"up{{{PS0}}}": "1x9 0 1x140"}),
    "Restarts": Case(
        13,
        {f"process_start_time_seconds{{{W0}}}": "1000x9 2000+60x140"},
        {f"process_start_time_seconds{{{W0}}}": "1000x9 2000 2060 2120x140"},
    ),
    "Memory": Case(
        20,
        {f"process_resident_memory_bytes{{{PS0}}}": "4e9x9 13e9x140"},
        {f"process_resident_memory_bytes{{{PS0}}}": "4e9x9 12.7e9x140"},
    ),
    "StreamAway": Case(11, {f"worker_stream_away{{{W0}}}": ONCE}, {f"worker_stream_away{{{W0}}}": "0x9 1 0x140"}),
    "ShardsAway": Case(11, {f"worker_shards_away{{{W0}}}": ONCE}, {f"worker_shards_away{{{W0}}}": "0x9 1 0x140"}),
    "Disconnects": Case(
        13, {f"worker_reconnects_total{{{W0}}}": "0x9 0+3.5x140"}, {f"worker_reconnects_total{{{W0}}}": "0x9 10x140"}
    ),
    "Lag": Case(
        # More than 10,000 from minute 14 on, and then for ten minutes.
        24,
        {f'worker_lag_messages{{{W0},partition="0"}}': "50x9 2000+2000x140"},
        {f'worker_lag_messages{{{W0},partition="0"}}': "50x9 90000-500x140"},
    ),
    "Stuck": Case(
        20,  # five minutes without a change, for five minutes
        {f'shard_clock_offset{{{one},partition="0"}}': "0+60000x10 600000x140" for one in (PS0, PS1)},
        {f'shard_clock_offset{{{one},partition="0"}}': "0+60000x10 600000x140" for one in (PS0, PS1)}
        | {f'worker_lag_messages{{{W0},partition="0"}}': ZERO},
    ),
    "StandsStill": Case(
        10,
        {f"worker_stalls_total{{{W0}}}": ONCE},
        {f"worker_stalls_total{{{W0}}}": "2x150", f"worker_lag_messages{{{W0}}}": "5x150"},
    ),
    "Orphan": Case(
        20,  # Prometheus looks back for five minutes
        {f'worker_lag_messages{{{W0},partition="0"}}': "50x9", f'worker_lag_messages{{{W1},partition="1"}}': "50x9"},
        {f'worker_lag_messages{{{W0},partition="0"}}': "50x9", f'worker_lag_messages{{{W1},partition="0"}}': "50x140"},
    ),
    "Old": Case(
        15,
        {f"worker_watermark_delay_seconds{{{one}}}": "2x9 400x140" for one in (W0, W1)},
        {f"worker_watermark_delay_seconds{{{W0}}}": "2x9 400x140"},
    ),
    # Of 120,000 samples a minute; above the threshold three minutes after it began, as it is a mean of five.
    "Bad": Case(18, {BAD: "0+10x10 2100+2000x140"}, {BAD: "0+10x10 1200+1100x140"}),
    "BadStream": Case(13, {BAD: "0+10x10 12100+12000x140"}, {BAD: "0+10x10 5100+5000x140"}),
    "DeadLetters": Case(
        14,
        {f'worker_dead_letters_total{{{W0},reason="not_json"}}': "0+10x10 400+300x140"},
        {f'worker_dead_letters_total{{{W0},reason="not_json"}}': "0+16x150"},
    ),
    "Late": Case(
        37,  # of 120,000 a minute, a twentieth in a mean of fifteen minutes after eight of them
        {f"worker_late_samples_total{{{W0}}}": "0+10x14 12000+12000x140"},
        {f"worker_late_samples_total{{{W0}}}": "0+10x14 5000+5000x140"},
    ),
    "Lost": Case(
        10, {f"worker_skipped_samples_total{{{W0}}}": ONCE}, {f"worker_skipped_samples_total{{{W0}}}": "7x150"}
    ),
    "NaN": Case(10, {NON_FINITE: ONCE}, {NON_FINITE: "3x150"}),
    "NaNPredictions": Case(
        10,
        {f"worker_window_non_finite_predictions{{{W0}}}": ONCE},
        {f"worker_window_non_finite_predictions{{{W0}}}": ZERO},
    ),
    "Worse": Case(
        25,
        {f'worker_window_normalized_entropy_ratio{{{W0},label="click"}}': "0.8x9 1.1x140"},
        {f'worker_window_normalized_entropy_ratio{{{W0},label="click"}}': "0.8x9 1.1x9 0.99x130"},
    ),
    "Calibration": Case(
        25,
        {f'worker_window_calibration_ratio{{{one},label="click"}}': "1x9 0.85x140" for one in (W0, W1)},
        {f'worker_window_calibration_ratio{{{W0},label="click"}}': "1x9 0.85x140"},
    ),
    "Rewinds": Case(10, {f"worker_rewinds_total{{{W0}}}": "0x9 6x140"}, {f"worker_rewinds_total{{{W0}}}": "0x9 4x140"}),
    "NotReady": Case(15, {f"shard_ready{{{PS1}}}": FROM_10}, {f"shard_ready{{{PS1}}}": "1x9 0x3 1x140"}),
    "Damaged": Case(10, {f'{EVENTS}"damaged_checkpoints"}}': ONCE}, {f'{EVENTS}"refused_token"}}': ONCE}),
    "NoCheckpoint": Case(
        26,
        {f"shard_checkpoint_timestamp_seconds{{{LEAD}}}": UNTIL_10},
        {f"shard_checkpoint_timestamp_seconds{{{LEAD}}}": UNTIL_10} | NOTHING_LEARNED,
    ),
    "CheckpointFails": Case(
        10,
        {f'shard_checkpoints_total{{{LEAD},outcome="failed"}}': ONCE},
        {f"shard_checkpoint_failures_total{{{PS0}}}": "2x150"},
    ),
    "NoBackup": Case(
        15, {f"shard_backup_in_step{{{PS0}}}": FROM_10}, {f"shard_backup_in_step{{{PS0}}}": "1x9 0x3 1x140"}
    ),
    "TookOver": Case(10, {f'{EVENTS}"backup_took_over"}}': ONCE}, {f'{EVENTS}"backup_took_over"}}': "1x150"}),
    "Broken": Case(10, {f'{EVENTS}"failed_ShardBroken"}}': ONCE}, {f'{EVENTS}"refused_token"}}': ONCE}),
    "DiskFull": Case(10, {f'{EVENTS}"disk_errors"}}': ONCE}, {f'{EVENTS}"refused_token"}}': ONCE}),
    "Evicted": Case(
        71,
        {f'shard_dropped_rows_total{{{PS0},reason="evicted"}}': "0x9 0+100x140"},
        {f'shard_dropped_rows_total{{{PS0},reason="evicted"}}': "0x9 0+100x30 3000x110"},
    ),
    "Rejected": Case(
        18,  # of 600 pushes a minute; a tenth of a mean of five minutes
        {f'shard_pushes_total{{{PS0},outcome="rejected"}}': "0x10 120+120x140"},
        {f'shard_pushes_total{{{PS0},outcome="rejected"}}': "0x10 60+60x140"},
    ),
    "Apart": Case(
        15,
        {f'shard_clock_offset{{{PS1},partition="0"}}': "0+60000x9 490000+60000x140"},
        {f'shard_clock_offset{{{PS1},partition="0"}}': "0+60000x9 540000+60000x140"},
    ),
    "Strangers": Case(10, {f'{EVENTS}"refused_token"}}': ONCE}, {f'{EVENTS}"backup_took_over"}}': ONCE}),
    "Sessions": Case(10, {f"shard_workers{{{PS0}}}": "2x9 201x140"}, {f"shard_workers{{{PS0}}}": "2x9 200x140"}),
    "NoLeader": Case(
        17, {f"shard_publication_held{{{LEAD}}}": "0x9"}, {f"shard_publication_held{{{LEAD}}}": "0x9 _x5 0x140"}
    ),
    "ShardAway": Case(
        11,
        {f'coordinator_shards{{{LEAD},state="away"}}': ONCE},
        {f'coordinator_shards{{{LEAD},state="away"}}': "0x9 1 0x140"},
    ),
    "LostMember": Case(
        10,
        {f'coordinator_lost_members_total{{{LEAD},kind="worker"}}': ONCE},
        {f'coordinator_lost_members_total{{{LEAD},kind="worker"}}': "2x150"},
    ),
    "LagUnknown": Case(
        20,
        {f"coordinator_lag_messages{{{LEAD}}}": "50x9"},
        {f"coordinator_lag_messages{{{LEAD}}}": "50x9", f"up{{{LEAD}}}": FROM_10},
    ),
    "Held": Case(
        20,
        {f"shard_publication_held{{{LEAD}}}": ONCE},
        {f"shard_publication_held{{{LEAD}}}": "0x9 1x8 0x130"},
    ),
    "NotPublished": Case(
        15,
        {f'{PUBLISHED}"published"}}': UNTIL_10, f'{PUBLISHED}"failed"}}': "0x10 6+6x140"},
        {f'{PUBLISHED}"failed"}}': "0x10 6+6x140"},
    ),
    "PublicationOld": Case(21, {PUBLISHED_AT: UNTIL_10}, {PUBLISHED_AT: UNTIL_10} | NOTHING_LEARNED),
    "NoVersion": Case(
        10,
        {f'shard_versions_total{{{LEAD},outcome="failed"}}': ONCE},
        {f'shard_versions_total{{{LEAD},outcome="failed"}}': "1x150"},
    ),
    "NotServing": Case(12, {f"serving_ready{{{SERVER}}}": FROM_10}, {f"serving_ready{{{SERVER}}}": "1x9 0x1 1x140"}),
    "Stale": Case(
        11,
        {f"serving_stale_seconds{{{SERVER}}}": "0x9 31+60x140"},
        {f"serving_stale_seconds{{{SERVER}}}": "0x9 31 0x140"},
    ),
    "DecisionsLost": Case(
        11,
        {f"serving_decisions_lost{{{SERVER}}}": ONCE},
        {f"serving_decisions_lost{{{SERVER}}}": "0x9 1 0x140"},
    ),
    "NotFresh": Case(
        15,
        {f"serving_freshness_seconds{{{SERVER}}}": "3x9 61+60x140"},
        {f"serving_freshness_seconds{{{SERVER}}}": "3x9 61+60x4 3x140"},
    ),
    "NotMoving": Case(
        20,
        {f'serving_publication{{{SERVER},version="head"}}': UNTIL_10},
        {f'serving_publication{{{SERVER},version="head"}}': UNTIL_10} | NOTHING_LEARNED,
    ),
    # Of 6,000 requests a minute; it is a mean of five.
    "NotLearned": Case(18, {f'{REQUESTS}"412"}}': "0x10 120+120x140"}, {f'{REQUESTS}"412"}}': "0x10 55+55x140"}),
    "Refused": Case(
        10,
        {f"serving_refused_publications_total{{{SERVER}}}": ONCE},
        {f"serving_refused_publications_total{{{SERVER}}}": "4x150"},
    ),
    "NotAsWanted": Case(
        11, {f"serving_as_wanted{{{SERVER}}}": FROM_10}, {f"serving_as_wanted{{{SERVER}}}": "1x9 0 1x140"}
    ),
    "RolledBack": Case(
        10,
        {f'serving_watchdog_rollbacks_total{{{SERVER},reason="mean"}}': ONCE},
        {f'serving_watchdog_rollbacks_total{{{SERVER},reason="mean"}}': "1x150"},
    ),
    "Shed": Case(
        15,  # 120 a minute are more than one a second in a mean of five after three
        {f'serving_shed_requests_total{{{SERVER},reason="queue"}}': "0x10 120+120x140"},
        {f'serving_shed_requests_total{{{SERVER},reason="queue"}}': "0x10 60+60x140"},
    ),
    "Queue": Case(
        11,
        {f"serving_waiting_instances{{{SERVER}}}": "10x9 4001x140"},
        {f"serving_waiting_instances{{{SERVER}}}": "10x9 4000x140"},
    ),
    "Errors": Case(18, {f'{REQUESTS}"503"}}': "0x10 120+120x140"}, {f'{REQUESTS}"503"}}': "0x10 55+55x140"}),
    "BadRequests": Case(18, {f'{REQUESTS}"400"}}': "0x10 120+120x140"}, {f'{REQUESTS}"400"}}': "0x10 55+55x140"}),
    "Slow": Case(
        16,
        {
            f'serving_request_seconds_bucket{{{SERVER},version="head",le="{at}"}}': "0+5990x10 65400+5500x140"
            for at in ("0.01", "0.05")
        },
        {f'serving_request_seconds_bucket{{{SERVER},version="head",le="0.01"}}': "0+10x150"},
    ),
    "Unknown": Case(
        33,  # more than half in a mean of fifteen minutes after eight of them
        {
            f'serving_ids_total{{{SERVER},version="head",table="ad",outcome="found"}}': "0+900x10 9100+100x140",
            f'serving_ids_total{{{SERVER},version="head",table="ad",outcome="born"}}': "0+100x10 1900+900x140",
        },
        {f'serving_ids_total{{{SERVER},version="head",table="ad",outcome="born"}}': "0+850x150"},
    ),
    "Guesses": Case(
        10,
        {f'serving_unauthorized_requests_total{{{SERVER},token="admin"}}': "0x9 21x140"},
        {f'serving_unauthorized_requests_total{{{SERVER},token="admin"}}': "0x9 18x140"},
    ),
    "Clients": Case(
        10,
        {f'serving_refused_connections_total{{{SERVER},reason="slow"}}': "0x9 101x140"},
        {f'serving_refused_connections_total{{{SERVER},reason="slow"}}': "0x9 90x140"},
    ),
}


def promtool(*words: str | Path) -> subprocess.CompletedProcess[str]:
    executable = command("promtool")
    if executable is None:
        pytest.skip("NOT TESTED, as there is no promtool")
    return subprocess.run([executable, *words], capture_output=True, text=True, check=False, timeout=300)


def names(series: str) -> str:
    """With the prefix of all metrics that are ours."""
    return series if series.startswith(("up{", "process_")) else f"streamtrain_{series}"


def group(name: str, changes: dict[str, str], firing: dict[int, list[str]]) -> dict[str, Any]:
    """A test of promtool: what fires at some minutes, in a healthy cluster with these changes."""
    series = {names(one): values for one, values in (HEALTHY | changes).items()}
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            {
                "expr": 'group by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in alerts],
            }
            for minute, alerts in firing.items()
        ],
    }


def written(folder: Path, rules: list[dict[str, Any]], *groups: dict[str, Any]) -> Path:
    """A file of tests, which knows these rules alone."""
    alerts, tests = folder / f"{rules[0]['alert']}.yml", folder / f"{rules[0]['alert']}-test.yml"
    alerts.write_text(json.dumps({"groups": [{"name": "alerts", "rules": rules}]}))
    tests.write_text(json.dumps({"rule_files": [str(alerts)], "evaluation_interval": "1m", "tests": groups}))
    return tests


def test_prometheus_accepts_its_files() -> None:
    done = promtool("check", "config", "--lint-fatal", FOLDER / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rules found" in done.stdout


def test_each_alert_fires_when_it_should_and_not_when_it_should_not(tmp_path: Path) -> None:
    assert [*CASES] == [rule["alert"] for rule in RULES]
    files = []
    for rule in RULES:
        alert = rule["alert"]
        minute, wrong, near = CASES[alert]
        fires = group(f"{alert} fires", wrong, {minute - 1: [], minute: [alert]})
        near_miss = group(f"{alert} nearly", near, {at: [] for at in range(0, MINUTES - 50, 2)})
        files.append(written(tmp_path, [rule], fires, near_miss))
    done = promtool("test", "rules", *files)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_fires_in_a_healthy_cluster(tmp_path: Path) -> None:
    done = promtool("test", "rules", written(tmp_path, RULES, group("healthy", {}, {at: [] for at in range(MINUTES)})))
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_alert_that_does_not_fire_is_found(tmp_path: Path) -> None:
    (rule,) = (rule for rule in RULES if rule["alert"] == "Gone")
    case = CASES["Gone"]
    done = promtool(
        "test", "rules", written(tmp_path, [rule], group("fires too early", case.wrong, {case.minute - 1: ["Gone"]}))
    )
    assert done.returncode == 1
    assert 'exp: {alertname="Gone"}' in done.stderr


def test_every_series_is_of_a_metric_that_an_alert_reads() -> None:
    read = " ".join(rule["expr"] for rule in RULES)
    assert all(names(one).partition("{")[0] in read for one in HEALTHY)

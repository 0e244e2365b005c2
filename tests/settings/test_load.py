"""Settings: where they come from, what is refused and how, and that each is documented."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from streamtrain.errors import ConfigError
from streamtrain.ps.rpc.security import Security
from streamtrain.settings.groups import KEYS, GateSettings
from streamtrain.settings.load import PREFIX, Settings, load_settings, settings_without_effect
from tests.settings.page import PAGE, table, written

SECRET = "correct-horse"

ALL = f"""
model = "m.py:model"
[ps]
addresses = ["ps-0:2222", "unix:/run/ps.sock"]
listen = "0.0.0.0:0"
metrics = "127.0.0.1:0"
max_message_bytes = 65536
max_keys = 1
wire_dtype = "bfloat16"
timeout = 2.5
sessions = 2
[consistency]
mode = "bounded"
staleness = 0
lease = "1m"
[checkpoint]
url = "s3://key:{SECRET}@bucket/x"
every = "500ms"
keep = 1
full_every = 0
[publish]
version_every = "1h"
keep = 3
[gate]
non_finite = false
auc_drop = 0.01
loss_rise = 1
calibration = 0.2
min_samples = 0
[security]
certificate = "a.crt"
key = "a.key"
ca = "ca.crt"
token = "{SECRET}"
insecure = true
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "streamtrain.toml") -> Path:
    file = Path(name)
    file.write_text(text)
    return file


def test_nothing_given_is_the_defaults() -> None:
    assert load_settings() == Settings()


def test_a_file_with_everything() -> None:
    write(ALL)
    made = load_settings()
    assert made.model == "m.py:model"
    assert made.ps.addresses == ("ps-0:2222", "unix:/run/ps.sock")
    assert (made.ps.listen, made.ps.metrics) == ("0.0.0.0:0", "127.0.0.1:0")
    assert (made.ps.wire_dtype, made.ps.timeout) == ("bfloat16", 2.5)
    assert (made.consistency.mode, made.consistency.staleness, made.consistency.lease) == ("bounded", 0, 60.0)
    assert (made.checkpoint.every, made.checkpoint.keep, made.checkpoint.full_every) == (0.5, 1, 0)
    assert (made.publish.version_every, made.publish.keep) == (3600.0, 3)
    assert made.gate == GateSettings(non_finite=False, auc_drop=0.01, loss_rise=1.0, calibration=0.2, min_samples=0)
    security = Security.from_settings(made.security)
    assert security == Security(Path("a.crt"), Path("a.key"), Path("ca.crt"), SECRET, True)


def test_a_later_source_wins() -> None:
    file = write('model = "file"\n[ps]\nsessions = 1\nmax_keys = 1\n', "other.toml")
    environment = {"STREAMTRAIN_PS__SESSIONS": "2", "STREAMTRAIN_PS__MAX_KEYS": "2", "STREAMTRAIN_MODEL": "environment"}
    made = load_settings(file, environment, {"ps.sessions": 3, "model": None})
    assert (made.ps.sessions, made.ps.max_keys, made.model) == (3, 2, "environment")


def test_the_environment_writes_everything_as_text() -> None:
    names = {
        "STREAMTRAIN_PS__ADDRESSES": "a:1, [::1]:2",
        "STREAMTRAIN_PS__TIMEOUT": "3",
        "STREAMTRAIN_SECURITY__INSECURE": "true",
        "STREAMTRAIN_SECURITY__TOKEN": "123",
        "STREAMTRAIN_PS_PORT_2222_TCP_ADDR": "10.0.0.1",
        "STREAMTRAIN_PORT": "tcp://10.0.0.1:2222",
        "STREAMTRAIN_PS_SERVICE_HOST": "10.0.0.1",
        "STREAMTRAIN_PS_SERVICE_PORT_GRPC": "2222",
        "STREAMTRAIN_GATE__AUC_DROP": ".01",
        "PATH": "/bin",
    }
    made = load_settings(environment=names)
    assert made.ps.addresses == ("a:1", "[::1]:2")
    assert made.ps.timeout == 3.0
    assert made.security.insecure
    assert made.gate.auc_drop == 0.01
    assert Security.from_settings(made.security).token == "123"


WRONG: list[tuple[str, str]] = [
    ("[ps]\nsessions = 0", "ps.sessions in streamtrain.toml must be greater than or equal to 1, not 0"),
    ("[ps]\nsessions = '8'", "ps.sessions in streamtrain.toml must be an integer, not '8'"),
    ("[ps]\nsessions = true", "ps.sessions in streamtrain.toml must be an integer, not True"),
    ("[ps]\nsessions = 8.0", "ps.sessions in streamtrain.toml must be an integer, not 8.0"),
    ("[ps]\nmax_message_bytes = 2147483648", "less than or equal to 2147483647, not 2147483648"),
    ("[ps]\naddresses = []", "ps.addresses in streamtrain.toml must be a list of addresses"),
    ("[ps]\naddresses = ['a:1', 2]", 'ps.addresses in streamtrain.toml must be "host:port"'),
    ("[ps]\naddresses = 'a:1,A:1'", "ps.addresses in streamtrain.toml must name every address once, not 'a:1,A:1'"),
    ("[ps]\nlisten = 2222", 'ps.listen in streamtrain.toml must be "host:port"'),
    ("[ps]\ntimeout = '0s'", "ps.timeout in streamtrain.toml must be a positive duration"),
    ("[ps]\ntimeout = '10'", "ps.timeout in streamtrain.toml must be a positive duration"),
    ("[ps]\ntimeout = 1" + "0" * 400, "ps.timeout in streamtrain.toml must be a positive duration"),
    ("[ps]\ntimeout = inf", "ps.timeout in streamtrain.toml must be a positive duration"),
    ("[ps]\nwire_dtype = 'int8'", "must be 'float32', 'float16' or 'bfloat16', not 'int8'"),
    ("[ps]\nadresses = []", "ps.adresses in streamtrain.toml is not a setting; did you mean ps.addresses?"),
    ('[ps]\n"a\\nb" = 1', "ps.a b in streamtrain.toml is not a setting; settings are checkpoint.every"),
    ("[ps.addresses]\na = 1", "ps.addresses in streamtrain.toml must be a list of addresses"),
    ("ps = 1", "ps in streamtrain.toml must be a table, [ps], not 1"),
    ("[[ps]]\nsessions = 1", "ps in streamtrain.toml must be a table"),
    ("modle = 'x'", "modle in streamtrain.toml is not a setting; did you mean model?"),
    ("model = ''", "model in streamtrain.toml must be non-empty text, not ''"),
    ("[consistency]\nmode = 'bounded'", "consistency.mode in streamtrain.toml is 'bounded', which requires"),
    (
        "[consistency]\nstaleness = 2",
        "consistency.staleness in streamtrain.toml is 2, but applies only to",
    ),
    ("[consistency]\nstaleness = -1", "must be greater than or equal to 0, not -1"),
    ("[checkpoint]\nkeep = 0", "checkpoint.keep in streamtrain.toml must be greater than or equal to 1, not 0"),
    ("[checkpoint]\nurl = 5", "checkpoint.url in streamtrain.toml must be non-empty text, not 5"),
    ("[gate]\nauc_drop = 0", "gate.auc_drop in streamtrain.toml must be greater than 0, not 0"),
    ("[gate]\nloss_rise = inf", "gate.loss_rise in streamtrain.toml must be a finite number, not inf"),
    ("[gate]\ncalibration = '1'", "gate.calibration in streamtrain.toml must be a number, not '1'"),
    ("[publish]\nkeep = 0", "publish.keep in streamtrain.toml must be greater than or equal to 1, not 0"),
    ("[gate]\ncalibration = nan", "gate.calibration in streamtrain.toml must be"),
    ("[stream]\nmax_bad_ratio = 2", "stream.max_bad_ratio in streamtrain.toml must be less than or equal to 1, not 2"),
    ("[stream.kafka]\na = [1]", "stream.kafka in streamtrain.toml must be a table of text, numbers and booleans"),
    ("[stream]\nkafka = '{}'", "stream.kafka in streamtrain.toml must be a table of text, numbers and booleans"),
    ("[serve]\nhosts = ['a', 2]", "serve.hosts in streamtrain.toml must be a name such as"),
    ("[security]\ninsecure = 'true'", "security.insecure in streamtrain.toml must be true or false, not 'true'"),
    ("[security]\ntoken = ''", "security.token in streamtrain.toml must be non-empty text, not ***"),
    ("[ps", "streamtrain.toml is not valid TOML: "),
    ("a = " + "[" * 3000, "streamtrain.toml is not valid TOML: "),
]


@pytest.mark.parametrize(("text", "message"), WRONG, ids=lambda text: text[:40])
def test_what_is_wrong_in_the_file_is_one_line(text: str, message: str) -> None:
    write(text)
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_files_that_cannot_be_read(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"configuration file none\.toml does not exist"):
        load_settings(Path("none.toml"))
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        load_settings(folder)
    Path("latin.toml").write_bytes(b"model = '\xff'")
    with pytest.raises(ConfigError, match=r"latin\.toml is not valid TOML"):
        load_settings(Path("latin.toml"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PS__SESSIONS", "many", "STREAMTRAIN_PS__SESSIONS in the environment must be an integer, not 'many'"),
        ("PS__SESSIONS", "9999", "must be less than or equal to 4096, not '9999'"),
        ("PS_SESSIONS", "1", "STREAMTRAIN_PS_SESSIONS in the environment is not a setting; did you mean ps.sessions?"),
        ("PS", "1", "STREAMTRAIN_PS in the environment is not a setting"),
        ("SECURITY__INSECURE", "yes", "must be true or false, not 'yes'"),
        ("SECURITY__CA", "", "must be non-empty text"),
        ("PS__ADDRESSES", "a:1,,b:1", 'must be "host:port"'),
    ],
)
def test_what_is_wrong_in_the_environment(name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(environment={PREFIX + name: value})
    assert message in str(caught.value)


def test_a_home_is_meant_as_shells_mean_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which do not see it in `--set key=~/x`: a folder named ~ was made."""
    monkeypatch.setenv("HOME", "/home/ann")
    given = {
        "checkpoint.url": "~/run",
        "up.data": "~",
        "join.folder": "~/spill~",
        "model": "~/m.py:model",
        "serve.models": '{"ads": "~/ads.py", "other": ""}',
    }
    loaded = load_settings(overrides=given)
    assert (loaded.checkpoint.url, loaded.up.data, loaded.join.folder) == (
        "/home/ann/run",
        "/home/ann",
        "/home/ann/spill~",
    )
    assert (loaded.model, loaded.serve.models) == ("/home/ann/m.py:model", {"ads": "/home/ann/ads.py", "other": ""})
    assert load_settings(overrides={"checkpoint.url": "s3://~/x"}).checkpoint.url == "s3://~/x"
    with pytest.raises(ConfigError, match=r"checkpoint\.url .*must be a path whose ~ has a home.*'~nobody9/x'"):
        load_settings(overrides={"checkpoint.url": "~nobody9/x"})


def test_what_is_wrong_on_the_command_line() -> None:
    with pytest.raises(ConfigError, match=r"^ps\.sessions on the command line must be an integer, not 'x'$"):
        load_settings(overrides={"ps.sessions": "x"})
    with pytest.raises(ConfigError, match=r"^ps\.thread on the command line is not a setting"):
        load_settings(overrides={"ps.thread": 1})


def test_a_wrong_value_is_told_even_where_a_later_source_mends_it() -> None:
    write("[ps]\nsessions = 0")
    with pytest.raises(ConfigError, match=r"ps\.sessions in streamtrain\.toml"):
        load_settings(overrides={"ps.sessions": 1})


def test_secrets_do_not_show() -> None:
    write(ALL)
    made = load_settings()
    for shown in (repr(made), str(made), repr(made.security), str(made.checkpoint), f"{made.model_dump()['security']}"):
        assert SECRET not in shown
    assert made.checkpoint.url == f"s3://key:{SECRET}@bucket/x"
    write(f"[checkpoint]\nurl = ['s3://key:{SECRET}@bucket']")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert SECRET not in f"{caught.value}{caught.value.__cause__}"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        Settings().ps.sessions = 3


VALUES = st.text(max_size=9) | st.integers() | st.floats() | st.booleans() | st.none() | st.lists(st.text(max_size=9))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=9), VALUES, max_size=3))
def test_settings_or_a_config_error_come_out(values: dict[str, Any]) -> None:
    texts = {PREFIX + key.upper().replace(".", "__"): str(value) for key, value in values.items()}
    for given_ in ({"overrides": values}, {"environment": texts}):
        assert len(message_of(given_).splitlines()) <= 1


def message_of(given_: dict[str, Any]) -> str:
    try:
        load_settings(**given_)
    except ConfigError as exc:
        return str(exc)
    return ""


def test_every_setting_is_documented_with_its_default() -> None:
    assert PAGE.read_text() == written(), "`python -m tests.settings.page` writes the page anew"
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (?:`(.+?)`)? ?\| \S", table(), re.M))
    assert sorted(rows) == list(KEYS)
    given_ = {key: tomllib.loads(f"x = {default}")["x"] for key, default in rows.items() if default and default != "[]"}
    assert load_settings(overrides=given_) == Settings()
    for key, default in rows.items():
        group, _, name = key.rpartition(".")
        value = getattr(getattr(Settings(), group) if group else Settings(), name)
        assert (default == "") == (value is None), key


def test_the_page_shows_what_works() -> None:
    example = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.S)[0]
    write(example)
    lines = re.findall(r"^(STREAMTRAIN_\w+)=(.*)$", PAGE.read_text(), re.M)
    assert load_settings(environment=dict(lines)) == load_settings()


def test_memory_is_a_size_or_auto() -> None:
    made = [load_settings(overrides={"ps.memory": one}).ps.memory for one in ("auto", "8GB", 1000)]
    assert made == ["auto", 8e9, 1000.0]
    with pytest.raises(
        ConfigError, match=r'ps.memory .*must be a positive size such as "50MB" or "1.5GB", not \'all\''
    ):
        load_settings(overrides={"ps.memory": "all"})


def test_what_has_no_effect_is_named() -> None:
    assert settings_without_effect(load_settings()) == []
    cases = {
        "publish.dtype": ("int8", "publish.url is set", {"publish.url": "redis://a:1"}),
        "gate.auc_drop": ("0.1", "publish.url is set", {"publish.url": "redis://a:1"}),
        "checkpoint.every": ("1s", "checkpoint.url is set", {"checkpoint.url": "x"}),
        "serve.cache_bytes": ("2000000", "serve.lookup is cache or disk", {"serve.lookup": "cache"}),
        "serve.disk": ("/tmp", "serve.lookup is disk", {"serve.lookup": "disk"}),
        "ps.disk": ("/tmp", "ps.memory is set", {"ps.memory": "8GB"}),
        "stream.schema_file": ("a.avsc", "stream.format is avro or protobuf", {"stream.format": "avro"}),
        "stream.late": ("learn", "stream.late_after is set", {"stream.late_after": "1m"}),
        "ps.backup_patience": ("1s", "ps.backups is set", {"ps.backups": "a:1"}),
        "coordinator.listen": ("a:1", "coordinator.address is set", {"coordinator.address": "a:1"}),
    }
    for key, (value, needed, way_out) in cases.items():
        made = load_settings(overrides={key: value})
        assert settings_without_effect(made) == [f"{key} has no effect unless {needed}"]
        assert settings_without_effect(load_settings(overrides={key: value, **way_out})) == []
    made = load_settings(overrides={"up.ps": 3, "ps.addresses": "a:1,a:2"})
    assert settings_without_effect(made) == ["up.ps has no effect where ps.addresses is set: there are 2 shards"]

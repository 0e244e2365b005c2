"""From a prediction to its outcome to what is learned from it, with all processes of `up`, over HTTP alone."""

import re
import sys
import uuid
from pathlib import Path

import httpx

from streamtrain.embedded.kafka import Broker
from tests.patience import PATIENCE, until
from tests.processes.test_local import running
from tests.stream.servers import kafka

__all__ = ["kafka"]

CLICKS = 40
MODEL = """
import keras
import streamtrain as st

schema = st.Schema(
    label="click", time="time", features=[st.Categorical("user", dim=1, combiner="sum", init=st.Constant(0.0))]
)

def graph(inputs):
    return keras.layers.Activation("linear")(inputs["user"])

# Gradient -1 per sample and -1000 more per click, rate 1, rows born zero: what is predicted counts both.
model = st.Model(
    schema,
    graph,
    loss=lambda labels, predictions: -(1.0 + 1000.0 * labels) * predictions,
    reduction="sum",
    embedding_optimizer=st.SGD(1.0),
)
"""
SETTINGS = """
model = "model.py:model"
stream = {{ url = "{url}", topic = "samples-{name}", create = 2 }}
publish.every = "200ms"
serve = {{ log = "shown-{name}" }}
up = {{ workers = 1, ps = 1, standby = false }}

[join]
impressions = "shown-{name}"
outcomes = "happened-{name}"
wait = "1h"  # what is not clicked is not learned meanwhile
labels = {{ click = {{ kinds = ["click"] }} }}
"""


def test_clicks_are_learned_once_and_served_though_the_joiner_is_killed(tmp_path: Path, kafka: Broker) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    settings = SETTINGS.format(url=f"kafka://{kafka.servers}", name=uuid.uuid4().hex)
    (tmp_path / "streamtrain.toml").write_text(settings)
    words = [sys.executable, "-m", "streamtrain", "up", "--set", f"up.data={tmp_path / 'data'}"]
    with running(tmp_path, words) as service:
        service.until_ready()
        last: dict[str, int] = {}
        url = f"http://{service.listen}/v1/models/model"
        with httpx.Client(timeout=PATIENCE) as client:

            def predict(**headers: str) -> float:
                answer = client.post(f"{url}:predict", json={"instances": [{"user": "ann"}]}, headers=headers)
                assert answer.status_code == 200, answer.text
                return float(answer.json()["predictions"][0][0])

            def predict_after(offsets: str) -> float:
                """Asks again as a client would: a joiner that was killed may take longer than an answer waits."""
                body, headers = {"instances": [{"user": "ann"}]}, {"x-min-offset": offsets}
                answers: list[httpx.Response] = []

                def is_there() -> bool:
                    answers.append(client.post(f"{url}:predict", json=body, headers=headers))
                    return answers[-1].status_code != 412

                until(is_there, told=lambda: answers[-1].text)
                assert answers[-1].status_code == 200, answers[-1].text
                return float(answers[-1].json()["predictions"][0][0])

            def click(id: str) -> httpx.Response:
                """Says it again while the topic, which is made as all starts, is not open yet."""
                answers: list[httpx.Response] = []

                def is_taken() -> bool:
                    answers.append(client.post(f"{url}/outcomes", json={"id": id, "kind": "click"}))
                    return answers[-1].status_code != 503

                until(is_taken, told=lambda: answers[-1].text)
                assert answers[-1].status_code == 200, answers[-1].text
                return answers[-1]

            for i in range(CLICKS):
                predict(**{"x-request-id": f"r{i}"})
                answer = click(f"r{i}-0")
                found = re.fullmatch(r"outcomes:(\d+):(\d+)", *answer.json()["offsets"])
                assert found is not None
                last[found[1]] = int(found[2])
                if i == CLICKS // 2:
                    service.kill("join")
            assert {*last} == {"0", "1"}
            wanted = ",".join(f"outcomes:{partition}:{offset}" for partition, offset in last.items())
            assert predict_after(wanted) == 1001 * CLICKS

            service.kill("join")  # the next one has written no sample yet, and the topic ends with a marker
            answer = client.post(f"{url}/outcomes", json={"id": "r0-0", "kind": "click"})
            assert predict_after(answer.json()["offsets"][0]) == 1001 * CLICKS  # a second click
        assert service.stop() == 0

"""When `up` acts on what is proposed."""

from typing import Any

import pytest

from streamtrain.errors import ConfigError, StreamtrainError
from streamtrain.service.autoscaler import Autoscaler, Numbers
from streamtrain.settings.load import load_settings


class Service:
    """Has as many shards and workers as it is told to have, unless it fails."""

    def __init__(self, **options: Any) -> None:
        overrides = {f"scale.{name}": value for name, value in {"max_shards": 8, "max_workers": 8, **options}.items()}
        self.now, self.numbers, self.fails = 0.0, Numbers(2, 2), False
        self.said: list[str] = []
        self.scaler = Autoscaler(
            load_settings(overrides=overrides).scale, self._act, self.said.append, lambda: self.now
        )

    def _act(self, numbers: Numbers) -> None:
        if self.fails:
            raise StreamtrainError("a shard does not answer")
        self.numbers = numbers

    def follow(self, shards: int, workers: int, seconds: float = 1.0) -> Numbers:
        for _ in range(round(seconds)):
            self.now += 1
            self.scaler.follow({"shards": shards, "workers": workers, "why": ["it is so"]}, self.numbers)
        return self.numbers


def test_more_start_at_once_and_fewer_after_a_while() -> None:
    service = Service()
    assert service.follow(4, 2) == (4, 2)
    assert service.said == ["4 shards and 2 workers instead of 2 shards and 2 workers (scale.auto): it is so"]
    assert service.follow(4, 3, 299) == (4, 2), "not again within five minutes"
    assert service.follow(4, 3, 2) == (4, 3)
    assert service.follow(2, 3, 299) == (4, 3)
    service.scaler.follow(None, service.numbers)  # a shard did not answer
    assert service.follow(4, 3) == (4, 3), "enough for a moment"
    assert service.follow(2, 3, 299) == (4, 3)
    assert service.follow(2, 3, 2) == (2, 3)
    assert len(service.said) == 3


def test_more_of_one_do_not_wait_for_fewer_of_the_other() -> None:
    service = Service()
    assert service.follow(4, 1) == (4, 2)
    assert service.follow(4, 1, 298) == (4, 2)
    assert service.follow(4, 1, 10) == (4, 1)
    assert service.said[-1].startswith("4 shards and 1 worker instead of 4 shards and 2 workers")


def test_limits_are_kept() -> None:
    service = Service(max_shards=3, min_workers=2, cooldown="10s")
    assert service.follow(8, 1, 100) == (3, 2)
    assert Service(min_shards=4).follow(2, 2) == (4, 2)
    assert len(service.said) == 1


def test_what_fails_is_said_and_tried_again() -> None:
    service = Service(cooldown="10s")
    service.fails = True
    assert service.follow(4, 2, 12) == (2, 2)
    assert service.said[1] == "still 2 shards and 2 workers: a shard does not answer"
    assert len(service.said) == 4
    service.fails = False
    assert service.follow(4, 2, 12) == (4, 2)


def test_limits_are_numbers_from_one() -> None:
    for name in ("min_shards", "max_shards", "min_workers", "max_workers"):
        with pytest.raises(ConfigError, match=f"scale.{name} .*greater than or equal to 1"):
            load_settings(overrides={f"scale.{name}": 0})

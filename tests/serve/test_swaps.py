"""Swaps under load: versions and the head change 200 times while clients ask; no request fails, none is mixed."""

import random
import threading
import time
from collections import Counter
from itertools import count

import httpx

from streamtrain.serve.follower import RegistryUpdater
from streamtrain.serve.registry import HEAD, Registry
from tests.patience import PATIENCE
from tests.serve.published import USERS, counted, origin_of, publish
from tests.serve.running import TOKEN, client_of, serving

SWAPS = 200
URL = "/v1/models/model"


def test_swaps_under_load() -> None:
    model = counted()
    origin = origin_of(model)
    for number in range(1, 5):
        publish(origin, number)
        origin.keep()
    registry = Registry(model, origin)
    done = threading.Event()
    failed: list[str] = []
    seen = [Counter[str]() for _ in range(3)]

    def ask(url: str, client_number: int, size: int) -> None:
        body = {"instances": [{"user": USERS[i % len(USERS)]} for i in range(size)]}
        with client_of(url) as client:
            while not done.is_set():
                try:
                    answer = client.post(f"{URL}:predict", json=body)
                except httpx.HTTPError as exc:
                    failed.append(repr(exc))
                    continue
                number = int(answer.headers.get("x-publication", 0))
                if answer.status_code != 200 or answer.json() != {"predictions": [[1001.0 * number]] * size}:
                    failed.append(answer.text)
                seen[client_number][answer.headers["x-model-version"]] += 1

    registry.promote(HEAD)
    with serving(registry, RegistryUpdater(registry, every=0.02)) as admin:
        # Small requests are predicted on the event loop, those of 40 on the thread.
        threads = [
            threading.Thread(target=ask, args=(str(admin.base_url), i, size)) for i, size in enumerate((1, 7, 40))
        ]
        for thread in threads:
            thread.start()
        try:
            rng = random.Random(0)
            deadline = time.monotonic() + PATIENCE
            for number in count(5):
                if number >= 5 + SWAPS and all(set(one) == {"1", "2", "3", "4", "head"} for one in seen):
                    break
                assert time.monotonic() < deadline, seen
                publish(origin, number)
                call = rng.choice([("promote", {"version": rng.choice([1, 2, 3, 4, "head"])}), ("rollback", None)])
                answer = admin.post(f"{URL}:{call[0]}", json=call[1], headers={"authorization": f"Bearer {TOKEN}"})
                assert answer.status_code in (200, 404, 409), answer.text  # 409: nothing to roll back to
        finally:
            done.set()
            for thread in threads:
                thread.join()
    assert failed == []
    swaps = registry.swaps
    assert swaps["promote"] + swaps["rollback"] + swaps["step"] + swaps["reload"] >= SWAPS

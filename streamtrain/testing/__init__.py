"""Fakes for tests, notebooks and benchmarks: a stream and a store of publications in the memory of one process.

`streamtrain.testing.stream.MemoryStream` takes the place of Kafka and passes the same contract suite
(tests/stream/test_contract.py); `streamtrain.testing.store.MemoryOrigin` takes the place of the models in Redis.

    >>> from streamtrain.testing.stream import MemoryStream
    >>> stream = MemoryStream.of({0: [{"user": "u1", "label": 1, "ts": 0.5}]})
    >>> stream.bounds()
    {0: Bounds(low=0, high=1)}
"""

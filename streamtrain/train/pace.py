"""Pace: how a loop goes about it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """How a loop goes about it.

    Attributes:
        batch_size: samples per step at most.
        batch_age: seconds that the first sample of a batch waits for others.
        ahead: batches that are pulled while one is in its step; 0 in `bulk`, at most the staleness in `bounded`.
        beat_seconds: between two signs of life.
        idle_seconds: between two looks for more samples.
        commit_seconds: between two commits of positions.
    """

    batch_size: int = 1024
    batch_age: float = 0.0
    ahead: int = 1
    beat_seconds: float = 1.0
    idle_seconds: float = 0.1
    commit_seconds: float = 5.0

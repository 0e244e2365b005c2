"""Shards with backups as an operator runs them: real processes, kill -9, pauses, and exact counts."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from streamtrain.ps.control import CHANNEL_OPTIONS, RemoteControl
from tests.cluster.test_ps_process import Process, free_addresses
from tests.ps.counting import Log
from tests.ps.raw import until
from tests.ps.test_backup import ENDS, Worker

"""Lead: what is done for all shards: checkpoints, publications, versions, and hearing of workers' predictions."""

from collections.abc import Callable, Sequence

from streamtrain.cluster.checkpoints import Checkpointer, Schedule
from streamtrain.cluster.leading import Leading
from streamtrain.cluster.publication_schedule import PublicationSchedule
from streamtrain.cluster.publications import Publications
from streamtrain.cluster.reports import Reports
from streamtrain.cluster.version_schedule import VersionSchedule
from streamtrain.ps.shards import Control
from streamtrain.settings import PublishSettings, Settings
from streamtrain.store.epochs import Epochs
from streamtrain.store.gate import Gate
from streamtrain.store.redis_dictionaries import RedisDictionaries
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_server import RedisServer
from streamtrain.store.redis_versions import RedisVersions


class Lead:
    """Done by the coordinator, or by shard 0 where there is none.

    Args:
        controls: of all shards, in order.
        settings: of the cluster.
        count: called with names of what happened.
        redis: where the model is published; None: nowhere.
        at_end: whether a last checkpoint is taken at the end.

    Attributes:
        reports: of workers.
        leading: what workers and users ask for.
        checkpoints: their schedule; None: there is no place for them.
        publications: theirs; None: there is no place for them.
    """

    def __init__(
        self,
        controls: Sequence[Control],
        settings: Settings,
        count: Callable[[str], object],
        redis: RedisServer | None,
        *,
        at_end: bool = False,
    ) -> None:
        self.reports = Reports()
        self.leading = Leading(self.reports, count)
        self.checkpoints: Schedule | None = None
        self.publications: PublicationSchedule | None = None
        self._versions: VersionSchedule | None = None
        kept, publish = settings.checkpoint, settings.publish
        if kept.url:
            checkpointer = Checkpointer(controls, Epochs(kept.url), keep=kept.keep, full_every=kept.full_every)
            self.checkpoints = self.leading.checkpoints = Schedule(checkpointer, kept.every, at_end=at_end, count=count)
        if redis is None:
            return
        dictionaries, gate = dictionaries_of(redis, publish), Gate(**dict(settings.gate))
        publications = Publications(
            controls, dictionaries, publish.model, publish.dtype, gate=gate, figures=self.reports.figures
        )
        self.publications = self.leading.schedule = PublicationSchedule(publications, publish.every, count)
        if publish.version_every:
            versions = RedisVersions(RedisModel(redis, publish.model))
            every, keep = publish.version_every, publish.keep
            self._versions = VersionSchedule(versions, dictionaries.head, every=every, keep=keep, count=count)

    def start(self) -> None:
        """Begins."""
        for schedule in (self.checkpoints, self.publications, self._versions):
            if schedule:
                schedule.start()

    def stop(self) -> None:
        """Ends, after what is under way. The shards must answer still."""
        for schedule in (self._versions, self.publications, self.checkpoints):
            if schedule:
                schedule.stop()


def redis_of(settings: PublishSettings) -> RedisServer | None:
    """Where a model is published; None: nowhere."""
    return RedisServer(settings.url, cluster=settings.cluster) if settings.url else None


def dictionaries_of(redis: RedisServer, settings: PublishSettings) -> RedisDictionaries:
    """The dictionaries of the published model."""
    return RedisDictionaries(RedisModel(redis, settings.model), log_bytes=settings.log_bytes)

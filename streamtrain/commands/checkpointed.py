"""A trainer that has learned what is in a checkpoint, to be compared with servers."""

from streamtrain.cluster.verify_trainer import Learned, without_zeros
from streamtrain.errors import CheckpointError
from streamtrain.learner import Learner
from streamtrain.model.batch import Batch
from streamtrain.model.model import Model
from streamtrain.store.checkpoint_origin import CheckpointOrigin
from streamtrain.store.epochs import Epochs
from streamtrain.store.origin import Floats


class CheckpointTrainer:
    """Predicts by the newest epoch below a URL, or by the one checkpoint that it is; see Trainer.

    Raises:
        CheckpointError: there is none, or it is of another schema, graph or optimizer.
        OriginUnavailable, PublicationCorrupt: it cannot be read.
    """

    def __init__(self, url: str, model: Model) -> None:
        publication = CheckpointOrigin(url, model.name).find(None)
        if publication is None:
            raise CheckpointError(f"there is no checkpoint at {url}")
        epochs = Epochs(url)
        place = epochs.place(publication.number) if publication.number in epochs.numbers() else url
        self._learner = Learner.load(place, model)
        self._learned = Learned(publication.run, without_zeros(publication.clock))

    def learned(self) -> Learned:
        """See Trainer."""
        return self._learned

    def predict(self, batch: Batch) -> Floats:
        """See Trainer."""
        return self._learner.predict(batch)

"""Real-time learning for recommenders, ads and search."""

from streamtrain.errors import (
    BadSample,
    CheckpointCorrupt,
    CheckpointError,
    ConfigError,
    SampleError,
    StreamtrainError,
    TooManyBadSamples,
)
from streamtrain.learner import Learned, Learner
from streamtrain.model.batch import Batch
from streamtrain.model.features import Categorical, Constant, Cross, Grid, Label, Numeric, Uniform, pool_sequence
from streamtrain.model.loader import load_model
from streamtrain.model.model import Model
from streamtrain.model.optimizers import FTRL, SGD, Adagrad, Adam, RowWiseAdagrad
from streamtrain.model.samples import REASONS
from streamtrain.model.schema import Schema
from streamtrain.quality.progressive import Metrics, ProgressiveValidation

__version__ = "0.1.0"

__all__ = [
    "FTRL",
    "REASONS",
    "SGD",
    "Adagrad",
    "Adam",
    "BadSample",
    "Batch",
    "Categorical",
    "CheckpointCorrupt",
    "CheckpointError",
    "ConfigError",
    "Constant",
    "Cross",
    "Grid",
    "Label",
    "Learned",
    "Learner",
    "Metrics",
    "Model",
    "Numeric",
    "ProgressiveValidation",
    "RowWiseAdagrad",
    "SampleError",
    "Schema",
    "StreamtrainError",
    "TooManyBadSamples",
    "Uniform",
    "load_model",
    "pool_sequence",
]

"""One learner on one stream, every sample predicted before it is learned from; prints a line of JSON.

    python benchmarks/harness/learners.py streamtrain --stream samples.jsonl --categorical user item --numeric age

quality.py runs it, peers in environments that may lack streamtrain. The stream is a file of JSON lines with `label`, or
`rare:600:something`, which is made of random numbers (`rare`). All learners are single processes with one thread. With
--seeds 3 the stream is learned three times, one of random numbers made anew each time, and figures are lists of three.

samples_per_s is per second of CPU, which other processes hardly change: the median over blocks of 1,024 samples. It
includes predicting and learning ready samples, growing tables, and metrics if the learner keeps them by itself. It
excludes starting, reading, parsing, hashing of ids, and compiling, which falls into a few of the blocks; spent_s
includes that. After --seconds of CPU a learner is stopped; there are figures at the marks that it has reached, and of
the whole stream if it has finished, and of what comes after its first twentieth ("later").
"""

import argparse
import json
import os
import re
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
from numpy.typing import NDArray

MARKS = (20_000, 50_000, 100_000, 200_000)
ROWS = 1 << 17  # of the table of Keras, to which ids are hashed
PARTS = 20  # of a stream, at whose ends LightGBM is trained; figures of "later" begin after the first
QUALITIES = ("auc", "log_loss", "auc_later", "log_loss_later", "of_mean", "calibration")
RARE_SAMPLES = 500_000
RARE_IDS = {"c0": 10, "c1": 100, "c2": 1_000, "c3": 3_000, "c4": 10_000}  # how many different ones, by field
BLOCK = 1024  # samples that are timed together; batches divide it
LONGEST = 30  # list, for Keras
EPSILON = 1e-6

Sample = dict[str, Any]


@dataclass(frozen=True)
class Learner:
    """What learns.

    Attributes:
        prepare: makes a batch of JSON messages ready; not timed.
        learn: predicts a ready batch, then learns from it; returns the predictions.
    """

    prepare: Callable[[list[bytes]], Any]
    learn: Callable[[Any], NDArray[np.floating[Any]]]


def streamtrain(args: argparse.Namespace) -> Learner:
    """Ours: a shape of SHAPES at the defaults, with what --replace says, or as they were before micro-batches."""
    import streamtrain as st

    features, graph = SHAPES[args.shape](args.categorical)
    plain = args.as_it_was or args.plain_numbers
    numeric = [st.Numeric(name, transform=None) if plain else st.Numeric(name) for name in args.numeric]
    model = st.Model(st.Schema(label="label", time="ts", features=[*features, *numeric]), graph, seed=args.seed)
    model = model.replace(**eval(f"dict({args.replace})", vars(st)))
    if args.as_it_was:
        model = model.replace(
            reduction="mean",
            micro_batch_size=None,
            embedding_optimizer=st.Adagrad(0.05, initial_accumulator=0.1),
            dense_optimizer=st.Adam(1e-3),
        )
    if args.micro_batch is not None:
        model = model.replace(micro_batch_size=args.micro_batch or None)
    learner = st.Learner(model, batch_size=args.batch)

    def prepare(messages: list[bytes]) -> Any:
        [(batch, bad)] = learner.read(messages)
        if bad:
            raise SystemExit(str(bad[0]))
        return batch

    return Learner(prepare, lambda batch: learner.learn(batch).predictions[:, 0])


Inputs = dict[str, Any]  # tensors by name of the feature
Shape = tuple[list[Any], Callable[[Inputs], Any] | None]  # features, and the graph


def _deep(names: Sequence[str]) -> Shape:
    """README's model: all there is, and one layer of 64."""
    import keras

    import streamtrain as st

    def graph(inputs: Inputs) -> Any:
        x = keras.layers.Concatenate()([*inputs.values()])
        return keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(64, "relu")(x))

    return [st.Categorical(name, dim=16) for name in names], graph


def _two_layers(names: Sequence[str]) -> Shape:
    """A large graph: layers of 256 and 128 over rows of 128, so that the first weight has 100,000 elements or more."""
    import keras

    import streamtrain as st

    def graph(inputs: Inputs) -> Any:
        x = keras.layers.Concatenate()([*inputs.values()])
        for width in (256, 128):
            x = keras.layers.Dense(width, "relu")(x)
        return keras.layers.Dense(1, "sigmoid")(x)

    return [st.Categorical(name, dim=128) for name in names], graph


def _wide_deep(names: Sequence[str]) -> Shape:
    """The same, plus one weight per id."""
    import keras

    import streamtrain as st

    wide = [st.Categorical(f"wide_{name}", dim=1, field=name, combiner="sum") for name in names]

    def graph(inputs: Inputs) -> Any:
        weights = [inputs.pop(one.name) for one in wide]
        x = keras.layers.Dense(64, "relu")(keras.layers.Concatenate()([*inputs.values()]))
        score = keras.layers.Add()([keras.layers.Dense(1)(x), *weights])
        return keras.layers.Activation("sigmoid")(score)

    return [*_deep(names)[0], *wide], graph


def _dcn(names: Sequence[str]) -> Shape:
    """DCN-v2: two cross layers, then one of 64 (https://arxiv.org/abs/2008.13535)."""
    import keras

    def graph(inputs: Inputs) -> Any:
        x0 = x = keras.layers.Concatenate()([*inputs.values()])
        for _ in range(2):
            x = keras.layers.Add()([keras.layers.Multiply()([x0, keras.layers.Dense(x0.shape[-1])(x)]), x])
        return keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(64, "relu")(x))

    return _deep(names)[0], graph


def _two_towers(names: Sequence[str]) -> Shape:
    """The first half of the fields against the others and the numbers: the product of two vectors of 32."""
    import keras

    def graph(inputs: Inputs) -> Any:
        first = [inputs.pop(name) for name in names[: (len(names) + 1) // 2]]
        towers = [
            keras.layers.Dense(32)(keras.layers.Dense(64, "relu")(keras.layers.Concatenate()(parts)))
            for parts in (first, [*inputs.values()])
        ]
        score = keras.layers.Dot(axes=1)(towers)
        return keras.layers.Dense(1, "sigmoid", kernel_initializer="ones")(score)

    return _deep(names)[0], graph


def _factorization_machine(names: Sequence[str]) -> Shape:
    """All pairs of ids, one weight per id, and numbers (https://doi.org/10.1109/ICDM.2010.127)."""
    import keras

    features, _ = _wide_deep(names)

    def graph(inputs: Inputs) -> Any:
        weights = [inputs.pop(f"wide_{name}") for name in names]
        vectors = [inputs.pop(name) for name in names]
        total = keras.layers.Add()(vectors)
        squares = keras.layers.Add()([keras.ops.square(one) for one in vectors])
        pairs = 0.5 * keras.ops.sum(keras.ops.square(total) - squares, -1, keepdims=True)
        return _scored([pairs, *weights], inputs)

    return features, graph


def _one_weight(names: Sequence[str]) -> Shape:
    """Logistic regression."""
    import streamtrain as st

    def graph(inputs: Inputs) -> Any:
        return _scored([inputs.pop(name) for name in names], inputs)

    return [st.Categorical(name, dim=1, combiner="sum") for name in names], graph


def _no_graph(names: Sequence[str]) -> Shape:
    """The graph that a model has which is given none."""
    import streamtrain as st

    return [st.Categorical(name, dim=16) for name in names], None


def _scored(terms: list[Any], numbers: Inputs) -> Any:
    """The sigmoid of some terms and a weight for each number."""
    import keras

    ones = keras.ops.ones_like(terms[0])
    linear = keras.layers.Dense(1)(keras.layers.Concatenate()([ones, *numbers.values()]) if numbers else ones)
    return keras.layers.Activation("sigmoid")(keras.layers.Add()([linear, *terms]))


SHAPES: dict[str, Callable[[Sequence[str]], Shape]] = {
    "one layer": _deep,
    "two layers of 256 and 128": _two_layers,
    "without a graph": _no_graph,
    "wide & deep": _wide_deep,
    "DCN-v2, two layers": _dcn,
    "two towers": _two_towers,
    "factorization machine, all pairs": _factorization_machine,
    "one weight per id": _one_weight,
}


def plain_keras(args: argparse.Namespace) -> Learner:
    """Plain Keras: one table of a fixed number of rows that ids are hashed to, and `train_on_batch`.

    The prediction is that of the training step, which is made before the weights change.
    """
    import keras
    import tensorflow as tf

    class Predicting(keras.Model):  # type: ignore[misc]
        """Returns its predictions from a training step."""

        def train_step(self, data: Any) -> dict[str, Any]:
            """Trains like `keras.Model.train_step`."""
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                predictions = self(x, training=True)
                loss = self.compute_loss(y=y, y_pred=predictions)
            weights = self.trainable_weights
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"predictions": predictions}

    keras.utils.set_random_seed(args.seed)
    table = keras.layers.Embedding(ROWS, 16)
    lists = [name for name in args.categorical if name in args.lists]
    single = [name for name in args.categorical if name not in args.lists]
    inputs, parts = [], []
    if single:
        inputs.append(keras.Input((len(single),), dtype="int32"))
        parts.append(keras.layers.Flatten()(table(inputs[-1])))
    for _ in lists:
        ids = keras.Input((LONGEST,), dtype="int32")
        there = keras.ops.expand_dims(keras.ops.cast(ids > 0, "float32"), -1)
        most = keras.ops.maximum(keras.ops.sum(there, 1), 1.0)
        inputs.append(ids)
        parts.append(keras.ops.sum(table(ids) * there, 1) / most)
    if args.numeric:
        inputs.append(keras.Input((len(args.numeric),)))
        parts.append(inputs[-1])
    x = parts[0] if len(parts) == 1 else keras.layers.Concatenate()(parts)
    output = keras.layers.Dense(1, "sigmoid")(keras.layers.Dense(64, "relu")(x))
    model = Predicting(inputs, output)
    model.compile(optimizer=keras.optimizers.Adam(args.rate), loss="binary_crossentropy", jit_compile=False)

    def prepare(messages: list[bytes]) -> Any:
        samples = [json.loads(message) for message in messages]
        made: list[Any] = []
        if single:
            made.append(np.array([[_row(name, one[name]) for name in single] for one in samples], np.int32))
        for name in lists:
            padded = np.zeros((len(samples), LONGEST), np.int32)
            for i, one in enumerate(samples):
                rows = [_row(name, value) for value in one[name][:LONGEST]]
                padded[i, : len(rows)] = rows
            made.append(padded)
        if args.numeric:
            made.append(np.array([[_log1p(one[name]) for name in args.numeric] for one in samples], np.float32))
        labels = np.array([[one["label"]] for one in samples], np.float32)
        return (made if len(made) > 1 else made[0]), labels

    return Learner(prepare, lambda batch: model.train_on_batch(*batch, return_dict=True)["predictions"][:, 0])


def vowpal_wabbit(args: argparse.Namespace) -> Learner:
    """Vowpal Wabbit with its defaults: linear, or with all pairs of fields."""
    options = "--quiet --loss_function logistic -b 22" + (" -q ::" if args.pairs else "")
    learner = import_module("vowpalwabbit").Workspace(options)

    def text(sample: Sample) -> str:
        fields = [f"|{chr(97 + i)} {' '.join(_tokens(name, sample[name]))}" for i, name in enumerate(args.categorical)]
        numbers = [f"|{chr(65 + i)} n:{_log1p(sample[name]):g}" for i, name in enumerate(args.numeric)]
        return f"{1 if sample['label'] else -1} {' '.join([*fields, *numbers])}"

    def prepare(messages: list[bytes]) -> Any:
        return [learner.example(text(json.loads(message))) for message in messages]

    def learn(examples: Any) -> NDArray[np.floating[Any]]:
        scores = np.empty(len(examples))
        for i, example in enumerate(examples):
            learner.learn(example)  # leaves the prediction that was made before
            scores[i] = example.get_simplelabel_prediction()
            learner.finish_example(example)
        result: NDArray[np.floating[Any]] = 1 / (1 + np.exp(-scores))
        return result

    return Learner(prepare, learn)


def river(args: argparse.Namespace) -> Learner:
    """River's logistic regression: with its default, plain SGD, or with AdaGrad."""
    module = import_module("river.optim")
    optimizer = {"sgd": module.SGD, "adagrad": module.AdaGrad}[args.optimizer]()
    model = import_module("river.linear_model").LogisticRegression(optimizer=optimizer)

    def features(sample: Sample) -> dict[str, float]:
        ids = {token: 1.0 for name in args.categorical for token in _tokens(name, sample[name])}
        return ids | {name: _log1p(sample[name]) for name in args.numeric}

    def prepare(messages: list[bytes]) -> Any:
        samples = [json.loads(message) for message in messages]
        return [(features(sample), bool(sample["label"])) for sample in samples]

    def learn(batch: Any) -> NDArray[np.floating[Any]]:
        predictions = np.empty(len(batch))
        for i, (x, y) in enumerate(batch):
            predictions[i] = model.predict_proba_one(x)[True]
            model.learn_one(x, y)
        return predictions

    return Learner(prepare, learn)


def lightgbm(args: argparse.Namespace) -> Learner:
    """100 trees that are trained anew on all of the past at each twentieth of the stream.

    Ids are categories by order of first occurrence, as LightGBM wants; lists are left out. Until it is trained first,
    it predicts the mean label so far.
    """
    module = import_module("lightgbm")
    single = [name for name in args.categorical if name not in args.lists]
    codes: dict[str, dict[object, int]] = {name: {} for name in single}
    with open(args.stream, "rb") as lines:
        every = -(-min(sum(1 for _ in lines), args.samples or sys.maxsize) // PARTS)
    rows: list[NDArray[np.floating[Any]]] = []
    labels: list[bool] = []
    trained: list[Any] = []  # the latest model, if there is one

    def prepare(messages: list[bytes]) -> Any:
        samples = [json.loads(message) for message in messages]
        ids = [[codes[name].setdefault(one[name], len(codes[name])) for name in single] for one in samples]
        made = np.array([[*of, *(one[name] for name in args.numeric)] for of, one in zip(ids, samples, strict=True)])
        return made, [bool(one["label"]) for one in samples]

    def learn(batch: Any) -> NDArray[np.floating[Any]]:
        x, y = batch
        if trained:
            predictions: NDArray[np.floating[Any]] = trained[0].predict(x)
        else:
            predictions = np.full(len(x), (sum(labels) + 0.5) / (len(labels) + 1))
        before = len(labels) // every
        rows.append(x)
        labels.extend(y)
        if len(labels) // every > before:
            past = module.Dataset(np.concatenate(rows), labels, categorical_feature=[*range(len(single))])
            settings = {"objective": "binary", "num_threads": 1, "verbosity": -1, "seed": args.seed}
            trained[:] = [module.train(settings, past, num_boost_round=100)]
        return predictions

    return Learner(prepare, learn)


LEARNERS = {"streamtrain": streamtrain, "lightgbm": lightgbm, "keras": plain_keras, "vw": vowpal_wabbit, "river": river}


def _row(name: str, value: object) -> int:
    """Row of the table of Keras; 0 is padding."""
    return 1 + zlib.crc32(f"{name}={value}".encode()) % (ROWS - 1)


def _log1p(value: float) -> float:
    """Our default transform of numbers, which peers get, too."""
    return float(np.sign(value) * np.log1p(abs(value)))


def _tokens(name: str, value: object) -> list[str]:
    """The ids of a field; a missing one is "", which is an id to ours, too."""
    values = value if isinstance(value, list) else [value]
    return [re.sub(r"[\s:|]", "_", f"{name}_{one}") for one in values]


def auc(predictions: NDArray[np.floating[Any]], labels: NDArray[np.bool_]) -> float:
    """The exact area under the ROC curve; ties count half."""
    _, inverse, counts = np.unique(predictions, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    positive = int(labels.sum())
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / (positive * (len(labels) - positive)))


def log_loss(predictions: NDArray[np.floating[Any]], labels: NDArray[np.bool_]) -> float:
    """The mean log loss."""
    p = np.clip(predictions.astype(float), EPSILON, 1 - EPSILON)
    return float(-np.log(np.where(labels, p, 1 - p)).mean())


def of_mean(predictions: NDArray[np.floating[Any]], labels: NDArray[np.bool_]) -> float:
    """The log loss divided by that of always predicting the mean label in hindsight."""
    return log_loss(predictions, labels) / log_loss(np.full(len(labels), labels.mean()), labels)


def rare(every: int, says: bool, seed: int) -> Iterator[bytes]:
    """Samples of five ids as JSON, one positive in about `every`.

    If ids say something, each has a normal effect on the log-odds, of deviation 0.6.
    """
    random = np.random.default_rng(seed)
    ids = {name: random.integers(count, size=RARE_SAMPLES) for name, count in RARE_IDS.items()}
    logits = np.full(RARE_SAMPLES, -np.log(every - 1))
    for name, count in RARE_IDS.items() if says else ():
        effects = random.normal(0, 0.6, count)
        logits += effects[ids[name]] - 0.6**2 / 2
    labels = random.random(RARE_SAMPLES) < 1 / (1 + np.exp(-logits))
    text = "{" + "".join(f'"{name}":%d,' for name in RARE_IDS) + '"ts":0,"label":%d}'
    for row in zip(*(column.tolist() for column in ids.values()), labels.tolist(), strict=True):
        yield (text % row).encode()


def batches(stream: str, size: int, most: int | None, seed: int = 0) -> Iterator[list[bytes]]:
    """The samples of a stream in batches."""
    with ExitStack() as stack:
        if stream.startswith("rare:"):
            _, every, says = stream.split(":")
            lines: Iterable[bytes] = rare(int(every), says == "something", seed)
        else:
            lines = stack.enter_context(open(stream, "rb"))
        taken = islice(lines, most)
        while batch := list(islice(taken, size)):
            yield batch


Ready = tuple[Any, list[bool]]  # a batch as a learner takes it, and its labels


def ready_for(learner: Learner, parts: Iterator[list[bytes]]) -> Iterator[Ready]:
    """Batches of messages as a learner takes them."""
    return ((learner.prepare(messages), [bool(json.loads(one)["label"]) for one in messages]) for messages in parts)


def figures(learner: Learner, batches: Iterable[Ready], seconds: float) -> dict[str, Any]:
    """The figures of one pass; those of a part of the stream are lists, which are empty if it was stopped before."""
    predictions: list[NDArray[np.floating[Any]]] = []
    labels: list[bool] = []
    blocks: list[float] = []  # seconds
    spent, whole = 0.0, True
    for ready, of_batch in batches:
        if spent > seconds:
            whole = False
            break
        began = time.process_time()
        predictions.append(np.asarray(learner.learn(ready)))
        took = time.process_time() - began
        spent += took
        if len(labels) % BLOCK == 0:
            blocks.append(0.0)
        blocks[-1] += took
        labels += of_batch
    predicted = np.concatenate(predictions)
    known = np.array(labels)
    timed = blocks[: len(known) // BLOCK]
    later, half = len(known) // PARTS, len(known) // 2
    ends: Sequence[int] = [mark for mark in MARKS if mark <= len(known)]
    return {
        "samples": len(known),
        "samples_per_s": BLOCK / statistics.median(timed),
        "spent_s": spent,
        "auc": [auc(predicted, known)] if whole else [],
        "log_loss": [log_loss(predicted, known)] if whole else [],
        "of_mean": [of_mean(predicted, known)] if whole else [],
        "calibration": [float(predicted[half:].mean() / known[half:].mean())] if whole else [],
        "auc_later": [auc(predicted[later:], known[later:])] if whole else [],
        "log_loss_later": [log_loss(predicted[later:], known[later:])] if whole else [],
        "auc_at": {mark: [auc(predicted[:mark], known[:mark])] if mark in ends else [] for mark in MARKS},
        "log_loss_at": {mark: [log_loss(predicted[:mark], known[:mark])] if mark in ends else [] for mark in MARKS},
    }


def of_seeds(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one pass for each seed; lists of them have one value for each."""
    make, is_file = LEARNERS[args.learner], not args.stream.startswith("rare:")
    found, ready = [], list[Ready]()
    for seed in range(args.seed, args.seed + args.seeds):
        args.seed = seed
        learner = make(args)
        of_stream = ready_for(learner, batches(args.stream, args.batch, args.samples, seed))
        if args.seeds == 1 or not is_file:
            found.append(figures(learner, of_stream, args.seconds))
        else:
            ready = ready or [*of_stream]
            found.append(figures(learner, ready, args.seconds))
    if args.seeds == 1:
        return found[0]
    medians = {name: statistics.median(one[name] for one in found) for name in ("samples_per_s", "spent_s")}
    lists = {name: [value for one in found for value in one[name]] for name in QUALITIES}
    return found[0] | medians | lists


def main() -> None:
    """Runs one learner."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("learner", choices=LEARNERS)
    parser.add_argument("--stream", required=True, help="file of JSON lines; or rare:600:something, or :nothing")
    parser.add_argument("--categorical", nargs="+", required=True)
    parser.add_argument("--lists", nargs="*", default=[], help="those of --categorical that are lists")
    parser.add_argument("--numeric", nargs="*", default=[])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, help="of streamtrain; 0: none")
    parser.add_argument("--as-it-was", action="store_true", help="streamtrain, at its defaults before micro-batches")
    parser.add_argument("--replace", default="", metavar="CODE", help="options of streamtrain's Model, as arguments")
    parser.add_argument("--shape", choices=SHAPES, default="one layer", help="of streamtrain's model")
    parser.add_argument("--plain-numbers", action="store_true", help="streamtrain, with numbers as they are")
    parser.add_argument("--optimizer", choices=("sgd", "adagrad"), default="sgd", help="of River")
    parser.add_argument("--rate", type=float, default=1e-3, help="of Keras's Adam")
    parser.add_argument("--pairs", action="store_true", help="Vowpal Wabbit with all pairs of fields")
    parser.add_argument("--samples", type=int, help="learn only the first ones")
    parser.add_argument("--seconds", type=float, default=120.0, help="of CPU, after which it is stopped")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="passes, each with the next seed")
    args = parser.parse_args()
    os.environ |= dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"), "1")
    print(json.dumps(of_seeds(args)))


if __name__ == "__main__":
    main()

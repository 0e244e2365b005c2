"""Will a flight arrive more than 15 minutes late? The model of `streamtrain demo`.

One weight per id, moved by plain SGD with a constant rate: it never settles, so it follows the weather and the jams of
the day. The first thing to try with a stream of your own.

Measured, one pass, every flight predicted before it is learned from (`python benchmarks/quality.py flights`):

    batch size     16       32       64       128      256
    AUC            0.7826   0.7850   0.7790   0.7617   0.7333
    log loss       0.4625   0.4472   0.4483   0.4617   0.4835

The rate was chosen on this stream, so expect a little less of another. Vowpal Wabbit with all quadratic features gets
0.7493 on it.

A flight's label is learned as soon as the flight was due to leave; with labels that arrive hours later, figures fall.
"""

import keras

import streamtrain as st

IDS = ("carrier", "tail", "flight", "origin", "dest", "route", "hour", "weekday", "month")

schema = st.Schema(
    label="label",
    time="ts",
    features=[st.Categorical(name, dim=1, init=st.Constant(0.0)) for name in IDS],
)


def graph(inputs):
    return keras.layers.Activation("sigmoid")(keras.layers.Add()(list(inputs.values())))


model = st.Model(schema, graph, loss="binary_crossentropy", embedding_optimizer=st.SGD(2.0), name="flights")

"""Will a flight arrive more than 15 minutes late? The model of `streamtrain demo`.

There is one weight per id, trained by plain SGD with a constant rate. It never converges, so it follows the weather and
the congestion of the day. Try this model first on a stream of your own.

Results of one pass, with every flight predicted before it is learned (`python benchmarks/example_models.py flights`):

    rate           0.03     0.06     0.1
    AUC            0.7880   0.7930   0.7918
    log loss       0.4383   0.4360   0.4427

The rate was chosen on this stream, so expect slightly worse results on others. Vowpal Wabbit with all quadratic
features reaches an AUC of 0.7493.

A flight's label is learned as soon as the flight is due to leave. With labels that arrive hours later, the AUC falls.
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


model = st.Model(schema, graph, loss="binary_crossentropy", embedding_optimizer=st.SGD(0.06), name="flights")

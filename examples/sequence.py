"""Attention over a user's history: a small Deep Interest Network (Zhou et al. 2018).

The items of the history and the candidate share one embedding table. With `combiner=None`, the graph receives the
sequence, padded to `max_length`, and a mask.
"""

import keras
from keras import ops

import streamtrain as st

DIM = 16

schema = st.Schema(
    label="label",
    time="ts",
    features=[
        st.Categorical("user", dim=DIM),
        st.Categorical("item", dim=DIM, min_count=2, expire_after="30d"),
        st.Categorical("history", dim=DIM, table="item", combiner=None, max_length=50),
    ],
)


@keras.saving.register_keras_serializable(package="streamtrain.examples")
class Attention(keras.layers.Layer):
    """The mean of a sequence [batch, length, dim], weighted by how well each fits a query [batch, dim]; masked."""

    def call(self, query, sequence, mask):
        scores = ops.sum(ops.expand_dims(query, 1) * sequence, axis=-1) / DIM**0.5
        scores = ops.where(mask, scores, -1e9)
        weights = ops.softmax(scores, axis=-1) * ops.cast(mask, "float32")
        return ops.sum(ops.expand_dims(weights, -1) * sequence, axis=1)


def graph(inputs):
    interest = Attention()(inputs["item"], inputs["history"], inputs["history_mask"])
    x = keras.layers.Concatenate()([inputs["user"], inputs["item"], interest, inputs["item"] * interest])
    x = keras.layers.Dense(64, activation="relu")(x)
    return keras.layers.Dense(1, activation="sigmoid")(x)


model = st.Model(schema, graph, embedding_optimizer=st.RowWiseAdagrad(), name="sequence")

"""Will a user rate a movie 4 or 5? A factorization machine on MovieLens 100K, learned from one rating after another.

Fields: ts, label, user, item, genres (a list), year, zip. Run it on the stream as JSON lines:

    streamtrain learn movielens-100k.jsonl.gz --model examples/movielens.py:model --batch-size 2

Measured, one pass, every rating predicted before it is learned from (`python benchmarks/quality.py movielens`):

    batch size     2        1        8        64
    AUC            0.7713   0.7732   0.7640   0.7418
    log loss       0.5663   0.5646   0.5730   0.5923

Over three seeds 0.7712 to 0.7717 at batch size 2. Rates and features were chosen on this stream, so expect a little
less of another. Vowpal Wabbit with all quadratic features gets 0.7669 on it.

Users rate in bursts, so what the model has not yet learned of a burst costs most: small batches are worth their price.
"""

import keras

import streamtrain as st

ZERO, FAST, SLOW = st.Constant(0.0), st.Adagrad(0.3), st.Adagrad(0.17)

schema = st.Schema(
    label="label",
    time="ts",
    features=[
        st.Categorical("user_wide", field="user", dim=1, init=ZERO, optimizer=FAST),
        st.Categorical("item_wide", field="item", dim=1, init=ZERO, optimizer=FAST),
        st.Categorical("genres_wide", field="genres", dim=1, init=ZERO, optimizer=FAST),
        st.Categorical("year_wide", field="year", dim=1, init=ZERO, optimizer=FAST),
        st.Categorical("zip_wide", field="zip", dim=1, init=ZERO, optimizer=FAST),
        st.Cross("user_genres_wide", of=("user", "genres"), dim=1, init=ZERO, optimizer=FAST),
        st.Categorical("user", dim=8, optimizer=SLOW),
        st.Categorical("item", dim=8, optimizer=SLOW),
        st.Categorical("genres", dim=8, optimizer=SLOW),
    ],
)


def graph(inputs):
    wide = keras.layers.Add()([tensor for name, tensor in inputs.items() if name.endswith("_wide")])
    movie = keras.layers.Add()([inputs["item"], inputs["genres"]])
    affinity = keras.layers.Dot(axes=1)([inputs["user"], movie])
    return keras.layers.Activation("sigmoid")(keras.layers.Add()([wide, affinity]))


model = st.Model(schema, graph, loss="binary_crossentropy", reduction="sum", name="movielens")

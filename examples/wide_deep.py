"""Wide & deep (Cheng et al. 2016): one weight per id and cross, next to a network over embeddings and numbers.

Each sample has two tasks: whether an ad was clicked and, if so, whether something was bought. The second label is
optional: the model learns the first task from samples without it.
"""

import keras

import streamtrain as st

IDS = ("user", "ad", "advertiser", "page", "device")
ZERO, SPARSE = st.Constant(0.0), st.FTRL(0.1, l1=0.001)

schema = st.Schema(
    label=["click", st.Label("purchase", optional=True)],
    time="ts",
    weight="weight",
    features=[
        *(st.Categorical(f"{name}_wide", field=name, dim=1, init=ZERO, optimizer=SPARSE) for name in IDS),
        st.Cross("user_advertiser_wide", of=("user", "advertiser"), dim=1, init=ZERO, optimizer=SPARSE),
        *(st.Categorical(name, dim=16, min_count=2, expire_after="30d") for name in IDS),
        st.Categorical("interests", dim=16, max_length=20, default="none"),
        st.Numeric("price", transform="log1p"),
        st.Numeric("age_of_ad", transform="standardize", mean=7.0, stddev=3.0, default=7.0),
    ],
)


def graph(inputs):
    wide = keras.layers.Add()([tensor for name, tensor in inputs.items() if name.endswith("_wide")])
    deep = keras.layers.Concatenate()([tensor for name, tensor in inputs.items() if not name.endswith("_wide")])
    deep = keras.layers.Dense(64, activation="relu")(deep)
    deep = keras.layers.Dense(32, activation="relu")(deep)
    logits = {label: keras.layers.Add()([wide, keras.layers.Dense(1)(deep)]) for label in ("click", "purchase")}
    return {label: keras.layers.Activation("sigmoid")(logit) for label, logit in logits.items()}


model = st.Model(
    schema,
    graph,
    loss="binary_crossentropy",
    loss_weights={"purchase": 2.0},
    name="wide-deep",
)

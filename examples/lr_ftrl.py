"""Logistic regression by FTRL-proximal with L1 (McMahan et al. 2013): one weight per id and cross, most exactly zero.

The classic of ad click prediction, on the flights of `streamtrain demo`: will one arrive more than 15 minutes late?
The graph has no weights of its own; all is rows of dim 1. L1 keeps a weight at 0 until its evidence is strong enough.

Measured, one pass, every flight predicted before it is learned from (`python benchmarks/quality.py lr_ftrl`):

    batch size     64       16       256
    AUC            0.7695   0.7848   0.7273
    log loss       0.4578   0.4426   0.4981

83,742 rows, of which 86% are exactly zero. By `l1`, at batch size 64 (`python benchmarks/sparsity.py`):

    l1             0        1        3        5
    AUC            0.7643   0.7685   0.7695   0.7677
    zeros          0%       58%      86%      93%

Rates, crosses and l1 were chosen on this stream, so expect a little less of another. Vowpal Wabbit with all quadratic
features gets 0.7493 on it; what it lacks are the crosses of three and four, which stand for single days.

A row that is zero still is a row: it keeps its optimizer's state, and takes memory.
"""

import keras

import streamtrain as st

IDS = ("carrier", "tail", "flight", "origin", "dest", "route", "hour", "weekday", "month")
CROSSES = (
    *(("origin", "hour"), ("dest", "hour"), ("carrier", "hour"), ("weekday", "hour"), ("month", "hour")),
    *(("origin", "month"), ("dest", "month"), ("carrier", "month"), ("flight", "month"), ("tail", "month")),
    *(("month", "weekday"), ("carrier", "origin")),
    *(("origin", "month", "weekday"), ("dest", "month", "weekday"), ("carrier", "month", "weekday")),
    *(("month", "weekday", "hour"), ("origin", "month", "weekday", "hour")),
)
ZERO = st.Constant(0.0)

schema = st.Schema(
    label="label",
    time="ts",
    features=[
        *(st.Categorical(name, dim=1, init=ZERO) for name in IDS),
        *(st.Cross("_".join(names), dim=1, of=names, init=ZERO) for names in CROSSES),
    ],
)


def graph(inputs):
    return keras.layers.Activation("sigmoid")(keras.layers.Add()(list(inputs.values())))


model = st.Model(schema, graph, embedding_optimizer=st.FTRL(0.3, l1=3.0), reduction="sum", name="lr-ftrl")

"""W1 with an output beside it that tells whether a sample has been learned."""

from dataclasses import replace
from typing import Any

import workloads

import streamtrain as st


def _probed() -> st.Model:
    """W1, and "seen": how many times the sample's probe has been learned, exactly.

    All fields have defaults, so that a probe can be asked for alone.
    """
    base = workloads.model(workloads.WORKLOADS["w1"])
    probe = st.Categorical("probe", dim=1, combiner="sum", default="", init=st.Constant(0.0), optimizer=st.SGD(1.0))

    def graph(inputs: dict[str, Any]) -> Any:
        rows = {name: tensor for name, tensor in inputs.items() if name != "probe"}
        return {"label": base.graph(rows), "seen": inputs["probe"]}

    return st.Model(
        st.Schema(
            label=["label", st.Label("seen", kind="real", optional=True)],
            time="ts",
            features=[*(replace(one, default=0) for one in base.schema.features), probe],
        ),
        graph,
        loss={"label": "binary_crossentropy", "seen": lambda labels, predictions: -predictions[:, 0]},
        embedding_optimizer=base.embedding_optimizer,
        dense_optimizer=base.dense_optimizer,
        reduction="sum",
    )


model = _probed()

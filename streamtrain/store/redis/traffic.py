"""The traffic of a model in Redis, next to its labels: all servers follow it, and changes are in the same history."""

from collections.abc import Mapping

from streamtrain.errors import ArmNotLoaded, PublicationCorrupt, Superseded, TrafficRefused
from streamtrain.store.publication import PROD, parse_version_number
from streamtrain.store.redis.model import RedisModel
from streamtrain.store.redis.scripts import TRAFFIC
from streamtrain.store.redis.versions import RedisVersions
from streamtrain.store.traffic import HEAD, Arm, Traffic, check_weights


class RedisTraffic:
    """The traffic of a model. Thread-safe.

    Every method may raise OriginUnavailable, and PublicationError.
    """

    def __init__(self, model: RedisModel) -> None:
        self._model, self._own = model, model.keys.model

    def read(self) -> Traffic | None:
        """The traffic in force; None: all requests go to what is served. Where Redis has lost it, as it was read last.

        Raises:
            PublicationCorrupt: it is damaged.
        """
        return self._parsed(self._model.decided().traffic)

    def change(
        self, weights: Mapping[str, float], who: str, why: str = "", *, mirror: str | None = None, force: bool = False
    ) -> Traffic:
        """Divides requests among arms, on all servers.

        Args:
            weights: percentages by arm: "prod" for what is served, "head", a version, a label, another model, or
                MODEL@LABEL; they add up to 100. Empty: as they are.
            who: for the history.
            why: for the history.
            mirror: an arm that also predicts all requests; "none": nothing does; None: as it is.
            force: whether to divide them even if a server that lives has not loaded an arm.

        Raises:
            ConfigError: weights are negative, or do not add up to 100.
            TrafficRefused: there is no such arm, or a server has not loaded it. Nothing has changed.
            Superseded: it has been changed meanwhile.
        """
        text = self._read()
        before = self._parsed(text) or Traffic(((Arm(PROD, self._own, PROD), 100.0),))
        if weights:
            check_weights(weights)
        arms = [(self.resolve(name), float(weight)) for name, weight in weights.items()] or [*before.arms]
        copied = None if mirror == "none" else before.mirror if mirror is None else self.resolve(mirror)
        if copied is not None and mirror is None and not self._is_there(copied):
            copied = None  # as it has no effect
        if gone := [arm.name for arm, weight in arms if weight and not self._is_there(arm)]:
            raise TrafficRefused(f"there is no {' or '.join(gone)} any more, so give the weights of all arms")
        resting = {arm.name for arm, weight in arms if not weight}
        after = Traffic(tuple(arms), copied, tuple(one for one in before.stopped if one[0] in resting))
        if not force:
            used = [arm for arm, weight in after.arms if weight] + ([copied] if copied else [])
            self._check_loaded({arm.name: arm for arm in used})
        self._set(text, before, after, who, why)
        return after

    def missing(self, traffic: Traffic) -> list[str]:
        """Names of its arms that are not there any more: what is served gets their requests."""
        return [arm.name for arm in traffic.every_arm if not self._is_there(arm)]

    def _is_there(self, arm: Arm) -> bool:
        return arm.at == PROD or self._has(arm.model, arm.at)

    def stop(self, traffic: Traffic, name: str, who: str, why: str) -> Traffic:
        """Gives an arm no more requests.

        Raises:
            Superseded: the traffic is not as given any more.
        """
        text = self._read()
        if self._parsed(text) != traffic:
            raise Superseded(f"the traffic of {self._model.name} was changed meanwhile")
        after = traffic.stop(name, self._own, why)
        self._set(text, traffic, after, who, why)
        return after

    def resolve(self, name: str) -> Arm:
        """What the name of an arm means.

        Raises:
            TrafficRefused: nothing, or a label as well as a model.
        """
        if name == PROD:
            return Arm(name, self._own, PROD)
        model, separator, at = name.rpartition("@")
        if separator:
            if model != self._own and not self._is_published(model):
                raise TrafficRefused(f"there is no model {model!r}")
            if at != PROD and not self._has(model, at):
                raise TrafficRefused(f"model {model} has no label or version {at!r}")
            return Arm(name, model, at)
        is_own, is_model = self._has(self._own, name), name != self._own and self._is_published(name)
        if is_own and is_model:
            raise TrafficRefused(
                f"{name!r} is a label of {self._own} and a model: write {self._own}@{name} or {name}@{PROD}"
            )
        if is_model:
            return Arm(name, name, PROD)
        if not is_own:
            labels = ", ".join([PROD, HEAD, *(one for one in self._versions(self._own).labels() if one != PROD)])
            raise TrafficRefused(
                f"{self._own} has no label or version {name!r}, and no such model is published; labels are {labels}"
            )
        return Arm(name, self._own, name)

    def _check_loaded(self, arms: Mapping[str, Arm]) -> None:
        """Every server of the model that lives must have loaded the arms."""
        living = {server for of in self._versions(self._own).holders().values() for server in of}
        if not living:
            raise ArmNotLoaded(f"no server serves {self._own} now, so nothing is loaded")
        for arm in arms.values():
            holders = self._versions(arm.model).holders()
            if arm.at == PROD:
                having = {server for of in holders.values() for server in of}
            else:
                number = 0 if arm.at == HEAD else self._number(arm.model, arm.at)
                having = {*holders.get(number, [])}
            if lacking := sorted(living - having):
                way_out = (
                    "wait until it is, or label the version so that it is loaded"
                    if arm.model == self._own
                    else f"start that server with {self._own} and {arm.model} in serve.models, or wait until it is"
                )
                raise ArmNotLoaded(
                    f"{arm.name} is not loaded on {', '.join(lacking)}, so requests there could not be predicted with "
                    f"it: {way_out}"
                )

    def _has(self, model: str, at: str) -> bool:
        versions = self._versions(model)
        if at == HEAD:
            return versions.head() is not None
        number = parse_version_number(at)
        return at in versions.labels() or (number is not None and versions.find(number) is not None)

    def _number(self, model: str, at: str) -> int:
        found = self._versions(model).labels().get(at, parse_version_number(at))
        if found is None:
            raise TrafficRefused(f"model {model} has no label or version {at!r}")
        return found

    def _is_published(self, model: str) -> bool:
        if not model.replace("-", "").replace("_", "").isalnum():
            return False
        versions = self._versions(model)
        return versions.head() is not None or bool(versions.all())

    def _versions(self, model: str) -> RedisVersions:
        return RedisVersions(self._model if model == self._own else RedisModel(self._model.server, model))

    def _read(self) -> bytes:
        found = self._model.server.call("GET", self._model.keys.traffic)
        return b"" if found is None else bytes(found)

    def _parsed(self, text: bytes) -> Traffic | None:
        try:
            return Traffic.from_json(text) if text else None
        except ValueError as exc:
            raise PublicationCorrupt(f"the traffic of {self._model.name} is damaged: {exc}") from exc

    def _set(self, text: bytes, before: Traffic, after: Traffic, who: str, why: str) -> None:
        if not self._model.run(TRAFFIC, text, after.to_json(), who, why, str(before), str(after)):
            raise Superseded(f"the traffic of {self._model.name} was changed meanwhile: try again")

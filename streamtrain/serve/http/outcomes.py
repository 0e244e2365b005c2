"""Where clients tell what became of predictions."""

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta, Struct
from starlette.routing import BaseRoute

from streamtrain.serve.errors import RETRY_SECONDS, HTTPError
from streamtrain.serve.feedback.outcomes import BadOutcome, Outcome, OutcomeBatch, parse_outcomes
from streamtrain.serve.feedback.progress import OUTCOMES
from streamtrain.serve.http.requests import read_body
from streamtrain.serve.http.responses import any_of, documented, json_response, request_body
from streamtrain.serve.service.service import Service


class OutcomesWritten(Struct):
    """Where the outcomes are."""

    offsets: Annotated[
        list[str | None], Meta(description="Of each, as x-min-offset takes it; null: it is not known to be written.")
    ]


BODIES = (Outcome, OutcomeBatch, OutcomesWritten)


def routes(service: Service) -> list[BaseRoute]:
    """The route."""
    api = APIRouter(tags=["outcomes"])
    reference = [{"$ref": f"#/components/schemas/{one.__name__}"} for one in (Outcome, OutcomeBatch)]

    @api.post(
        "/v1/models/{name}/outcomes",
        summary="Tell what became of predictions",
        responses=documented(OutcomesWritten, 400, 404, 409, 413, 503),
        openapi_extra=request_body(any_of(reference)),
    )
    async def outcomes(name: str, request: Request) -> Response:
        service.find(name)
        writer = service.feedback.outcomes
        if writer is None:
            raise HTTPError(409, "this server takes no outcomes: set serve.outcomes, or join.outcomes")
        with service.admission.admit() as admitted:
            body = await read_body(service, request, admitted)
            try:
                given = parse_outcomes(body)
                if len(given) > service.config.max_instances:
                    raise HTTPError(
                        413,
                        f"a request may have at most {service.config.max_instances} outcomes, not {len(given)}",
                    )
                messages = writer.encode(given)
            except BadOutcome as exc:
                writer.counts["refused"] += 1
                raise HTTPError(400, f"nothing was written: {exc}") from exc
            written = await writer.write(messages)
        offsets = [None if at is None else f"{OUTCOMES}{at.partition}:{at.offset}" for at in written.places]
        if not written.failure:
            return json_response(OutcomesWritten(offsets))
        missing = sum(one is None for one in offsets)
        error = f"{missing} of {len(offsets)} outcomes are not known to be written: {written.failure}"
        return json_response({"error": error, "offsets": offsets}, 503, {"retry-after": RETRY_SECONDS})

    return api.routes

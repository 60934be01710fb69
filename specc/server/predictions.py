"""Predicted outputs of requests: what a client expects, and what usage says of it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from specc.errors import RequestError
from specc.runtime.engine import Engine
from specc.runtime.requests.predicted import predicted_ids, takes_predictions
from specc.server.errors import bad_request
from specc.server.generate import Output

_log = logging.getLogger("specc.serve")


def read_prediction(prediction: Any, engine: Engine) -> list[int] | None:
    """Token ids of what a client expects of an output; None where it expects nothing.

    Nor does it count where the engine has no steps for it: the output is the same, and clients send
    it to any server. The log says so once.

    Raises:
        ApiError: it has another form, or is too long.
    """
    if prediction is None:
        return None
    if not takes_predictions(engine):
        _say(", ".join(engine.plans))
        return None
    try:
        return predicted_ids(engine, prediction)
    except RequestError as error:
        raise bad_request(error.found, error.needed, error.do, "prediction") from error


def prediction_usage(outputs: Sequence[Output]) -> dict[str, int]:
    """Tokens of a prediction that outputs which have ended have, and that they do not have."""
    found = [output.metrics for output in outputs if output.metrics]
    return {
        "accepted_prediction_tokens": sum(x.accepted_prediction_tokens for x in found),
        "rejected_prediction_tokens": sum(x.rejected_prediction_tokens for x in found),
    }


@functools.cache
def _say(plans: str) -> None:
    _log.warning(
        "a request has a prediction, which has no effect here: steps of this engine (%s) take"
        " nothing of the host; compile it with --draft suffix, beside another draft with --combine"
        " best",
        plans,
    )

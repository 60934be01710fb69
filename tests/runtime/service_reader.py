"""What reads the updates of a request that was handed to a service."""

from __future__ import annotations

import threading

from specc.runtime.service.service import Service, Update
from specc.sampling.params import SamplingParams


class Reader:
    """Updates of one request."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.has_ended = threading.Event()

    def __call__(self, update: Update) -> None:
        self.updates.append(update)
        if update.is_last:
            self.has_ended.set()

    def wait(self) -> Update:
        assert self.has_ended.wait(30), "no last update"
        return self.updates[-1]

    @property
    def tokens(self) -> list[int]:
        return [token for update in self.updates for token in update.token_ids]

    def output(self) -> list[int]:
        """All tokens, of a request that does not fail."""
        assert self.wait().error is None
        return self.tokens


def ask(service: Service, prompt: list[int], params: SamplingParams) -> Reader:
    reader = Reader()
    service.submit(prompt, params, reader)
    return reader

"""Lookups: steps make them, the host makes the same for votes and to choose a plan."""

from __future__ import annotations

from specc.drafters.drafter import Drafter
from specc.drafters.lookup import Lookup
from specc.runtime.drafters.host_drafter import HostDrafter, Tokens
from specc.runtime.drafters.suffix_index import SuffixIndex


class HostLookup(HostDrafter):
    """Looks up what followed the longest suffix of a request that occurred in it before."""

    def propose(self, request: Tokens, num_tokens: int, drafter: Drafter) -> tuple[list[int], int]:
        assert isinstance(drafter, Lookup)
        if request.suffix_index is None:
            request.suffix_index = SuffixIndex()
        index = request.suffix_index
        index.extend(request.token_ids[len(index) :])
        return index.propose(num_tokens, drafter.ngram)


HOST = HostLookup

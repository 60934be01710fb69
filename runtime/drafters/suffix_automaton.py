"""Every substring of a growing text, and where it ended last.

The suffix automaton (Blumer et al., 1985) has one state for each set of substrings that end at the
same places, at most 2n of them, and grows by amortized O(1) a token. The suffixes of the text lie
on the path of links from the state of the whole text to the root, longer ones first.

Where a state's substrings ended last is not stored in the state: each token would move a whole
path. Each place owns the part of its path that no later place has taken, and remembers which took
the rest, and up to which length: that is the last one that took anything, since one that takes a
substring takes all its suffixes. So to find the last place of a state is to follow takers, with
the path compressed, and a token touches only the owners of its path. That is the `access` of
link-cut trees (Sleator and Tarjan, 1983), amortized O(log n) owners a token.
"""

from __future__ import annotations

from array import array

_ROOT = 0
_NOWHERE = -1
_NO_TOKEN = -2


class SuffixAutomaton:
    """States are numbers; place n is after the n-th token, so `tokens[n]` follows it.

    Token ids are not negative; -1 may separate texts.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        # of each state: longest substring, link, a place at which it ended, and transitions: the
        # first one in two arrays, further ones in a dict, for most states have one
        self._length = array("i", [0])
        self._link = array("i", [_NOWHERE])
        self._place = array("i", [0])
        self._token = array("i", [_NO_TOKEN])
        self._next = array("i", [_NOWHERE])
        self._more: dict[int, dict[int, int]] = {}
        # of each place: its state; and of the last place that took from its path: up to which
        # length, at which state, and which place
        self._state = array("i", [_ROOT])
        self._taken = array("i", [0])
        self._taken_at = array("i", [_ROOT])
        self._taker = array("i", [0])

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add a token; its place is not known to `find` before `take`."""
        length, link, more = self._length, self._link, self._more
        firsts, nexts = self._token, self._next
        state = self._state[-1]
        new = self._add_state(length[state] + 1)
        self.tokens.append(token)
        self._state.append(new)
        self._taken.append(0)
        self._taken_at.append(_ROOT)
        self._taker.append(0)
        # `step` and `_set` are written out: this loop is most of the cost of a token
        while state != _NOWHERE:
            first = firsts[state]
            if first == token:
                following = nexts[state]
                break
            if first == _NO_TOKEN:
                firsts[state], nexts[state] = token, new
            elif (others := more.get(state)) is None:
                more[state] = {token: new}
            elif token in others:
                following = others[token]
                break
            else:
                others[token] = new
            state = link[state]
        else:
            link[new] = _ROOT
            return
        if length[following] == length[state] + 1:
            link[new] = following
            return
        copy = self._copy(following, length[state] + 1)
        link[following] = link[new] = copy
        while state != _NOWHERE and self.step(state, token) == following:
            self._set(state, token, copy)
            state = link[state]

    def take(self) -> list[tuple[int, int]]:
        """Make the end of the text the last place of all its suffixes.

        Returns:
            Where they ended before: pairs of a length and a place, lengths falling, places rising.
            A suffix ended at the place of the last pair that is no shorter than the suffix.
        """
        length, link, last = self._length, self._link, self._place
        taken, taken_at, taker = self._taken, self._taken_at, self._taker
        now = len(self.tokens)
        state = self._state[now]
        last[state] = now
        state = link[state]
        # first look, then take: taking changes what is found
        path: list[tuple[int, int]] = []
        while state > _ROOT:
            place = last[state]
            if taken[place] >= length[state]:
                place = self.find(state)
            path.append((state, place))
            state = taken_at[place] if place else link[state]
        places: list[tuple[int, int]] = []
        for state, place in path:
            if place:
                limit = length[state]
                places.append((limit, place))
                taken[place], taken_at[place], taker[place] = limit, state, now
            else:
                last[state] = now
        return places

    def find(self, state: int) -> int:
        """The last place that was taken for a state's substrings; 0 if there is none."""
        place, length = self._place[state], self._length[state]
        taken, taker = self._taken, self._taker
        if taken[place] < length:
            return place
        chain = []
        while taken[place] >= length:
            chain.append(place)
            place = taker[place]
        self._place[state] = place
        # let each of them name the last one that took as much, for the states in between
        for earlier in reversed(chain[:-1]):
            later, limit = taker[earlier], taken[earlier]
            while taken[later] >= limit:
                later = taker[later]
            taker[earlier] = later
        return place

    def step(self, state: int, token: int) -> int:
        """State of the substring with one more token; -1 if the text does not have it."""
        if self._token[state] == token:
            return self._next[state]
        more = self._more.get(state)
        return _NOWHERE if more is None else more.get(token, _NOWHERE)

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Longest suffix of (a substring, token) in the text, as a state and a length.

        Args:
            state: of the substring.
            length: of the substring.
            token: that follows it.
        """
        while (following := self.step(state, token)) == _NOWHERE:
            state = self._link[state]
            if state == _NOWHERE:
                return _ROOT, 0
            length = self._length[state]
        return following, length + 1

    def shorten(self, state: int) -> tuple[int, int]:
        """The longest suffix that ends at more places, as a state and a length."""
        state = self._link[state]
        return state, self._length[state]

    def _add_state(self, length: int) -> int:
        self._length.append(length)
        self._link.append(_NOWHERE)
        self._place.append(0)
        self._token.append(_NO_TOKEN)
        self._next.append(_NOWHERE)
        return len(self._length) - 1

    def _copy(self, state: int, length: int) -> int:
        """A state with the same transitions and places, for its shorter substrings."""
        copy = self._add_state(length)
        self._link[copy] = self._link[state]
        self._place[copy] = self._place[state]
        self._token[copy] = self._token[state]
        self._next[copy] = self._next[state]
        if (others := self._more.get(state)) is not None:
            self._more[copy] = others.copy()
        return copy

    def _set(self, state: int, token: int, following: int) -> None:
        if self._token[state] in (token, _NO_TOKEN):
            self._token[state], self._next[state] = token, following
        else:
            self._more.setdefault(state, {})[token] = following

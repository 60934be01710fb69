"""How many ranks run an engine, and how long they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass

from specc.errors import ConfigError

# more than rank 0 takes to see and to tell that another one is silent
_LATER_S = 3.0
# signs come twice a second from a thread of their own, however long a pass takes
_SILENT_S = 7.0
_OF_TIMEOUT = 5


@dataclass(frozen=True)
class RankOptions:
    """Of an engine that several processes run.

    Args:
        num_ranks: processes; 1 is this one alone.
        timeout_s: seconds after which a rank that does not get on with an order counts as hung,
            and rank 0 as gone if it gives no sign of life.
        start_timeout_s: seconds until all ranks have to be there and to have loaded the engine.
        ends_process: where a rank is lost, this process ends too, with exit code 1, when open
            requests have had time to get their errors. Else every call raises the error.
        draft_ranks: ranks that run the drafts.
        oversubscribes: ranks of this machine may be more than its cores.
    Raises:
        ConfigError: a number that cannot be.
    """

    num_ranks: int
    timeout_s: float = 30.0
    start_timeout_s: float = 300.0
    ends_process: bool = True
    draft_ranks: int = 1
    oversubscribes: bool = False

    @property
    def collective_timeout_s(self) -> float:
        """That a rank waits for others in a collective: what watches sees more, and earlier."""
        return self.timeout_s + _LATER_S

    @property
    def silence_s(self) -> float:
        """After which another rank than 0 that gives no sign of life is lost.

        A pass may take long, a sign may not. Of rank 0 that is only said where it is stopped: its
        process runs its user's code, too, which may let no thread beside it run.
        """
        return min(self.timeout_s, max(_SILENT_S, self.timeout_s / _OF_TIMEOUT))

    def __post_init__(self) -> None:
        if type(self.num_ranks) is not int or self.num_ranks < 1:
            raise ConfigError(f"{self.num_ranks} ranks", "1 or more", "correct the number")
        for name in ("timeout_s", "start_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"{name} {getattr(self, name)}", "seconds, more than 0", "correct the number"
                )
        if self.draft_ranks != 1:
            raise ConfigError(
                f"drafts on {self.draft_ranks} ranks", "drafts on rank 0 alone", "leave it at 1"
            )

"""Targets of a load: a server, or an engine in this process behind the same service."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specc.close_name import advice
from specc.errors import ConfigError, RequestError
from specc.load.decisions import DecisionTrace, TracedPolicy
from specc.load.request import LoadRequest
from specc.load.result import LoadRun
from specc.load.run import ClientLimits, LoadClient, Reply, run_load
from specc.runtime.core import EngineCore
from specc.runtime.engine import Engine
from specc.runtime.policies.named import GOODPUT, NAMES
from specc.runtime.service.service import Service, Update
from specc.runtime.service.stream import UpdateStream
from specc.sampling.params import SamplingParams
from specc.speculation.metrics import SpecStats

if TYPE_CHECKING:
    from specc.load.http_client import HttpClient

SERVER = "server"
# seconds that cancelled requests have to leave the engine
_SETTLE_S = 60.0
_WARMUP_TOKENS = 32
Progress = Callable[[int, int], object]


class LoadSubject(Protocol):
    """Serves loads, each with one policy."""

    def check(self, policies: Sequence[str]) -> None:
        """Raises SpeccError: unknown plan or policy."""
        ...

    def run(
        self,
        policy: str,
        requests: Sequence[LoadRequest],
        progress: Progress,
        trace: DecisionTrace | None,
    ) -> LoadRun:
        """Serve a load from an idle state."""
        ...


@dataclass
class EngineSubject:
    """An engine in this process; each load gets a new scheduler, policy and service.

    Args:
        warmup: number of the load's first requests that are also sent before it, uncounted.
        temperature: 0 is greedy.
        seed: of sampling.
        shares_prefixes: enable the prefix cache.
        adapts_verification: for the policy goodput; see `EngineCore`.
    """

    engine: Engine
    limits: ClientLimits
    warmup: int = 0
    temperature: float = 0.0
    seed: int = 0
    shares_prefixes: bool = False
    adapts_verification: bool = False

    def check(self, policies: Sequence[str]) -> None:
        for policy in policies:
            if policy not in self.engine.plans and policy not in NAMES:
                raise RequestError(
                    f"policy {policy!r}",
                    f"a plan of this engine ({', '.join(self.engine.plans)}) or a policy:"
                    f" {', '.join(NAMES)}",
                    advice(
                        policy, [*self.engine.plans, *NAMES], "choose one of them, or compile again"
                    ),
                )
        if self.adapts_verification:
            check_adapting(policies)
            # refuse now rather than after the runs of other policies
            self._core(GOODPUT)

    def run(
        self,
        policy: str,
        requests: Sequence[LoadRequest],
        progress: Progress,
        trace: DecisionTrace | None,
    ) -> LoadRun:
        core = self._core(policy)
        with closing(Service(core, max_waiting=1 << 30)) as service:
            client = ServiceClient(service, self.temperature, self.seed)
            asyncio.run(warm_up(client, requests, self.warmup))
            scheduler = core.scheduler
            if trace is not None and scheduler.policy.decision is not None:
                scheduler.use(TracedPolicy(scheduler.policy, scheduler, trace))
            run = asyncio.run(run_load(requests, client, self.limits, progress))
            service.drain(_SETTLE_S)
            return run

    def _core(self, policy: str) -> EngineCore:
        is_plan = policy in self.engine.plans
        return EngineCore(
            self.engine,
            policy if is_plan else None,
            None if is_plan else policy,
            shares_prefixes=self.shares_prefixes,
            adapts_verification=self.adapts_verification and policy == GOODPUT,
        )


def check_adapting(policies: Sequence[str]) -> None:
    """Raises ConfigError: none of these policies adapts verification."""
    if GOODPUT not in policies:
        raise ConfigError(
            f"--adaptive-verification, and the policies {', '.join(policies)}",
            f"the policy {GOODPUT} among them: others verify whole trees",
            f"add it, as in --policies off,{GOODPUT}, or leave --adaptive-verification out",
        )


@dataclass
class ServerSubject:
    """A remote server with its own policy.

    Args:
        warmup: see `EngineSubject`.
    """

    client: HttpClient
    limits: ClientLimits
    warmup: int = 0

    def check(self, policies: Sequence[str]) -> None:
        if list(policies) != [SERVER]:
            raise ConfigError(
                f"--policies {','.join(policies)} with --base-url",
                "a server, which has a policy of its own",
                "leave --policies out; start the server with --policy or --plan",
            )
        asyncio.run(self._connect())

    def run(
        self,
        policy: str,
        requests: Sequence[LoadRequest],
        progress: Progress,
        trace: DecisionTrace | None,
    ) -> LoadRun:
        return asyncio.run(self._run(requests, progress))

    async def _connect(self) -> None:
        async with self.client:
            await self.client.connect()

    async def _run(self, requests: Sequence[LoadRequest], progress: Progress) -> LoadRun:
        async with self.client:
            await warm_up(self.client, requests, self.warmup)
            return await run_load(requests, self.client, self.limits, progress)


async def warm_up(client: LoadClient, requests: Sequence[LoadRequest], count: int) -> None:
    """Send the first requests concurrently, with short outputs.

    Raises:
        SpeccError: a request failed.
    """
    if not count:
        return
    first = [
        LoadRequest(
            request.index,
            0.0,
            request.prompt,
            request.num_prompt_tokens,
            min(_WARMUP_TOKENS, request.num_output_tokens),
        )
        for request in requests[:count]
    ]
    run = await run_load(first, client)
    for result in run.results:
        if result.error is not None:
            raise RequestError(
                f"a request of the warm-up failed: {result.error}",
                "requests that the engine serves",
                "correct --prompt-tokens, --output-tokens or --base-url; or pass --warmup 0",
            )


class ServiceClient:
    """A client of an in-process service.

    Args:
        temperature: 0 is greedy.
        seed: of sampling; each request has its own.
    """

    def __init__(self, service: Service, temperature: float = 0.0, seed: int = 0) -> None:
        self._service = service
        self._temperature = temperature
        self._seed = seed

    async def send(self, request: LoadRequest, on_tokens: Callable[[int], object]) -> Reply:
        params = SamplingParams(
            temperature=self._temperature,
            max_tokens=request.num_output_tokens,
            ignore_eos=True,
            seed=self._seed + request.index,
        )

        def observe(update: Update) -> None:
            on_tokens(len(update.token_ids))

        begin_s = time.perf_counter()
        stream = UpdateStream(self._service, request.prompt, params, observe=observe)
        last: Update | None = None
        async with contextlib.aclosing(aiter(stream)) as updates:  # type: ignore[type-var]
            async for update in updates:
                last = update
        assert last is not None, "a stream ends with an update"
        if last.error is not None:
            raise last.error
        stats = last.metrics or SpecStats()
        waited_s = time.perf_counter() - begin_s - stats.elapsed_s
        return Reply(
            finish_reason=last.finish_reason or "",
            num_prompt_tokens=stream.ticket.num_prompt_tokens,
            queue_s=max(0.0, waited_s),
            stats=stats,
        )

    async def counters(self) -> None:
        return None

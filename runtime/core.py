"""What moves the requests of one engine: scheduler, runner and loop, with the policy in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specc.close_name import advice
from specc.errors import ConfigError, RequestError
from specc.runtime.engine import Engine
from specc.runtime.in_flight import InFlight
from specc.runtime.policies.base import FixedPolicy, Policy
from specc.runtime.policies.named import make_policy
from specc.runtime.requests.chat_template import ChatTemplate, load_template
from specc.runtime.requests.request_maker import RequestMaker
from specc.runtime.scheduling.scheduler import Scheduler
from specc.sampling.generation_config import SamplingDefaults
from specc.speculation.live_nodes import says_confidence
from specc.speculation.plans import SpecPlan

_ITERATIONS_BETWEEN_CHECKS = 32


class EngineCore:
    """The moving parts after `LLM` and `Service`; for one thread at a time, but for `requests`.

    Args:
        engine: loaded.
        plan: of every step; None is the engine's default, see `LLM`.
        policy: picks plans instead; or its name.
        shares_prefixes: look for the rows of a prompt among those of earlier requests.
        shares_outputs: suffix drafts look into earlier requests' outputs.
        shares_unsalted: requests without a `cache_salt` share either.
        max_seq_len: tokens of prompt and output together; None is the engine's limit.
        micro_batches: batches of disjoint requests in flight, where the target has stages; None is
            as many as these.
        adapts_verification: how much of its tree the target verifies is chosen for each request.
        confidence_threshold: least probability of a draft token that is verified, as its drafter
            says it; 0 verifies all. Of what both say, the smaller number of nodes counts.
        multi_step_s: seconds that steps in a row may take before requests are looked at; 0 looks at
            them after each.
        defaults: options of requests that leave them out.
    Raises:
        RequestError: the engine has no such plan, or not the plans that the policy needs.
        ConfigError: micro-batches of an engine without stages; adaptive verification where no
            policy or no pass can do it; a threshold where no drafter of the plans in use says how
            likely its tokens are, or no pass takes a part of a tree.
    """

    def __init__(
        self,
        engine: Engine,
        plan: str | None = None,
        policy: Policy | str | None = None,
        *,
        shares_prefixes: bool = True,
        shares_outputs: bool = True,
        shares_unsalted: bool = True,
        max_seq_len: int | None = None,
        micro_batches: int | None = None,
        adapts_verification: bool = False,
        confidence_threshold: float = 0.0,
        multi_step_s: float = 0.0,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        own_policy = engine.policy if plan is None and policy is None else "fixed"
        if isinstance(policy, str):
            own_policy, policy = policy, None
        plan = engine.default_plan if plan is None else plan
        if plan not in engine.plans:
            raise RequestError(
                f"plan {plan!r}",
                f"a plan of this engine: {', '.join(engine.plans)}",
                advice(plan, engine.plans, "choose one of them, or compile the engine again"),
            )
        self.engine = engine
        self.defaults = defaults or SamplingDefaults()
        self._template: ChatTemplate | None = None
        shares_pass = engine.runner_type.shares_pass
        ranks = engine.manifest.num_ranks if engine.manifest else 1
        cuts_trees = shares_pass or (engine.facts.captures_live and ranks == 1)
        if own_policy == "measured" == engine.policy and not engine.plans[plan].speculates:
            # there is nothing to compare
            own_policy = "fixed"
        is_fixed = policy is None and own_policy == "fixed"
        if confidence_threshold:
            in_use = [engine.plans[plan]] if is_fixed else list(engine.plans.values())
            _check_threshold(confidence_threshold, engine, in_use, cuts_trees)
        self.runner = engine.runner_type(
            engine.target,
            engine.drafts,
            engine.steps,
            engine.cache,
            engine.prefill_chunk,
            engine.operators,
            engine.link,
            engine.drawn,
            engine.staged,
            confidence_threshold,
        )
        self.scheduler = Scheduler(
            engine.cache,
            engine.plans,
            policy or FixedPolicy(plan),
            engine.prefill_chunk,
            engine.position_limit,
            shares_prefixes=shares_prefixes,
            shares_outputs=shares_outputs,
            shares_pass=shares_pass,
            cuts_trees=cuts_trees,
            window=engine.window,
            looks_ahead=engine.facts.is_captured,
        )
        if own_policy != "fixed" or adapts_verification:
            if adapts_verification and (policy is not None or ranks > 1):
                _refuse_adapting(policy, ranks)
            chosen = make_policy(
                own_policy,
                engine.plans,
                self.scheduler.host_drafts,
                engine.profile,
                shares_pass=shares_pass,
                cuts_trees=cuts_trees,
                max_num_seqs=engine.cache.shape.max_num_seqs,
                adapts_verification=adapts_verification,
                graph_sizes=self.runner.graph_sizes,
                plan=plan,
            )
            self.scheduler.use(chosen)
        num_batches = _batches_of(engine, micro_batches)
        self.in_flight = InFlight(self.scheduler, self.runner, num_batches, multi_step_s)
        engine.loops.add(self.in_flight)
        self.requests = RequestMaker(
            engine,
            plan if is_fixed else None,
            max_seq_len=max_seq_len,
            cuts_by_draws=confidence_threshold > 0,
            shares_unsalted=shares_unsalted,
        )
        self.num_iterations = 0
        # no request may go on
        self.is_closed = False

    def chat_template(self) -> ChatTemplate:
        """The chat templates of the engine, with which it renders others, too; loaded once.

        Raises:
            ConfigError: a file of the engine cannot be read, or holds no template.
        """
        if self._template is None:
            self._template = load_template(self.engine.directory, may_be_empty=True)
        assert self._template is not None
        return self._template

    def advance(self) -> bool:
        """Bring all requests one iteration further; False where none can run."""
        self.num_iterations += 1
        if self.num_iterations % _ITERATIONS_BETWEEN_CHECKS == 0:
            self.engine.check_weights()
        return self.in_flight.advance()


def _check_threshold(
    threshold: float,
    engine: Engine,
    in_use: Sequence[SpecPlan],
    cuts_trees: bool,
) -> None:
    """Refuse a threshold of confidence that would change nothing, or does not go with the rest.

    Args:
        threshold: above 0.
        engine: loaded.
        in_use: plans that its steps may have.
        cuts_trees: the target can verify a part of a tree.
    Raises:
        ConfigError: it does not go with them.
    """
    option = f"--confidence-threshold {threshold:g}"
    if not cuts_trees or (engine.manifest is not None and engine.manifest.num_ranks > 1):
        raise ConfigError(
            f"{option}, and an engine whose steps ask no drafter how much to verify",
            "an engine of the backends cpu, cuda or eager, of one rank",
            "leave it out, or compile for one of these and one rank",
        )
    if any(map(says_confidence, in_use)):
        return
    names = ", ".join(plan.name for plan in in_use)
    asked = f"{option}, and {'an engine of the plans' if len(in_use) > 1 else 'the plan'} {names}"
    if any(says_confidence(replace(plan, tile=None)) for plan in in_use):
        raise ConfigError(
            f"{asked}, whose trees are verified in tiles",
            "a pass of the target over the whole tree, of which it can leave nodes out",
            "leave it out, or compile with a larger --max-logits-mb",
        )
    if others := [plan.name for plan in engine.plans.values() if says_confidence(plan)]:
        raise ConfigError(
            f"{asked}, of which no part can be verified by what a drafter says",
            f"a plan of this engine whose trees can end early: {', '.join(others)}",
            f"leave it out, or pass --plan {others[0]}",
        )
    raise ConfigError(
        asked,
        "a chain or a static tree of a DSpark drafter that has a confidence head",
        "leave it out, or compile with such a --draft and --num-speculative-tokens or --tree",
    )


def _refuse_adapting(policy: Policy | None, ranks: int) -> None:
    """Raises ConfigError: what adaptive verification does not go with."""
    if policy is not None:
        raise ConfigError(
            f"--adaptive-verification, and a policy of type {type(policy).__name__}",
            "a policy by its name, goodput",
            "pass that, or have the policy's live_nodes say what is verified",
        )
    raise ConfigError(
        f"--adaptive-verification, and an engine of {ranks} ranks",
        "an engine of one process",
        "leave it out, or compile the engine for one rank",
    )


def _batches_of(engine: Engine, micro_batches: int | None) -> int | None:
    """Batches of disjoint requests in flight; None where the target has no stages."""
    if engine.staged is not None:
        return micro_batches or engine.staged.num_stages
    manifest = engine.manifest
    if manifest is not None and manifest.stages and micro_batches is not None:
        # a graph of a step holds its whole way through the stages
        if micro_batches > 1:
            raise ConfigError(
                f"--micro-batches {micro_batches}, and stages whose steps are captured"
                f" (backend {engine.backend})",
                "one batch at a time: a graph of rank 0 ends with what the last stage found",
                "leave it out, or pass --micro-batches 1",
            )
        return None
    if micro_batches is None:
        return None
    raise ConfigError(
        f"--micro-batches {micro_batches}, and an engine without stages",
        "an engine that was compiled with --pipeline-parallel-size",
        "leave it out, or compile the engine again with stages",
    )

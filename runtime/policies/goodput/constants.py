"""What goodput is tuned with: every number that is neither measured nor learned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GoodputConstants:
    """Constants of the policy goodput; found on the simulated loads of docs/notebook/goodput.md.

    Args:
        hold: iterations that a decision holds for at least.
        longest_hold: and at most.
        plain_every: iterations after which plain ones are timed again, where all draft.
        paid_off: iterations over which what a draft catches up is paid off.
        first_looks: first iterations, of each of which the seconds are looked at.
        often: first iterations, of which as many are looked at as have time for it.
        seldom: of steps that go on alike afterwards, one in so many is looked at, or fewer.
        deciding_share: of the time, that deciding may take, and as much looking at seconds of
            steps that go on alike.
        margin: what another division of the batch has to promise, as a share of the present one's
            goodput.
        margin_of_off: how many times larger the batch has to be under off before drafts read
            prompts again: they have missed what happened meanwhile.
        load_every: iterations after which, at the earliest, it is looked at again whether drafts
            read prompts, unless the load has changed.
        typical_context: committed rows of a request that is still to come.
        spare_requests: that are remembered beyond those that run.
        further_plan: what a further plan has to gain, as a share: levels of two plans do not share
            passes.
        model_rate: acceptance of an unknown draft model's first choice.
        lookup_rate: of an unknown lookup's token.
        prior_width: ranks of a tree's prior.
        chunk: tokens of a long pass, in which several requests' drafts read what they have missed.
        prompt_news: weight of the newest iteration in how often prompts come along, and with how
            many tokens.
        always: share of iterations that counts as every one.
        long_pass: tokens of a pass that has long been busy with every token.
        longer_pass: tokens of another one.
        ratio_memory: measurements of a size whose median corrects the table.
        cut_steps: measurements from which on captured steps that verify parts of trees have a ratio
            of their own: the first ones capture their graphs.
        host_steps: measurements from which on the host's seconds of an iteration are its own.
        host_memory: measurements of one kind of iterations after which those of the other are
            forgotten.
        most_ratio: measured over predicted seconds that are further off than this factor, either
            way, are no measurement.
        probe_share: of the time, that trials may cost.
        probe_saved: steps' seconds for which that is saved up at most.
        probe_first: over n, a further share of the time of the n-th iteration that they may cost:
            in the beginning there is more to learn than to lose.
        probe_debt: times as much as was saved up at most, that a trial may cost.
        probe_hope: acceptance at every depth that a draft may turn out to have.
        probe_rows: requests that try a plan, where others can go on with theirs.
        rates_memory: observations that shared rates remember.
        rates_prior: observations that a prior counts for.
        own_keep: what a request's own steps keep of their weight with each further one.
        block: tokens of one request, of which at a time it is learned how much requests differ.
        correlation: of a request's tokens, where nothing is known.
        correlation_blocks: blocks that this counts for.
        least_correlation: that is believed.
        most_correlation: likewise.
        block_keep: what blocks keep of their weight with each further one.
        odds_step: factors on the odds are told apart by this much in their logarithm.
        arrivals: latest requests, which tell how often others come, and how long prompts are.
        silence: a silence says something where so many requests should have come,
        longer_silence: and where it is so many times longer than the longest before.
        shortest_s: seconds in which all of those requests come at least.
        least_rate: requests a second where none come: sizes then tell how long one alone takes.
        caution: standard errors by which requests may come more often than they seem to.
        output_tokens: of a request of an unknown load.
        output_guesses: ended requests that this guess counts for.
        output_news: weight of the newest request in the length of outputs.
        spec_shares: of the requests that run, those that speculate.
        chance: standard deviations by which more requests are there than would by chance.
        changed_share: change of the number of requests that is worth another look, as a share;
        changed_requests: and in all.
        most_raised: times as many requests a second that a queue may stand for, at most.
        some_tokens: times as many tokens that some requests have to get to speculate alone.
    """

    # decisions
    hold: int = 8
    longest_hold: int = 128
    plain_every: int = 2048
    paid_off: int = 32
    first_looks: int = 16
    often: int = 256
    seldom: int = 4
    deciding_share: float = 0.005
    margin: float = 1.01
    margin_of_off: float = 1.1
    load_every: int = 16
    typical_context: float = 256.0
    spare_requests: int = 256
    further_plan: float = 1.002
    # priors
    model_rate: float = 0.7
    lookup_rate: float = 0.4
    prior_width: int = 8
    # seconds
    chunk: int = 512
    prompt_news: float = 1 / 64
    always: float = 0.99
    long_pass: int = 1024
    longer_pass: int = 2048
    ratio_memory: int = 31
    cut_steps: int = 3
    host_steps: int = 8
    host_memory: int = 256
    most_ratio: float = 1000.0
    # trials
    probe_share: float = 0.01
    probe_saved: float = 200.0
    probe_first: float = 1.0
    probe_debt: float = 2.0
    probe_hope: float = 0.9
    probe_rows: int = 4
    # acceptance
    rates_memory: float = 300.0
    rates_prior: float = 4.0
    own_keep: float = 0.97
    block: int = 16
    correlation: float = 0.25
    correlation_blocks: int = 4
    least_correlation: float = 0.01
    most_correlation: float = 0.5
    block_keep: float = 0.99
    odds_step: float = 0.125
    # arrivals
    arrivals: int = 512
    silence: float = 8.0
    longer_silence: float = 1.5
    shortest_s: float = 1e-6
    least_rate: float = 1e-3
    caution: float = 0.25
    output_tokens: float = 128.0
    output_guesses: float = 2.0
    output_news: float = 1 / 64
    # lasting loads
    spec_shares: tuple[float, ...] = (1.0, 0.5, 0.25)
    chance: float = 1.0
    changed_share: float = 0.25
    changed_requests: int = 4
    most_raised: float = 1024.0
    some_tokens: float = 1.05


TUNED = GoodputConstants()

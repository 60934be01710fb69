"""Plans of `specc bench --synthetic`, and the draft that proposes their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specc.config import CompileConfig
from specc.drafters.drafter import Drafter
from specc.drafters.registry import FIRST
from specc.errors import ConfigError
from specc.speculation.plans import SpecPlan

if TYPE_CHECKING:
    from specc.cli.options.bench import ShapesOptions


def choose_shape_plans(
    options: ShapesOptions, acceptance: Sequence[float] | None, has_draft: bool
) -> tuple[SpecPlan, ...]:
    """Plans to compare with off.

    Without options that is a chain of 4; with probabilities of k siblings a tree whose first level
    has k children, and every other node one.

    Raises:
        ConfigError: plans or acceptance without a draft, or siblings that no plan has; a self-draft
            beside a draft of another shape, or a malformed one.
    """
    from specc.bench.synthetic.shapes import SHAPES
    from specc.compiler.context import engine_plans
    from specc.speculation.choose_plans import DEFAULT_CHAIN, choose_plans, parse_tree

    head = head_of(options, has_draft)
    has_draft = has_draft or head is not None
    is_own = options.draft is not None and head is None
    names = _self_draft(options, has_draft) if is_own else FIRST
    plans: tuple[SpecPlan, ...] = ()
    if options.trees or options.num_speculative_tokens is not None or is_own:
        shapes = [parse_tree(text) for text in options.trees]
        plans = choose_plans(shapes, options.num_speculative_tokens, names)
    if not has_draft and options.draft is None and acceptance is not None:
        # as `parse_shapes` reads them: after a name a slash, after a directory a comma
        separator = "/" if options.synthetic in SHAPES else ","
        raise ConfigError(
            f"--synthetic-acceptance without a draft: --synthetic {options.synthetic}",
            "a draft, whose tokens are accepted or not",
            f"--synthetic {options.synthetic}{separator}DRAFT, or --draft self:window=512",
        )
    _check_dice(plans, acceptance)
    if has_draft and not plans and acceptance is not None:
        plans = (SpecPlan.from_widths((len(acceptance), *(1,) * (DEFAULT_CHAIN - 1))),)
    plans = tuple(engine_plans(CompileConfig(plans=plans), has_draft))
    widest = max((width for plan in plans for width in plan.widths), default=0)
    if acceptance is not None and len(acceptance) > widest:
        trees = ", ".join(plan.name for plan in plans if plan.widths)
        raise ConfigError(
            f"--synthetic-acceptance for {len(acceptance)} siblings; {trees} has {widest} a node",
            f"at most {widest} probabilities, or a tree of that width",
            f"leave out the others, or pass --tree {len(acceptance)},1,1",
        )
    return plans


def _check_dice(plans: Sequence[SpecPlan], acceptance: Sequence[float] | None) -> None:
    """Raises ConfigError: dice, and a tree whose shape is not known before it is drawn."""
    for plan in plans:
        if acceptance is not None and not plan.is_static:
            raise ConfigError(
                f"--synthetic-acceptance and the plan {plan.name}, whose shape follows from its"
                " draft's probabilities",
                "chains or trees of one shape, in which each node has its rank",
                "leave out --synthetic-acceptance: the report has the length at which a step pays",
            )


def head_of(options: ShapesOptions, has_draft: bool) -> str | None:
    """Name of the head that --draft asks for; None where it asks for none.

    Raises:
        ConfigError: a head, and a draft of another shape.
    """
    from specc.bench.synthetic.drafters import HEADS

    if options.draft not in HEADS:
        return None
    if has_draft:
        raise ConfigError(
            f"--synthetic {options.synthetic} and --draft {options.draft}",
            "one draft: another shape, or a head of the target's",
            "name the target's shape alone in --synthetic, or leave out --draft",
        )
    return options.draft


def _self_draft(options: ShapesOptions, has_draft: bool) -> tuple[Drafter, ...]:
    """The view; see `choose_shape_plans`."""
    from specc.bench.synthetic.drafters import HEADS
    from specc.speculation.choose_plans import split_drafts

    models, drafters = split_drafts(options.draft)
    if models or has_draft or drafters[0].view is None or drafters[0].has_second_program:
        raise ConfigError(
            f"--synthetic {options.synthetic} --draft {options.draft}",
            "shapes of a target and of a draft, or one shape and --draft self:window=W,sink=S,"
            f" {', '.join(HEADS)}",
            "name the shape of a draft in --synthetic TARGET/DRAFT, or leave one of them out",
        )
    return drafters

"""Questions of published data sets: conversations of several turns, in categories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Spec-Bench has MT-Bench's categories one by one; its tables have them as one
MT_BENCH = "mt_bench"
_MT_BENCH_CATEGORIES = frozenset((
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
))  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One conversation: what its user says, turn by turn.

    Args:
        turns: of the user; the model's own answers come in between.
    """

    question_id: str
    category: str
    turns: tuple[str, ...]


def by_category(
    questions: Sequence[Question], most: int | None = None
) -> dict[str, list[Question]]:
    """Questions of each category, in the order of the file.

    Args:
        most: questions of a category that are kept; None is all.
    """
    found: dict[str, list[Question]] = {}
    for question in questions:
        found.setdefault(question.category, []).append(question)
    return {category: own[:most] for category, own in found.items()}


def groups_of(categories: Mapping[str, object]) -> dict[str, list[str]]:
    """Categories that published tables have as one; none where one of them is absent."""
    if not set(categories) >= _MT_BENCH_CATEGORIES or len(categories) == len(_MT_BENCH_CATEGORIES):
        return {}
    return {MT_BENCH: [name for name in categories if name in _MT_BENCH_CATEGORIES]}

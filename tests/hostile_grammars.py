"""Grammars that a server must survive, as `StructuredOutputsParams` take them."""

from __future__ import annotations

from typing import Any


def chained_references(count: int) -> dict[str, Any]:
    """A JSON schema whose references lead from one to the next."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count - 1)}
    return {"$ref": "#/$defs/d0", "$defs": chain | {f"d{count - 1}": {"type": "integer"}}}


def chained_lark(count: int) -> str:
    rules = [f"r{i}: r{i + 1}" for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "x"\n'])


def chained_gbnf(count: int) -> str:
    rules = [f"r{i} ::= r{i + 1}" for i in range(count)]
    return "\n".join(["root ::= r0", *rules, f'r{count} ::= "x"\n'])


def slow(number: int = 0) -> str:
    """Takes the library far longer than allowed; another one for each number."""
    return chained_gbnf(9_900) + f"s{number} ::= root\n"


def many_items(count: int, number: int = 0) -> list[str]:
    return [f"{number} item {i}" for i in range(count)]

"""Contents in parts: whether a chat template reads them, and what it is handed where it may not.

Clients send a content as a text or as a list of parts. Templates read the one, the other, or both;
a text where parts are wanted is lost without an error, and so is a list where a text is wanted. So
it is detected as vLLM does it: a template that goes through the parts of contents gets lists as
they are, any other gets their text.
Source: https://github.com/vllm-project/vllm, vllm/renderers/hf.py, `_detect_content_format`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import nodes

# filters that look at each part
_BY_PART = frozenset(("selectattr", "rejectattr", "map", "groupby", "select", "reject", "first"))
_FIELDS = frozenset(("type", "text"))


class Parts(list[Any]):
    """Parts of a content, and their text where a template takes it for one.

    Some templates read parts of one role, and the text of another. What they do to a text gives
    what it would give; a line feed is between two parts, as vLLM has it.
    """

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return text_of(self)

    def __add__(self, other: Any) -> Any:
        return str(self) + other if isinstance(other, str) else super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        return other + str(self) if isinstance(other, str) else NotImplemented

    def __contains__(self, item: object) -> bool:
        return item in str(self) if isinstance(item, str) else super().__contains__(item)

    def __eq__(self, other: object) -> bool:
        return str(self) == other if isinstance(other, str) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __getattr__(self, name: str) -> Any:
        return getattr(str(self), name)


def text_of(parts: Sequence[Mapping[str, Any]]) -> str:
    """Of all parts; a line feed is between two."""
    return "\n".join(part["text"] for part in parts)


def reads_parts(template: nodes.Template) -> bool:
    """Whether a template goes through the parts of a message's content."""
    names = _content_names(template)
    if any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For)):
        return True
    for call in template.find_all(nodes.Filter):
        if call.name in _BY_PART and _is_content(call.node, names):
            return True
    found: nodes.Getattr | nodes.Getitem
    for found in template.find_all((nodes.Getattr, nodes.Getitem)):  # type: ignore[assignment]
        # messages[0].content[0].text
        part = found.node
        if not isinstance(part, nodes.Getitem) or not _is_number(part.arg):
            continue
        if _field(found) in _FIELDS and _is_content(part.node, names):
            return True
    return False


def _content_names(template: nodes.Template) -> frozenset[str]:
    """Variables, and parameters of macros, that hold a content somewhere."""
    names: set[str] = set()
    macros = {macro.name: macro for macro in template.find_all(nodes.Macro)}
    while True:
        more = {name for name, value in _bindings(template, macros) if _is_content(value, names)}
        if more <= names:
            return frozenset(names)
        names |= more


def _bindings(
    template: nodes.Template, macros: Mapping[str, nodes.Macro]
) -> Iterator[tuple[str, nodes.Node]]:
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name):
            yield assign.target.name, assign.node
    for call in template.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in macros:
            parameters = macros[call.node.name].args
            for parameter, value in zip(parameters, call.args, strict=False):
                yield parameter.name, value
            for pair in call.kwargs:
                yield pair.key, pair.value


def _is_content(node: nodes.Node | None, names: frozenset[str] | set[str]) -> bool:
    if isinstance(node, nodes.Name):
        return node.name in names
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getitem | nodes.Getattr):
        return _field(node) == "content"
    if isinstance(node, nodes.Call):
        is_get = isinstance(node.node, nodes.Getattr) and node.node.attr == "get"
        return is_get and bool(node.args) and _constant(node.args[0]) == "content"
    if isinstance(node, nodes.Filter):
        return _is_content(node.node, names)
    if isinstance(node, nodes.CondExpr):
        return _is_content(node.expr1, names) or _is_content(node.expr2, names)
    if isinstance(node, nodes.And | nodes.Or):
        return _is_content(node.left, names) or _is_content(node.right, names)
    return False


def _field(node: nodes.Node) -> Any:
    return node.attr if isinstance(node, nodes.Getattr) else _constant(getattr(node, "arg", None))


def _constant(node: nodes.Node | None) -> Any:
    return node.value if isinstance(node, nodes.Const) else None


def _is_number(node: nodes.Node) -> bool:
    value = _constant(node.node if isinstance(node, nodes.Neg) else node)
    return type(value) is int

"""Constructor expressions of a generated file, broken over lines where they are long."""

from typing import NamedTuple, Union

LINE_WIDTH = 110

Expression = Union[str, "Call"]


class Call(NamedTuple):
    """`opening` argument, argument, … `closing`; every argument comes with its prefix, such as `width=`."""

    opening: str
    arguments: tuple[tuple[str, Expression], ...]
    closing: str = ")"


def call(name: str, *positional: object, **keywords: object) -> Call:
    """A call with plain values, written as `repr` writes them."""
    arguments = [("", repr(value)) for value in positional]
    return Call(f"{name}(", (*arguments, *((f"{key}=", repr(value)) for key, value in keywords.items())))


def render(expression: Expression, indent: int = 0, used: int = 0) -> str:
    """The text, with `used` characters before and one comma behind it on its line: one argument per line if it must."""
    if isinstance(expression, str):
        return expression
    flat = expression.opening + ", ".join(prefix + render(value, -10_000) for prefix, value in expression.arguments)
    flat += expression.closing
    if indent + used + len(flat) < LINE_WIDTH or not expression.arguments:
        return flat
    inner = indent + 4
    lines = [f"{' ' * inner}{prefix}{render(value, inner, len(prefix))}," for prefix, value in expression.arguments]
    return "\n".join([expression.opening, *lines, " " * indent + expression.closing])

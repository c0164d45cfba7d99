"""A calculator for arithmetic only: no names, no calls, bounded work, exact fractions.

Python's parser gives the tree and `Fraction` the arithmetic; nothing is evaluated as code.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import pairwise

MAX_CHARS = 200
MAX_DIGITS = 60
"""Maximum digits of a numerator or denominator, intermediate ones included."""
MAX_EXPONENT = 100

_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})

_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """The value of ``expression``: a whole number, or a decimal with at most twelve significant digits.

    Takes + - * / // % ** (or ^), brackets, and numbers, which may have commas between thousands, e.g. "1,200 * (3 + 4.5)".

    Raises
    ------
    ValueError
        Anything else, a division by zero, or a number of more than `MAX_DIGITS` digits; the message is for the model to read.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, of at most {MAX_CHARS}")
    try:
        tree = ast.parse(_as_python(expression), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError('not arithmetic; write e.g. "12 * 7 + 5"') from error
    return _shown(_value(tree.body))


def _as_python(expression: str) -> str:
    text = expression.strip().removesuffix("=").translate(_SPELLINGS)
    parts = text.split(",")
    for before, after in pairwise(parts):
        thousands = before[-1:].isdigit() and after[:3].isdigit() and len(after[:3]) == 3 and not after[3:4].isdigit()
        if not thousands:
            raise ValueError('a comma that does not separate thousands; write e.g. "1,200 + 5"')
    return "".join(parts)


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        if node.value in (math.inf, -math.inf):
            raise ValueError(f"a number of more than {MAX_DIGITS} digits")
        return _bounded(Fraction(str(node.value)))  # from the text: the float is only near it
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        inner = _value(node.operand)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return _power(_value(node.left), _value(node.right))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if right == 0 and isinstance(node.op, ast.Div | ast.FloorDiv | ast.Mod):
            raise ValueError("division by zero")
        return _bounded(Fraction(_BINARY[type(node.op)](left, right)))
    raise ValueError("only numbers, + - * / // % ** and brackets")


def _power(left: Fraction, right: Fraction) -> Fraction:
    if right.denominator != 1 or abs(right) > MAX_EXPONENT:
        raise ValueError(f"an exponent is a whole number from -{MAX_EXPONENT} to {MAX_EXPONENT}")
    if left == 0 and right < 0:
        raise ValueError("division by zero")
    return _bounded(left ** int(right))


def _bounded(value: Fraction) -> Fraction:
    limit = 10**MAX_DIGITS
    if abs(value.numerator) >= limit or value.denominator >= limit:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    return value


def _shown(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext() as context:
        context.prec = 12
        quotient = Decimal(value.numerator) / Decimal(value.denominator)
        return f"{quotient.normalize():f}"

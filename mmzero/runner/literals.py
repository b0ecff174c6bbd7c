"""Values of a config as they are typed on a command line: literals, and dicts as configs write them."""

import ast
from typing import Any


def read_literal(text: str) -> Any:
    """Read a literal of Python, in which dicts may be calls of ``dict``.

    Args:
        text (str): Such as "dict(type='SGD', lr=0.1)" or "[1, 2]".

    Returns:
        Any: The value.

    Raises:
        ValueError: If it is none.
    """
    try:
        return ast.literal_eval(_Dicts().visit(ast.parse(text.strip(), mode='eval')))
    except (SyntaxError, TypeError) as error:
        raise ValueError(str(error)) from error


class _Dicts(ast.NodeTransformer):
    """Calls of ``dict`` as literals."""

    def visit_Call(self, node: ast.Call) -> ast.AST:  # noqa: N802
        """See :class:`ast.NodeTransformer`."""
        self.generic_visit(node)
        named = isinstance(node.func, ast.Name) and node.func.id == 'dict'
        if not named or node.args or any(word.arg is None for word in node.keywords):
            return node
        return ast.Dict([ast.Constant(word.arg) for word in node.keywords], [word.value for word in node.keywords])

"""What the expressions of a method stand for: modules below ``self``, constants, or what only the data say."""

import ast
from collections.abc import Iterable

EACH, PICKED, PART = '*', '?', '[:]'
"""Segments of a path: each element in turn, one that the data pick, and a container of which they pick a part."""

Path = tuple[str, ...]

KNOWN: Path = ()
"""In place of the path of a loop variable: no module, but the same on every rank."""


class Values:
    """What the local names of a method stand for, as far as it was read.

    Args:
        self_name (str): What the method calls its module.
        known (Iterable[str]): Arguments that are the same on every rank.
        keywords (str): What it calls its ``**kwargs``; empty: it has none.
    """

    def __init__(self, self_name: str, known: Iterable[str], keywords: str) -> None:
        self.self_name, self.keywords = self_name, keywords
        self.names: dict[str, Path] = {}
        self.known = set(known)
        # Lists that the method makes: their lengths follow from its code.
        self.lists: set[str] = set()
        # What is drawn at random, with the rates it was compared with, and what was computed from the data.
        self.drawn: dict[str, tuple[str, ...]] = {}
        self.from_data: set[str] = set()

    def path_of(self, node: ast.AST) -> Path | None:
        """The path of an expression below self, or None if it is none."""
        if isinstance(node, ast.Name):
            return () if node.id == self.self_name else self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.path_of(node.value)
            return None if base is None else (*base, node.attr)
        if isinstance(node, ast.Subscript):
            base = self.path_of(node.value)
            return None if not base else self._element(base, node.slice)
        if isinstance(node, ast.NamedExpr):
            return self.path_of(node.value)
        if isinstance(node, ast.Call) and node.args and is_random(node):
            base = self.path_of(node.args[0])
            return (*base, PICKED) if base else None
        return None

    def _element(self, base: Path, index: ast.AST) -> Path:
        if isinstance(index, ast.Slice):
            bounds = [bound for bound in (index.lower, index.upper, index.step) if bound is not None]
            return (*base, PART) if any(map(self.is_picked, bounds)) else base
        try:
            return (*base, str(ast.literal_eval(index)))
        except (ValueError, TypeError, SyntaxError):
            return (*base, EACH if self.is_known(index) else PICKED)

    def elements_of(self, node: ast.AST) -> list[Path | None]:
        """What each loop variable stands for when one iterates over an expression; None for what only the data say."""
        path = self.path_of(node)
        if path:
            return [(*path, EACH)]
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, 'attr', '')
            if name == 'zip':
                return [self.elements_of(item)[0] for item in node.args]
            if name in ('reversed', 'list', 'tuple', 'iter', 'sorted') and node.args:
                return self.elements_of(node.args[0])
            if name == 'enumerate' and node.args:
                return [KNOWN, *self.elements_of(node.args[0])]
            if name == 'range':
                return [None if self.is_picked(node) else KNOWN]
            if isinstance(node.func, ast.Attribute) and self.path_of(node.func.value):
                elements = self.elements_of(node.func.value)
                known: list[Path | None] = [KNOWN]
                ways = dict(values=elements, children=elements, keys=known)
                return ways.get(name) or ([KNOWN, *elements] if name in ('items', 'named_children') else [None])
        return [KNOWN if self.is_known(node) else None]

    def bind(self, name: str, path: Path | None) -> None:
        """Give a name what a loop variable, or a part of a tuple, stands for."""
        self.forget(name)
        if path:
            self.names[name] = path
        elif path is not None:
            self.known.add(name)

    def forget(self, name: str) -> None:
        """A name is given something else."""
        self.names.pop(name, None)
        self.drawn.pop(name, None)
        for names in (self.known, self.lists, self.from_data):
            names.discard(name)

    def is_known(self, node: ast.AST) -> bool:
        """Whether an expression is the same on every rank: of numbers, counters and attributes of self."""
        bound = {
            name.id
            for item in ast.walk(node)
            if isinstance(item, ast.comprehension)
            for name in ast.walk(item.target)
            if isinstance(name, ast.Name)
        }
        calls = [item for item in ast.walk(node) if isinstance(item, ast.Call)]
        functions = {id(_root(call.func)) for call in calls if self._is_function(call.func)}
        loose = {item.id for item in ast.walk(node) if isinstance(item, ast.Name) and id(item) not in functions}
        paths = {name for name, path in self.names.items() if PICKED not in path}
        return loose <= {self.self_name, *self.known, *paths, *bound} and all(map(self.is_constant_call, calls))

    def _is_function(self, func: ast.expr) -> bool:
        """Whether a call is that of a function, or asks a tensor for what is the same on every rank."""
        if isinstance(func, ast.Name) or getattr(func, 'attr', '') in _OF_TENSORS:
            return True
        root = _root(func)
        return isinstance(root, ast.Name) and root.id in ('math', 'torch', 'np', 'numpy')

    def is_picked(self, node: ast.AST) -> bool:
        """Whether an expression was drawn, or computed from the values of tensors."""
        names = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
        return bool(names & (self.from_data | self.drawn.keys())) or is_random(node) or _reduces(node)

    def is_by_data(self, test: ast.AST) -> bool:
        """Whether a condition may differ from rank to rank: it computes something, or draws."""
        if isinstance(test, ast.BoolOp):
            return any(map(self.is_by_data, test.values))
        if isinstance(test, ast.Compare) and is_identity(test) and not isinstance(test.left, ast.Call):
            return False
        asked = {id(item.value) for item in ast.walk(test) if isinstance(item, ast.Attribute)}
        for node in ast.walk(test):
            if isinstance(node, ast.Name) and id(node) not in asked and node.id in self.from_data | self.drawn.keys():
                return True
            if isinstance(node, ast.Attribute) and node.attr == 'shape' and self.path_of(node) is None:
                return True
            if isinstance(node, ast.Call) and not self.is_constant_call(node):
                return True
        return False

    def is_constant_call(self, call: ast.Call) -> bool:
        """Whether a call gives the same on every rank."""
        text, name = ast.unparse(call.func), getattr(call.func, 'attr', getattr(call.func, 'id', ''))
        if name in _CONSTANT or name in _OF_TENSORS or text.startswith(('torch.jit.', 'torch.compiler.')):
            return True
        if name in ('get', 'pop') and isinstance(call.func, ast.Attribute):
            # A config's, or a keyword's.
            return bool(self.path_of(call.func.value)) or text == f'{self.keywords}.{name}'
        if name == 'keys' and isinstance(call.func, ast.Attribute):
            return bool(self.path_of(call.func.value))
        if text == 'len' and call.args:
            # len(self.layers), but not len(proposals).
            made = isinstance(call.args[0], ast.Name) and call.args[0].id in self.lists
            return made or self.path_of(call.args[0]) is not None or self.is_known(call.args[0])
        return (text in _FUNCTIONS or text.startswith('math.')) and all(map(self.is_known, call.args))

    def rates(self, test: ast.AST) -> tuple[str, ...]:
        """Attributes of self that a draw is compared with; none where the data decide."""
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        drawn = [self.drawn[name] for name in sorted(names & self.drawn.keys())]
        if names & self.from_data or not drawn and not is_random(test):
            return ()
        return (*(rate for rates in drawn for rate in rates), *self._own_attributes(test))

    def _own_attributes(self, test: ast.AST) -> tuple[str, ...]:
        paths = [self.path_of(node) for node in ast.walk(test) if isinstance(node, ast.Attribute)]
        whole = [path for path in paths if path and not any(o and o != path and o[: len(path)] == path for o in paths)]
        return tuple('.'.join(path) for path in whole if path != ('training',))

    def assign(self, name: str, value: ast.expr, conditions: list[tuple[str, ...]]) -> None:
        """Give a name the value of an expression.

        Args:
            name (str): The name.
            value (ast.expr): The expression.
            conditions (list[tuple[str, ...]]): Rates of the conditions by data under which it does.
        """
        path, drawn, is_from_data = self.path_of(value), self._drawn_by(value, conditions), self._is_from_data(value)
        is_known = self.is_known(value)
        self.forget(name)
        if path:
            self.names[name] = path
        if is_from_data:
            self.from_data.add(name)
        elif drawn is not None:
            self.drawn[name] = drawn
        elif is_known:
            self.known.add(name)
        if isinstance(value, (ast.List, ast.ListComp)):
            self.lists.add(name)

    def _drawn_by(self, value: ast.expr, conditions: list[tuple[str, ...]]) -> tuple[str, ...] | None:
        """Rates of what a name is given, where it comes from a draw or is set because of the data; None elsewhere."""
        if isinstance(value, ast.Constant) and conditions:
            return joined(conditions)
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if is_random(value) or isinstance(value, _DERIVES) and names & self.drawn.keys():
            return self.rates(value)
        return None

    def _is_from_data(self, value: ast.AST) -> bool:
        if isinstance(value, _DERIVES):
            return any(map(self._is_from_data, ast.iter_child_nodes(value)))
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in _FUNCTIONS:
            return any(map(self._is_from_data, value.args))
        if isinstance(value, ast.Name):
            return value.id in self.from_data
        if isinstance(value, ast.Call) and ast.unparse(value.func) == 'len' and value.args:
            return self.is_picked(value.args[0])
        return isinstance(value, ast.Call) and not is_random(value) and _reduces(value)


_DERIVES = (ast.BoolOp, ast.Compare, ast.UnaryOp, ast.BinOp)

# The same on every rank, whatever they are given.
_CONSTANT = {
    'isinstance', 'hasattr', 'getattr', 'callable', 'issubclass', 'type', 'str',
    'is_grad_enabled', 'is_scripting', 'is_tracing', 'is_autocast_enabled', 'is_compiling', 'is_available',
    'is_initialized', 'get_world_size', 'is_tensor',
    'startswith', 'endswith', 'lower', 'upper', 'split', 'strip',
}  # fmt: skip
_OF_TENSORS = {'dim', 'ndimension', 'is_floating_point', 'is_complex'}

# The same on every rank where what they are given is.
_FUNCTIONS = {
    'abs', 'all', 'any', 'bool', 'enumerate', 'float', 'int', 'list', 'max', 'min', 'range', 'reversed', 'round', 'set',
    'sorted', 'sum', 'tuple', 'zip',
}  # fmt: skip

_REDUCTIONS = {
    'all', 'any', 'argmax', 'argmin', 'argsort', 'count_nonzero', 'item', 'max', 'mean', 'min', 'multinomial',
    'nelement', 'nonzero', 'numel', 'sum', 'tolist', 'topk', 'unique',
}  # fmt: skip


def _reduces(node: ast.AST) -> bool:
    """Whether a method of a tensor or a function of torch brings its values together."""
    calls = (item.func for item in ast.walk(node) if isinstance(item, ast.Call))
    return any(isinstance(func, ast.Attribute) and func.attr in _REDUCTIONS for func in calls)


def _root(node: ast.AST) -> ast.AST:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node


def is_identity(node: ast.Compare) -> bool:
    """Whether a comparison is one of objects, such as ``is None``."""
    return all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)


def is_random(node: ast.AST) -> bool:
    """Whether an expression draws."""
    calls = (item for item in ast.walk(node) if isinstance(item, ast.Call))
    return any(word in ast.unparse(call.func) for call in calls for word in ('rand', 'uniform', 'bernoulli'))


def joined(conditions: list[tuple[str, ...]]) -> tuple[str, ...]:
    """The rates of all conditions; none where one of them is by the data."""
    return tuple(rate for rates in conditions for rate in rates) if all(conditions) else ()

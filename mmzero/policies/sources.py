"""What the code of a module's class does with the modules below it, read from its source without running it.

[Note: reading a model's code]
Whether a module may be a unit depends on the code around it: a unit has to be called on every rank, in every step,
through its own forward. That cannot be seen in the tree of modules, and running a detector takes data. So the sources
of the classes are read: every ``self.a.b``, through loops, indices and local names. What is dynamic (``getattr``, a
module handed over as an argument) is not seen, and nothing is concluded from it.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

EACH, PICKED = '*', '?'
"""Segments of a path for an element: each one in turn, or one that the data picks."""


@dataclass(frozen=True)
class Use:
    """One place where a class uses what is below ``self``.

    Args:
        path (tuple[str, ...]): Attributes after ``self``; EACH, PICKED or a number for an element of a container.
        is_called (bool): Whether it is called there.
        may_skip (bool): Whether the data, or a random draw, decides if the place is passed.
        rates (tuple[str, ...]): Attributes of self that such draws are compared with; where all of them are 0, as
            rates of layer drop mostly are, nothing is skipped.
        place (str): Function, file and line, for messages.
    """

    path: tuple[str, ...]
    is_called: bool
    may_skip: bool
    rates: tuple[str, ...]
    place: str


@cache
def uses_of(cls: type) -> tuple[Use, ...]:
    """Read how the methods of a class use its submodules and parameters after construction.

    Args:
        cls (type): The class of a module.

    Returns:
        tuple[Use, ...]: The uses; empty where the source is not to be had, and for classes of torch.
    """
    readers: dict[str, list[_Reader]] = {}
    for name, tree in _methods(cls):
        reader = _Reader(cls.__name__, name, *tree)
        reader.read()
        readers.setdefault(name, []).append(reader)
    calls = {name: set().union(*(reader.own_calls for reader in group)) for name, group in readers.items()}
    later = _after_construction(calls)
    return tuple(use for name in sorted(later) for reader in readers[name] for use in reader.uses)


def calls_itself(cls: type, method: str) -> bool:
    """Whether a method of a class calls the module itself, ``self(...)``.

    Args:
        cls (type): The class.
        method (str): The method's name.

    Returns:
        bool: Whether it does.
    """
    trees = [tree for name, (tree, _, _) in _methods(cls) if name == method]
    calls = (node.func for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(isinstance(func, ast.Name) and func.id == 'self' for func in calls)


_CONSTRUCTORS = {'__init__', 'init_weights', '_init_weights', 'reset_parameters', 'train', 'extra_repr', '__repr__'}


def _methods(cls: type) -> Iterator[tuple[str, tuple[ast.FunctionDef, str, int]]]:
    """The methods of a class, and those of its bases that they extend through ``super()``."""
    hidden = set()
    for base in cls.__mro__:
        if base is object or base.__module__.startswith(('torch.', 'mmengine.')):
            continue
        for name, value in vars(base).items():
            function = inspect.unwrap(value.fget if isinstance(value, property) else value)  # type: ignore[arg-type]
            tree = _parse(function) if name not in hidden and inspect.isfunction(function) else None
            if tree is None:
                continue
            if not any(isinstance(node, ast.Name) and node.id == 'super' for node in ast.walk(tree[0])):
                hidden.add(name)
            yield name, tree


@cache
def _parse(function: object) -> tuple[ast.FunctionDef, str, int] | None:
    try:
        lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
        tree = ast.parse(textwrap.dedent(''.join(lines))).body[0]
    except (OSError, SyntaxError, TypeError, IndexError):
        return None
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    return tree, inspect.getsourcefile(function) or '', first  # type: ignore[arg-type]


def _after_construction(calls: dict[str, set[str]]) -> set[str]:
    """Methods that run when the module is used: not those that only constructors reach."""
    building = _closure({name for name in calls if name in _CONSTRUCTORS}, calls)
    return _closure(calls.keys() - building, calls) - _CONSTRUCTORS


def _closure(start: set[str], calls: dict[str, set[str]]) -> set[str]:
    found, todo = set(start), list(start)
    while todo:
        for name in calls.get(todo.pop(), set()) & calls.keys() - found:
            found.add(name)
            todo.append(name)
    return found


Path = tuple[str, ...]


class _Reader(ast.NodeVisitor):
    """Collects the uses of one method."""

    def __init__(self, cls_name: str, name: str, tree: ast.FunctionDef, file: str, first_line: int) -> None:
        self.tree, self.file, self.offset = tree, file, first_line - 1
        self.where = f'{cls_name}.{name}'
        self.self_name = tree.args.args[0].arg
        self.uses: list[Use] = []
        self.own_calls: set[str] = set()
        self.names: dict[str, Path] = {}
        self.counters: set[str] = set()
        self.drawn: set[str] = set()
        self.conditions: list[tuple[str, ...]] = []

    def read(self) -> None:
        for statement in self.tree.body:
            self.visit(statement)

    # Paths

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
        return None

    def _element(self, base: Path, index: ast.AST) -> Path:
        if isinstance(index, ast.Slice):
            return base
        try:
            return (*base, str(ast.literal_eval(index)))
        except (ValueError, TypeError, SyntaxError):
            return (*base, PICKED if self._is_picked(index) else EACH)

    def _is_picked(self, index: ast.AST) -> bool:
        """Whether more than counters, attributes of self and numbers are in an index."""
        loose = [node.id for node in ast.walk(index) if isinstance(node, ast.Name)]
        calls = [node for node in ast.walk(index) if isinstance(node, ast.Call)]
        known = {self.self_name, 'len', *self.counters}
        return not known.issuperset(loose) or any(not self._is_constant_call(call) for call in calls)

    def elements_of(self, node: ast.AST) -> list[Path | None]:
        """What each loop variable stands for when one iterates over an expression; None for anything else."""
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, 'attr', '')
            if name == 'zip':
                return [self.elements_of(item)[0] for item in node.args]
            if name in ('reversed', 'list', 'tuple', 'iter') and node.args:
                return self.elements_of(node.args[0])
            if name == 'enumerate' and node.args:
                return [None, *self.elements_of(node.args[0])]
            if name in ('values', 'children') and isinstance(node.func, ast.Attribute):
                return self.elements_of(node.func.value)
            if name in ('items', 'named_children') and isinstance(node.func, ast.Attribute):
                return [None, *self.elements_of(node.func.value)]
            return [None]
        path = self.path_of(node)
        return [(*path, EACH) if path else None]

    # Statements

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        path = self.path_of(node.value)
        random = _is_random(node.value)
        for target in node.targets:
            for name in (item for item in ast.walk(target) if isinstance(item, ast.Name)):
                self.names.pop(name.id, None)
                self.drawn.discard(name.id)
                if random:
                    self.drawn.add(name.id)
            if isinstance(target, ast.Name) and path:
                self.names[target.id] = path
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for one, value in zip(target.elts, node.value.elts, strict=False):
                    inner = self.path_of(value)
                    if isinstance(one, ast.Name) and inner:
                        self.names[one.id] = inner

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind(node.target, node.iter)
        before = len(self.conditions)
        for test in self._tests_before_break(node.body):
            self.conditions.append(self._rates(test))
        for statement in node.body:
            self.visit(statement)
        del self.conditions[before:]
        for statement in node.orelse:
            self.visit(statement)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        self._bind(node.target, node.iter)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> None:
        for generator in node.generators:
            self.visit(generator)
        self.visit(node.elt)

    visit_ListComp = visit_GeneratorExp = visit_SetComp = _comprehension

    def _bind(self, target: ast.AST, iterated: ast.AST) -> None:
        items = target.elts if isinstance(target, ast.Tuple) else [target]
        nested = [inner for item in items for inner in (item.elts if isinstance(item, ast.Tuple) else [item])]
        paths = self.elements_of(iterated)
        counts = isinstance(iterated, ast.Call) and getattr(iterated.func, 'id', '') in ('range', 'enumerate')
        for index, name in enumerate(nested):
            if not isinstance(name, ast.Name):
                continue
            self.names.pop(name.id, None)
            self.counters.discard(name.id)
            path = paths[index] if index < len(paths) else None
            if path:
                self.names[name.id] = path
            elif counts and index == 0:
                self.counters.add(name.id)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        if not self._is_by_data(node.test):
            for statement in (*node.body, *node.orelse):
                self.visit(statement)
            return
        rates = self._rates(node.test)
        # Whatever the data say, this runs.
        both = self._paths_run(node.body) & self._paths_run(node.orelse)
        before = len(self.uses)
        self.conditions.append(rates)
        for statement in (*node.body, *node.orelse):
            self.visit(statement)
        self.conditions.pop()
        self.uses[before:] = [
            replace(use, may_skip=bool(self.conditions), rates=()) if use.path in both else use
            for use in self.uses[before:]
        ]
        if _leaves(node.body):
            # What follows may be passed over.
            self.conditions.append(rates)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        before = len(self.conditions)
        if self._is_by_data(node.test):
            self.conditions.append(())
        for statement in (*node.body, *node.orelse):
            self.visit(statement)
        del self.conditions[before:]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        # Checkpointed blocks put their body into an inner function and call it.
        for statement in node.body:
            self.visit(statement)

    def visit_Call(self, node: ast.Call) -> None:
        path = self.path_of(node.func)
        if path:
            self._note(path, node, is_called=True)
            if len(path) == 1:
                self.own_calls.add(path[0])
        else:
            self.visit(node.func)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.path_of(node)
        if path is None:
            self.visit(node.value)
        elif isinstance(node.ctx, ast.Load):
            self._note(path, node, is_called=False)
            if len(path) == 1:
                self.own_calls.add(path[0])

    def visit_Subscript(self, node: ast.Subscript) -> None:
        path = self.path_of(node)
        if path is None:
            self.generic_visit(node)
        elif isinstance(node.ctx, ast.Load):
            self._note(path, node, is_called=False)
            self.visit(node.slice)

    def visit_Name(self, node: ast.Name) -> None:
        path = self.names.get(node.id)
        if path and isinstance(node.ctx, ast.Load):
            self._note(path, node, is_called=False)

    def _note(self, path: Path, node: ast.expr, is_called: bool) -> None:
        place = f'{self.where} ({self.file}:{node.lineno + self.offset})'
        rates = tuple(rate for rates in self.conditions for rate in rates) if all(self.conditions) else ()
        self.uses.append(Use(path, is_called, bool(self.conditions), rates, place))

    # Conditions

    def _is_by_data(self, test: ast.AST) -> bool:
        """Whether a condition may differ from rank to rank: it computes something, or draws."""
        for node in ast.walk(test):
            if isinstance(node, ast.Name) and node.id in self.drawn:
                return True
            if isinstance(node, ast.Attribute) and node.attr == 'shape' and self.path_of(node) is None:
                return True
            if isinstance(node, ast.Call) and not self._is_constant_call(node):
                return True
        return False

    def _is_constant_call(self, call: ast.Call) -> bool:
        text = ast.unparse(call.func)
        if text.split('.')[-1] in _CONSTANT or text.startswith(('torch.jit.', 'torch.compiler.')):
            return True
        if text.endswith('.get') and isinstance(call.func, ast.Attribute) and self.path_of(call.func.value):
            return True  # a config's
        # len(self.layers), but not len(proposals).
        return text == 'len' and bool(call.args) and self.path_of(call.args[0]) is not None

    def _rates(self, test: ast.AST) -> tuple[str, ...]:
        if not any(isinstance(node, ast.Name) and node.id in self.drawn for node in ast.walk(test)):
            return () if not _is_random(test) else self._own_attributes(test)
        return self._own_attributes(test)

    def _own_attributes(self, test: ast.AST) -> tuple[str, ...]:
        paths = (self.path_of(node) for node in ast.walk(test) if isinstance(node, ast.Attribute))
        return tuple(path[0] for path in paths if path and path != ('training',))

    def _paths_run(self, statements: list[ast.stmt]) -> set[Path | None]:
        """Paths that are called, or handed to a call, such as that of a checkpoint."""
        calls = [node for item in statements for node in ast.walk(item) if isinstance(node, ast.Call)]
        return {self.path_of(item) for call in calls for item in (call.func, *call.args)} - {None, ()}

    def _tests_before_break(self, body: list[ast.stmt]) -> list[ast.expr]:
        ifs = [node for item in body for node in ast.walk(item) if isinstance(node, ast.If)]
        return [node.test for node in ifs if _leaves(node.body, ast.Break) and self._is_by_data(node.test)]


_CONSTANT = {
    'isinstance',
    'hasattr',
    'getattr',
    'callable',
    'is_grad_enabled',
    'is_scripting',
    'is_tracing',
    'issubclass',
}


def _is_random(node: ast.AST) -> bool:
    calls = (item for item in ast.walk(node) if isinstance(item, ast.Call))
    return any(word in ast.unparse(call.func) for call in calls for word in ('rand', 'uniform', 'bernoulli'))


def _leaves(body: list[ast.stmt], *kinds: type) -> bool:
    return any(isinstance(item, kinds or (ast.Return, ast.Continue, ast.Break)) for item in body)

"""Reading one method of a module's class: what it does with the modules below ``self``."""

import ast
from dataclasses import dataclass, replace

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


Path = tuple[str, ...]


def read_method(where: str, tree: ast.FunctionDef, file: str, first_line: int) -> tuple[list[Use], set[str]]:
    """Read one method.

    Args:
        where (str): Its name with that of its class, for messages.
        tree (ast.FunctionDef): Its source.
        file (str): Where it stands.
        first_line (int): The line in which it begins.

    Returns:
        tuple[list[Use], set[str]]: The uses, and the attributes of self that it calls or reads, methods among them.
    """
    reader = _Reader(where, tree, file, first_line)
    for statement in tree.body:
        reader.visit(statement)
    return reader.uses, reader.own_calls


class _Reader(ast.NodeVisitor):
    def __init__(self, where: str, tree: ast.FunctionDef, file: str, first_line: int) -> None:
        self.file, self.offset = file, first_line - 1
        self.where = where
        self.self_name = tree.args.args[0].arg
        self.uses: list[Use] = []
        self.own_calls: set[str] = set()
        self.names: dict[str, Path] = {}
        self.counters: set[str] = set()
        self.drawn: dict[str, tuple[str, ...]] = {}
        self.conditions: list[tuple[str, ...]] = []

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
        drawn = self._drawn_by(node.value)
        for target in node.targets:
            for name in (item for item in ast.walk(target) if isinstance(item, ast.Name)):
                self.names.pop(name.id, None)
                self.drawn.pop(name.id, None)
                if drawn is not None:
                    self.drawn[name.id] = drawn
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
        drawn = [self.drawn[node.id] for node in ast.walk(test) if isinstance(node, ast.Name) and node.id in self.drawn]
        if not drawn and not _is_random(test):
            return ()
        return (*(rate for rates in drawn for rate in rates), *self._own_attributes(test))

    def _drawn_by(self, value: ast.expr) -> tuple[str, ...] | None:
        """Rates of what a name is given, where it comes from a draw or is set because of the data; None elsewhere."""
        if isinstance(value, ast.Constant) and self.conditions:
            return tuple(rate for rates in self.conditions for rate in rates) if all(self.conditions) else ()
        names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
        if _is_random(value) or isinstance(value, (ast.BoolOp, ast.Compare, ast.UnaryOp)) and names & self.drawn.keys():
            return self._rates(value)
        return None

    def _own_attributes(self, test: ast.AST) -> tuple[str, ...]:
        paths = [self.path_of(node) for node in ast.walk(test) if isinstance(node, ast.Attribute)]
        whole = [path for path in paths if path and not any(o and o != path and o[: len(path)] == path for o in paths)]
        return tuple('.'.join(path) for path in whole if path != ('training',))

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

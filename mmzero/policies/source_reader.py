"""Reading one method of a module's class: what it does with the modules below ``self``."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from mmzero.policies.source_values import Path, Values, is_identity, joined


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
        method (str): The method that it stands in.
    """

    path: Path
    is_called: bool
    may_skip: bool
    rates: tuple[str, ...]
    place: str
    method: str


@dataclass
class Reading:
    """What was read in one method.

    Args:
        uses (list[Use]): The uses, in order.
        own_calls (set[str]): Attributes of self that it calls or reads, methods among them.
        given (dict[str, list[dict[int | str, bool]]]): For each call of a method of self, which of its arguments, by
            index and by name, are the same on every rank.
    """

    uses: list[Use] = field(default_factory=list)
    own_calls: set[str] = field(default_factory=set)
    given: dict[str, list[dict[int | str, bool]]] = field(default_factory=lambda: defaultdict(list))


def read_method(where: str, tree: ast.FunctionDef, file: str, first_line: int, known: Iterable[str] = ()) -> Reading:
    """Read one method.

    Args:
        where (str): Its name with that of its class, for messages.
        tree (ast.FunctionDef): Its source.
        file (str): Where it stands.
        first_line (int): The line in which it begins.
        known (Iterable[str]): Arguments that are the same on every rank. Defaults to none.

    Returns:
        Reading: What it does.
    """
    reader = _Reader(where, tree, file, first_line, known)
    for statement in tree.body:
        reader.visit(statement)
    return reader.found


class _Reader(ast.NodeVisitor):
    def __init__(self, where: str, tree: ast.FunctionDef, file: str, first_line: int, known: Iterable[str]) -> None:
        self.file, self.offset = file, first_line - 1
        self.where = where
        keywords = tree.args.kwarg.arg if tree.args.kwarg is not None else ''
        self.values = Values(arguments(tree)[0], known, keywords)
        self.found = Reading()
        self.conditions: list[tuple[str, ...]] = []

    # Statements

    def visit_Assign(self, node: ast.Assign) -> None:
        self._look(node.value)
        for target in node.targets:
            self._assign(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._look(node.value)
            self._assign(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._look(node.value)
        self._assign(node.target, node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        if isinstance(node.target, ast.Name):
            both = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            self.values.assign(node.target.id, both, self.conditions)
        else:
            self.visit(node.target)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            self.values.assign(target.id, value, self.conditions)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            parts = parts if len(parts) == len(target.elts) else [value] * len(target.elts)
            for one, part in zip(target.elts, parts, strict=True):
                self._assign(one.value if isinstance(one, ast.Starred) else one, part)

    def visit_For(self, node: ast.For) -> None:
        self._iterate(node.target, node.iter)
        # What the body computes, its condition asks in the next round.
        tests = self._leaving_tests(node.body)
        counted = [()] if self._is_counted_by_data(node.iter) else []
        with self._under(*counted, *map(self.values.rates, tests)):
            self._visit_all(node.body)
        self._visit_all(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self._look(node.test)
        self._foresee(node.body)
        rates = [self.values.rates(test) for test in self._leaving_tests(node.body)]
        with self._under(*[()] * self.values.is_by_data(node.test), *rates):
            self._visit_all([*node.body, *node.orelse])

    def visit_If(self, node: ast.If) -> None:
        self._look(node.test)
        if not self.values.is_by_data(node.test):
            self._visit_all([*node.body, *node.orelse])
            return
        rates = self.values.rates(node.test)
        self._either(rates, node.body, node.orelse)
        if _leaves(node.body) or _leaves(node.orelse):
            # What follows may be passed over.
            self.conditions.append(rates)

    def visit_Match(self, node: ast.Match) -> None:
        self._look(node.subject)
        guards = [case.guard for case in node.cases if case.guard is not None]
        for guard in guards:
            self._look(guard)
        bodies = [case.body for case in node.cases]
        if not any(map(self.values.is_by_data, [node.subject, *guards])):
            self._visit_all([statement for body in bodies for statement in body])
            return
        catches_all = any(isinstance(c.pattern, ast.MatchAs) and not (c.pattern.pattern or c.guard) for c in node.cases)
        self._either((), *bodies, *([] if catches_all else [[]]))
        if any(map(_leaves, bodies)):
            self.conditions.append(())

    def visit_Try(self, node: ast.Try) -> None:
        runs = self._paths_run(node.body)
        self._visit_all([*node.body, *node.orelse])
        before = len(self.found.uses)
        with self._under(()):
            self._visit_all([statement for handler in node.handlers for statement in handler.body])
        self._always_runs(before, runs)
        self._visit_all(node.finalbody)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        # Checkpointed blocks put their body into an inner function and call it.
        self._visit_all(node.body)

    # Expressions

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._look(node.test)
        if self.values.is_by_data(node.test):
            self._either(self.values.rates(node.test), [node.body], [node.orelse])
        else:
            self._visit_all([node.body, node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        before = len(self.conditions)
        for value in node.values:
            self._look(value)
            if self.values.is_by_data(value):
                self.conditions.append(self.values.rates(value))
        del self.conditions[before:]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        self._look(node.operand)

    def visit_Compare(self, node: ast.Compare) -> None:
        for item in (node.left, *node.comparators):
            (self._look if is_identity(node) else self.visit)(item)

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp) -> None:
        with self._under():
            for generator in node.generators:
                self._iterate(generator.target, generator.iter)
                if self._is_counted_by_data(generator.iter):
                    self.conditions.append(())
                for test in generator.ifs:
                    self._look(test)
                    if self.values.is_by_data(test):
                        self.conditions.append(self.values.rates(test))
            self._visit_all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])

    visit_ListComp = visit_GeneratorExp = visit_SetComp = visit_DictComp = _comprehension

    def visit_Call(self, node: ast.Call) -> None:
        path = self.values.path_of(node.func)
        if path:
            self._note(path, node, is_called=True)
        else:
            self.visit(node.func)
        self._give(node.func, node.args, node.keywords)
        only_looks = isinstance(node.func, ast.Name) and (node.func.id in _LOOKS or _asks_by_name(node))
        for index, argument in enumerate(node.args):
            (self._look if only_looks else self.visit)(argument)
            self._give(argument, node.args[index + 1 :], node.keywords)
        self._visit_all([keyword.value for keyword in node.keywords])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        path = self.values.path_of(node)
        if path is None:
            self.visit(node.value)
        elif isinstance(node.ctx, ast.Load):
            self._note(path, node, is_called=False)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        path = self.values.path_of(node)
        if path is None:
            self.generic_visit(node)
        elif isinstance(node.ctx, ast.Load):
            self._note(path, node, is_called=False)
            self.visit(node.slice)

    def visit_Name(self, node: ast.Name) -> None:
        path = self.values.names.get(node.id)
        if path and isinstance(node.ctx, ast.Load):
            self._note(path, node, is_called=False)

    # What is found

    def _note(self, path: Path, node: ast.expr, is_called: bool) -> None:
        if len(path) == 1:
            self.found.own_calls.add(path[0])
        place = f'{self.where} ({self.file}:{node.lineno + self.offset})'
        may_skip, method = bool(self.conditions), self.where.rpartition('.')[2]
        self.found.uses.append(Use(path, is_called, may_skip, joined(self.conditions), place, method))

    def _look(self, node: ast.AST) -> None:
        """Visit what is only asked whether it is there, or given a name, and so is not used yet."""
        path = self.values.path_of(node)
        if not path or isinstance(node, (ast.Call, ast.NamedExpr)):
            self.visit(node)
        elif len(path) == 1:
            self.found.own_calls.add(path[0])

    def _give(self, func: ast.AST, args: Sequence[ast.expr], keywords: Sequence[ast.keyword]) -> None:
        """Note what a method of self is called with, or handed over with, such as to a checkpoint."""
        path = self.values.path_of(func)
        of_super = isinstance(func, ast.Attribute) and ast.unparse(func.value).startswith('super(')
        if not of_super and (path is None or len(path) != 1):
            return
        given: dict[int | str, bool] = {}
        for index, arg in enumerate(args):
            given[index] = not isinstance(arg, ast.Starred) and self.values.is_known(arg)
        given |= {word.arg or '**': word.arg is not None and self.values.is_known(word.value) for word in keywords}
        self.found.given[func.attr if isinstance(func, ast.Attribute) else path[0]].append(given)  # type: ignore[index]

    def _iterate(self, target: ast.AST, iterated: ast.expr) -> None:
        self._look_through(iterated)
        paths = self.values.elements_of(iterated)
        items = target.elts if isinstance(target, ast.Tuple) else [target]
        nested = [inner for item in items for inner in (item.elts if isinstance(item, ast.Tuple) else [item])]
        for index, name in enumerate(nested):
            if isinstance(name, ast.Name):
                self.values.bind(name.id, paths[index] if index < len(paths) else None)

    def _look_through(self, iterated: ast.AST) -> None:
        """Visit what is iterated over, of which only the elements are used."""
        if isinstance(iterated, ast.Call) and isinstance(iterated.func, ast.Name) and iterated.func.id in _ITERATORS:
            for item in iterated.args:
                self._look_through(item)
        elif not (isinstance(iterated, ast.Call) and any(self.values.elements_of(iterated))):
            self._look(iterated)

    def _is_counted_by_data(self, iterated: ast.AST) -> bool:
        return not self.values.path_of(iterated) and self.values.is_picked(iterated)

    # Conditions

    def _visit_all(self, nodes: Sequence[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    @contextmanager
    def _under(self, *rates: tuple[str, ...]) -> Iterator[None]:
        before = len(self.conditions)
        self.conditions += rates
        yield
        del self.conditions[before:]

    def _either(self, rates: tuple[str, ...], *ways: Sequence[ast.AST]) -> None:
        """Visit ways of which the data choose one; what is in all of them runs whatever they say."""
        all_run = set.intersection(*map(self._paths_run, ways))
        before = len(self.found.uses)
        for way in ways:
            with self._under(rates):
                self._visit_all(way)
        self._always_runs(before, all_run)

    def _always_runs(self, first: int, paths: set[Path | None]) -> None:
        self.found.uses[first:] = [
            replace(use, may_skip=bool(self.conditions), rates=()) if use.path in paths else use
            for use in self.found.uses[first:]
        ]

    def _paths_run(self, nodes: Sequence[ast.AST]) -> set[Path | None]:
        """Paths that are called, or handed to a call, such as that of a checkpoint."""
        calls = [node for item in nodes for node in ast.walk(item) if isinstance(node, ast.Call)]
        return {self.values.path_of(item) for call in calls for item in (call.func, *call.args)} - {None, ()}

    def _foresee(self, body: Sequence[ast.stmt]) -> None:
        """Names to which the body of a loop gives what it computes from the data, before the next round asks."""
        for item in body:
            for node in ast.walk(item):
                if isinstance(node, ast.Assign) and self.values.is_picked(node.value):
                    self._assign(node.targets[0], node.value)

    def _leaving_tests(self, body: Sequence[ast.stmt]) -> list[ast.expr]:
        """Conditions by data on which a loop ends early."""
        ifs = [node for item in body for node in ast.walk(item) if isinstance(node, ast.If)]
        leaving = [node.test for node in ifs if _leaves(node.body, ast.Break, ast.Return)]
        if leaving:
            self._foresee(body)
        return [test for test in leaving if self.values.is_by_data(test)]


# Functions that ask about a module and leave its parameters alone.
_LOOKS = {'callable', 'hasattr', 'id', 'isinstance', 'len', 'type'}
_ITERATORS = {'enumerate', 'iter', 'list', 'reversed', 'sorted', 'tuple', 'zip'}


def _asks_by_name(call: ast.Call) -> bool:
    """Whether a call is ``getattr(module, 'name', ...)``: of the module it wants an attribute, and no more is known."""
    is_getattr = isinstance(call.func, ast.Name) and call.func.id == 'getattr'
    return is_getattr and len(call.args) > 1 and isinstance(call.args[1], ast.Constant)


def arguments(tree: ast.FunctionDef) -> list[str]:
    """The names of a method's arguments by position, self first.

    Args:
        tree (ast.FunctionDef): Its source.

    Returns:
        list[str]: The names.
    """
    return [item.arg for item in (*tree.args.posonlyargs, *tree.args.args)]


def _leaves(body: Sequence[ast.stmt], *kinds: type) -> bool:
    return any(isinstance(item, kinds or (ast.Return, ast.Continue, ast.Break)) for item in body)

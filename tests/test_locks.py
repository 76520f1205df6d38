"""Finds lost locks: a class that uses an attribute with a lock held uses it nowhere without it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.cases import cases

# Methods that change what they are called on.
CHANGES = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "push",
    "put", "remove", "setdefault", "update",
}  # fmt: skip


@dataclass
class Method(ast.NodeVisitor):
    """Attributes that a method uses, each with the locks that it holds there."""

    held: frozenset[str] = frozenset()
    uses: list[tuple[str, frozenset[str]]] = field(default_factory=list)
    changes: set[str] = field(default_factory=set)

    def visit_With(self, node: ast.With) -> None:
        before, names = self.held, [ast.unparse(item.context_expr) for item in node.items]
        self.held |= {name for name in names if name.endswith("lock")}
        self.generic_visit(node)
        self.held = before

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            self.changes.add(ast.unparse(node.func.value))
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.uses.append((ast.unparse(node), self.held))
        if not isinstance(node.ctx, ast.Load):
            self.changes.add(ast.unparse(node))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.changes.add(ast.unparse(node.value))
        self.generic_visit(node)


def without(methods: dict[str, Method], lock: str) -> dict[str, set[str]]:
    """By method what it uses while the lock is not held, neither by its callers in the class."""
    inside = {name for name in methods if name.startswith("_")}
    while True:
        found = {
            name: {use for use, held in method.uses if lock not in held and name not in inside}
            for name, method in methods.items()
        }
        called = {use for method in methods.values() for use, _ in method.uses}
        outside = {
            name
            for name in inside
            if f"self.{name}" not in called or any(f"self.{name}" in one for one in found.values())
        }
        if not outside:
            return found
        inside -= outside


def unguarded(cls: ast.ClassDef) -> Iterator[str]:
    methods: dict[str, Method] = {}
    for function in cls.body:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            methods[function.name] = method = Method()
            for statement in function.body:
                method.visit(statement)
    methods.pop("__init__", None)
    uses = [one for method in methods.values() for one in method.uses]
    changed = {name for method in methods.values() for name in method.changes}
    for lock in {lock for _, held in uses for lock in held}:
        owner = lock.rpartition(".")[0]
        guarded = {use for use, held in uses if lock in held and use != lock}
        if lock.endswith(".lock"):
            # It is public: it guards all that is reached by its owner.
            guarded = {use for use, _ in uses if use.rpartition(".")[0] == owner} - {lock}
        else:
            guarded &= changed
        for name, used in without(methods, lock).items():
            yield from (f"{cls.name}.{name} {use}" for use in used & guarded)


def test_what_is_used_with_a_lock_is_not_used_without_it() -> None:
    found = {
        use
        for path in Path(__file__).parents[1].glob("*/warpwatch*/**/*.py")
        for cls in ast.walk(ast.parse(path.read_text()))
        if isinstance(cls, ast.ClassDef)
        for use in unguarded(cls)
    }
    assert found == set(cases(__file__)["free"])

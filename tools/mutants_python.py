"""Small changes of Python code, of which `tools/mutants.py --random` takes some."""

import ast
from collections.abc import Iterator, Mapping

OPERATORS: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin"}
CONVERSIONS = ("contiguous", "clone", "clamp", "clamp_", "clamp_min", "clamp_max", "nan_to_num", "abs", "float", "copy")
"""Methods of which a mutant removes a call."""
LEFT_ALONE = (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
DTYPES = {"float32": "bfloat16", "float64": "float32"}
NOT_CODE = ("annotation", "returns", "decorator_list", "bases", "keywords")
Change = tuple[ast.AST, str]
"""A node and the text that replaces it."""


def changes_of(node: ast.AST) -> Iterator[Change]:
    """The changes of a node and of all below it, without annotations, decorators, assertions and texts of errors."""
    if isinstance(node, LEFT_ALONE) or (isinstance(node, ast.keyword) and node.arg == "strict"):
        return
    if isinstance(node, ast.Raise):
        yield node, "pass"
        if isinstance(node.exc, ast.Call) and not isinstance(node.exc.func, ast.Call):
            yield node.exc.func, "ArithmeticError"
        return
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield from ((node.test, text) for text in ("False", "True") if not isinstance(node.test, ast.Constant))
    yield from ((node, text) for text in _replacements(node))
    for name, value in ast.iter_fields(node):
        if name not in NOT_CODE or isinstance(node, ast.Call):
            for child in value if isinstance(value, list) else [value]:
                yield from changes_of(child) if isinstance(child, ast.AST) else ()


def _replacements(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                yield _with(node, ops=[*ops[:at], OPERATORS[type(op)](), *ops[at + 1 :]])
        case ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in OPERATORS:
            yield _with(node, op=OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield str(not value)
        case ast.Constant(value=int() as value):
            yield str(value + 1)
        case ast.Constant(value=float() as value):
            yield repr(2.0 * value if value else 1.0)
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield _with(node, func=ast.Name(NAMES[name]))
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in NAMES:
            yield _with(node, func=ast.Attribute(value, NAMES[name]))
        case ast.Call(func=ast.Attribute(value=value, attr=name)) if name in CONVERSIONS:
            yield f"({ast.unparse(value)})"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute()]):
            yield "pass"
        case ast.Attribute(value=ast.Name(id="torch" | "np"), attr=name) if name in DTYPES:
            yield f"{ast.unparse(node.value)}.{DTYPES[name]}"
        case ast.Tuple(elts=[_, _, *_], ctx=ast.Load()):
            yield _with(node, elts=node.elts[:-1])
    match node:
        case ast.Call(func=ast.Name(id="min" | "max" | "gcd" | "zip")):
            pass  # in either order the same
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred):
            yield _with(node, args=[second, first, *rest])
    match node:
        case ast.Call(keywords=[*_, ast.keyword(arg=str(name))]) if name != "strict":
            yield _with(node, keywords=node.keywords[:-1])


def _with(node: ast.AST, **fields: object) -> str:
    old = {name: getattr(node, name) for name in node._fields}
    return f"({ast.unparse(type(node)(**old | fields))})"

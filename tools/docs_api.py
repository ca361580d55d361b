"""The reference of docs/api.md and the tables of fields of docs/backend-data.md, from signatures and docstrings.

See pages.py.
"""

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from tools.pages import filled, markdown

NAMES = {
    "moe_mk.config.moe.MoEConfig": "load parse from_hf with_",
    "moe_mk.comm.groups.ParallelGroups": "from_mesh",
    "moe_mk.layer.moe_layer.MoELayer": (
        "from_checkpoint load load_weights loader forward forward_routed route steps explain report memory_report "
        "warm_up reset_expert_load recover release_weights"
    ),
    "moe_mk.layer.deepseek_v3.DeepseekV3MoE": "from_config",
    "moe_mk.layer.report.MemoryReport": "",
    "moe_mk.placement.expert_map.ExpertMap": "linear round_robin from_physical",
    "moe_mk.config.device.DeviceProfile": "load",
    "moe_mk.experts.residency.ResidencyPool": "",
    "moe_mk.config.problem.Problem": "",
    "moe_mk.oracle.verdict.Decision": "text as_dict",
    "moe_mk.oracle.select": "",
    "moe_mk.router.router.Router": "",
    "moe_mk.router.topk.grouped_topk": "",
}
"""What the reference lists, with methods by name."""
FIELDS = {
    "moe_mk.experts.base.ExpertsContext": "`self.context` of experts",
    "moe_mk.prepare_finalize.base.TransportContext": "`self.context` of a transport",
    "moe_mk.tokens.Routing": "`routing` of `prepare`",
    "moe_mk.tokens.RowTokens": "`tokens` in rows",
    "moe_mk.tokens.GroupedTokens": "`tokens` sorted by expert",
    "moe_mk.tokens.BatchedTokens": "`tokens` in blocks",
    "moe_mk.tokens.ExpertOutput": "what experts return",
    "moe_mk.quant.tensor.QuantTensor": "values of tokens and weights",
    "moe_mk.weights.expert_weights.ExpertWeights": "`weights`, canonical",
    "moe_mk.weights.expert_weights.SlotWeights": "`weights.slot(n)`",
}


def found(dotted: str) -> object:
    """A class or function by its dotted name."""
    module, _, name = dotted.rpartition(".")
    return getattr(importlib.import_module(module), name)


def first_line(made: object) -> str:
    """The first paragraph of a docstring, as one line."""
    return " ".join((inspect.getdoc(made) or "").split("\n\n")[0].split())


def signature(name: str, made: object) -> str:
    """A call with its parameters, without annotations."""
    target = made.__init__ if inspect.isclass(made) and "__init__" in vars(made) else made
    shown = []
    for each in inspect.signature(target).parameters.values():  # type: ignore[arg-type]
        if each.name in ("self", "cls"):
            continue
        default = "" if each.default is inspect.Parameter.empty else f"={each.default!r}"
        default = "=..." if re.search(r"[(<]", default) and default != "=()" else default
        mark = "**" if each.kind is each.VAR_KEYWORD else "*" if each.kind is each.VAR_POSITIONAL else ""
        if each.kind is each.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(f"{mark}{each.name}{default}")
    return f"{name}({', '.join(shown)})"


def reference() -> str:
    """The names, signatures and first lines."""
    parts = []
    for dotted, methods in NAMES.items():
        made, short = found(dotted), dotted.rpartition(".")[2]
        parts.append(f"### `{short}`\n\n`{dotted}`. {first_line(made)}\n")
        parts.append(f"```text\n{signature(short, made)}\n```\n")
        rows = [["method", "does"]]
        for name in methods.split():
            method = getattr(made, name)
            rows.append([f"`{signature(name, method)}`".replace("|", r"\|"), first_line(method)])
        parts.append("" if len(rows) == 1 else markdown(rows) + "\n")
    return "\n".join(part for part in parts if part)


def fields() -> str:
    """A table of the fields of every class that authors of backends are given."""
    parts = []
    for dotted, what in FIELDS.items():
        rows = [["field", "meaning"]]
        rows += [[f"{name}: {kind}", meaning] for name, kind, meaning in fields_of(found(dotted))]  # type: ignore[arg-type]
        parts.append(f"## `{dotted.rpartition('.')[2]}`, {what}\n\n{markdown(rows)}\n")
    return "\n".join(parts)


def fields_of(cls: type) -> Iterator[tuple[str, str, str]]:
    """(name, type, docstring) of the fields of a dataclass."""
    body = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(body, ast.ClassDef)
    stated = {}
    for index, node in enumerate(body.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            following = body.body[index + 1] if index + 1 < len(body.body) else None
            text = following.value if isinstance(following, ast.Expr) else None
            words = text.value if isinstance(text, ast.Constant) else ""
            stated[node.target.id] = ast.unparse(node.annotation), " ".join(str(words).split())
    for field in dataclasses.fields(cls):
        kind, meaning = stated.get(field.name, ("", ""))
        yield f"`{field.name}`", f"`{kind}`".replace("|", r"\|"), meaning.replace("|", r"\|")


def pages(root: Path) -> dict[str, str]:
    """Both pages, with what is written between their marks."""
    listed = filled(root, "docs/api.md", "reference", f"\n{reference()}")
    return listed | filled(root, "docs/backend-data.md", "fields", f"\n{fields()}")

"""Imports flow one way (docs/architecture.md)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rag_blend

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rag_blend"
FILES = sorted(PACKAGE.rglob("*.py"))


def imports_of(file: Path) -> set[str]:
    """All modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def top_level(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


MODULES = {module_of(file): file for file in FILES}


def test_the_core_knows_no_framework() -> None:
    for file in FILES:
        assert not top_level(imports_of(file)) & {"llama_index", "langchain", "langchain_core"}, file


@pytest.mark.parametrize("part", ["match", "storage", "plan.py", "errors.py"])
def test_no_torch_where_bytes_and_ids_are_enough(part: str) -> None:
    path = PACKAGE / part
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        assert not top_level(imports_of(file)) & {"torch", "transformers"}, file


def test_the_core_measures_and_prints_nothing() -> None:
    """Imports from evaluation and cli would make every user pay for what few of them need."""
    above = ("rag_blend.evaluation", "rag_blend.cli")
    core = {name: file for name, file in MODULES.items() if not name.startswith((*above, "rag_blend.__main__"))}
    assert "rag_blend.engine" in core
    for file in core.values():
        assert not [module for module in imports_of(file) if module.startswith(above)], file


def test_evaluation_knows_no_command_line() -> None:
    for name, file in MODULES.items():
        if name.startswith("rag_blend.evaluation"):
            assert not top_level(imports_of(file)) & {"typer", "rich"}, file
            assert not [module for module in imports_of(file) if module.startswith("rag_blend.cli")], file


def test_only_bulk_ingestion_needs_ray() -> None:
    using = {name for name, file in MODULES.items() if top_level(imports_of(file)) & {"ray", "pyarrow"}}
    assert using == {"rag_blend.ray.blocks", "rag_blend.ray.bulk", "rag_blend.cli.cluster"}
    for name, file in MODULES.items():
        if not name.startswith(("rag_blend.ray", "rag_blend.cli")):
            assert not [module for module in imports_of(file) if module.startswith("rag_blend.ray")], file


def test_there_is_no_cycle() -> None:
    graph = {name: imports_of(file) & set(MODULES) - {name} for name, file in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"import cycle: {' -> '.join([*path, name])}"
        if name not in done:
            for other in sorted(graph[name]):
                # A package's __init__ gathers its modules; they name each other directly.
                if not name.startswith(other + "."):
                    visit(other, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def reading_order() -> dict[str, int]:
    """Row of each module in the table of docs/architecture.md; names in a row lie where its first one does."""
    table, _ = (ROOT / "docs" / "architecture.md").read_text("utf-8").split("## One query")
    order: dict[str, int] = {}
    for row, cell in enumerate(re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)):
        first, *others = re.findall(r"`([^`]+)`", cell)
        base = ROOT if first.startswith("integrations/") else PACKAGE
        folder = (base / first).parent
        for path in (base / first, *(folder / name for name in others)):
            assert path.exists(), f"docs/architecture.md names {path.relative_to(ROOT)}, which is not there"
            for file in path.rglob("*.py") if path.is_dir() else [path]:
                order[module_of(file).removeprefix("integrations.")] = row
    return order


def test_every_file_has_its_place_in_the_reading_order_and_imports_from_above() -> None:
    order = reading_order()
    unlisted = {name for name, file in MODULES.items() if name not in order and file.stem != "__init__"}
    assert unlisted == {"rag_blend.__main__"}
    for name, row in order.items():
        file = MODULES.get(name) or ROOT / "integrations" / f"{name.replace('.', '/')}.py"
        if file.exists():  # a package's __init__ gathers its modules
            below = {module for module in imports_of(file) if order.get(module, row) > row}
            assert not below, f"{file}: {below} stand below it in docs/architecture.md"


@pytest.mark.parametrize("kind", ["codecs", "selectors", "storage", "models"])
def test_plug_ins_know_their_base_but_not_each_other(kind: str) -> None:
    for file in (PACKAGE / kind).glob("*.py"):
        if file.stem in {"__init__", "base"} or file.stem.startswith("_"):
            continue
        siblings = {m for m in imports_of(file) if m.startswith(f"rag_blend.{kind}.")}
        assert all(m.startswith((f"rag_blend.{kind}.base", f"rag_blend.{kind}._")) for m in siblings), file


def test_integrations_use_public_names_only() -> None:
    files = sorted((ROOT / "integrations").rglob("*.py"))
    assert files
    public = {*rag_blend.__all__, "vllm", "vllm.request_fields"}
    for file in files:
        for module in imports_of(file):
            if module.partition(".")[0] == "rag_blend":
                assert module == "rag_blend" or module.removeprefix("rag_blend.") in public, (file, module)


def test_public_names_exist_and_are_few() -> None:
    assert all(hasattr(rag_blend, name) for name in rag_blend.__all__)
    assert len(rag_blend.__all__) <= 20


def test_no_pickle_and_no_shell() -> None:
    for file in FILES + sorted((ROOT / "integrations").rglob("*.py")):
        assert not top_level(imports_of(file)) & {"pickle", "subprocess", "shelve", "dill", "cloudpickle"}, file
        assert "torch.load" not in file.read_text("utf-8"), file

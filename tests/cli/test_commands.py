"""What holds for every command, and that none of them makes the others slow to start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import random_model, small_tokenizer
from typer.testing import CliRunner

import rag_blend
from rag_blend.__main__ import main
from rag_blend.cli import app


def commands(command: Any, name: str = "rag-blend") -> Iterator[tuple[str, Any]]:
    parts = getattr(command, "commands", {})  # of a group
    for part, sub in parts.items():
        yield from commands(sub, f"{name} {part}")
    if not parts:
        yield name, command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_an_example_and_prints_json(name: str) -> None:
    command = COMMANDS[name]
    assert f"Example: {name} " in " ".join((command.help or "").split())
    assert any("--json" in parameter.opts for parameter in command.params)


def test_help_loads_neither_torch_nor_a_framework() -> None:
    """They take seconds; where they are missing from memory, `rag-blend --help` takes a fraction of one."""
    code = (
        "import sys, typer.testing, rag_blend.cli\n"
        "result = typer.testing.CliRunner().invoke(rag_blend.cli.app, ['--help'])\n"
        "assert result.exit_code == 0 and 'ingest' in result.output, result.output\n"
        "print(*{'torch', 'transformers', 'numpy', 'llama_index', 'langchain_core'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"rag-blend {rag_blend.__version__}\n")


@pytest.mark.parametrize("name", [name for name in COMMANDS if not name.startswith("rag-blend store")])
def test_where_caches_live_is_called_storage_everywhere(name: str) -> None:
    """Its old name is still understood."""
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert "--store" not in options
    if "--storage" in options:
        group = name.split()[1:]
        result = CliRunner().invoke(app, [*group, "--store"])
        assert result.exit_code == 2 and "requires an argument" in result.stderr, result.stderr


def test_an_unknown_name_of_the_package_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Blend'"):
        _ = rag_blend.Blend  # type: ignore[attr-defined]
    assert set(rag_blend.__all__) <= set(dir(rag_blend))


def test_without_typer_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("rag_blend.cli")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit, match=r'in a clone of rag_blend: pip install -e "\.\[cli\]"'):
        main()


def test_doctor_fails_for_a_model_that_cannot_be_blended(tmp_path: Path) -> None:
    random_model("gpt2").save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["doctor", str(tmp_path)])
    assert result.exit_code == 1 and "no rotary" in result.output

"""An environment of its own for every peer, made once from Python or Node packages."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[3] / "constraints.txt"
TIMEOUT_S = 1800
_NODE_PLATFORM = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}.get(platform.machine(), platform.machine())


class NotInstalledError(Exception):
    """An environment could not be made; the text says why."""


@dataclass(frozen=True)
class Environment:
    """What is installed for a peer.

    Attributes:
        name: Of its directory.
        pip: One list of arguments for each ``pip install``; versions come from constraints.txt where they are there.
        npm: Packages, with versions.
    """

    name: str
    pip: tuple[tuple[str, ...], ...] = ()
    npm: tuple[str, ...] = ()

    def program(self, root: Path) -> str:
        """What runs scripts in it."""
        return "node" if self.npm else str(root / self.name / "bin" / "python")

    def make(self, root: Path) -> None:
        """Install it below `root`, unless that was done before.

        Raises:
            NotInstalledError: That failed, or took too long.
        """
        directory = root / self.name
        done = directory / "recipe.json"
        recipe = json.dumps(asdict(self))
        if done.is_file() and done.read_text("utf-8") == recipe:
            return
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for command in self._commands(directory):
            _run(command, directory)
        done.write_text(recipe, "utf-8")

    def _commands(self, directory: Path) -> list[list[str]]:
        python = str(directory / "bin" / "python")
        commands = []
        if self.pip:
            pip = [python, "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
            commands = [[sys.executable, "-m", "venv", str(directory)], *([*pip, *packages] for packages in self.pip)]
        if self.npm:
            # Optional packages are builds for every other platform and GPU, scripts would fetch or compile one.
            npm = ["npm", "install", "--prefix", str(directory), "--omit=optional", "--ignore-scripts", "--save-exact"]
            commands.append([*npm, *(package.format(platform=_NODE_PLATFORM) for package in self.npm)])
        return commands


def _run(command: list[str], directory: Path) -> None:
    try:
        subprocess.run(command, cwd=directory, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError as error:
        raise NotInstalledError(f"{command[0]} is not on the PATH") from error
    except subprocess.TimeoutExpired as error:
        raise NotInstalledError(f"{command[0]} did not finish within {TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        said = [line for line in str(error.stderr or error.stdout).splitlines() if line.strip()]
        wrong = next((line for line in said if "error" in line.lower()), said[-1] if said else "it said nothing")
        raise NotInstalledError(f"{Path(command[0]).name} failed: {wrong.strip()}") from error

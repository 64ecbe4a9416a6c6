"""Which model a command line means: a directory, a hub id, or ``demo``."""

from __future__ import annotations

import os
from pathlib import Path

import typer

DEMO = "demo"


def model_named(name: str) -> str:
    """The absolute path of a model's directory; or a hub id, unless it is neither cached nor to be had.

    Raises:
        FileNotFoundError: The directory has no model in it, or the hub cannot be reached.
    """
    if Path(name).is_dir() or name == DEMO:
        return str(model_directory(Path(name)).resolve())  # whoever asks may stand elsewhere
    if name.startswith((os.sep, ".", "~")):
        raise FileNotFoundError(f"there is no model directory {name!r}")
    _expect_on_hub(name)
    return name


def model_directory(path: Path) -> Path:
    """The same directory; that of the demo model for ``demo``, if no model here has that name.

    Raises:
        FileNotFoundError: There is no model.
    """
    if (path / "config.json").is_file():
        return path
    if path == Path(DEMO):
        return _demo_model()
    if path.is_dir():
        raise FileNotFoundError(f"{str(path)!r} is no model directory: it has no config.json")
    raise FileNotFoundError(f"there is no model directory {str(path)!r}")


def _demo_model() -> Path:
    from rag_blend.demo import DemoModelMissingError, demo_model_dir

    try:
        return demo_model_dir()
    except DemoModelMissingError as error:
        typer.echo(f"rag-blend: {error}", err=True)  # lines to copy, which `user_errors` would join
        raise typer.Exit(2) from None


def _expect_on_hub(hub_id: str) -> None:
    """Ask the hub once: loading a model asks it again for half a minute, file by file, when it does not answer."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_hf_file_metadata(hf_hub_url(hub_id, "config.json"))
    except (HfHubHTTPError, ValueError):
        return  # it has answered, or this is no hub id: what loads the model knows what to say
    except Exception as error:  # of the HTTP library, which differs between versions of the hub's client
        if not isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
            raise FileNotFoundError(
                f"there is no model directory {hub_id!r}, and {constants.ENDPOINT} cannot be reached to look for it "
                f"there ({error}): check the name and the network"
            ) from error
        constants.HF_HUB_OFFLINE = True  # of this process alone: the cached files will do

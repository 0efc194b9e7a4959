"""`hsconnector train`: `speculators train` with its samples from a sidecar."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from hsconnector.cli import CouldNotStart

__all__ = ["train"]

_BACKEND = "--hidden-states-backend"


def train(context: typer.Context) -> None:
    """Runs `speculators train` with the hidden-states backend `hsconnector`.

    Every argument goes to it unchanged; --help lists them, --sidecar and the --hsc-... ones are ours. Without --config
    the backend need not be named. On several GPUs: `torchrun --no-python --nproc-per-node 8 hsconnector train ...`.
    """
    try:
        from hsconnector.integrations.speculators import load_trainer

        run = load_trainer()
    except ModuleNotFoundError as error:
        raise CouldNotStart(
            f"training needs {error.name}: pip install 'hsconnector[train]', or where vLLM's own versions must not "
            "change: pip install --no-deps speculators==0.9.0 hs-connectors==0.9.0 datasets==5.1.0"
        ) from error
    run(with_backend(context.args))


def with_backend(arguments: Sequence[str]) -> list[str]:
    """The arguments with our backend as the default; a configuration file may name another, so it is left to that."""
    if any(word.split("=")[0] == "--config" for word in arguments):
        return list(arguments)
    return [_BACKEND, "hsconnector", *arguments]


train.context_settings = {  # type: ignore[attr-defined]
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

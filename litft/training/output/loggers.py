"""Loggers that receive the rows of metrics.csv too: TensorBoard, Weights & Biases or MLflow,
through Lightning's loggers."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# the logger's module and class, and the package it
# needs; pyproject.toml has an extra of the same name
LOGGERS = {
    "tensorboard": (
        "lightning_fabric.loggers",
        "TensorBoardLogger",
        "torch.utils.tensorboard",
    ),
    "wandb": ("pytorch_lightning.loggers", "WandbLogger", "wandb"),
    "mlflow": ("pytorch_lightning.loggers", "MLFlowLogger", "mlflow"),
}


def check_logger(name: str) -> None:
    """Raise ValueError if the packages of the logger are not installed."""
    if name == "csv":
        return
    module, _, package = LOGGERS[name]
    try:
        import_module(module)
        import_module(package)
    except ImportError as error:
        raise ValueError(
            f"--logger {name} needs the package {error.name}; pip install 'litft[{name}]'"
        ) from None


def make_logger(
    name: str,
    folder: Path,
    flags: dict[str, Any],
    start_step: int,
    logged_as: list[str] | None,
    project: str | None = None,
) -> Any:
    """Return a logger for the run in `folder` with the run's flags logged; None for csv.

    project: the project or experiment of the run; None: taken from the packages' own environment
    variables, as the run's
    name always is: WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME, MLFLOW_EXPERIMENT_NAME,
    MLFLOW_RUN_NAME. logged_as: the logger and its id of a run that resumes after `start_step`
    steps. Raises ValueError if the logger cannot be created.
    """
    if name == "csv":
        return None
    version = None
    if logged_as and logged_as[0] == name:
        version = logged_as[1]
    purge_step = None
    if start_step:
        purge_step = start_step + 1
    # MLflow's default of 7 retries blocks for minutes without output
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    module, cls, _ = LOGGERS[name]

    # what each logger needs to continue the run that it has
    settings = {
        "tensorboard": dict(
            root_dir=folder,
            name="",
            version="tensorboard",
            purge_step=purge_step,
        ),
        "wandb": dict(name=_env_or("WANDB_NAME", folder.name), save_dir=folder, id=version)
        | dict(
            project=project or _env_or("WANDB_PROJECT", "litft"),
            entity=os.environ.get("WANDB_ENTITY"),
        ),
        "mlflow": dict(
            run_name=_env_or("MLFLOW_RUN_NAME", folder.name),
            run_id=version,
            tracking_uri=_mlflow_uri(),
        )
        | dict(experiment_name=project or _env_or("MLFLOW_EXPERIMENT_NAME", "litft")),
    }[name]
    try:
        logger = getattr(import_module(module), cls)(**settings)
        if version is None:
            logger.log_hyperparams(flags)
        return logger
    except Exception as error:  # each package has its own exceptions
        raise ValueError(f"--logger {name}: {type(error).__name__}: {error}") from None


def finish(logger: Any, status: str, say: Callable[[str], None]) -> None:
    """Report the end of the run, "success" or "failed", to the logger; a logger that fails causes
    only a warning."""
    try:
        logger.finalize(status)
        # or W&B's next run in this process continues it
        if callable(close := getattr(logger.experiment, "finish", None)):
            close()
    except Exception as error:
        say(f"warning: the end of the run could not be logged ({error})")


def _env_or(variable: str, default: str) -> str:
    """Return the value of an environment variable, or `default` if it is unset or empty."""
    return os.environ.get(variable) or default


def _mlflow_uri() -> str:
    """Return the URI in MLflow's own environment variable, or the file that `mlflow ui` opens by
    default."""
    return os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")


def row_sink(logger: Any, say: Callable[[str], None]) -> Callable[[dict[str, float]], None]:
    """Return a function that passes rows to a logger; after the first error it warns and passes no
    more rows."""
    failed = False

    def log(row: dict[str, float]) -> None:
        nonlocal failed
        if failed:
            return
        try:
            values = dict(row)
            step = int(values.pop("step"))
            logger.log_metrics(values, step=step)
        except Exception as error:
            # one warning is enough: the next rows would fail as well
            failed = True
            say(
                f"warning: logging failed at step {row['step']} ({error}); later rows are only in "
                "metrics.csv"
            )

    return log

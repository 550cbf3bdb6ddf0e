"""Who gets the rows of metrics.csv besides: TensorBoard, Weights & Biases or MLflow, by Lightning's loggers."""

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

# module and class, and the extra of pyproject.toml that brings them
LOGGERS = {
    "tensorboard": ("lightning_fabric.loggers", "TensorBoardLogger", "torch.utils.tensorboard"),
    "wandb": ("pytorch_lightning.loggers", "WandbLogger", "wandb"),
    "mlflow": ("pytorch_lightning.loggers", "MLFlowLogger", "mlflow"),
}


def check_logger(name: str) -> None:
    """ValueError where its packages are not installed."""
    if name == "csv":
        return
    home, _, package = LOGGERS[name]
    try:
        import_module(home)
        import_module(package)
    except ImportError as error:
        raise ValueError(f"--logger {name}: {error}; pip install 'litft[{name}]'") from None


def make_logger(
    name: str, folder: Path, flags: dict[str, Any], begun: int, logged_as: list[str] | None, project: str | None = None
) -> Any:
    """A logger of the run in `folder` that has got the run's flags; None for csv.

    project: what the run is listed under; else the packages' own variables say it, and its name: WANDB_PROJECT,
    WANDB_ENTITY, WANDB_NAME, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_NAME. logged_as: who logged this run until now, and what
    they called it, to go on with after `begun` steps. ValueError where a server cannot be had.
    """
    if name == "csv":
        return None
    version = logged_as[1] if logged_as and logged_as[0] == name else None
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # its own 7 are minutes without a word
    home, cls, _ = LOGGERS[name]
    settings = {
        "tensorboard": dict(root_dir=folder, name="", version="tensorboard", purge_step=begun + 1 if begun else None),
        "wandb": dict(name=_given("WANDB_NAME", folder.name), save_dir=folder, id=version)
        | dict(project=project or _given("WANDB_PROJECT", "litft"), entity=os.environ.get("WANDB_ENTITY")),
        "mlflow": dict(run_name=_given("MLFLOW_RUN_NAME", folder.name), run_id=version, tracking_uri=_mlflow_uri())
        | dict(experiment_name=project or _given("MLFLOW_EXPERIMENT_NAME", "litft")),
    }[name]
    try:
        logger = getattr(import_module(home), cls)(**settings)
        if version is None:
            logger.log_hyperparams(flags)
        return logger
    except Exception as error:  # each package has its own
        raise ValueError(f"--logger {name}: {type(error).__name__}: {error}") from None


def finish(logger: Any, status: str, say: Callable[[str], None]) -> None:
    """The run has come to its end, by success or failed; a logger that cannot be told gets a word, and no more."""
    try:
        logger.finalize(status)
        if callable(end := getattr(logger.experiment, "finish", None)):  # W&B's next run in this process is another
            end()
    except Exception as error:
        say(f"warning: the logger was not told of the end ({error})")


def _given(variable: str, usual: str) -> str:
    """What the environment says, or else what we do."""
    return os.environ.get(variable) or usual


def _mlflow_uri() -> str:
    """The server that MLflow's own variable names, or the file that `mlflow ui` looks for."""
    return os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")


def row_sink(logger: Any, say: Callable[[str], None]) -> Callable[[dict[str, float]], None]:
    """What gives a logger each row; where one is not taken, a word on that, and no more rows: the run goes on."""
    failed = False

    def log(row: dict[str, float]) -> None:
        nonlocal failed
        if failed:
            return
        try:
            logger.log_metrics({name: value for name, value in row.items() if name != "step"}, step=int(row["step"]))
        except Exception as error:
            failed = True
            say(f"warning: the logger takes no rows from step {row['step']} on ({error}); metrics.csv has all of them")

    return log

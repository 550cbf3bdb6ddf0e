"""The commands by name, each with the class of its arguments."""

from litft.args.evaluation import RunEvalArgs
from litft.args.export import (
    ConvertArgs,
    ExportArgs,
    GgufConvertArgs,
    GgufExportArgs,
    MergeArgs,
)
from litft.args.finetune_commands import FINETUNE
from litft.args.hub import DownloadArgs, UploadArgs
from litft.args.inference import ChatArgs, GenerateArgs
from litft.args.plan import PlanArgs, PrepareArgs
from litft.args.recipes import RecipesArgs
from litft.args.runs import RunsArgs
from litft.args.schema import SchemaArgs
from litft.args.serving import ServeArgs
from litft.args.sweep import SweepArgs

ARGS: dict[str, type] = {
    **{f"finetune {method}": args for method, args in FINETUNE.items()},
    "generate": GenerateArgs,
    "chat": ChatArgs,
    "serve": ServeArgs,
    "merge_lora": MergeArgs,
    "run_eval": RunEvalArgs,
    "prepare_data": PrepareArgs,
    "runs": RunsArgs,
    "sweep": SweepArgs,
    "recipes": RecipesArgs,
    "schema": SchemaArgs,
    "plan": PlanArgs,
    "convert_hf_checkpoint": ConvertArgs,
    "convert_to_hf": ExportArgs,
    "download": DownloadArgs,
    "upload": UploadArgs,
    "convert_gguf_checkpoint": GgufConvertArgs,
    "convert_to_gguf": GgufExportArgs,
}

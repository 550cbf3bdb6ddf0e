"""Every flag, as a typed and documented dataclass field.

The docstring below a field is its --help text.
"""

from litft.args.args_of_commands import ARGS
from litft.args.data import DataArgs
from litft.args.data_path import Formats
from litft.args.distill import DistillArgs
from litft.args.evaluation import RunEvalArgs
from litft.args.export import (
    ConvertArgs,
    ExportArgs,
    GgufConvertArgs,
    GgufExportArgs,
    MergeArgs,
    MergedArgs,
    WriteArgs,
)
from litft.args.finetune import EvalArgs, FinetuneArgs, Optimizers, SaveArgs, TrainArgs
from litft.args.finetune_commands import (
    FINETUNE,
    AdapterFinetuneArgs,
    AdapterV2FinetuneArgs,
    FullFinetuneArgs,
    LoRAFinetuneArgs,
)
from litft.args.grpo import GrpoArgs
from litft.args.hub import DownloadArgs, UploadArgs
from litft.args.inference import (
    ChatArgs,
    GenerateArgs,
    ModelArgs,
    OpenArgs,
    SpeculativeArgs,
)
from litft.args.methods import AdapterArgs, AdapterV2Args, LoRAArgs
from litft.args.plan import PlanArgs, PrepareArgs
from litft.args.preference import Objectives, PreferenceArgs
from litft.args.recipes import RecipesArgs
from litft.args.runs import RunsArgs
from litft.args.sampling import NUMBERS, Sampling
from litft.args.schema import SchemaArgs
from litft.args.serving import ServeArgs
from litft.args.sweep import Setting, SweepArgs, setting_name
from litft.args.value_checks import impossible_numbers, parse_duration, parse_size

GROUPS = (
    "data",
    "preference",
    "grpo",
    "distill",
    "train",
    "eval",
    "save",
    "lora",
    "adapter",
)

__all__ = [
    "ARGS",
    "FINETUNE",
    "NUMBERS",
    "AdapterArgs",
    "AdapterFinetuneArgs",
    "AdapterV2Args",
    "AdapterV2FinetuneArgs",
    "ChatArgs",
    "ConvertArgs",
    "DataArgs",
    "DistillArgs",
    "DownloadArgs",
    "EvalArgs",
    "ExportArgs",
    "FinetuneArgs",
    "Formats",
    "FullFinetuneArgs",
    "GenerateArgs",
    "GgufConvertArgs",
    "GgufExportArgs",
    "GrpoArgs",
    "LoRAArgs",
    "LoRAFinetuneArgs",
    "MergeArgs",
    "MergedArgs",
    "ModelArgs",
    "Objectives",
    "OpenArgs",
    "Optimizers",
    "PlanArgs",
    "PreferenceArgs",
    "PrepareArgs",
    "RecipesArgs",
    "RunEvalArgs",
    "RunsArgs",
    "Sampling",
    "SaveArgs",
    "SchemaArgs",
    "ServeArgs",
    "Setting",
    "SpeculativeArgs",
    "SweepArgs",
    "TrainArgs",
    "UploadArgs",
    "WriteArgs",
    "impossible_numbers",
    "parse_duration",
    "parse_size",
    "setting_name",
]

"""Every flag, as typed and documented fields. The text under a field is its --help; a default stands there only."""

from litft.args.checks import impossible_numbers, seconds, size
from litft.args.finetune import (
    AdapterFinetuneArgs,
    AdapterV2FinetuneArgs,
    DataArgs,
    EvalArgs,
    FinetuneArgs,
    Formats,
    FullFinetuneArgs,
    LoRAFinetuneArgs,
    Optimizers,
    SaveArgs,
    TrainArgs,
)
from litft.args.methods import AdapterArgs, AdapterV2Args, LoRAArgs
from litft.args.sampling import NUMBERS, Sampling
from litft.args.tools import (
    ChatArgs,
    ConvertArgs,
    ExportArgs,
    GenerateArgs,
    GgufConvertArgs,
    GgufExportArgs,
    GuessArgs,
    MergeArgs,
    ModelArgs,
    OpenArgs,
    PlanArgs,
    PrepareArgs,
    RunEvalArgs,
    ServeArgs,
    WriteArgs,
)

GROUPS = ("data", "train", "eval", "save", "lora", "adapter")

__all__ = [
    "NUMBERS",
    "AdapterArgs",
    "AdapterFinetuneArgs",
    "AdapterV2Args",
    "AdapterV2FinetuneArgs",
    "ChatArgs",
    "ConvertArgs",
    "DataArgs",
    "EvalArgs",
    "ExportArgs",
    "FinetuneArgs",
    "Formats",
    "FullFinetuneArgs",
    "GenerateArgs",
    "GgufConvertArgs",
    "GgufExportArgs",
    "GuessArgs",
    "LoRAArgs",
    "LoRAFinetuneArgs",
    "MergeArgs",
    "ModelArgs",
    "OpenArgs",
    "Optimizers",
    "PlanArgs",
    "PrepareArgs",
    "RunEvalArgs",
    "Sampling",
    "SaveArgs",
    "ServeArgs",
    "TrainArgs",
    "WriteArgs",
    "impossible_numbers",
    "seconds",
    "size",
]

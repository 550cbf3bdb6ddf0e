"""The command `prepare_data`: tokenize the data into the cache, and print counts and problems."""

import json
import re
import sys
from pathlib import Path

from litft.args import LoRAFinetuneArgs, PrepareArgs
from litft.args.ignored import ignored_flags
from litft.atomic import atomic_write
from litft.data.dataset import DataSplits, load_data
from litft.data.sources import notes_on_sources
from litft.pretrained.folder import resolve
from litft.training.data_report import data_report
from litft.training.dry_run import print_hints_last
from litft.training.run_setup import resolve_setup
from litft.training.schedule import Schedule


def prepare_data(args: PrepareArgs) -> None:
    """Tokenize the data into the cache, and print counts, problems and lengths."""
    finetuning = LoRAFinetuneArgs(
        checkpoint_dir=args.checkpoint_dir,
        base_dir=args.base_dir,
        data=args.data,
        objective=args.objective,
    )
    finetuning.train.global_batch_size = args.global_batch_size
    finetuning.grpo.max_new_tokens = args.max_new_tokens
    source = resolve(args.source_dir, args.base_dir)
    source.check_base_dir(args.base_dir)
    setup = resolve_setup(finetuning, source)
    objective = setup.objective
    data = load_data(
        args.data,
        setup.tokenizer,
        setup.method.vocab_size(source.config),
        source.config.max_positions,
        kind=objective.data_kind,
        completion_tokens=objective.completion_tokens,
    )
    schedule = Schedule(finetuning, data, ranks=1, group_size=objective.group_size)
    for note in (*ignored_flags(finetuning), *notes_on_sources(args.data)):
        print(note)
    print_hints_last(data_report(schedule, data.tokenizer, args.show))
    if args.findings:
        count = _write_findings(data, Path(args.findings))
        print(f"{count:,} findings are in {args.findings}", file=sys.stderr)


def _write_findings(data: DataSplits, path: Path) -> int:
    """Write all findings on all records, a JSON object a line; return their number."""
    lines = []
    for label, store in data.stores.items():
        for found in store.findings():
            record = found["record"].removeprefix(f"{label}, ")
            digits = re.findall(r"\d+", record)
            line = {
                "file": label,
                "record": record,
                "number": int(digits[-1]) if digits else None,
                "finding": found["finding"],
            }
            if found["earlier"]:
                line["earlier"] = found["earlier"].removeprefix(f"{label}, ")
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    atomic_write(path, "".join(lines))
    return len(lines)

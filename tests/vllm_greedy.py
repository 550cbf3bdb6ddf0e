"""Greedy tokens of a model folder in vLLM on a CPU, without and with a LoRA adapter: run by vLLM's
interpreter.

`PYTHON tests/vllm_greedy.py FOLDER ADAPTER NUM_TOKENS PROMPT` prints a line of JSON: {"base":
[...], "adapter": [...]}. With "" in place of the adapter, only the tokens of the folder.
"""

import json
import os
import sys

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


def main(folder: str, adapter: str, num_tokens: str, prompt: str) -> None:
    """Print the tokens."""
    os.environ.update(SETTINGS)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    model = LLM(
        model=folder,
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        max_num_seqs=2,
        enable_lora=bool(adapter),
        max_lora_rank=16,
        limit_mm_per_prompt={"image": 0, "video": 0},  # text alone
        skip_mm_profiling=True,
    )
    greedy = SamplingParams(temperature=0, max_tokens=int(num_tokens), ignore_eos=True)
    tokens = {}
    requests = {"base": None}
    if adapter:
        requests["adapter"] = LoRARequest("adapter", 1, adapter)
    for name, request in requests.items():
        (answer,) = model.generate([prompt], greedy, lora_request=request, use_tqdm=False)
        tokens[name] = list(answer.outputs[0].token_ids)
    print(json.dumps(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])

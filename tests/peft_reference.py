"""PEFT as the reference: adapters with random values, and training steps."""

import torch

from litft.data.packing import collate

TOKENS = torch.randint(512, (2, 23), generator=torch.Generator().manual_seed(2))


def write_adapter(base, folder, seed=1, **values):
    """Write an adapter with random A and B by PEFT and return PEFT's model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    values = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **values}
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **values))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model


def peft_losses(reference, samples, rate, steps, decay=0.01):
    """Train a PEFT model by a plain loop on all samples and return the loss of each step."""
    batch = collate([[sample] for sample in samples])
    mask = (
        torch.arange(batch.tokens.size(1))
        < torch.tensor([[s.tokens.numel()] for s in samples])
    ).long()
    parameters = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        parameters, lr=rate, betas=(0.9, 0.95), weight_decay=decay
    )
    losses = []
    for _ in range(steps):
        logits = reference(input_ids=batch.tokens, attention_mask=mask).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), ignore_index=-100
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses

"""The memory of a teacher that is read before the student, or is beside it."""

from litft.model.loss import LOGIT_ROWS
from litft.pretrained.build import unfilled_model, weight_bytes
from litft.pretrained.folder import PretrainedFolder
from litft.training.memory.plan import Weight, sharded_weights

# of each logit of a chunk: in the teacher's dtype, in fp32, their logarithms, and those of others
BYTES_PER_LOGIT = 14


def teacher_bytes(
    source: PretrainedFolder, precision: str, quantize: str, shards: int
) -> int:
    """Return the bytes of a teacher's weights on each device, with what is gathered at once of
    `shards` shards."""
    if shards == 1:
        return weight_bytes(source, precision, quantize)
    model = unfilled_model(source, precision, quantize)
    weights = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # bits are packed already, so that each tensor has the size that it has in memory
        weights[name] = Weight(tensor.numel(), tensor.nbytes, packed=False)
    placed = sharded_weights(model, weights, shards, gather_dtype=None)
    return placed.resident + placed.gathered


def teacher_pass_bytes(
    source: PretrainedFolder, precision: str, quantize: str, shards: int
) -> int:
    """Return the bytes that a teacher needs to read examples, without the activations of a block,
    which are small beside its weights."""
    logits = LOGIT_ROWS * source.config.vocab_size * BYTES_PER_LOGIT
    return teacher_bytes(source, precision, quantize, shards) + logits

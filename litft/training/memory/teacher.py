"""The memory of a teacher that is read before the student, or is beside it."""

from litft.model.loss import LOGIT_ROWS
from litft.pretrained.build import weight_bytes
from litft.pretrained.folder import PretrainedFolder

# of each logit of a chunk: in the teacher's dtype, in fp32, their logarithms, and those of others
BYTES_PER_LOGIT = 14


def teacher_pass_bytes(source: PretrainedFolder, precision: str, quantize: str) -> int:
    """Return the bytes that a teacher needs to read examples, without the activations of a block,
    which are small beside its weights."""
    logits = LOGIT_ROWS * source.config.vocab_size * BYTES_PER_LOGIT
    return weight_bytes(source, precision, quantize) + logits

"""Writing checkpoints: synthetic ones, tiny models of transformers, and conversions of others.

from moe_mk.lab.checkpoints.tiny_models import write_packed_checkpoint
"""

from moe_mk.lab.checkpoints.checkpoint_shape import CheckpointShape
from moe_mk.lab.checkpoints.official_names import official_state_dict
from moe_mk.lab.checkpoints.synthesize import is_complete, write_checkpoint

__all__ = ["CheckpointShape", "is_complete", "official_state_dict", "write_checkpoint"]

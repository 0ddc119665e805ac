"""What a run carries from step to step."""

from typing import Any

import flax.struct
import jax


@flax.struct.dataclass
class State:
  """Everything that a checkpoint holds. Random keys are not in it: they follow from the seed and the step."""

  step: jax.Array  # int32 [], how many updates were made
  params: Any
  batch_stats: Any  # running statistics of the encoder's norms
  extra: Any  # a method's own: queue, bank, momentum encoder, centre; {} where it has none
  opt_state: Any

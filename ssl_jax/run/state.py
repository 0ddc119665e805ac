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
  extra: Any  # a method's own (queue, bank, momentum encoder, centre), the average of the weights, the probe
  opt_state: Any

  @property
  def evaluated(self) -> tuple[Any, Any]:
    """(params, batch_stats) for evaluations: the averaged ones where the run keeps an average (`config.ema`)."""
    if 'average' not in self.extra:
      return self.params, self.batch_stats
    return {**self.params, 'network': self.extra['average']['network']}, self.extra['average']['batch_stats']


def average_of(params: Any, batch_stats: Any) -> dict[str, Any]:
  """What an average of the weights is taken of."""
  return {'network': params['network'], 'batch_stats': batch_stats}

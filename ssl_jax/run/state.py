"""The state of a run, from step to step."""

from typing import Any

import flax.struct
import jax


@flax.struct.dataclass
class State:
  """Everything that a checkpoint holds. It has no random keys: they follow from the seed and the step."""

  step: jax.Array  # int32 [], the number of updates so far
  params: Any
  batch_stats: Any  # running statistics of the encoder's norms
  extra: Any  # the method's state (queue, bank, momentum encoder, centre), the weight average, the online probe
  opt_state: Any

  @property
  def evaluated(self) -> tuple[Any, Any]:
    """(params, batch_stats) for evaluations: the averaged ones if the run keeps an average (`config.ema`)."""
    if 'average' not in self.extra:
      return self.params, self.batch_stats
    return {**self.params, 'network': self.extra['average']['network']}, self.extra['average']['batch_stats']


def average_of(params: Any, batch_stats: Any) -> dict[str, Any]:
  """The part of the state that the weight average is taken over."""
  return {'network': params['network'], 'batch_stats': batch_stats}

"""The training state of a run."""

from typing import Any

import flax.struct
import jax


@flax.struct.dataclass
class State:
  """The content of a checkpoint. It has no random keys: they are derived from the seed and the step."""

  step: jax.Array  # int32 [], the number of updates so far
  params: Any
  batch_stats: Any  # running statistics of batch normalization
  extra: Any  # the method's state (queue, bank, momentum encoder, center), the weight average, the online probe
  opt_state: Any

  @property
  def evaluated(self) -> tuple[Any, Any]:
    """(params, batch_stats) for evaluations: the moving average if there is one (`config.ema`)."""
    if 'average' not in self.extra:
      return self.params, self.batch_stats
    return {**self.params, 'network': self.extra['average']['network']}, self.extra['average']['batch_stats']


def average_of(params: Any, batch_stats: Any) -> dict[str, Any]:
  """The part of the state that is averaged."""
  return {'network': params['network'], 'batch_stats': batch_stats}

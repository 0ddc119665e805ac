"""Every method of configs/cifar10.py for 30 epochs: does it train, how fast, in how much memory?

  python -m experiments.baselines.sweep --budget-minutes=25

Settings for 200 epochs are scaled to 30: milestones, the period of a temperature schedule, the warm-up of DINO's
teacher temperature, the start of SwAV's queue. Cosine schedules always end with the run. Learning-rate warm-ups are
short and stay as they are.
"""

import pathlib

from experiments import runner
from experiments.tables import Column, Row, Sweep


def row(variant: str, title: str, changes: dict | None = None, minutes: float = 2.5) -> Row:
  config = f'configs/cifar10.py:{variant}' if variant != 'simclr' else 'configs/cifar10.py'
  return Row(variant, title, config, changes or {}, minutes=minutes)


MEMORY = {'optimizer.milestones': (24, 28.5)}  # (160, 190) of 200
CACR = {'optimizer.milestones': (23.25, 25.5, 27.75)}  # (155, 170, 185) of 200
SWEEP = Sweep(
  title='Every method of the papers, CIFAR-10, 30 epochs',
  protocol=(
    'CIFAR-10, 30 epochs, last epoch, one run training at a time. kNN: backbone features, 200 neighbors, votes '
    'weighted by exp(s/0.1). Linear: logistic regression (L-BFGS) on the same features. Seconds per epoch: median '
    'over all epochs except the first. Peak memory: the most that jax held on the device, including kNN.'
  ),
  columns=(
    Column('knn200', 'kNN-200, %'),
    Column('linear', 'linear, %'),
    Column('seconds_per_epoch', 's/epoch'),
    Column('peak_memory_gib', 'peak memory, GiB'),
  ),
  common={'epochs': 30, 'eval.every_epochs': 0},
  timed=True,
  rows=(
    row('simclr', 'SimCLR, τ = 0.2'),
    row('moco', 'MoCo v2', minutes=3),
    row('moco_v3', 'MoCo v3', minutes=3),
    row('byol', 'BYOL', minutes=3),
    row('simsiam', 'SimSiam'),
    row('barlow_twins', 'Barlow Twins', minutes=3),
    row('vicreg', 'VICReg', minutes=3),
    row('w_mse', 'W-MSE'),
    row('zero_cl', 'Zero-CL'),
    row('arb', 'ARB'),
    row('dino', 'DINO', {'method.teacher_temperature.epochs': 4.5}, minutes=3),
    Row('swav_no_queue', 'SwAV', 'configs/cifar10.py:swav', minutes=3),
    row('swav', 'SwAV, queue of 3,840 from epoch 2', {'method.queue': 3840, 'method.queue_epochs': 2}, minutes=3),
    row('memory_bank', 'memory bank, 4,095 negatives', {'method.negatives': 4095, **MEMORY}),
    row('memory_bank_hard', 'memory bank, hardest 8.19 %', MEMORY, minutes=3),
    row('dystress', 'DySTreSS'),
    row('kukleva', "Kukleva's schedule", {'temperature.period': 30}),
    row('dcl', 'DCL'),
    row('dclw', 'DCLW'),
    row('macl', 'MACL'),
    row('balanced', 'balanced contrastive, batch 512', changes={'optimizer.schedule': 'cosine'}),
    row('align_uniform', 'alignment and uniformity'),
    # This row was run before the config had the τ⁺ of HCL's code.
    Row(
      'hard_negative',
      'hard negatives (HCL), τ⁺ = 0',
      'configs/cifar10.py',
      {'loss.name': 'hard_negative', 'loss.beta': 1.0, 'temperature.tau': 0.5},
      minutes=2.5,
    ),
    row(
      'cmc',
      'CMC, negatives of all views, K = 4, AlexNet',
      {'method.name': 'simclr', 'loss.name': 'multi_positive', **CACR},
      minutes=3,
    ),
    row('cacr', 'CACR, K = 4, AlexNet', CACR, minutes=3),
    row('cacr_k1', 'CACR, K = 1, AlexNet', CACR),
    row('cacr_moco', 'CACR on MoCo v2, K = 4', minutes=5),
    Row('hard_negative_0.1', 'hard negatives (HCL), τ⁺ = 0.1', 'configs/cifar10.py:hard_negative', further=True),
    Row('isogclr', 'iSogCLR', 'configs/cifar10.py:isogclr', minutes=2.5, further=True),
    Row('fnc', 'FNC, four views', 'configs/cifar10.py:fnc', minutes=5, further=True),
    Row('emp_ssl', 'EMP-SSL, 20 views', 'configs/cifar10.py:emp_ssl', minutes=9, further=True),
    Row('cmc_by_pairs', 'CMC, K = 4, AlexNet', 'configs/cifar10.py:cmc', CACR, minutes=3, further=True),
  ),
)

if __name__ == '__main__':
  runner.main(SWEEP, pathlib.Path(__file__).parent)

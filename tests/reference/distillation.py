"""The losses with a target, as torch float64 transcriptions of the published pseudo-code."""

import torch
from torch.nn import functional


def byol(p, z):
  """Grill et al. 2020, Eq. 2: the squared distance of unit vectors."""
  return (functional.normalize(p, dim=1) - functional.normalize(z.detach(), dim=1)).pow(2).sum(dim=1)


def simsiam(p, z):
  """Chen & He 2021, Alg. 1, before its mean."""
  return -(functional.normalize(p, dim=1) * functional.normalize(z.detach(), dim=1)).sum(dim=1)


def dino(s, t, centre, temperature, teacher_temperature):
  """Caron et al. 2021, Alg. 1, H(t, s) before its mean."""
  t = torch.softmax((t.detach() - centre) / teacher_temperature, dim=1)
  return -(t * torch.log_softmax(s / temperature, dim=1)).sum(dim=1)


@torch.no_grad()
def sinkhorn(scores, epsilon=0.05, iterations=3):
  """Caron et al. 2020, App. A: Alg. 1's sinkhorn."""
  q = torch.exp(scores / epsilon).T
  q = q / q.sum()
  k, b = q.shape
  r, c = torch.ones(k, dtype=q.dtype) / k, torch.ones(b, dtype=q.dtype) / b
  for _ in range(iterations):
    q = q * (r / q.sum(dim=1)).unsqueeze(1)
    q = q * (c / q.sum(dim=0)).unsqueeze(0)
  return (q / q.sum(dim=0, keepdim=True)).T


def swav(scores, codes, temperature):
  """Caron et al. 2020, Alg. 1, before its mean."""
  return -(codes * torch.log_softmax(scores / temperature, dim=1)).sum(dim=1)

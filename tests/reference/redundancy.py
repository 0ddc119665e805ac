"""The losses without negatives, as torch float64 transcriptions of the published equations and pseudo-code."""

import torch


def off_diagonal(matrix):
  return matrix[~torch.eye(len(matrix), dtype=torch.bool)]


def barlow_twins(z1, z2, lam=0.0051):
  """Zbontar et al. 2021, Alg. 1; BatchNorm1d(affine=False) normalises with the biased variance and an eps of 1e-5."""
  n, d = z1.shape
  norm = torch.nn.BatchNorm1d(d, affine=False, dtype=z1.dtype)
  c = norm(z1).T @ norm(z2) / n
  return (torch.diagonal(c) - 1).pow(2).sum() + lam * off_diagonal(c).pow(2).sum()


def vicreg(z1, z2, invariance=25.0, variance=25.0, covariance=1.0):
  """Bardes et al. 2022, Alg. 1."""
  n, d = z1.shape
  loss = invariance * torch.nn.functional.mse_loss(z1, z2)
  for z in (z1, z2):
    loss = loss + variance * torch.relu(1 - torch.sqrt(z.var(dim=0) + 1e-4)).mean()
    centred = z - z.mean(dim=0)
    loss = loss + covariance * off_diagonal(centred.T @ centred / (n - 1)).pow(2).sum() / d
  return loss


def w_mse(z1, z2, eps=0.0):
  """Ermolov et al. 2021: whitening by the Cholesky factor, then the mean squared distance of unit vectors."""
  n, d = z1.shape
  unit = []
  for z in (z1, z2):
    centred = z - z.mean(dim=0)
    covariance = (1 - eps) * centred.T @ centred / (n - 1) + eps * torch.eye(d, dtype=z.dtype)
    whitening = torch.linalg.inv(torch.linalg.cholesky(covariance))
    unit.append(torch.nn.functional.normalize(centred @ whitening.T, dim=1))
  return (unit[0] - unit[1]).pow(2).sum(dim=1).mean()


def _zca(x, eps):
  """Rows of x are the samples. The transform is held, as in the authors' code."""
  covariance = x.T @ x / len(x)
  u, s, _ = torch.linalg.svd(covariance)
  return x @ (u @ torch.diag(1 / torch.sqrt(s + eps)) @ u.T).detach()


def zero_cl(z1, z2, kind='both', eps=0.01):
  """Zhang et al. 2022 (ICLR), after the authors' code."""
  loss = 0.0
  for name, views in (('feature', (z1, z2)), ('instance', (z1.T, z2.T))):
    if kind in (name, 'both'):
      standard = [(z - z.mean(dim=0)) / (z.std(dim=0) + 1e-4) for z in views]
      h1, h2 = (_zca(z, eps) for z in standard)
      loss = loss + (torch.diagonal(h1.T @ h2 / len(h1)) - 1).pow(2).sum()
  return loss


def emp_ssl(*views, invariance=200.0, eps=0.2):
  """Tong et al. 2023, eps as in the authors' code: the coding rate of each view, and its cosine with their mean."""
  views = [torch.nn.functional.normalize(z, dim=1) for z in views]
  center = sum(views) / len(views)
  loss = 0.0
  for z in views:
    n, d = z.shape
    loss = loss - torch.logdet(torch.eye(d, dtype=z.dtype) + d / (n * eps) * z.T @ z) / 2
    loss = loss - invariance * torch.nn.functional.cosine_similarity(z, center, dim=1).mean()
  return loss / len(views)


def arb(z1, z2, groups=1, eps=1e-5):
  """Zhang et al. 2022 (CVPR): features as rows, aligned with the nearest orthonormal base of the other view's."""
  n = len(z1)
  z1, z2 = (((z - z.mean(dim=0)) / (z.std(dim=0) + 1e-5)).T for z in (z1, z2))

  def base(z):
    parts = []
    for part in torch.chunk(z, groups):
      values, vectors = torch.linalg.eigh(part @ part.T / n)
      parts.append(vectors @ torch.diag((values + eps) ** -0.5) @ vectors.T @ part)
    return torch.cat(parts).detach()

  return sum(((z * base(other)).sum(dim=1) / n - 1).pow(2).sum() for z, other in ((z1, z2), (z2, z1)))

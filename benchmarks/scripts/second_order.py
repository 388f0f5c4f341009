"""Linear algebra in a step: a Gaussian process by Cholesky decomposition, trained with L-BFGS."""

import torch

x, y = torch.randn(1024, 8, device="cuda"), torch.randn(1024, 1, device="cuda")
logarithms = torch.zeros(2, device="cuda", requires_grad=True)
optimizer = torch.optim.LBFGS([logarithms], max_iter=3)


def loss() -> torch.Tensor:
    """Return the negative logarithm of the likelihood."""
    optimizer.zero_grad()
    scale, noise = logarithms.exp()
    covariance = torch.exp(-torch.cdist(x, x).square() / scale) + (noise + 1e-3) * torch.eye(1024, device="cuda")
    factor = torch.linalg.cholesky(covariance)
    found = (y * torch.cholesky_solve(y, factor)).sum() / 2 + factor.diagonal().log().sum()
    found.backward()
    return found


for _ in range(3):
    optimizer.step(loss)

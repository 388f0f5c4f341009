"""A graph network by index_add and sparse products, with embeddings that have sparse gradients."""

import torch
from torch import nn

NODES, EDGES = 5000, 40_000
edges = torch.randint(NODES, (2, EDGES)).cuda()
adjacency = torch.sparse_coo_tensor(edges, torch.ones(EDGES, device="cuda"), (NODES, NODES)).coalesce()
embedding = nn.Embedding(NODES, 128, sparse=True).cuda()
layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(3)).cuda()
optimizers = [torch.optim.SparseAdam(embedding.parameters()), torch.optim.Adam(layers.parameters())]
for _ in range(3):
    x = embedding(torch.arange(NODES, device="cuda"))
    for layer in layers:
        gathered = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        x = torch.relu(layer(gathered) + torch.sparse.mm(adjacency, x))
    x.square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()

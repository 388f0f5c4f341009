"""A training run without its numbers: fake tensors that live and die as real ones do on a processor or on a GPU."""

"""Post-training of causal language models with the diagonal model Fisher measured while they learn."""

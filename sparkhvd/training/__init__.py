"""What the ranks run: the training loop, its checkpoints and what it reports."""

"""From logits to token ids: constraints, penalties, truncation, noise; one row at a time."""

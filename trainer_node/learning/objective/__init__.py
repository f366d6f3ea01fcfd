"""From rollouts to a loss: rows, advantages, micro-batches, objective, statistics. Pure."""
